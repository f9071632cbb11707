"""The base URL that agents are given: a small server on this machine, for as long as a loop runs, that speaks the OpenAI contract's chat.

A key is a session, and nothing else is let in. `POST /v1/chat/completions` answers, `POST /v1/reward` takes a reward by callback, and
`GET /v1/models` tells the model to ask. The key stands in a header, or in the path (`/keys/{key}/v1/...`) for whoever sends a key of their own.
"""

import json
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from bloomery.recipes.agent_http import JsonHandler, LocalServer
from bloomery.recipes.agent_sessions import Session
from bloomery.types.errors import NotFound, Unauthorized

_KEYED = "/keys/"


class Door:
    """Open within its `with`; threads may let sessions in and out."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._sessions: dict[str, Session] = {}
        self._server = LocalServer(host, 0, _handler(self._sessions))
        self.base_url = f"{self._server.url}/v1"

    def keyed_url(self, key: str) -> str:
        """A base URL that is itself the key."""
        return f"{self._server.url}{_KEYED}{key}/v1"

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.__exit__(*raised)

    def admit(self, session: Session) -> None:
        """Let in whoever has its key."""
        self._sessions[session.key] = session

    def dismiss(self, session: Session) -> None:
        """Its key opens nothing any more."""
        self._sessions.pop(session.key, None)


def _handler(known: dict[str, Session]) -> type["_Handler"]:
    class Handler(_Handler):
        sessions = known

    return Handler


class _Handler(JsonHandler):
    sessions: ClassVar[dict[str, Session]]

    def answer(self, path: str, body: dict[str, Any]) -> None:
        """By the session that the key opens."""
        session, path = self._opened(path)
        match path:
            case "/v1/chat/completions":
                asked, answer = session.answer(body, self.is_there)
                if asked.stream:
                    self._stream(answer)
                else:
                    self.send(200, answer)
            case "/v1/reward":
                session.report(body)
                self.send(200, {"rollout_id": session.rollout_id})
            case _:
                raise NotFound(f"there is no {path} here: ask /v1/chat/completions")

    def show(self, path: str) -> dict[str, Any]:
        """The models of the session: clients ask for them to see that somebody is there, and which one to ask."""
        session, path = self._opened(path)
        shown = session.shown()
        if path == "/v1/models":
            return {"object": "list", "data": [shown], "first_id": session.model, "last_id": session.model, "has_more": False}
        if unquote(path) == f"/v1/models/{session.model}":
            return shown
        raise NotFound(f"there is no {path} to read here: the only model is `{session.model}`, at /v1/models")

    def _opened(self, path: str) -> tuple[Session, str]:
        """The session of a request's key, and the path behind it."""
        key = self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")
        if path.startswith(_KEYED):
            key, _, rest = path.removeprefix(_KEYED).partition("/")
            path = f"/{rest}"
        session = self.sessions.get(key)
        if session is None:
            raise Unauthorized("this key opens no rollout: it was never given out, or its rollout is over")
        return session, path

    def _stream(self, answer: dict[str, Any]) -> None:
        """All of it as one chunk: an agent that reads streams reads this."""
        (choice,) = answer["choices"]
        calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        told = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
        chunk = answer | {"object": "chat.completion.chunk", "choices": [told]}
        self.write(200, "text/event-stream", b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")

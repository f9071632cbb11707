"""Rollouts on a server of yours that speaks Eval Protocol's remote rollouts, as agents: nothing of the package is needed here.

    with RemoteRollouts("http://127.0.0.1:3000", score, port=8701) as remote, Agents(remote, tokenizer) as agents:
        train(client, [problem("1", [{"role": "user", "content": "..."}])], agents, config, Path("cursor.json"), steps=30)

Each rollout is one `POST /init`. Its `model_base_url` is the rollout's own: whatever key the server asks with, this rollout is answered. The server
says how it went where its logs go (`FW_TRACING_GATEWAY_BASE_URL`, here `http://127.0.0.1:8701`), by a record with a status and the rollout's id; then
`score` rates the conversation that was served, or the server has reported a reward to `{model_base_url}/reward`.
"""

import http.client
import json
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

from bloomery.recipes.agent_http import JsonHandler, LocalServer
from bloomery.recipes.agents import Episode
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Problem
from bloomery.types.errors import InvalidInput, NotFound

Message = dict[str, Any]

DONE: Final = 100
LATE: Final = 4
FAILED: Final = 13
_OK: Final = 0
_RUNNING: Final = 101
"""Codes of a status: finished, deadline exceeded, an internal error; OK, and running. All others are errors."""
_ANSWER_BYTES: Final = 1 << 16


class RolloutFailed(Exception):
    """The server said that its rollout failed, or did not take it."""


class Finished(NamedTuple):
    """A rollout that the server says is done, for whoever scores it."""

    rollout_id: str
    problem: Problem
    messages: list[Message]
    """The longest conversation that was served, with its last answer."""
    extras: Mapping[str, Any]
    """What the server told beside the status."""


Score = Callable[[Finished], "float | Reward | None"]
"""A number, a `Reward`, or None where the server reports it."""


def problem(row_id: str, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), ground_truth: Any = None) -> Problem:
    """A row as the protocol has it; the server gets the messages and tools, `score` also the ground truth."""
    return Problem(row_id, (), {"messages": list(messages), "tools": list(tools) or None, "ground_truth": ground_truth})


class RemoteRollouts:
    """An agent for `Agents`, within its `with`: starts each rollout on the server and waits for its status, to the episode's deadline."""

    def __init__(
        self, url: str, score: Score = lambda _: None, *, port: int = 0, host: str = "127.0.0.1", completion_params: Mapping[str, Any] | None = None
    ) -> None:
        self._url, self._score, self._params = url.rstrip("/"), score, dict(completion_params or {})
        self._run = secrets.token_hex(6)
        self._waiting: dict[str, _Waiting] = {}
        self._server = LocalServer(host, port, _handler(self._waiting))
        self.gateway_url = self._server.url
        """Where the server's records of status go."""

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.__exit__(*raised)

    def __call__(self, episode: Episode) -> float | Reward | None:
        """One rollout; an exception says how it failed."""
        return self.scored(self._score, episode)

    def scored(self, score: Score, episode: Episode) -> float | Reward | None:
        """The same, with the rewards of another."""
        deadline = time.monotonic() + episode.timeout_s
        waiting = self._waiting[episode.attempt_id] = _Waiting()
        try:
            post(f"{self._url}/init", self._request(episode), episode.timeout_s)
            if not waiting.told.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the server did not say how rollout {episode.attempt_id} ended within {episode.timeout_s:g} s")
        finally:
            del self._waiting[episode.attempt_id]
        if waiting.code == LATE:
            raise TimeoutError(waiting.message)
        if waiting.code not in (_OK, DONE):
            raise RolloutFailed(f"status {waiting.code}: {waiting.message}")
        return score(Finished(episode.rollout_id, episode.problem, episode.conversation(), waiting.extras))

    def _request(self, episode: Episode) -> dict[str, Any]:
        row = episode.problem.data
        ids = {
            "invocation_id": self._run,
            "experiment_id": self._run,
            "run_id": self._run,
            "rollout_id": episode.attempt_id,
            "row_id": episode.problem.id,
        }
        return {
            "completion_params": {**self._params, "model": episode.model},
            "messages": row["messages"],
            "tools": row["tools"],
            "model_base_url": episode.keyed_url,
            "metadata": ids,
            "api_key": episode.api_key,
        }


class _Waiting:
    def __init__(self) -> None:
        self.told = threading.Event()
        self.code, self.message = _RUNNING, ""
        self.extras: Mapping[str, Any] = {}


def post(url: str, body: Mapping[str, Any], timeout_s: float) -> None:
    """Say something in JSON to whom no answer is wanted of; RolloutFailed where it was not taken, TimeoutError where that is not known in time."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            # Nothing of it is wanted, and who says something without end is not listened to.
            answer.read(_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise RolloutFailed(f"{url} answered {error.code}: {error.read(2000).decode(errors='replace')}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(f"{url} did not answer within {timeout_s:g} s") from None
        raise RolloutFailed(f"{url} cannot be reached: {error.reason}") from None
    except (ConnectionError, http.client.HTTPException) as error:
        # What breaks while the answer is waited for, urllib hands on as it is.
        raise RolloutFailed(f"{url} broke off before it answered: {error!r}") from None


def _handler(waiting: dict[str, _Waiting]) -> type["_Handler"]:
    class Handler(_Handler):
        rollouts = waiting

    return Handler


class _Handler(JsonHandler):
    """Takes records of status; those without one are notes that nobody reads here."""

    rollouts: ClassVar[dict[str, _Waiting]]

    def answer(self, path: str, body: dict[str, Any]) -> None:
        if path not in ("/logs", "/v1/logs"):
            raise NotFound(f"there is no {path} here: records go to /logs")
        told = body.get("status")
        if told is not None:
            self._tell(body, told)
        self.send(200, {})

    def _tell(self, body: dict[str, Any], told: Any) -> None:
        tags = body.get("tags")
        ids = [tag.removeprefix("rollout_id:") for tag in (tags if isinstance(tags, list) else []) if str(tag).startswith("rollout_id:")]
        if not isinstance(told, dict) or not isinstance(told.get("code"), int):
            raise InvalidInput("a `status` has a `code`, a number", field="status")
        known = [waiting for one in ids if (waiting := self.rollouts.get(one)) is not None]
        if not known:
            raise NotFound(f"no rollout of this id is waited for: {', '.join(ids) or 'the record has no tag `rollout_id:...`'}")
        for waiting in known:
            if told["code"] != _RUNNING and not waiting.told.is_set():
                extras = body.get("extras")
                waiting.code, waiting.message = told["code"], str(told.get("message") or "")
                waiting.extras = extras if isinstance(extras, dict) else {}
                waiting.told.set()

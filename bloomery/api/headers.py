"""Headers that an answer carries whatever it is: its id, and what handlers add while they are at it."""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.types.ids import new_id

_ADDED: Final = "bloomery.answer_headers"

Headers = Callable[[], dict[str, str]]


class AnswerHeaders:
    """Every response carries `x-request-id`, and what was put into `answer_headers` of its request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        added: list[Headers] = []
        scope[_ADDED] = added

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", new_id("request"))
                for more in added:
                    headers.update(more())
            await send(message)

        await self._app(scope, receive, send_named)


def answer_headers(scope: Scope) -> list[Headers]:
    """What is asked for more headers when the answer begins."""
    added: list[Headers] = scope[_ADDED]
    return added

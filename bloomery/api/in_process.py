"""Requests that this process sends itself: the application answers them as it answers those that come over a socket, in all but who calls.

Who calls was found out before, so no key is shown.
"""

import asyncio
import logging
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from bloomery.api import errors
from bloomery.api.auth import KNOWN_CALLER
from bloomery.services.access.principal import Principal
from bloomery.services.batches.answers import Answered
from bloomery.types.errors import BloomeryError, Unauthorized
from bloomery.types.ids import new_id

_AGAIN: Final = (429, 503)
"""What these refuse may be had later."""

log = logging.getLogger(__name__)


async def ask(app: ASGIApp, caller: Principal | Unauthorized, path: str, body: bytes) -> Answered:
    """The answer to a POST of this JSON."""
    sent: list[Message] = []
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            # Nobody hangs up: who wants no answer any more cancels.
            await asyncio.get_running_loop().create_future()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(_scope(caller, path, body), receive, send)
    except Exception as error:
        log.exception("POST %s of a batch went wrong", path)
        if not sent:
            await errors.respond(path, BloomeryError(f"internal error ({type(error).__name__})"))(_scope(caller, path, body), receive, send)
    headers = Headers(raw=sent[0]["headers"])
    status: int = sent[0]["status"]
    content = b"".join(message.get("body", b"") for message in sent[1:])
    again_s = float(headers.get("retry-after", "1")) if status in _AGAIN else None
    return Answered(status, headers.get("x-request-id", new_id("request")), content, again_s)


def _scope(caller: Principal | Unauthorized, path: str, body: bytes) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
        KNOWN_CALLER: caller,
    }

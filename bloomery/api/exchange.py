"""What routes and the layers around them need of a request alike: its body, whether its client is still there, and whether its answer broke off."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from bloomery.types.errors import InvalidInput, TooLarge

_BROKE_OFF: Final = "bloomery.broke_off"

T = TypeVar("T")


async def read_bytes(request: Request, most_bytes: int, otherwise: str = "shorten it") -> bytes:
    """The body, read no further than to where it is too large; `otherwise` is what to do then."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most_bytes:
                raise TooLarge(f"the body is over the limit of {most_bytes >> 20} MiB: {otherwise}", field="body")
    except ClientDisconnect:
        raise InvalidInput("the body broke off: its sender hung up", field="body") from None
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client hangs up first; the error of `receive` where that fails. `work` has ended in any case."""
    try:
        # The deadline that is set when the client hangs up.
        async with asyncio.timeout(None) as patience:
            listening = asyncio.create_task(_until_gone(receive, patience))
            try:
                return await work
            finally:
                listening.cancel()
    except TimeoutError:
        if patience.expired():
            listening.result()
            return None
        raise


def watch_stream(scope: Scope) -> None:
    """Have `broke_off` tell, later, of a stream that answers this request."""
    scope[_BROKE_OFF] = [False]


def note_broken(scope: Scope) -> None:
    """The stream that answers this request ends with an error, which its status could not tell any more."""
    scope.get(_BROKE_OFF, []).append(True)


def broke_off(scope: Scope) -> bool:
    """Whether the stream that answered this request ended with an error."""
    return bool(scope.get(_BROKE_OFF, [False])[-1])


async def _until_gone(receive: Receive, patience: asyncio.Timeout) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:
        # Nobody would hear the client hang up any more.
        _expire(patience)
        raise
    _expire(patience)


def _expire(patience: asyncio.Timeout) -> None:
    patience.reschedule(asyncio.get_running_loop().time())

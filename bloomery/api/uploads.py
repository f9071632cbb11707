"""Files as the body of a request, or as a part of a form: taken from the network as fast as the disk takes them, and never in memory as a whole."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Final, NamedTuple

from fastapi import Request
from starlette.requests import ClientDisconnect

from bloomery.types.errors import InvalidInput, Unavailable

_AT_ONCE: Final = 1 << 20
"""Bytes that are handed to a thread for the disk together."""
_FORMS: Final = ("multipart/", "application/x-www-form-urlencoded")


class Uploaded(NamedTuple):
    """A file at its beginning, and a hash of its bytes."""

    file: BinaryIO
    digest: bytes


@asynccontextmanager
async def uploaded(request: Request, scratch: Path | None) -> AsyncIterator[Uploaded]:
    """The body in a file that has no name, and is gone with this."""
    kind = request.headers.get("content-type", "").lower()
    if kind.startswith(_FORMS):
        raise InvalidInput(f"the body is a form ({kind.partition(';')[0]}): send the bytes of the file alone", field="content-type")
    with TemporaryFile(dir=scratch) as file:
        with told():
            found = await write(file, request.stream())
        yield found


async def write(file: BinaryIO, parts: AsyncIterator[bytes]) -> Uploaded:
    """All parts, in the file, which is at its beginning then."""
    digest, waiting = hashlib.sha256(), bytearray()
    async for part in parts:
        digest.update(part)
        waiting += part
        if len(waiting) >= _AT_ONCE:
            await asyncio.to_thread(file.write, bytes(waiting))
            waiting = bytearray()
    await asyncio.to_thread(_finish, file, bytes(waiting))
    return Uploaded(file, digest.digest())


@contextmanager
def told() -> Iterator[None]:
    """A sender who hangs up and a disk without room are told of as what they are."""
    try:
        yield
    except ClientDisconnect:
        raise InvalidInput("the body broke off: its sender hung up", field="body") from None
    except OSError as error:
        raise Unavailable(f"the file cannot be written ({error.strerror}): is the server's disk full? Free space there and send it again") from error


def _finish(file: BinaryIO, rest: bytes) -> None:
    file.write(rest)
    file.flush()
    file.seek(0)

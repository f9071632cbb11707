"""Request bodies that were compressed with zstd, decompressed within bounds; bodies in any other coding are refused."""

import asyncio
from typing import Final

import zstandard
from fastapi import Request

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.types.errors import InvalidInput

ZSTD: Final = "zstd"
_PIECE: Final = 1 << 10
"""A piece of a frame can become 32,768 times as much: decompressed in small ones, a bomb is noticed before it is large."""
MAX_FRAMES: Final = 1024
MAX_WINDOW: Final = 1 << 27


class Decoded(Request):
    """A request with the body that its sender compressed."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._decoded = body

    async def body(self) -> bytes:
        """The whole body."""
        return self._decoded


async def decoded(request: Request) -> Request:
    """The request, with its body readable."""
    coding = coding_of(request)
    if coding in ("", "identity"):
        return request
    if coding != ZSTD:
        raise InvalidInput(f"content-encoding is `{coding}`: send the body as it is, or compressed with {ZSTD}", field="content-encoding")
    return Decoded(request, await asyncio.to_thread(decompress, await request.body()))


def coding_of(request: Request) -> str:
    """How the sender of a request says that its body is encoded."""
    return request.headers.get("content-encoding", "identity").strip().lower()


def decompress(data: bytes, *, limit: int = MAX_BODY_BYTES) -> bytes:
    """All frames of `data`, of at most `limit` bytes together."""
    found, place = bytearray(), 0
    for _ in range(MAX_FRAMES):
        if place == len(data):
            return bytes(found)
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        try:
            while place < len(data) and not frame.eof:
                piece = data[place : place + _PIECE]
                found += frame.decompress(piece)
                place += len(piece) - len(frame.unused_data)
                if len(found) > limit:
                    raise InvalidInput(f"the body has over {limit >> 20} MiB when it is decompressed: send it in parts", field="body")
        except zstandard.ZstdError as error:
            raise InvalidInput(f"the body is not {ZSTD}, as content-encoding says: {error}", field="body") from error
        if not frame.eof:
            raise InvalidInput(f"the body ends inside a {ZSTD} frame", field="body")
    if place < len(data):
        raise InvalidInput(f"the body has more than {MAX_FRAMES} {ZSTD} frames: compress it as one", field="body")
    return bytes(found)

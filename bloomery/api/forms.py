"""Forms with a file (`multipart/form-data`), as they come in: short fields in memory, the file on disk."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email import message_from_string
from email.message import Message
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Final, NamedTuple

from fastapi import Request

from bloomery.api.uploads import Uploaded, told, write
from bloomery.types.errors import InvalidInput, TooLarge, shown

KIND: Final = "multipart/form-data"
FILE: Final = "file"
MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 1 << 12
"""Of a field that is no file, and of the head of a part."""
_HEAD_END: Final = b"\r\n\r\n"


class Form(NamedTuple):
    """Fields by name, and the file that came with them."""

    fields: dict[str, str]
    filename: str
    content: Uploaded


@asynccontextmanager
async def form_with_file(request: Request, scratch: Path | None, most_bytes: int, *, name: str = FILE) -> AsyncIterator[Form]:
    """The form in the body, whose one file is called `name`, and is gone with this; at most `most_bytes` are read."""
    parts = _Parts(_bounded(request.stream(), most_bytes), _boundary(request))
    with TemporaryFile(dir=scratch) as file:
        with told():
            form = await _read(parts, name, file)
        yield form


async def _read(parts: "_Parts", file_name: str, file: BinaryIO) -> Form:
    fields: dict[str, str] = {}
    filename, content = file_name, None
    async for part in parts:
        name = str(part.get_param("name", "", header="content-disposition"))
        if name in fields or (name == file_name and content is not None):
            raise InvalidInput(f"`{shown(name)}` is there twice", field=shown(name))
        if name == file_name:
            filename = part.get_filename() or file_name
            content = await write(file, parts.content())
        elif len(fields) < MAX_FIELDS:
            fields[name] = (await _whole(parts.content(), f"`{shown(name)}`")).decode(errors="replace")
        else:
            raise InvalidInput(f"the form has more than {MAX_FIELDS} fields", field="body")
    if content is None:
        raise InvalidInput(f"the form has no `{file_name}`", field=file_name)
    return Form(fields, filename, content)


class _Parts:
    """The parts of a form, one after the other: its head, and then its content, before the next one."""

    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes) -> None:
        self._pieces = pieces
        self._delimiter = b"\r\n--" + boundary
        # The first boundary need not follow a line.
        self._held = bytearray(b"\r\n")
        self._began = False

    def __aiter__(self) -> "_Parts":
        return self

    async def __anext__(self) -> Message:
        if not self._began:
            self._began = True
            async for _ in self.content():
                pass
        end = await self._take(2)
        if end == b"--":
            async for _ in self._pieces:
                pass
            raise StopAsyncIteration
        if end != b"\r\n":
            raise InvalidInput("the form is broken: a boundary ends with a new line", field="body")
        head = await _whole(self._until(_HEAD_END), "the head of a part")
        return message_from_string(head.decode(errors="replace"))

    def content(self) -> AsyncIterator[bytes]:
        """Up to the next boundary."""
        return self._until(self._delimiter)

    async def _until(self, mark: bytes) -> AsyncIterator[bytes]:
        """What comes before a mark, in pieces; the mark is taken, too."""
        while (place := self._held.find(mark)) < 0:
            # The mark may have begun already.
            sure = len(self._held) - len(mark) + 1
            if sure > 0:
                yield await self._take(sure)
            await self._more()
        if place:
            yield await self._take(place)
        del self._held[: len(mark)]

    async def _take(self, count: int) -> bytes:
        while len(self._held) < count:
            await self._more()
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    async def _more(self) -> None:
        try:
            self._held += await anext(self._pieces)
        except StopAsyncIteration:
            raise InvalidInput("the form breaks off before its last boundary", field="body") from None


def _boundary(request: Request) -> bytes:
    head = message_from_string(f"content-type: {request.headers.get('content-type', '')}\n\n")
    boundary = head.get_boundary()
    if head.get_content_type() != KIND or not boundary:
        raise InvalidInput(f"send a form with a file, as `content-type: {KIND}; boundary=...`", field="content-type")
    return boundary.encode(errors="replace")


async def _bounded(pieces: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes]:
    read = 0
    async for piece in pieces:
        read += len(piece)
        if read > most_bytes:
            raise TooLarge(f"the form is over the limit of {most_bytes >> 20} MiB: send the file in parts", field="body")
        yield piece


async def _whole(pieces: AsyncIterator[bytes], what: str) -> bytes:
    whole = bytearray()
    async for piece in pieces:
        whole += piece
        if len(whole) > MAX_FIELD_BYTES:
            raise InvalidInput(f"{what} has more than {MAX_FIELD_BYTES} bytes", field="body")
    return bytes(whole)

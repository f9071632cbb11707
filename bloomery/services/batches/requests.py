"""The file of a batch: a request on each line. It is read through once, in pieces; where each line lies is remembered, and what is wrong with any."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw

from bloomery.services.data.files import PIECE_BYTES
from bloomery.store.blobs import Blobs
from bloomery.types.batches import MAX_LINES, BatchEndpoint, BatchProblem
from bloomery.types.errors import shown

MAX_LINE_BYTES: Final = 17 << 20
"""A body that is as long as any may be, and what stands around it."""
MAX_PROBLEMS: Final = 100
"""That are told of a file."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


class _Body(msgspec.Struct, frozen=True):
    model: str
    stream: Any = None


class Request(NamedTuple):
    """What a line asks."""

    custom_id: str
    body: bytes


_LINE: Final = msgspec.json.Decoder(_Line)
_BODY: Final = msgspec.json.Decoder(_Body)


@dataclass(eq=False)
class Requests:
    """Those of a file whose bytes are a blob; `problems` says why none of them can be answered."""

    blobs: Blobs
    key: str
    model: str | None = None
    problems: list[BatchProblem] = field(default_factory=list)
    _starts: "array[int]" = field(default_factory=lambda: array("Q"))
    _stops: "array[int]" = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Request:
        line = _LINE.decode(self.blobs.part(self.key, self._starts[number], self._stops[number]))
        return Request(line.custom_id, bytes(line.body))

    @classmethod
    def read(cls, blobs: Blobs, key: str, size_bytes: int, endpoint: BatchEndpoint) -> "Requests":
        """All of the file."""
        found, ids = cls(blobs, key), dict[str, int]()
        pieces = (blobs.part(key, start, min(start + PIECE_BYTES, size_bytes)) for start in range(0, size_bytes, PIECE_BYTES))
        for number, (start, line) in enumerate(_lines(pieces), start=1):
            if len(line) <= MAX_LINE_BYTES and not line.strip():
                continue
            if len(found) == MAX_LINES:
                found._add("too_many_tasks", f"a batch has at most {MAX_LINES} requests: make several of it", number)
                break
            found._starts.append(start)
            found._stops.append(start + len(line))
            if len(line) > MAX_LINE_BYTES:
                found._add("invalid_request", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB: shorten the request", number)
                break
            found._look(line, number, endpoint, ids)
            if len(found.problems) == MAX_PROBLEMS:
                break
        if not found and not found.problems:
            found._add("empty_file", "the file has no requests: give one on each line", None)
        return found

    def _look(self, line: bytes, number: int, endpoint: BatchEndpoint, ids: dict[str, int]) -> None:
        try:
            request = _LINE.decode(line)
        except msgspec.ValidationError as error:
            form = "a line is an object of `custom_id`, `method`, `url` and `body`"
            return self._add("invalid_request", f"{form}: {_lower(str(error))}", number)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._add("invalid_json_line", f"the line is not JSON: {error}", number)
        if (before := ids.setdefault(request.custom_id, number)) != number:
            problem = f"`custom_id` is `{shown(request.custom_id)}`, which line {before} has: give each request its own"
            return self._add("duplicate_custom_id", problem, number, "custom_id")
        if request.method != "POST":
            return self._add("invalid_request", f"`method` is POST, not `{shown(request.method)}`", number, "method")
        if request.url != endpoint:
            problem = f"`url` is `{shown(request.url)}`, and the batch was made for `{endpoint}`: a batch has requests of one route"
            return self._add("url_mismatch", problem, number, "url")
        try:
            body = _BODY.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._add("invalid_request", f"`body` is an object with a `model`: {_lower(str(error))}", number, "body")
        if body.stream not in (None, False):
            return self._add("invalid_request", "`stream` is nothing for a file: leave it out", number, "body.stream")
        if self.model is None:
            self.model = body.model
        elif body.model != self.model:
            problem = f"`model` is `{shown(body.model)}`, and `{shown(self.model)}` in lines before: a batch asks one model"
            return self._add("model_mismatch", problem, number, "body.model")

    def _add(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.problems.append(BatchProblem(code=code, message=message, line=line, param=param))


def _lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines and where they begin; of one that is too long as much as shows it, and then nothing more."""
    start, rest = 0, bytearray()
    for piece in pieces:
        rest += piece
        *whole, tail = rest.split(b"\n") if b"\n" in piece else (rest,)
        for line in whole:
            yield start, bytes(line)
            start += len(line) + 1
        rest = bytearray(tail)
        if len(rest) > MAX_LINE_BYTES:
            yield start, bytes(rest)
            return
    if rest:
        yield start, bytes(rest)


def _lower(message: str) -> str:
    return f"{message[:1].lower()}{message[1:]}"

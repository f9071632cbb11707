"""What runs in a jail: takes a program and then rows, and gives outcomes. It knows nobody but the other end of its one channel.

Frames are four bytes of length and JSON. Every batch of rows comes with a token, which its outcomes repeat: what others write into the channel has
none. What the grader prints goes there too, as frames of its own and up to a bound, so that it is known even of a grader that had to be killed.
"""

import io
import json
import os
import struct
import sys
from typing import Any, Final

from bloomery.grade.calling import Grader, failure, forget, loaded

SAID_CHARS: Final = 2000
"""Of what one grade prints that are kept."""
JAILED: Final = {"jailed": True}
"""The first frame: whoever sends it is jailed, and has not seen the program yet."""
_LENGTH: Final = struct.Struct(">I")


class Channel:
    """The inner end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def receive(self) -> Any:
        """The next frame; None where nobody is there any more."""
        head = self._read(_LENGTH.size)
        return json.loads(self._read(*_LENGTH.unpack(head))) if head else None

    def send(self, frame: dict[str, Any]) -> None:
        """Text that is not Unicode is escaped: whoever reads it finds out."""
        body = json.dumps(frame).encode()
        left = memoryview(_LENGTH.pack(len(body)) + body)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _read(self, wanted: int) -> bytes:
        parts = []
        while wanted and (part := os.read(self._descriptor, min(wanted, 1 << 20))):
            parts.append(part)
            wanted -= len(part)
        return b"" if wanted else b"".join(parts)


class Said(io.TextIOBase):
    """Standing in for standard output and error: passes on lines until a grade has said enough, and takes the rest in silence."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._line, self._left = channel, "", SAID_CHARS

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        kept = str(text)[: self._left]
        self._left -= len(kept)
        self._line += kept
        if "\n" in kept or (kept and not self._left):
            self.flush()
        return len(text)

    def flush(self) -> None:
        line, self._line = self._line, ""
        if line:
            self._channel.send({"said": line})

    def begin(self) -> None:
        """The next grade: what the one before did not end with a line counts as its."""
        self._line, self._left = "", SAID_CHARS


def serve(descriptor: int) -> None:
    """Until there are no more rows."""
    channel = Channel(descriptor)
    said = Said(channel)
    sys.stdout = sys.stderr = said
    channel.send(JAILED)
    if (program := channel.receive()) is None:
        return
    grader = _load(program, channel, said)
    while grader is not None and (batch := channel.receive()) is not None:
        said.begin()
        outcomes = grader.outcomes(batch["rows"])
        said.flush()
        channel.send({"token": batch["token"], "outcomes": outcomes})


def rehearse() -> None:
    """Grade once in the fork server, so that what is made at the first use is there in every fork, and need not be made in each."""
    grader = loaded("def grade(sample, item):\n    return 1.0", "grade", "auto")
    row = json.loads(json.dumps({"item": {}, "sample": {"output_text": ""}, "messages": [], "trace": None}))
    json.dumps({"token": "", "outcomes": grader.outcomes([row])})
    forget()


def _load(program: dict[str, Any], channel: Channel, said: Said) -> Grader | None:
    try:
        grader = loaded(program["source"], program["entry"], program["style"])
    except BaseException as error:
        said.flush()
        channel.send({"token": program["token"], "outcomes": [failure(error)]})
        return None
    said.flush()
    channel.send({"token": program["token"], "outcomes": [], "together": grader.together})
    return grader

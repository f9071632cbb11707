"""What waits for the engines: operations that were accepted and have no result, bounded by their number and by their bytes.

A run may have at most `MAX_WAITING` operations and `MAX_WAITING_BYTES` of payloads that wait, and no more bytes than are left of what all runs may
have: so the more runs wait, the less of each, and whoever comes late finds room. What a run's engine computes next is taken in any case, because
nothing else makes room. What waits behind an operation that did not come yet makes no room for itself, and its sender may not send that operation
before the others were taken: of what all may have, one such run is left as much as a run may have, until it is computed; then it is another's turn.
"""

from collections.abc import Iterable
from typing import Final

from bloomery.types.operations import ForwardBackward, Operation, Rejected
from bloomery.types.wire import encode

MAX_WAITING: Final = 4096
"""Operations of a run without a result; also how far ahead of the others one may arrive."""
MAX_WAITING_BYTES: Final = 4 << 30
"""The same in bytes of payloads, which wait in the journal."""
MAX_WAITING_BYTES_OF_ALL: Final = 16 << 30
"""Of all runs together."""
SMALL_BYTES: Final = 4096
"""Of a refusal that says no more than why: their number bounds these."""


class Backlog:
    """That of a server."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of payloads of all runs."""
        self._completed: RunBacklog | None = None
        """The run behind a gap that what is left is left to."""

    @property
    def room_bytes(self) -> int:
        """How much more is taken."""
        return max(0, MAX_WAITING_BYTES_OF_ALL - self.bytes)

    def takes_behind_gap(self, run: "RunBacklog", size_bytes: int) -> bool:
        """Whether a run may have more that waits for an operation which did not come yet."""
        left_bytes = MAX_WAITING_BYTES - (0 if self._completed is None else self._completed.bytes)
        if self._completed is run or size_bytes + left_bytes <= self.room_bytes:
            return True
        if self._completed is None:
            self._completed = run
        return self._completed is run

    def pass_on(self, run: "RunBacklog") -> None:
        """A run waits behind no gap any more: another one may be completed."""
        if self._completed is run:
            self._completed = None


class RunBacklog:
    """That of one run, and its part in the whole."""

    def __init__(self, whole: Backlog) -> None:
        self.bytes = 0
        self._whole = whole
        self._sizes: dict[int, int] = {}

    @property
    def most_bytes(self) -> int:
        """What may wait at present."""
        return min(MAX_WAITING_BYTES, self._whole.room_bytes)

    def takes_behind_gap(self, size_bytes: int) -> bool:
        """Whether so much more may wait for an operation which did not come yet."""
        return self._whole.takes_behind_gap(self, size_bytes)

    def gap_closed(self) -> None:
        """What waits here is being computed."""
        self._whole.pass_on(self)

    def add(self, seq: int, size_bytes: int) -> None:
        """An operation waits."""
        self._sizes[seq] = size_bytes
        self._count(size_bytes)

    def remove(self, seqs: Iterable[int]) -> None:
        """These wait no more."""
        self._count(-sum(self._sizes.pop(seq, 0) for seq in seqs))

    def forget(self) -> None:
        """Nobody waits here any more."""
        self.remove(list(self._sizes))

    def _count(self, size_bytes: int) -> None:
        self.bytes += size_bytes
        self._whole.bytes += size_bytes
        if self.bytes == 0:
            self.gap_closed()


def payload_bytes(operation: Operation) -> int:
    """What matters of an operation's size."""
    if isinstance(operation, Rejected):
        # Its message may repeat what was sent.
        return len(encode(operation))
    return operation.input_bytes if isinstance(operation, ForwardBackward) else 0


def small(operation: Operation) -> bool:
    """Whether an operation needs no room: without one that says why it was refused, those behind it would wait for what nobody sends again."""
    return not isinstance(operation, ForwardBackward) and payload_bytes(operation) <= SMALL_BYTES

"""Batches of OpenAI's contract: a file of requests that are answered when there is time for them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from bloomery.types.files import MAX_LIFE_S, MIN_LIFE_S
from bloomery.types.resources import Resource

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MAX_LINES: Final = 50_000
"""Requests of a batch."""
MAX_WINDOW_H: Final = 168
Key = Annotated[str, Field(min_length=1, max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class BatchState(StrEnum):
    """Where a batch is: looked at, answered, put together, and one of four ends."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing comes after it."""
        return not BATCH_NEXT[self]


BATCH_NEXT: Final[Mapping[BatchState, frozenset[BatchState]]] = {
    BatchState.VALIDATING: frozenset({BatchState.IN_PROGRESS, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLING}),
    BatchState.IN_PROGRESS: frozenset({BatchState.FINALIZING, BatchState.CANCELLING}),
    BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED}),
    BatchState.CANCELLING: frozenset({BatchState.CANCELLED}),
    BatchState.COMPLETED: frozenset(),
    BatchState.FAILED: frozenset(),
    BatchState.EXPIRED: frozenset(),
    BatchState.CANCELLED: frozenset(),
}
"""What comes after what. One that is put together is `expired` where requests are left."""


class NewBatch(Resource):
    """A batch as it is asked for."""

    endpoint: BatchEndpoint
    input_file: str
    window_h: Annotated[int, Field(ge=1, le=MAX_WINDOW_H)] = 24
    """Hours after which what is not answered is left."""
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_life_s: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)] | None = None
    """Seconds after which its files are deleted; None: they stay."""


class BatchProblem(Resource):
    """Why its file cannot be answered."""

    code: str
    message: str
    line: int | None = None
    """Counted from 1."""
    param: str | None = None


class BatchCounts(Resource):
    """Of its requests: all, those that were answered, and those whose answer is an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Resource):
    """A batch as it is."""

    id: str
    asked: NewBatch
    state: BatchState
    model: str | None
    """Which all its requests ask; None until they were looked at."""
    problems: list[BatchProblem]
    counts: BatchCounts
    output_file: str | None
    error_file: str | None
    times_us: dict[BatchState, int]
    """When it came to each state that it was in."""
    created_us: int
    expires_us: int


class BatchPage(Resource):
    """Some of them."""

    data: list[Batch]
    has_more: bool

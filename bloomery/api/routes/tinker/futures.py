"""Futures of samples.

Results of training operations lie in the journal and are found there whoever asks and however often the api was restarted. Samples are not
journaled: their futures live in memory, can be fetched again for a while, and when they are gone the SDK is told to submit the sample again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, NamedTuple

from fastapi import Depends, FastAPI, Request

from bloomery.api.routes.tinker.errors import as_ours
from bloomery.types.errors import Gone, NotFound, Unavailable
from bloomery.types.operations import Failed

MAX_RUNNING: Final = 4096
MAX_KEPT: Final = 8192
MAX_KEPT_BYTES: Final = 256 << 20

log = logging.getLogger(__name__)


class SampleAnswer(NamedTuple):
    """A finished sample: the body to send and the version of the weights that made it."""

    body: bytes
    version: str


Make = Callable[[], Coroutine[Any, Any, SampleAnswer]]


class _Entry(NamedTuple):
    owner: str
    task: asyncio.Task[SampleAnswer | Failed]


class SampleFutures:
    """Samples in the making and the latest finished ones, by request id."""

    def __init__(self, *, max_running: int = MAX_RUNNING, max_kept: int = MAX_KEPT, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_running, self._max_kept, self._max_kept_bytes = max_running, max_kept, max_kept_bytes
        self._entries: dict[str, _Entry] = {}
        self._finished: dict[str, int] = {}
        """Sizes of finished answers, oldest first."""
        self._kept_bytes = 0

    def start(self, request_id: str, owner: str, make: Make) -> None:
        """Begin a sample; a repeated submission joins the one that is there."""
        if request_id in self._entries:
            return
        if len(self._entries) - len(self._finished) >= self._max_running:
            raise Unavailable(f"{self._max_running} samples are in the making; try again when some are done")
        task = asyncio.create_task(_settled(make))
        self._entries[request_id] = _Entry(owner, task)
        task.add_done_callback(lambda done: self._note_finished(request_id, done))

    async def wait(self, request_id: str, owner: str, timeout_s: float) -> SampleAnswer | Failed | None:
        """The answer, or None while the sample is still in the making after `timeout_s`."""
        task = self._find(request_id, owner).task
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            return None
        if task.cancelled():
            raise Gone(f"sample `{request_id}` was cancelled")
        return task.result()

    def cancel(self, request_id: str, owner: str) -> None:
        """Stop a sample and forget it."""
        self._find(request_id, owner).task.cancel()

    def cancel_all(self, beginning: str, owner: str) -> None:
        """Stop the owner's samples whose names begin like this."""
        for request_id, entry in self._entries.items():
            if entry.owner == owner and request_id.startswith(beginning):
                entry.task.cancel()

    async def close(self) -> None:
        """Stop everything."""
        tasks = [entry.task for entry in self._entries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, request_id: str, owner: str) -> _Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            raise Gone(f"sample `{request_id}` is not in memory any more; submit it again")
        if entry.owner != owner:
            raise NotFound(f"no future `{request_id}`")
        return entry

    def _note_finished(self, request_id: str, task: asyncio.Task[SampleAnswer | Failed]) -> None:
        answer = None if task.cancelled() else task.result()
        self._finished[request_id] = len(answer.body) if isinstance(answer, SampleAnswer) else 0
        self._kept_bytes += self._finished[request_id]
        while len(self._finished) > self._max_kept or self._kept_bytes > self._max_kept_bytes:
            oldest = next(iter(self._finished))
            self._kept_bytes -= self._finished.pop(oldest)
            del self._entries[oldest]


def sample_futures(request: Request) -> SampleFutures:
    """The futures of this app."""
    state = request.app.state
    if not hasattr(state, "sample_futures"):
        state.sample_futures = SampleFutures()
    found: SampleFutures = state.sample_futures
    return found


@asynccontextmanager
async def closing_futures(app: FastAPI) -> AsyncIterator[None]:
    """Samples in the making end with the app."""
    yield
    if hasattr(app.state, "sample_futures"):
        await app.state.sample_futures.close()


Futures = Annotated[SampleFutures, Depends(sample_futures)]


async def _settled(make: Make) -> SampleAnswer | Failed:
    """A sample that fails is an answer too."""
    try:
        return await make()
    except Exception as error:
        ours = as_ours(error)
        if ours.category == "server":
            log.error("a sample failed: %s", ours.message, exc_info=error)
        return Failed(message=ours.message, category=ours.category)

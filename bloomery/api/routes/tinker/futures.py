"""Futures of samples.

Results of training operations lie in the journal and are found there whoever asks and however often the api was restarted. Samples are not
journaled: their futures live in memory, can be fetched again for a while, and when they are gone the SDK is told to submit the sample again.
A client may fetch each by itself, or be told which of a sampler's have ended and fetch those (`completions.py`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, NamedTuple

from fastapi import Depends, FastAPI, Request

from bloomery.api.routes.tinker.completions import Completions, Ended
from bloomery.api.routes.tinker.errors import as_ours
from bloomery.api.routes.tinker.names import SampleFuture
from bloomery.obs import background
from bloomery.types.errors import Conflict, Gone, Unavailable
from bloomery.types.generation import LogprobsMode
from bloomery.types.operations import Failed

MAX_RUNNING: Final = 4096
"""Sequences in the making, of all clients."""
MAX_RUNNING_TOKENS: Final = 1 << 23
"""Tokens of their prompts and drafts, each of which takes about 40 bytes while its sample waits."""
MAX_KEPT: Final = 8192
MAX_KEPT_BYTES: Final = 256 << 20

log = logging.getLogger(__name__)


class SampleAnswer(NamedTuple):
    """A finished sample: the body to send, the version of the weights that made it, and whose log-probabilities its tokens have."""

    body: bytes
    version: str
    mode: LogprobsMode
    kept: tuple[int, ...] | None = None
    """Of drafts, tokens of each sample; None where there were none."""


class Load(NamedTuple):
    """How much a sample is: its sequences, and the tokens of its prompt and its drafts."""

    sequences: int
    tokens: int


Make = Callable[[], Coroutine[Any, Any, SampleAnswer]]


class _Entry(NamedTuple):
    asked: bytes
    owner: str
    load: Load
    task: asyncio.Task[SampleAnswer | Failed]


class SampleFutures:
    """Samples in the making and the latest finished ones, by request id."""

    def __init__(
        self,
        *,
        max_running: int = MAX_RUNNING,
        max_running_tokens: int = MAX_RUNNING_TOKENS,
        max_kept: int = MAX_KEPT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._max_running, self._max_running_tokens = max_running, max_running_tokens
        self._max_kept, self._max_kept_bytes = max_kept, max_kept_bytes
        self._entries: dict[str, _Entry] = {}
        self._running = Load(0, 0)
        self._finished: dict[str, int] = {}
        """Sizes of finished answers, oldest first."""
        self._kept_bytes = 0
        self._completions = Completions()
        self.turned_away = 0
        """Submissions that found no room."""

    def start(
        self, future: SampleFuture, owner: str, load: Load, make: Make, admit: Callable[[], None] = lambda: None, *, asked: bytes = b""
    ) -> None:
        """Begin a sample; a repeated submission joins the one that is there, unless that was cancelled. One too large for any bound is made alone.

        `admit` may refuse a sample that is to be begun, by raising. `asked` is the hash of what is asked: Conflict where it is not what was before.
        """
        known = self._entries.get(future.request_id)
        if known is not None and not known.task.cancelling():
            if known.asked != asked:
                what = f"sample {future.seq} of `{future.sampling_session_id}` was asked for with another body"
                raise Conflict(f"{what}: repeat that body, or give a new sample the next number", field="seq_id")
            return
        sequences, tokens = self._running.sequences + load.sequences, self._running.tokens + load.tokens
        if self._running.sequences and (sequences > self._max_running or tokens > self._max_running_tokens):
            self.turned_away += 1
            running = f"{self._running.sequences} sequences with prompts and drafts of {self._running.tokens} tokens"
            raise Unavailable(f"{running} are in the making; try again when some are done")
        admit()
        if future.request_id in self._finished:
            self._drop(future.request_id)
        self._completions.begin(future)
        task = asyncio.create_task(_settled(make))
        self._entries[future.request_id] = _Entry(asked, owner, load, task)
        self._running = Load(sequences, tokens)
        task.add_done_callback(lambda done: self._note_finished(future, load, done))

    async def wait(self, future: SampleFuture, owner: str, timeout_s: float) -> SampleAnswer | Failed | None:
        """The answer, or None while the sample is still in the making after `timeout_s`."""
        task = self._find(future, owner).task
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            return None
        if task.cancelled():
            raise Gone(f"sample `{future.request_id}` was cancelled")
        self._completions.known(future)
        return task.result()

    async def ended(self, sampling_session_id: str, clone: int, after: int, timeout_s: float) -> Ended:
        """Which samples of a sampler's client have ended since `after`; waits for one up to `timeout_s`."""
        return await self._completions.ended(sampling_session_id, clone, after, timeout_s)

    def forget(self, request_ids: Iterable[str], sampling_session_id: str) -> None:
        """Let go of finished answers of a sampler that its client has."""
        own = SampleFuture(sampling_session_id, 0).siblings
        for request_id in request_ids:
            if request_id.startswith(own) and request_id in self._finished:
                self._drop(request_id)

    def cancel(self, future: SampleFuture, owner: str) -> None:
        """Stop a sample and forget it."""
        self._find(future, owner).task.cancel()

    def cancel_all(self, beginning: str, owner: str) -> None:
        """Stop the owner's samples whose names begin like this."""
        for request_id, entry in self._entries.items():
            if entry.owner == owner and request_id.startswith(beginning):
                entry.task.cancel()

    async def close(self) -> None:
        """Stop everything."""
        await background.stop(*(entry.task for entry in self._entries.values()))

    def _find(self, future: SampleFuture, owner: str) -> _Entry:
        entry = self._entries.get(future.request_id)
        if entry is None or entry.owner != owner:
            raise Gone(f"sample `{future.request_id}` is not in memory any more; submit it again")
        return entry

    def _note_finished(self, future: SampleFuture, load: Load, task: asyncio.Task[SampleAnswer | Failed]) -> None:
        answer = None if task.cancelled() else task.result()
        size = len(answer.body) if isinstance(answer, SampleAnswer) else None
        self._running = Load(self._running.sequences - load.sequences, self._running.tokens - load.tokens)
        entry = self._entries.get(future.request_id)
        if entry is None or entry.task is not task:
            # Cancelled, and begun anew before its end was noticed: that one has ended or will, and nobody waits for this.
            self._completions.replaced(future)
            return
        self._completions.end(future, size)
        self._finished[future.request_id] = size or 0
        self._kept_bytes += size or 0
        while len(self._finished) > self._max_kept or self._kept_bytes > self._max_kept_bytes:
            self._drop(next(iter(self._finished)))

    def _drop(self, request_id: str) -> None:
        self._kept_bytes -= self._finished.pop(request_id)
        del self._entries[request_id]


async def sample_futures(request: Request) -> SampleFutures:
    """The futures of this app."""
    found: SampleFutures = request.app.state.sample_futures
    return found


@asynccontextmanager
async def closing_futures(app: FastAPI) -> AsyncIterator[None]:
    """Samples in the making end with the app."""
    yield
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

"""The thread that steps a `Sampler`: orders reach it between two steps, events reach each request's event loop.

Whoever waits for it is told so after a while. Those who stop waiting do not undo what they asked.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar

from bloomery.infer.engine import EngineEvent
from bloomery.infer.sampler import Sampler
from bloomery.infer.scrub import Scrub
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Unavailable, reason
from bloomery.types.generation import Abort, Generate, GenerateFailed, SampleFinished, SamplerEvent

log = logging.getLogger(__name__)
T = TypeVar("T")
_CLOSED: Final = "the engine was closed"


async def within(timeout_s: float, whom: str, awaited: Awaitable[T]) -> T:
    """What comes of `awaited`; Unavailable, naming whom it waited for, when nothing comes in time."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            found = await awaited
    except TimeoutError:
        if not scope.expired():
            raise
        raise Unavailable(f"waited {timeout_s:g} s for {whom}") from None
    return found


class _Stream(NamedTuple):
    """Where the events of a request go, those of one step at a time."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[list[SamplerEvent]]

    def put(self, events: list[SamplerEvent]) -> None:
        """From any thread."""
        # A loop that is closed waits for nothing.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.events.put_nowait, events)


class _Order(NamedTuple):
    """Something for the thread to do between two steps."""

    work: Callable[[], Any]
    answer: Future[Any]

    def obey(self) -> None:
        """Do it; whatever it raises is its answer."""
        try:
            self.answer.set_result(self.work())
        except Exception as error:
            self.answer.set_exception(error)


class SamplerThread:
    """Owns a sampler from `start` to `stop`."""

    def __init__(self, sampler: Sampler, *, step_s: float, scrub: Scrub) -> None:
        """`step_s`: how long anybody waits for the thread, which may be in the middle of a step."""
        self._sampler, self._step_s, self._scrub = sampler, step_s, scrub
        self._why_closed = _CLOSED
        self._inbox: SimpleQueue[_Order] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._drains: list[Future[None]] = []
        self._closed = False
        self._thread = Thread(target=self._run, name="sampler")

    def start(self) -> None:
        """Step from here on."""
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, and every stream with an error."""
        self.post(self._close)
        await asyncio.to_thread(self._thread.join, self._step_s)
        if self._thread.is_alive():
            raise Unavailable(f"waited {self._step_s:g} s for the sampler's thread to end")

    def refuse_closed(self) -> None:
        """For what needs no thread, and is of no use without one."""
        if self._closed:
            raise Unavailable(self._why_closed)

    async def do(self, work: Callable[[], T]) -> T:
        """Have the thread do something between two steps."""
        order = self.post(work)
        if not order.done():
            self.refuse_closed()
        whom = "the sampler's thread, which is in the middle of a step or hangs: what was asked is done when that ends"
        return await within(self._step_s, whom, asyncio.wrap_future(order))

    def post(self, work: Callable[[], T]) -> Future[T]:
        """The same from anywhere, for nobody to wait for it here."""
        answer: Future[T] = Future()
        # Who stops waiting for it does not undo it.
        answer.set_running_or_notify_cancel()
        self._inbox.put(_Order(work, answer))
        return answer

    async def generate(self, request: Generate) -> AsyncGenerator[EngineEvent, None]:
        """Serve a request."""
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        unfinished = request.num_samples
        try:
            await self.do(lambda: self._begin(request, stream))
            while unfinished:
                for event in await self._next(stream):
                    if isinstance(event, GenerateFailed):
                        raise event.error()
                    unfinished -= isinstance(event, SampleFinished)
                    yield event
        finally:
            self.post(lambda: self._end(request.request_id, stream))

    async def _next(self, stream: _Stream) -> list[SamplerEvent]:
        """A request may wait long for its turn, or for the end of a pause, and its caller knows how long; the thread is there all the while."""
        while True:
            try:
                async with asyncio.timeout(self._step_s):
                    return await stream.events.get()
            except TimeoutError:
                await self.do(lambda: None)

    # On the thread.

    def drained(self) -> Future[None]:
        """Done when no request is in hand any more."""
        done: Future[None] = Future()
        self._drains.append(done)
        return done

    def end_drains(self, error: BloomeryError | None = None) -> None:
        """All is done, or will not be."""
        for done in self._drains:
            if done.set_running_or_notify_cancel():
                done.set_result(None) if error is None else done.set_exception(error)
        self._drains.clear()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._obey()
                if self._sampler.busy:
                    self._step()
                self._sampler.tidy()
                self._look_at_weights()
                if not self._sampler.in_hand:
                    self.end_drains()
        finally:
            # Also where the loop broke: nobody waits for a thread that is gone.
            self._close()
            self.end_drains(Unavailable(self._why_closed))
            self._sampler.call_off_swaps(Unavailable(self._why_closed))
            for request_id, stream in self._streams.items():
                stream.put([GenerateFailed(request_id=request_id, message=self._why_closed, category="server")])
            while not self._inbox.empty():
                self._inbox.get().answer.set_exception(Unavailable(self._why_closed))

    def _look_at_weights(self) -> None:
        """What is served with the decoder cannot be served any more where that is not what it was."""
        try:
            self._scrub.take_turn()
        except Corrupt as error:
            log.error("%s; the engine closes", error.message)
            self._why_closed = f"{_CLOSED}, because {error.message}: make another one, from its files"
            self._close()

    def _close(self) -> None:
        self._closed = True

    def _obey(self) -> None:
        """Every order that has come; waits for one while there is nothing to sample, but not for longer than until something else is due."""
        try:
            if not self._sampler.busy:
                self._inbox.get(timeout=min(self._scrub.due_in_s, self._sampler.tidy_in_s)).obey()
            while True:
                self._inbox.get_nowait().obey()
        except Empty:
            return

    def _step(self) -> None:
        try:
            events = self._sampler.step()
        except Exception as error:
            log.exception("a sampling step broke")
            self._sampler.fail_running(f"sampling broke: {type(error).__name__}: {reason(error)}")
            return
        by_request: dict[str, list[SamplerEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            if request_id in self._streams:
                self._streams[request_id].put(own)

    def _begin(self, request: Generate, stream: _Stream) -> None:
        if request.request_id in self._streams:
            raise Conflict(f"request `{request.request_id}` is being served already: choose a fresh id", field="request_id")
        self._streams[request.request_id] = stream
        self._sampler.submit(request)

    def _end(self, request_id: str, stream: _Stream) -> None:
        # Whoever was refused because of another one's id ends nothing.
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._sampler.abort(Abort(request_id=request_id))

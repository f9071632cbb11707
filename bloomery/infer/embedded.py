"""The engine of this process: a thread that steps a `Sampler`, behind the `Engine` protocol.

Orders reach the thread between two steps; events reach each request's event loop. New weights are copied and read on other threads, so that what
the sampler's thread does for a swap is to exchange a reference.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np

from bloomery.infer.engine import EngineEvent, Update
from bloomery.infer.grammar import Grammars
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.staging import Staging, checksum
from bloomery.infer.versions import VERSIONS_IN_MEMORY, Model, Source
from bloomery.models.decoder import Decoder
from bloomery.models.numerics import Form
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, NotSupported, Unavailable, WorkerError
from bloomery.types.generation import Abort, Generate, GenerateFailed, Live, PromptScored, SampleFinished, SamplerEvent, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.serving import MODEL, Capabilities, EngineMetrics, KvPolicy, PauseMode, WeightInfo

log = logging.getLogger(__name__)
T = TypeVar("T")
_CLOSED: Final = "the engine was closed"


class _Stream(NamedTuple):
    """Where the events of a request go, those of one step at a time."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[list[SamplerEvent]]

    def put(self, events: list[SamplerEvent]) -> None:
        """From any thread; a loop that is closed waits for nothing."""
        if not self.loop.is_closed():
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


class EmbeddedEngine:
    """Our own sampler on a thread of its own; an async context manager that begins and ends it.

    `version` is what the bare `decoder` is called, and `bit_exact` what the probe of this machine found (`models/numerics`).
    """

    def __init__(
        self,
        decoder: Decoder,
        source: Source,
        *,
        version: str,
        bit_exact: bool,
        limits: Limits | None = None,
        grammars: Grammars | None = None,
        form: Form | None = None,
        versions_in_memory: int = VERSIONS_IN_MEMORY,
    ) -> None:
        self._config, self._source, self._bit_exact, self._versions_in_memory = decoder.config, source, bit_exact, versions_in_memory
        self._sampler = Sampler(decoder, source, limits, grammars, form, versions_in_memory=versions_in_memory)
        self._inbox: SimpleQueue[_Order] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._drains: list[Future[None]] = []
        self._stagings: dict[str, Staging] = {}
        self._versions_given = {version}
        self._asleep = self._closed = False
        self._paused_before_sleep: PauseMode | None = None
        self._thread = Thread(target=self._run, name="embedded engine")
        self._sampler.serve(MODEL, Weights(version=version))
        self._sampler.step()

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._do(self._close)
        await asyncio.to_thread(self._thread.join)

    async def generate(self, request: Generate) -> AsyncGenerator[EngineEvent, None]:
        """Serve a request."""
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        await self._do(lambda: self._begin(request, stream))
        unfinished = request.num_samples
        try:
            while unfinished:
                for event in await stream.events.get():
                    if isinstance(event, GenerateFailed):
                        raise InvalidInput(event.message, field=event.field) if event.category == "user" else WorkerError(event.message)
                    unfinished -= isinstance(event, SampleFinished)
                    yield event
        finally:
            self._post(lambda: self._end(request.request_id))

    async def score(self, prompt: list[int], weights: Weights | Live, *, top_k: int = 0) -> PromptScored:
        """Score a prompt."""
        request = Generate(
            request_id=new_id("generate"),
            weights=weights,
            prompt=Array.of(np.array(prompt, np.int32)),
            params=SamplingParams(max_tokens=0, seed=0),
            prompt_logprobs=True,
            prompt_top_k=top_k,
        )
        scores = [event async for event in self.generate(request) if isinstance(event, PromptScored)]
        if not scores:
            raise Conflict("the engine was paused with `abort` before the prompt was scored: ask again", field="prompt")
        return scores[0]

    async def abort(self, abort: Abort) -> None:
        """End a request or a sample."""
        await self._do(lambda: self._sampler.abort(abort))

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; with `drain`, when all that was in hand is done."""
        await self._do(lambda: self._pause(mode))
        if mode == "drain":
            done: Future[None] = Future()
            await self._do(lambda: self._drains.append(done))
            await asyncio.wrap_future(done)

    async def resume(self) -> None:
        """Go on."""
        await self._do(self._resume)

    async def begin_update(self, name: str, version: str) -> None:
        """Copy what is served under a name."""
        if name in self._stagings:
            raise Conflict(f"an update of `{name}` is staged already: commit or cancel it", field="name")
        model = await self._model(name)
        if version in self._versions_given or version in await self._do(lambda: set(self._sampler.versions.held)):
            raise Conflict(f"version `{version}` names other weights already: every update needs a name of its own", field="version")
        self._versions_given.add(version)
        self._stagings[name] = await asyncio.to_thread(Staging, model, version)

    async def apply(self, name: str, update: Mapping[str, Update]) -> None:
        """Change the copy."""
        await asyncio.to_thread(self._staging(name).apply, update)

    async def commit(self, name: str, policy: KvPolicy) -> WeightInfo:
        """Serve the copy."""
        staging = self._staging(name)
        model = staging.model()
        await asyncio.to_thread(self._sampler.prepare, model)
        swapped = await self._do(lambda: self._hold_and_swap(name, staging, policy))
        del self._stagings[name]
        await asyncio.wrap_future(swapped)
        return WeightInfo(name, model.version, await asyncio.to_thread(checksum, model))

    async def cancel_update(self, name: str) -> None:
        """Forget the copy."""
        self._staging(name)
        del self._stagings[name]

    async def switch(self, name: str, weights: Weights, policy: KvPolicy) -> WeightInfo:
        """Serve weights of the disk."""
        if name in self._stagings:
            raise Conflict(f"an update of `{name}` is staged: commit or cancel it first", field="name")
        model = await asyncio.wrap_future(await self._do(lambda: self._sampler.swap(name, weights, policy)))
        return WeightInfo(name, model.version, await asyncio.to_thread(checksum, model))

    async def weight_info(self, name: str) -> WeightInfo:
        """What is served under a name."""
        model = await self._model(name)
        return WeightInfo(name, model.version, await asyncio.to_thread(checksum, model))

    async def load_adapter(self, name: str, weights: Weights) -> None:
        """Serve an adapter of the disk."""
        model = await asyncio.wrap_future(await self._do(lambda: self._sampler.serve(name, weights)))
        if model.adapter is None:
            await self._do(lambda: self._sampler.withdraw(name))
            raise InvalidInput(f"version {weights.version} is a whole model, not an adapter: switch `{MODEL}` to it", field="weights")

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no longer."""
        if name == MODEL:
            raise NotSupported(f"`{MODEL}` is the engine's own model, which is always there: only adapters are unloaded", field="name")
        await self._do(lambda: self._sampler.withdraw(name))
        self._stagings.pop(name, None)

    async def adapters(self) -> dict[str, str]:
        """Names and versions."""
        served = await self._do(lambda: self._sampler.names)
        return {name: weights.version for name, weights in served.items() if name != MODEL}

    async def reset_prefix_cache(self) -> None:
        """Forget keys and values of requests that have left."""
        await self._do(self._sampler.reset_prefix_cache)

    async def sleep(self) -> None:
        """Give back memory."""
        await self._do(self._sleep)

    async def wake(self) -> None:
        """Serve again."""
        await self._do(self._wake)

    def capabilities(self) -> Capabilities:
        """Everything that the protocol has."""
        return Capabilities(
            bit_exact=self._bit_exact,
            router_capture=self._config.routing is not None,
            delta_update=True,
            update_while_serving=True,
            kv_policies=("keep", "recompute", "flush"),
            pinned_versions=True,
            max_adapters=None,
            max_adapters_in_memory=self._versions_in_memory,
        )

    async def metrics(self) -> EngineMetrics:
        """What the sampler is doing."""
        return await self._do(self._metrics)

    async def _do(self, work: Callable[[], T]) -> T:
        """Have the thread do something between two steps."""
        order = self._post(work)
        if self._closed:
            raise Unavailable(_CLOSED)
        return await asyncio.wrap_future(order)

    def _post(self, work: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        # Who stops waiting for it does not undo it.
        answer.set_running_or_notify_cancel()
        self._inbox.put(_Order(work, answer))
        return answer

    async def _model(self, name: str) -> Model:
        """What is served under a name; read from the disk where it is not in memory."""
        weights = await self._do(lambda: self._sampler.served(name))
        held = await self._do(lambda: self._sampler.versions.take(weights.version))
        return await asyncio.to_thread(self._source.load, weights) if held is None else held

    def _staging(self, name: str) -> Staging:
        if name not in self._stagings:
            raise Conflict(f"no update of `{name}` is staged: begin one", field="name")
        return self._stagings[name]

    # On the thread.

    def _run(self) -> None:
        while not self._closed:
            self._obey()
            if self._sampler.busy:
                self._step()
            if not self._sampler.in_hand:
                self._end_drains(None)
        while not self._inbox.empty():
            self._inbox.get().answer.set_exception(Unavailable(_CLOSED))

    def _obey(self) -> None:
        """Every order that has come; waits for one while there is nothing to sample."""
        try:
            if not self._sampler.busy:
                self._inbox.get().obey()
            while True:
                self._inbox.get_nowait().obey()
        except Empty:
            return

    def _step(self) -> None:
        try:
            events = self._sampler.step()
        except Exception as error:
            log.exception("a sampling step broke")
            self._sampler.fail_running(f"sampling broke: {type(error).__name__}: {error}")
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

    def _end(self, request_id: str) -> None:
        del self._streams[request_id]
        self._sampler.abort(Abort(request_id=request_id))

    def _pause(self, mode: PauseMode) -> None:
        self._refuse_asleep()
        self._sampler.pause(mode)

    def _resume(self) -> None:
        self._refuse_asleep()
        self._end_drains(Conflict("the engine was resumed before it had drained", field="mode"))
        self._sampler.resume()

    def _hold_and_swap(self, name: str, staging: Staging, policy: KvPolicy) -> Future[Model]:
        self._sampler.served(name)
        self._sampler.versions.hold(staging.model(), staging.size_bytes, pinned=True)
        return self._sampler.swap(name, Weights(version=staging.model().version), policy)

    def _sleep(self) -> None:
        self._refuse_asleep()
        self._sampler.rest()
        self._paused_before_sleep, self._asleep = self._sampler.paused, True
        self._sampler.pause("keep")

    def _wake(self) -> None:
        if not self._asleep:
            raise Conflict("the engine is not asleep")
        self._asleep = False
        self._sampler.resume()
        if self._paused_before_sleep is not None:
            self._sampler.pause(self._paused_before_sleep)

    def _refuse_asleep(self) -> None:
        if self._asleep:
            raise Conflict("the engine is asleep: wake it first")

    def _metrics(self) -> EngineMetrics:
        return EngineMetrics(
            running_sequences=self._sampler.running_sequences,
            waiting_sequences=self._sampler.waiting_sequences,
            tokens_sampled=self._sampler.tokens_sampled,
            tokens_prefilled=self._sampler.tokens_prefilled,
            cache_usage=self._sampler.cache_usage,
            preemptions=self._sampler.preemptions,
            versions_in_memory=len(self._sampler.versions.held),
            version_bytes=self._sampler.versions.held_bytes,
            swaps=self._sampler.swaps,
            paused=None if self._asleep else self._sampler.paused,
            asleep=self._asleep,
        )

    def _end_drains(self, error: BloomeryError | None) -> None:
        for done in self._drains:
            if done.set_running_or_notify_cancel():
                done.set_result(None) if error is None else done.set_exception(error)
        self._drains.clear()

    def _close(self) -> None:
        self._closed = True
        self._end_drains(Unavailable(_CLOSED))
        for request_id, stream in self._streams.items():
            stream.put([GenerateFailed(request_id=request_id, message=_CLOSED, category="server")])

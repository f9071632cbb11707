"""The engine of this process: a `Sampler` on a thread of its own, behind the `Engine` protocol.

New weights are copied and read on other threads, so that what the sampler's thread does for a swap is to exchange a reference. Which names are being
updated, and which versions there were, that thread alone writes down: of two who want the same, one comes first.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np

from bloomery.infer.engine import EngineEvent, Update
from bloomery.infer.grammar import Grammars
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.sampler_thread import SamplerThread, within
from bloomery.infer.staging import Staging, checksum
from bloomery.infer.versions import VERSIONS_IN_MEMORY, Model, Source
from bloomery.models.decoder import Decoder
from bloomery.models.numerics import Form
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict, NotSupported, Unavailable
from bloomery.types.generation import Abort, Generate, Live, PromptScored, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.serving import MODEL, Capabilities, EngineMetrics, KvPolicy, PauseMode, WeightInfo

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long anybody waits at most, and then hears for whom. For a request's turn its caller alone knows how long."""

    step_s: float = 300.0
    """For the end of a step: that of a large model on few cores takes long."""
    weights_s: float = 1800.0
    """For weights to be read, copied or summed, and to have room in memory."""
    drain_s: float = 3600.0
    """For requests in hand to end."""


@dataclass(slots=True, eq=False)
class _NewWeights:
    """An update of what a name stands for."""

    version: str
    staging: Staging | None = None
    """None while the copy is made."""


class EmbeddedEngine:
    """Our own sampler on a thread of its own; an async context manager that begins and ends it.

    `version` is what the bare `decoder` is called, and `bit_exact` what the probe of this machine found (`models/numerics`). Whatever takes longer
    than its deadline is `Unavailable`, and may be done later all the same.
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
        deadlines: Deadlines | None = None,
    ) -> None:
        self._config, self._source, self._bit_exact, self._versions_in_memory = decoder.config, source, bit_exact, versions_in_memory
        self._sampler = Sampler(decoder, source, limits, grammars, form, versions_in_memory=versions_in_memory)
        self._deadlines = deadlines or Deadlines()
        self._thread = SamplerThread(self._sampler, step_s=self._deadlines.step_s)
        self._do = self._thread.do
        self._updates: dict[str, _NewWeights] = {}
        self._versions_given = {version}
        self._asleep = False
        self._paused_before_sleep: PauseMode | None = None
        self._sampler.serve(MODEL, Weights(version=version))
        self._sampler.step()

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._thread.stop()

    def generate(self, request: Generate) -> AsyncGenerator[EngineEvent, None]:
        """Serve a request."""
        return self._thread.generate(request)

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
        if mode != "drain":
            await self._do(lambda: self._pause(mode))
            return
        drained = asyncio.wrap_future(await self._do(self._drain))
        try:
            await asyncio.wait([drained], timeout=self._deadlines.drain_s)
        finally:
            late = drained.cancel()
        if late:
            open_ids = await self._do(lambda: self._sampler.request_ids)
            raise Unavailable(
                f"waited {self._deadlines.drain_s:g} s for requests in hand: {len(open_ids)} have not ended, {', '.join(open_ids[:3])} among them; "
                f"the engine stays paused: ask again, or pause with `abort`"
            )
        drained.result()

    async def resume(self) -> None:
        """Go on."""
        await self._do(self._resume)

    async def begin_update(self, name: str, version: str) -> None:
        """Copy what is served under a name."""
        update = _NewWeights(version)
        try:
            weights, held = await self._do(lambda: self._reserve(name, update))
            model = await self._read(weights) if held is None else held
            update.staging = await self._aside(f"a copy of `{name}`", lambda: Staging(model, version))
        except BaseException:
            self._thread.post(lambda: self._release(name, update))
            raise
        if self._updates.get(name) is not update:
            raise Conflict(f"the update of `{name}` was cancelled before it was staged: begin another", field="name")

    async def apply(self, name: str, update: Mapping[str, Update]) -> None:
        """Change the copy."""
        staging = self._staging(name)
        await self._aside(f"tensors to be applied to the update of `{name}`", lambda: staging.apply(update))

    async def commit(self, name: str, policy: KvPolicy) -> WeightInfo:
        """Serve the copy; where that fails it can be committed again or cancelled, and is not changed any more."""
        staging = self._staging(name)
        staging.seal()
        await self._aside(f"the update of `{name}` to be prepared", lambda: self._sampler.prepare(staging.model()))
        return await self._served(name, await self._do(lambda: self._hold_and_swap(name, staging, policy)))

    async def cancel_update(self, name: str) -> None:
        """Forget the copy."""
        await self._do(lambda: self._cancel(name))

    async def switch(self, name: str, weights: Weights, policy: KvPolicy) -> WeightInfo:
        """Serve weights of the disk."""
        return await self._served(name, await self._do(lambda: self._switch(name, weights, policy)))

    async def weight_info(self, name: str) -> WeightInfo:
        """What is served under a name."""
        weights, held = await self._do(lambda: self._current(name))
        return await self._info(name, await self._read(weights) if held is None else held)

    async def load_adapter(self, name: str, weights: Weights) -> None:
        """Serve an adapter of the disk."""
        await self._swapped(name, await self._do(lambda: self._sampler.serve(name, weights, adapter_only=True)))

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no longer."""
        if name == MODEL:
            raise NotSupported(f"`{MODEL}` is the engine's own model, which is always there: only adapters are unloaded", field="name")
        await self._do(lambda: self._unload(name))

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

    async def _aside(self, whom: str, work: Callable[[], T]) -> T:
        """Have another thread do what takes longer than the sampler may stand still."""
        return await within(self._deadlines.weights_s, whom, asyncio.to_thread(work))

    async def _read(self, weights: Weights) -> Model:
        return await self._aside(f"version {weights.version} to be read", lambda: self._source.load(weights))

    async def _swapped(self, name: str, swap: Future[Model]) -> Model:
        whom = f"the weights of `{name}` to be read and to have room in memory: they are served as soon as they have"
        return await within(self._deadlines.weights_s, whom, asyncio.wrap_future(swap))

    async def _served(self, name: str, swap: Future[Model]) -> WeightInfo:
        return await self._info(name, await self._swapped(name, swap))

    async def _info(self, name: str, model: Model) -> WeightInfo:
        return WeightInfo(name, model.version, await self._aside(f"the checksum of `{name}`", lambda: checksum(model)))

    def _update(self, name: str) -> _NewWeights:
        if (update := self._updates.get(name)) is None:
            raise Conflict(f"no update of `{name}` is staged: begin one", field="name")
        return update

    def _staging(self, name: str) -> Staging:
        if (staging := self._update(name).staging) is None:
            raise Conflict(f"an update of `{name}` is just being staged: wait until it has begun", field="name")
        return staging

    # On the thread.

    def _current(self, name: str) -> tuple[Weights, Model | None]:
        """What is served under a name, and its model if that is in memory."""
        weights = self._sampler.served(name)
        return weights, self._sampler.versions.take(weights.version)

    def _reserve(self, name: str, update: _NewWeights) -> tuple[Weights, Model | None]:
        """Name and version are taken from here on; returns what the update begins from."""
        if name in self._updates:
            raise Conflict(f"an update of `{name}` is staged already: commit or cancel it", field="name")
        if self._sampler.is_swapped(name):
            raise Conflict(f"`{name}` is just being given other weights: wait for them, then begin", field="name")
        current = self._current(name)
        version = update.version
        if version in self._versions_given or version in self._sampler.versions.held:
            raise Conflict(f"version `{version}` names other weights already: every update needs a name of its own", field="version")
        self._updates[name] = update
        self._versions_given.add(version)
        return current

    def _release(self, name: str, update: _NewWeights) -> None:
        """Of an update that never was staged."""
        if self._updates.get(name) is update:
            del self._updates[name]
            self._versions_given.discard(update.version)

    def _cancel(self, name: str) -> None:
        self._update(name)
        del self._updates[name]

    def _hold_and_swap(self, name: str, staging: Staging, policy: KvPolicy) -> Future[Model]:
        """The update is over when its weights are held: nobody commits it twice, or cancels it."""
        if self._update(name).staging is not staging:
            raise Conflict(f"this update of `{name}` was cancelled before it was committed: begin another", field="name")
        model = staging.model()
        self._sampler.versions.hold(model, staging.size_bytes, pinned=True)
        del self._updates[name]
        return self._sampler.swap(name, Weights(version=model.version), policy)

    def _switch(self, name: str, weights: Weights, policy: KvPolicy) -> Future[Model]:
        if name in self._updates:
            raise Conflict(f"an update of `{name}` is staged: commit or cancel it first", field="name")
        return self._sampler.swap(name, weights, policy)

    def _unload(self, name: str) -> None:
        self._sampler.withdraw(name)
        self._updates.pop(name, None)

    def _drain(self) -> Future[None]:
        self._pause("drain")
        return self._thread.drained()

    def _pause(self, mode: PauseMode) -> None:
        self._refuse_asleep()
        if mode == "keep":
            self._thread.end_drains(Conflict("the engine was paused with `keep` before it had drained", field="mode"))
        self._sampler.pause(mode)

    def _resume(self) -> None:
        self._refuse_asleep()
        self._thread.end_drains(Conflict("the engine was resumed before it had drained", field="mode"))
        self._sampler.resume()

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

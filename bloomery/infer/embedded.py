"""The engine of this process: a `Sampler` on a thread of its own, behind the `Engine` protocol.

New weights are copied, read and summed on other threads, so that what the sampler's thread does for a swap is to exchange a reference. An update
waits for that thread once, when it is committed: what names are being updated is written down beside it (`changes`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np

from bloomery.infer.arrivals import Kind
from bloomery.infer.changes import Changes, NewWeights
from bloomery.infer.engine import EngineEvent, Update
from bloomery.infer.grammar import Grammars
from bloomery.infer.plan import Limits
from bloomery.infer.probe import Probation
from bloomery.infer.probe_prompt import ask_probe
from bloomery.infer.sampler import Sampler
from bloomery.infer.sampler_thread import SamplerThread, within
from bloomery.infer.scrub import SCRUB_S, Scrub
from bloomery.infer.staging import Staging, checksum
from bloomery.infer.versions import VERSIONS_IN_MEMORY, Model, Source
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form, plain_form
from bloomery.models.kernel_probe import probe
from bloomery.models.numerics import numerics_id
from bloomery.models.rests import resting
from bloomery.sync.proof import Proof, as_it_is, prove
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict, NotSupported, Unavailable
from bloomery.types.generation import Abort, Generate, Live, PromptScored, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.serving import MODEL, STEP_S, Capabilities, EngineMetrics, KvPolicy, PauseMode, WeightInfo

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long anybody waits at most, and then hears for whom. For a request's turn its caller alone knows how long."""

    step_s: float = STEP_S
    """For the end of a step: that of a large model on few cores takes long."""
    weights_s: float = 1800.0
    """For weights to be read, copied or summed, and to have room in memory."""
    drain_s: float = 3600.0
    """For requests in hand to end."""


class EmbeddedEngine:
    """Our own sampler on a thread of its own; an async context manager that begins and ends it.

    `version` is what the bare `decoder` is called. Before it serves, which form gives the trainer's bits with this decoder here is found out
    (`models/kernel_probe`), and the sampler, in that form, answers the probe prompt: `capabilities().bit_exact` says what came of both. Whatever
    takes longer than its deadline is `Unavailable`, and may be done later all the same.

    What lies in memory is looked at again for as long as the engine runs (`scrub`): a version that has changed is taken out of service, and where the
    decoder has, the engine closes and says so to all who ask it.
    """

    def __init__(
        self,
        decoder: Decoder,
        source: Source,
        *,
        version: str,
        plain: bool = False,
        limits: Limits | None = None,
        grammars: Grammars | None = None,
        versions_in_memory: int = VERSIONS_IN_MEMORY,
        deadlines: Deadlines | None = None,
        scrub_s: float = SCRUB_S,
    ) -> None:
        """`plain`: the fastest form, which promises no bits. `scrub_s`: between two looks at a part of what lies in memory."""
        self._config, self._source, self._versions_in_memory = decoder.config, source, versions_in_memory
        form, exact = _form(decoder, plain=plain)
        self._sampler = Sampler(decoder, source, limits, grammars, form, versions_in_memory=versions_in_memory)
        self._sampler.serve(MODEL, Weights(version=version))
        self._sampler.step()
        base = Model(version, decoder, None)
        self._bit_exact = ask_probe(self._sampler, base, exact=exact).bit_equal and exact
        self._sampled_before, self._prefilled_before = self._sampler.tokens_sampled, self._sampler.tokens_prefilled
        numerics = numerics_id(decoder.dtype, decoder.device)
        self._probation = Probation(base, form, self._sampler.computed_with, exact=self._bit_exact, numerics=numerics)
        self._sampler.versions.examine_with(self._probation.examine)
        self._deadlines = deadlines or Deadlines()
        self._scrub = Scrub(_proofs(base, self._sampler.computed_with(decoder)), self._sampler, scrub_s)
        self._thread = SamplerThread(self._sampler, step_s=self._deadlines.step_s, scrub=self._scrub)
        self._do = self._thread.do
        self._changes = Changes(self._sampler, version)
        self._asleep = False
        self._paused_before_sleep: PauseMode | None = None

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
        self._thread.refuse_closed()
        update = NewWeights(version)
        weights, held = self._changes.begin(name, update)
        try:
            model = await self._read(weights) if held is None else held
            update.staging = await self._changing(f"a copy of `{name}`", lambda: Staging(model, version))
        except BaseException:
            self._changes.release(name, update)
            raise
        if not self._changes.has(name, update):
            raise Conflict(f"the update of `{name}` was cancelled before it was staged: begin another", field="name")

    async def apply(self, name: str, update: Mapping[str, Update]) -> None:
        """Change the copy."""
        staging = self._changes.staged(name)
        await self._changing(f"tensors to be applied to the update of `{name}`", lambda: staging.apply(update))

    async def commit(self, name: str, policy: KvPolicy) -> WeightInfo:
        """Serve the copy, when what lies in memory is what was given; where that fails it can be committed again or cancelled, and is not changed."""
        staging = self._changes.staged(name)
        staging.seal()
        model = staging.model()
        await self._changing(f"the update of `{name}` to be prepared", lambda: self._sampler.prepare(model))
        await self._changing(f"the update of `{name}` to be proved", lambda: staging.prove(self._sampler.computed_with))
        await self._changing(f"the update of `{name}` to be probed", lambda: staging.ask_probe(self._probation.examine))
        # Reading all of it takes longer than a step of a large model, and beside the first one of the new weights it would hold that up.
        info = await self._info(name, model)
        await self._swapped(name, lambda: self._changes.commit(name, staging, policy))
        return info

    async def cancel_update(self, name: str) -> None:
        """Forget the copy."""
        self._thread.refuse_closed()
        self._changes.cancel(name)

    async def switch(self, name: str, weights: Weights, policy: KvPolicy) -> WeightInfo:
        """Serve weights of the disk."""
        kind: Kind = "model" if name == MODEL else "adapter"
        return await self._info(name, await self._given(name, lambda: self._sampler.swap(name, weights, policy, kind=kind)))

    async def weight_info(self, name: str) -> WeightInfo:
        """What is served under a name."""
        self._thread.refuse_closed()
        weights, held = self._changes.current(name)
        return await self._info(name, await self._read(weights) if held is None else held)

    async def load_adapter(self, name: str, weights: Weights) -> None:
        """Serve an adapter of the disk."""
        await self._given(name, lambda: self._sampler.serve(name, weights, kind="adapter"))

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no longer."""
        if name == MODEL:
            raise NotSupported(f"`{MODEL}` is the engine's own model, which is always there: only adapters are unloaded", field="name")
        await self._do(lambda: self._changes.withdraw(name))

    async def adapters(self) -> dict[str, str]:
        """Names and versions."""
        self._thread.refuse_closed()
        return {name: weights.version for name, weights in self._sampler.names.items() if name != MODEL}

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
            router_weights=self._config.routing is not None,
        )

    async def metrics(self) -> EngineMetrics:
        """What the sampler is doing."""
        return await self._do(self._metrics)

    async def _aside(self, whom: str, work: Callable[[], T]) -> T:
        """Have another thread do what takes longer than the sampler may stand still."""
        return await within(self._deadlines.weights_s, whom, asyncio.to_thread(work))

    async def _changing(self, whom: str, work: Callable[[], T]) -> T:
        """The same for an update, with rests between the pieces of the work while others sample."""

        def with_rests() -> T:
            with resting(lambda: self._sampler.busy):
                return work()

        return await self._aside(whom, with_rests)

    async def _read(self, weights: Weights) -> Model:
        return await self._aside(f"version {weights.version} to be read", lambda: self._source.load(weights))

    async def _given(self, name: str, order: Callable[[], Future[Model]]) -> Model:
        """Have a name given weights of the disk; its model, as soon as that is served."""
        self._changes.announce(name)
        return await self._swapped(name, lambda: self._changes.ordered(name, order))

    async def _swapped(self, name: str, order: Callable[[], Future[Model]]) -> Model:
        """Give a swap to the thread; its model, as soon as that is served."""
        swap = await self._do(order)
        whom = f"the weights of `{name}` to be read and to have room in memory: they are served as soon as they have"
        return await within(self._deadlines.weights_s, whom, asyncio.wrap_future(swap))

    async def _info(self, name: str, model: Model) -> WeightInfo:
        return WeightInfo(name, model.version, await self._changing(f"the checksum of `{name}`", lambda: checksum(model)))

    # On the thread.

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
            tokens_sampled=self._sampler.tokens_sampled - self._sampled_before,
            tokens_prefilled=self._sampler.tokens_prefilled - self._prefilled_before,
            cache_usage=self._sampler.cache_usage,
            preemptions=self._sampler.preemptions,
            versions_in_memory=len(self._sampler.versions.held),
            version_bytes=self._sampler.versions.held_bytes,
            swaps=self._sampler.swaps,
            paused=None if self._asleep else self._sampler.paused,
            asleep=self._asleep,
            tokens_kept=self._sampler.tokens_kept,
        )


def _form(decoder: Decoder, *, plain: bool) -> tuple[Form, bool]:
    """How the sampler is to compute, and whether that has the trainer's bits here."""
    if plain:
        return plain_form(decoder), False
    found = probe(decoder)
    for failure in found.failures:
        log.warning("not bit-exact here: %s", failure)
    return found.form, found.bit_exact


def _proofs(base: Model, computed: Decoder) -> list[Proof]:
    """Of both forms in memory: updates copy the plain one, requests are computed with the other."""
    known = as_it_is(base.version, base.decoder)
    return [known] if computed is base.decoder else [known, prove(known.expected, computed, None)]

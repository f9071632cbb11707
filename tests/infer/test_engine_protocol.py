"""What every engine behind the protocol keeps to, shown on the embedded one and on a fake, and what the fake's scripts make of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from bloomery.infer.embedded import EmbeddedEngine
from bloomery.infer.engine import Engine, EngineEvent, Patch, Update
from bloomery.infer.versions import Model
from bloomery.models.load import stored_tensors
from bloomery.models.published_names import PUBLISHED_PREFIX
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, NotFound, NotSupported, Unavailable, WorkerError
from bloomery.types.generation import Abort, Generate, Grammar, Live, PromptFound, SampledToken, SampleFinished, Weights
from bloomery.types.serving import MODEL, Capabilities, KvPolicy, VersionSpan, WeightInfo, version_spans
from tests.infer.builders import Adapters, adapter, prompt, request
from tests.infer.hash_engine import HashEngine, Script, numbers
from tests.infer.test_versions import other_model
from tests.infer.unhurried import UnhurriedEngine
from tests.train.builders import decoder

PATIENCE_S = 60
LONG = 400
"""Tokens: what happens after the first few happens in the middle."""
DECODER = decoder()


class Stage(NamedTuple):
    """An engine whose disk holds the adapters `v0` and `v1`, the model `whole`, and `broken`, which cannot be read."""

    engine: Engine
    whole: Callable[[int], dict[str, Tensor]]
    """All tensors of other weights, for the model."""
    part: str
    """The name of one of them."""
    adapter_part: tuple[str, tuple[int, ...]]
    """Name and shape of a tensor of the adapters."""


class Disk(Adapters):
    def weigh(self, weights: Weights) -> int:
        return 0 if weights.key is None else 1_000

    def load(self, weights: Weights) -> Model:
        if weights.version == "broken":
            raise ValueError("damaged")
        return super().load(weights)


@asynccontextmanager
async def embedded(**options: int) -> AsyncIterator[Stage]:
    versions = {"v0": adapter(DECODER, 0), "v1": adapter(DECODER, 1), "whole": other_model(DECODER, 1)}
    async with UnhurriedEngine(DECODER, Disk(DECODER, versions), version="base", **options) as engine:
        part = f"{PUBLISHED_PREFIX}layers.1.self_attn.q_proj.lora_B.weight"
        yield Stage(engine, lambda seed: stored_tensors(other_model(DECODER, seed)), "model.norm.weight", (part, (64, 16)))


@asynccontextmanager
async def fake(script: Script | None = None, **bounds: Any) -> AsyncIterator[Stage]:
    disk = {"v0": numbers(10), "v1": numbers(11), "whole": numbers(12), "broken": None}
    yield Stage(HashEngine(numbers(0), disk, script, wholes={"whole"}, **bounds), numbers, "w", ("w", (4, 4)))


@pytest.fixture(params=[embedded, fake], ids=["embedded", "fake"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with asyncio.timeout(PATIENCE_S), request.param() as stage:
        yield stage


def ask(name: str, *, live: str | None = None, version: str = "base", length: int = 20, **params: object) -> Generate:
    made = request(name, prompt(length), version=version, **params)
    return made if live is None else Generate(**{each: getattr(made, each) for each in made.__struct_fields__} | {"weights": Live(name=live)})


async def answer(engine: Engine, generate: Generate) -> list[EngineEvent]:
    return [event async for event in engine.generate(generate)]


def tokens_of(events: list[EngineEvent], sample: int = 0) -> list[SampledToken]:
    return [event for event in events if isinstance(event, SampledToken) and event.sample == sample]


def logprobs_of(events: list[EngineEvent]) -> list[float]:
    return [token.logprob for token in tokens_of(events)]


def ids(events: list[EngineEvent], sample: int = 0) -> list[int]:
    return [token.token for token in tokens_of(events, sample)]


def reasons(events: list[EngineEvent]) -> dict[int, str]:
    return {event.sample: event.reason for event in events if isinstance(event, SampleFinished)}


class Going:
    """A request that is being served, and what came of it so far."""

    def __init__(self, engine: Engine, generate: Generate) -> None:
        self.events: list[EngineEvent] = []
        self._engine = engine
        hold(engine, generate.request_id)
        self._begun = asyncio.Event()
        self._task = asyncio.create_task(self._collect(engine, generate))

    async def _collect(self, engine: Engine, generate: Generate) -> None:
        async with aclosing(engine.generate(generate)) as events:
            async for event in events:
                self.events.append(event)
                if len(self.events) == 3:
                    self._begun.set()

    async def begun(self) -> "Going":
        await self._begun.wait()
        return self

    async def ended(self) -> list[EngineEvent]:
        release(self._engine)
        await self._task
        return self.events

    @property
    def waits(self) -> bool:
        return not self.events and not self._task.done()


def hold(engine: Engine, request_id: str) -> None:
    """The embedded one waits for whoever is in the middle of a request; the fake takes its steps in the loop of whoever asks."""
    if isinstance(engine, UnhurriedEngine):
        engine.hold(request_id)


def release(engine: Engine) -> None:
    if isinstance(engine, UnhurriedEngine):
        engine.release()


def as_promised(engine: Engine, logprobs: list[float]) -> Any:
    """The same numbers, to the bit where the engine says that it is exact."""
    return logprobs if engine.capabilities().bit_exact else pytest.approx(logprobs, abs=1e-4)


async def idle(engine: Engine) -> None:
    while (metrics := await engine.metrics()).running_sequences + metrics.waiting_sequences:
        await asyncio.sleep(0)


async def test_tokens_stream_in_order_and_the_first_one_says_its_version(stage: Stage):
    events = await answer(stage.engine, ask("r", num_samples=2, max_tokens=12))
    for sample in range(2):
        tokens = tokens_of(events, sample)
        assert [token.position for token in tokens] == list(range(12))
        assert version_spans(tokens) == [VersionSpan("base", 0, 12)]
        assert sum(token.version is not None for token in tokens) == 1
    assert reasons(events) == {0: "length", 1: "length"}
    assert ids(events, 0) != ids(events, 1)


async def test_the_same_seed_gives_the_same_tokens_whatever_shares_the_batch(stage: Stage):
    alone = await answer(stage.engine, ask("alone", seed=5))
    many = await asyncio.gather(*(answer(stage.engine, ask(f"r{seed}", seed=seed)) for seed in range(8)))
    assert ids(many[5]) == ids(alone)
    assert logprobs_of(many[5]) == as_promised(stage.engine, logprobs_of(alone))
    assert len({tuple(ids(each)) for each in many}) == 8


async def test_a_bad_request_is_an_error_of_its_first_step_and_harms_nobody(stage: Stage):
    going = await Going(stage.engine, ask("good", max_tokens=40)).begun()
    bad = {
        "temperature": ask("bad", temperature=-1.0),
        "is being served already": ask("good"),
        "nothing is served as `nobody`": ask("r", live="nobody"),
    }
    for says, generate in bad.items():
        with pytest.raises(BloomeryError, match=says) as raised:
            await answer(stage.engine, generate)
        assert raised.value.category == "user"
    assert reasons(await going.ended()) == {0: "length"}


async def test_weights_that_cannot_be_had_fail_their_request_alone(stage: Stage):
    going = await Going(stage.engine, ask("good", max_tokens=40)).begun()
    for _ in range(2):
        with pytest.raises(WorkerError, match="cannot load weights broken"):
            await answer(stage.engine, ask("bad", version="broken"))
    with pytest.raises(BloomeryError, match="broken"):
        await stage.engine.load_adapter("bad", Weights(version="broken", key="k"))
    assert await stage.engine.adapters() == {}
    assert reasons(await going.ended()) == {0: "length"}


async def test_abort_ends_one_sample_or_all(stage: Stage):
    both = await Going(stage.engine, ask("both", num_samples=2, max_tokens=LONG)).begun()
    one = await Going(stage.engine, ask("one", num_samples=2, max_tokens=LONG)).begun()
    await stage.engine.abort(Abort(request_id="one", sample=1))
    await stage.engine.abort(Abort(request_id="both"))
    await stage.engine.abort(Abort(request_id="nobody"))
    assert reasons(await both.ended()) == {0: "abort", 1: "abort"}
    assert reasons(await one.ended()) == {0: "length", 1: "abort"}
    assert len(tokens_of(one.events)) == LONG


async def test_who_goes_away_ends_the_request(stage: Stage):
    hold(stage.engine, "r")
    async with aclosing(stage.engine.generate(ask("r", max_tokens=LONG))) as events:
        await anext(events)
    await idle(stage.engine)
    assert (await stage.engine.metrics()).tokens_sampled < LONG
    await answer(stage.engine, ask("r", max_tokens=3))


async def test_a_pause_that_keeps_lets_requests_stand_still_and_changes_no_token(stage: Stage):
    undisturbed = await answer(stage.engine, ask("first", max_tokens=LONG))
    going = await Going(stage.engine, ask("r", max_tokens=LONG)).begun()
    await stage.engine.pause("keep")
    newcomer = Going(stage.engine, ask("new", max_tokens=3))
    before = await stage.engine.metrics()
    assert before.paused == "keep"
    assert before.running_sequences == 1
    for _ in range(50):
        after = await stage.engine.metrics()
    assert after.tokens_sampled == before.tokens_sampled < 2 * LONG
    assert newcomer.waits
    await stage.engine.resume()
    assert ids(await going.ended()) == ids(undisturbed)
    assert len(ids(await newcomer.ended())) == 3


async def test_a_pause_that_drains_returns_when_all_that_was_in_hand_is_done(stage: Stage):
    going = await Going(stage.engine, ask("r", max_tokens=LONG)).begun()
    release(stage.engine)
    await stage.engine.pause("drain")
    assert (await stage.engine.metrics()).running_sequences == 0
    newcomer = Going(stage.engine, ask("new", max_tokens=3))
    assert reasons(await going.ended()) == {0: "length"}
    for _ in range(50):
        assert (await stage.engine.metrics()).paused == "drain"
    assert newcomer.waits
    await stage.engine.resume()
    assert len(ids(await newcomer.ended())) == 3


async def test_a_pause_that_aborts_ends_what_is_in_hand_and_what_comes_waits(stage: Stage):
    going = await Going(stage.engine, ask("r", num_samples=2, max_tokens=LONG)).begun()
    await stage.engine.pause("abort")
    assert reasons(await going.ended()) == {0: "abort", 1: "abort"}
    newcomer = Going(stage.engine, ask("new", max_tokens=3))
    await idle_but_for_newcomers(stage.engine)
    assert newcomer.waits
    await stage.engine.resume()
    assert len(ids(await newcomer.ended())) == 3


async def idle_but_for_newcomers(engine: Engine) -> None:
    while (await engine.metrics()).running_sequences:
        await asyncio.sleep(0)


@pytest.mark.parametrize("by", ["resume", "keep"])
async def test_whoever_waits_for_a_drain_hears_that_it_was_called_off(stage: Stage, by: str):
    going = await Going(stage.engine, ask("r", max_tokens=LONG)).begun()
    waiting = asyncio.create_task(stage.engine.pause("drain"))
    while (await stage.engine.metrics()).paused != "drain":
        await asyncio.sleep(0)
    await (stage.engine.resume() if by == "resume" else stage.engine.pause("keep"))
    with pytest.raises(Conflict, match="before it had drained"):
        await waiting
    await stage.engine.resume()
    assert len(ids(await going.ended())) == LONG


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keep", "recompute", "flush"])
async def test_an_update_reaches_requests_that_follow_and_spares_those_that_do_not(stage: Stage, policy: str):
    engine = stage.engine
    pinned_alone = await answer(engine, ask("alone", max_tokens=LONG))
    before = await engine.weight_info(MODEL)
    await engine.begin_update(MODEL, "new")
    await engine.apply(MODEL, stage.whole(7))
    assert await engine.weight_info(MODEL) == before
    follower = await Going(engine, ask("follower", live=MODEL, max_tokens=LONG)).begun()
    pinned = await Going(engine, ask("pinned", max_tokens=LONG)).begun()
    info = await engine.commit(MODEL, policy)
    assert info == await engine.weight_info(MODEL)
    assert info.version == "new"
    assert info.checksum != before.checksum
    old, new = version_spans(tokens_of(await follower.ended()))
    assert (old.version, old.start, new.version, new.start, new.stop) == ("base", 0, "new", old.stop, LONG)
    assert 0 < old.stop < LONG
    assert ids(follower.events)[: old.stop] == ids(pinned_alone)[: old.stop]
    assert ids(await pinned.ended()) == ids(pinned_alone)
    assert version_spans(tokens_of(pinned.events)) == [VersionSpan("base", 0, LONG)]
    fresh = await answer(engine, ask("fresh", live=MODEL, max_tokens=30))
    assert version_spans(tokens_of(fresh)) == [VersionSpan("new", 0, 30)]
    assert ids(fresh) != ids(pinned_alone)[:30]
    assert (await engine.metrics()).swaps == 1


async def test_weights_are_swapped_while_the_engine_is_paused(stage: Stage):
    engine = stage.engine
    follower = await Going(engine, ask("r", live=MODEL, max_tokens=LONG)).begun()
    await engine.pause("keep")
    info = await engine.switch(MODEL, Weights(version="whole", key="k"), "keep")
    assert info == await engine.weight_info(MODEL)
    await engine.resume()
    assert [span.version for span in version_spans(tokens_of(await follower.ended()))] == ["base", "whole"]


async def test_a_patch_changes_what_it_names_and_nothing_else(stage: Stage):
    engine, name = stage.engine, stage.part
    all_values = stage.whole(7)[name]
    places = torch.arange(all_values.numel(), dtype=torch.int32)
    patch = Patch(places, all_values.flatten(), tuple(all_values.shape))
    found = []
    for version, update in (
        ("whole tensor", all_values),
        ("patched", patch),
        ("as it was", Patch(places[:0], all_values.flatten()[:0], patch.shape)),
    ):
        await engine.begin_update(MODEL, version)
        await engine.apply(MODEL, {name: update})
        found.append((await engine.commit(MODEL, "keep")).checksum)
    assert len(set(found)) == 1
    some = Patch(places[2:3], all_values.flatten()[2:3] + 1, patch.shape)
    await engine.begin_update(MODEL, "one value")
    await engine.apply(MODEL, {name: some})
    assert (await engine.commit(MODEL, "keep")).checksum != found[0]


async def test_an_update_that_does_not_fit_is_refused_whole_and_goes_on(stage: Stage):
    engine, name = stage.engine, stage.part
    before = await engine.weight_info(MODEL)
    with pytest.raises(Conflict, match="no update of `model` is staged"):
        await engine.apply(MODEL, {})
    with pytest.raises(Conflict, match="no update of `model` is staged"):
        await engine.commit(MODEL, "keep")
    with pytest.raises(NotFound, match="nothing is served as `nobody`"):
        await engine.begin_update("nobody", "v")
    await engine.begin_update(MODEL, "new")
    with pytest.raises(Conflict, match="staged already"):
        await engine.begin_update(MODEL, "newer")
    good = stage.whole(7)[name]
    beyond = Patch(torch.tensor([good.numel()]), torch.ones(1), tuple(good.shape))
    bad: list[dict[str, Update]] = [{name: good, "unknown": torch.ones(2)}, {name: torch.ones(3, 3, 3)}, {name: beyond}]
    for update in bad:
        with pytest.raises(InvalidInput):
            await engine.apply(MODEL, update)
    same = await engine.commit(MODEL, "keep")
    assert same.checksum == before.checksum
    for used in ("new", "base"):
        with pytest.raises(Conflict, match="names other weights already"):
            await engine.begin_update(MODEL, used)
    await engine.begin_update(MODEL, "newest")
    await engine.cancel_update(MODEL)
    assert await engine.weight_info(MODEL) == same


async def outcomes(*calls: Coroutine[Any, Any, object]) -> list[type]:
    """What comes of calls that are made at once, by its kind."""
    return [type(found) for found in await asyncio.gather(*calls, return_exceptions=True)]


async def test_of_two_who_begin_an_update_at_once_one_comes_first(stage: Stage):
    engine = stage.engine
    await engine.load_adapter("a", Weights(version="v0", key="k"))
    of_one_name = await outcomes(engine.begin_update(MODEL, "first"), engine.begin_update(MODEL, "second"))
    assert set(of_one_name) == {type(None), Conflict}
    await engine.cancel_update(MODEL)
    of_one_version = await outcomes(engine.begin_update(MODEL, "both"), engine.begin_update("a", "both"))
    assert set(of_one_version) == {type(None), Conflict}
    updated, other = (MODEL, "a") if of_one_version[0] is type(None) else ("a", MODEL)
    assert (await engine.commit(updated, "keep")).version == "both"
    await engine.begin_update(other, "of its own")


async def test_of_a_commit_and_whoever_comes_with_it_one_takes_effect(stage: Stage):
    engine = stage.engine
    new = stage.whole(7)
    for number, other in enumerate((lambda: engine.commit(MODEL, "keep"), lambda: engine.cancel_update(MODEL))):
        await engine.begin_update(MODEL, f"new {number}")
        await engine.apply(MODEL, new)
        before = await engine.weight_info(MODEL)
        found = await outcomes(engine.commit(MODEL, "keep"), other())
        assert found.count(Conflict) == 1
        after = await engine.weight_info(MODEL)
        assert after.version == (f"new {number}" if WeightInfo in found else before.version)
        for late in (engine.commit(MODEL, "keep"), engine.cancel_update(MODEL), engine.apply(MODEL, new)):
            with pytest.raises(Conflict, match="no update of `model` is staged"):
                await late
    await engine.begin_update(MODEL, "newest")
    assert (await engine.commit(MODEL, "keep")).version == "newest"


async def test_adapters_come_and_go_while_requests_run(stage: Stage):
    engine = stage.engine
    running = await Going(engine, ask("running", max_tokens=LONG)).begun()
    await engine.load_adapter("a", Weights(version="v0", key="k"))
    await engine.load_adapter("b", Weights(version="v1", key="k"))
    assert await engine.adapters() == {"a": "v0", "b": "v1"}
    with pytest.raises(Conflict, match="is served already"):
        await engine.load_adapter("a", Weights(version="v1", key="k"))
    release(engine)
    requests = ask("named", live="a", max_tokens=LONG), ask("pinned", version="v0", max_tokens=LONG)
    by_name, by_version = await asyncio.gather(*(answer(engine, each) for each in requests))
    assert ids(by_name) == ids(by_version)
    last = await Going(engine, ask("last", live="a", max_tokens=LONG)).begun()
    await engine.unload_adapter("a")
    with pytest.raises(BloomeryError, match="nothing is served as `a`"):
        await answer(engine, ask("late", live="a"))
    await engine.load_adapter("a", Weights(version="v1", key="k"))
    assert ids(await last.ended()) == ids(by_name)
    assert await engine.adapters() == {"a": "v1", "b": "v1"}
    with pytest.raises(NotSupported):
        await engine.unload_adapter(MODEL)
    assert len(ids(await running.ended())) == LONG


async def test_a_name_stays_what_it_is_an_adapter_or_the_whole_model(stage: Stage):
    engine, adapter_of_disk, whole_of_disk = stage.engine, Weights(version="v0", key="k"), Weights(version="whole", key="k")
    await engine.load_adapter("a", adapter_of_disk)
    before = await engine.weight_info("a"), await engine.weight_info(MODEL)
    for refused, says in (
        (lambda: engine.switch("a", whole_of_disk, "keep"), "version whole is a whole model"),
        (lambda: engine.load_adapter("b", whole_of_disk), "version whole is a whole model"),
        (lambda: engine.load_adapter("b", Weights(version="base")), "version base is a whole model"),
        (lambda: engine.switch(MODEL, adapter_of_disk, "keep"), "version v0 is an adapter"),
    ):
        with pytest.raises(InvalidInput, match=says) as raised:
            await refused()
        assert raised.value.field == "weights"
    assert (await engine.weight_info("a"), await engine.weight_info(MODEL)) == before
    assert await engine.adapters() == {"a": "v0"}
    by_name, by_version = ask("named", live="a", max_tokens=9), ask("pinned", version="v0", max_tokens=9)
    assert ids(await answer(engine, by_name)) == ids(await answer(engine, by_version))
    await engine.begin_update("a", "new")
    with pytest.raises(InvalidInput):
        await engine.apply("a", stage.whole(7) | {"model.norm.weight": torch.ones(3)})
    await engine.cancel_update("a")
    assert (await engine.switch(MODEL, whole_of_disk, "keep")).version == "whole"
    assert (await engine.switch("a", Weights(version="v1", key="k"), "keep")).version == "v1"


async def test_an_adapter_is_updated_like_the_model(stage: Stage):
    engine = stage.engine
    await engine.load_adapter("a", Weights(version="v0", key="k"))
    name, shape = stage.adapter_part
    await engine.begin_update("a", "a-2")
    await engine.apply("a", {name: torch.full(shape, 0.25)})
    follower = await Going(engine, ask("r", live="a", max_tokens=LONG)).begun()
    model = await engine.weight_info(MODEL)
    assert (await engine.commit("a", "recompute")).version == "a-2"
    assert [span.version for span in version_spans(tokens_of(await follower.ended()))] == ["v0", "a-2"]
    assert await engine.weight_info(MODEL) == model
    await engine.begin_update("a", "a-3")
    await engine.unload_adapter("a")
    with pytest.raises(BloomeryError, match="`a`"):
        await engine.commit("a", "keep")


async def test_a_repeated_prompt_is_found_until_the_cache_is_reset_and_only_under_its_weights(stage: Stage):
    engine = stage.engine

    async def found(name: str, version: str = "base") -> bool:
        return isinstance((await answer(engine, ask(name, version=version)))[0], PromptFound)

    assert not await found("first")
    assert await found("again")
    assert not await found("other", "v0")
    await engine.reset_prefix_cache()
    assert not await found("after")


@pytest.mark.parametrize("policy", get_args(KvPolicy))
async def test_only_a_flush_forgets_what_was_kept_of_requests_that_have_left(stage: Stage, policy: KvPolicy):
    engine = stage.engine
    first = await answer(engine, ask("first"))
    await engine.switch(MODEL, Weights(version="whole", key="k"), policy)
    again = await answer(engine, ask("again"))
    assert isinstance(again[0], PromptFound) == (policy != "flush")
    assert ids(again) == ids(first)


async def test_sleep_gives_memory_back_and_who_comes_is_served_after(stage: Stage):
    engine = stage.engine
    before = await answer(engine, ask("before", version="v0"))
    awake = await engine.metrics()
    assert awake.version_bytes > 0
    going = await Going(engine, ask("going", max_tokens=LONG)).begun()
    with pytest.raises(Conflict, match="pause with `drain` or `abort` first"):
        await engine.sleep()
    await going.ended()
    await idle(engine)
    await engine.sleep()
    newcomer = Going(engine, ask("new", version="v0"))
    for order in (engine.sleep, engine.resume):
        with pytest.raises(Conflict, match="asleep"):
            await order()
    asleep = await engine.metrics()
    assert asleep.asleep
    assert asleep.versions_in_memory < awake.versions_in_memory
    assert (asleep.version_bytes, asleep.cache_usage) == (0, 0)
    assert newcomer.waits
    await engine.wake()
    events = await newcomer.ended()
    assert ids(events) == ids(before)
    assert not any(isinstance(event, PromptFound) for event in events), "keys and values were kept"
    assert (await engine.metrics()).version_bytes == awake.version_bytes
    with pytest.raises(Conflict, match="not asleep"):
        await engine.wake()


async def test_scores_are_those_of_the_named_weights_and_of_the_tokens_that_these_sample(stage: Stage):
    engine, found = stage.engine, {}
    await engine.load_adapter("a", Weights(version="v0", key="k"))
    base, first = Weights(version="base"), Weights(version="v0", key="k")
    for asked, weights in ((ask("base"), base), (ask("v0", version="v0"), first), (ask("a", live="a"), Live(name="a"))):
        sampled = await answer(engine, asked)
        score = await engine.score([*prompt(20), *ids(sampled)], weights, top_k=3)
        logprobs, tokens = score.logprobs.numpy(), np.array([*prompt(20), *ids(sampled)])
        assert np.isnan(logprobs).tolist() == [True, *[False] * 27]
        assert logprobs[20:].tolist() == as_promised(engine, logprobs_of(sampled))
        top_ids, top = score.top_ids.numpy(), score.top_logprobs.numpy()
        assert top_ids.shape == top.shape == (28, 3)
        assert (np.diff(top[1:]) <= 0).all()
        assert (logprobs[1:] <= top[1:, 0]).all()
        likely = top_ids[1:] == tokens[1:, None]
        assert top[1:][likely].tolist() == logprobs[1:][likely.any(1)].tolist()
        found[asked.request_id] = logprobs[1:20]
    assert found["a"].tolist() == as_promised(engine, found["v0"].tolist())
    assert (found["base"] != found["v0"]).sum() > 9


class Needed(NamedTuple):
    """What a capability is needed for, and the field that a refusal names."""

    field: str
    use: Callable[[Stage], Coroutine[Any, Any, object]]


def asked(**fields: object) -> Generate:
    return request("r", prompt(20), asked=fields)


async def patched(stage: Stage) -> None:
    (name, value), *_ = stage.whole(7).items()
    await stage.engine.begin_update(MODEL, "patched")
    await stage.engine.apply(MODEL, {name: Patch(torch.tensor([0]), value.flatten()[:1], tuple(value.shape))})


async def updated_while_it_serves(stage: Stage) -> None:
    going = await Going(stage.engine, ask("going", max_tokens=LONG)).begun()
    await stage.engine.begin_update(MODEL, "new")
    await stage.engine.commit(MODEL, "keep")
    await going.ended()


NEEDED = {
    "router_capture": Needed("routing", lambda stage: answer(stage.engine, asked(routing=True))),
    "router_weights": Needed("routing", lambda stage: answer(stage.engine, asked(routing=True, routing_weights=True))),
    "delta_update": Needed("update", patched),
    "update_while_serving": Needed("name", updated_while_it_serves),
    "pinned_versions": Needed("weights", lambda stage: answer(stage.engine, ask("r", version="v0"))),
}


@pytest.mark.parametrize("capability", [name for name, kind in Capabilities.__annotations__.items() if kind is bool and name != "bit_exact"])
async def test_an_engine_does_what_it_says_it_can_and_refuses_the_rest_by_name(stage: Stage, capability: str):
    needed = NEEDED[capability]
    if getattr(stage.engine.capabilities(), capability):
        await needed.use(stage)
        return
    with pytest.raises((NotSupported, InvalidInput), match=f"`{needed.field}`") as refused:
        await needed.use(stage)
    assert refused.value.field == needed.field


@pytest.mark.parametrize(
    ("field", "generate"),
    [
        ("grammar", asked(grammar=Grammar(kind="regex", text="a"))),
        ("embed", asked(embed=True)),
        ("drafts", asked(drafts=((1, 2),))),
        ("prompt_logprobs", asked(prompt_logprobs=True)),
        ("top_logprobs", asked(top_logprobs=1)),
        ("stop_tokens", ask("r", stop_tokens=(1,))),
    ],
)
async def test_the_fake_refuses_what_it_would_ignore(field: str, generate: Generate):
    async with fake() as stage:
        with pytest.raises(NotSupported, match=f"`{field}`") as refused:
            await answer(stage.engine, generate)
    assert refused.value.field == field


async def test_a_closed_engine_ends_its_streams_and_refuses_more():
    async with asyncio.timeout(PATIENCE_S):
        async with embedded() as stage:
            going = await Going(stage.engine, ask("r", max_tokens=LONG)).begun()
        with pytest.raises(WorkerError, match="closed"):
            await going.ended()
        with pytest.raises(Unavailable, match="closed"):
            await answer(stage.engine, ask("late"))


async def test_an_engine_that_breaks_in_the_middle_fails_that_stream_alone():
    async with asyncio.timeout(PATIENCE_S), fake(Script(fails_after={"bad": 5})) as stage:
        good, bad = Going(stage.engine, ask("good", max_tokens=20)), Going(stage.engine, ask("bad", max_tokens=20))
        with pytest.raises(WorkerError, match="broke"):
            await bad.ended()
        assert len(ids(bad.events)) == 5
        assert len(ids(await good.ended())) == 20


async def test_a_deadline_ends_the_wait_for_a_slow_engine_and_the_request_with_it():
    script = Script(stops_after={"slow": 5})
    async with asyncio.timeout(PATIENCE_S), fake(script) as stage:
        slow = Going(stage.engine, ask("slow", max_tokens=20))
        while len(slow.events) < 5:
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await slow.ended()
        assert len(ids(slow.events)) == 5
        await idle(stage.engine)
        drained = Going(stage.engine, ask("slow", max_tokens=20))
        while len(drained.events) < 5:
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stage.engine.pause("drain")
        script.released.set()
        await stage.engine.pause("drain")
        assert reasons(await drained.ended()) == {0: "length"}


async def test_adapters_by_name_are_more_than_fit_in_memory():
    """Each is loaded when it is named, under concurrent load, and nobody fails."""
    adapters = {f"v{seed}": adapter(DECODER, seed) for seed in range(8)}
    source = Disk(DECODER, adapters)
    async with asyncio.timeout(PATIENCE_S), EmbeddedEngine(DECODER, source, version="base", versions_in_memory=3) as engine:
        assert engine.capabilities().max_adapters_in_memory == 3
        for name in adapters:
            await engine.load_adapter(f"as {name}", Weights(version=name, key="k"))
        asks = [ask(f"{turn} {name}", live=f"as {name}", seed=turn, max_tokens=3) for turn in range(3) for name in adapters]
        together = await asyncio.gather(*(answer(engine, each) for each in asks))
        assert (await engine.metrics()).versions_in_memory <= 3
        for each, events in zip(asks, together, strict=True):
            alone = Generate(**{field: getattr(each, field) for field in each.__struct_fields__} | {"request_id": f"alone {each.request_id}"})
            assert ids(events) == ids(await answer(engine, alone)), each.request_id
            assert tokens_of(events)[0].version == each.weights.name.removeprefix("as ")
    assert len(source.loads) > len(adapters)

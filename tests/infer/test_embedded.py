"""What the embedded engine promises, and what it does where something takes too long or fails on the way: who waits hears for whom, nothing stays."""

import asyncio
from collections.abc import AsyncIterator, ItemsView
from contextlib import asynccontextmanager
from threading import Event

import pytest
import torch

from bloomery.infer import cache
from bloomery.infer.embedded import Deadlines, EmbeddedEngine
from bloomery.infer.versions import UPDATES_IN_MEMORY, Model
from bloomery.models import rests
from bloomery.models.factors import Factors
from bloomery.models.form import plain_form
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.kernel_probe import probe
from bloomery.models.published_names import PUBLISHED_PREFIX
from bloomery.types.errors import Conflict, Corrupt, Unavailable, WorkerError
from bloomery.types.generation import Abort, Weights
from bloomery.types.serving import MODEL
from tests.infer.builders import Adapters, adapter, full_logprobs, prompt
from tests.infer.test_engine_protocol import Going, answer, ask, idle, ids, tokens_of
from tests.infer.test_versions import other_model
from tests.infer.unhurried import impatient
from tests.models.test_kernel_probe import make_worse
from tests.train.builders import decoder

PATIENCE_S = 60
SHORT_S = 0.25
DECODER = decoder()
TENSOR = f"{PUBLISHED_PREFIX}layers.1.self_attn.q_proj.lora_B.weight"
CHANGED = {TENSOR: torch.full((64, 16), 0.25)}
VERSIONS = {f"v{seed}": adapter(DECODER, seed) for seed in range(2)}


class Disk(Adapters):
    """Reads adapters when it may, and weighs them, which the sampler's thread waits for, when it may."""

    def __init__(self) -> None:
        super().__init__(DECODER, VERSIONS)
        self.may_load, self.may_weigh, self.blocks = Event(), Event(), Event()
        self.may_load.set()
        self.may_weigh.set()
        self.damaged = False

    def weigh(self, weights: Weights) -> int:
        if not self.may_weigh.is_set():
            self.blocks.set()
        assert self.may_weigh.wait(PATIENCE_S)
        return 0 if weights.key is None else 1_000

    def load(self, weights: Weights) -> Model:
        assert weights.key is None or self.may_load.wait(PATIENCE_S)
        if self.damaged:
            raise WorkerError("damaged")
        return super().load(weights)


@asynccontextmanager
async def running(disk: Disk, *, versions_in_memory: int = 64, **deadlines: float) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        DECODER,
        disk,
        version="base",
        versions_in_memory=versions_in_memory,
        deadlines=Deadlines(**{"step_s": PATIENCE_S, **deadlines}),
    )
    try:
        async with asyncio.timeout(PATIENCE_S), engine:
            yield engine
    finally:
        disk.may_load.set()
        disk.may_weigh.set()


def stored(version: str) -> Weights:
    return Weights(version=version, key="k")


@pytest.mark.parametrize("plain", [False, True])
async def test_the_form_is_the_probes_and_bits_are_promised_where_it_found_them_and_never_of_the_plain_one(plain: bool) -> None:
    found = probe(DECODER)
    engine = EmbeddedEngine(DECODER, Disk(), version="base", plain=plain)
    assert engine._sampler._runner._form == (plain_form(DECODER) if plain else found.form)
    async with asyncio.timeout(PATIENCE_S), engine:
        assert engine.capabilities().bit_exact == (found.bit_exact and not plain)
        before = await engine.metrics()
        assert (before.tokens_sampled, before.tokens_prefilled) == (0, 0), "the probe prompt is nobody's request"
        asked = [ask(f"r{length}", length=length, max_tokens=9, seed=length) for length in (20, 33, 70)]
        for each, events in zip(asked, await asyncio.gather(*(answer(engine, each) for each in asked)), strict=True):
            sampled = tokens_of(events)
            prompt = each.prompt.numpy().tolist()
            trainers = full_logprobs(DECODER, [*prompt, *(token.token for token in sampled)], None)[len(prompt) - 1 :]
            assert [token.logprob for token in sampled] == (pytest.approx(trainers, abs=1e-4) if plain else trainers.tolist())


def test_bits_are_not_promised_where_products_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def worsen(out_RO: torch.Tensor, weight: torch.Tensor) -> None:
        """Rounds otherwise for more rows than the probe prompt has."""
        if len(out_RO) == 260:
            out_RO *= 1 + 2**-20

    make_worse(monkeypatch, worsen)
    assert not EmbeddedEngine(DECODER, Disk(), version="base").capabilities().bit_exact
    assert "not bit-exact here: the product with" in caplog.text


def test_nor_where_the_sampler_answers_the_probe_prompt_with_other_bits(caplog: pytest.LogCaptureFixture) -> None:
    near = decoder()
    near.norm.data *= 1 + 1e-6
    assert not EmbeddedEngine(DECODER, Adapters(near), version="base").capabilities().bit_exact
    assert "not bit-exact here: the probe prompt was answered up to" in caplog.text


async def test_scores_are_those_of_the_trainers_forward() -> None:
    tokens = prompt(70)
    async with running(Disk()) as engine:
        for named, weights in ((Weights(version="base"), None), (stored("v0"), VERSIONS["v0"])):
            score = await engine.score(tokens, named, top_k=2)
            trainers = full_logprobs(DECODER, tokens, weights).tolist()
            assert score.logprobs.numpy()[1:].tolist() == (trainers if engine.capabilities().bit_exact else pytest.approx(trainers, abs=1e-4))


async def test_sleep_gives_back_the_storage_of_keys_and_values_and_all_versions_that_a_disk_holds() -> None:
    async with running(Disk()) as engine:
        await answer(engine, ask("r", version="v0"))
        await idle(engine)
        cache = engine._sampler._cache
        assert cache.keys_NBKPE.shape[1] > 1
        assert cache.kept
        await engine.sleep()
        assert (cache.keys_NBKPE.shape[1], cache.values_NBKPE.shape[1], list(cache.kept)) == (1, 1, [])
        assert list(engine._sampler.versions.held) == []
        await engine.wake()


def test_a_source_whose_base_is_not_the_decoder_is_refused() -> None:
    with pytest.raises(Corrupt, match="does not answer the probe prompt as the trainer would"):
        EmbeddedEngine(DECODER, Adapters(other_model(DECODER, 1)), version="base")


async def blocked(disk: Disk, engine: EmbeddedEngine) -> "asyncio.Task[None]":
    """The engine's thread stands still, in the middle of loading `a`."""
    disk.may_weigh.clear()
    loading = asyncio.create_task(engine.load_adapter("a", stored("v0")))
    assert await asyncio.to_thread(disk.blocks.wait, PATIENCE_S)
    return loading


async def test_a_thread_that_is_busy_is_waited_for_so_long_and_does_what_it_was_told_later():
    disk = Disk()
    async with running(disk) as engine:
        loading = await blocked(disk, engine)
        with impatient(engine, step_s=SHORT_S):
            with pytest.raises(Unavailable, match=r"waited 0\.25 s for the sampler's thread"):
                await engine.pause("keep")
            with pytest.raises(Unavailable, match="sampler's thread"):
                await answer(engine, ask("r", max_tokens=5))
        disk.may_weigh.set()
        await loading
        found = await engine.metrics()
        assert (found.paused, found.waiting_sequences) == ("keep", 0)


async def test_whoever_begins_an_update_fills_it_gives_it_up_or_asks_what_is_served_waits_for_no_step():
    disk = Disk()
    async with running(disk) as engine:
        await engine.load_adapter("b", stored("v1"))
        loading = await blocked(disk, engine)
        before = await engine.weight_info("b")
        assert await engine.adapters() == {"b": "v1"}
        for number in range(2):
            await engine.begin_update("b", f"new {number}")
            await engine.apply("b", CHANGED)
            await engine.cancel_update("b")
        with pytest.raises(Conflict, match="`a` is just being given other weights"):
            await engine.begin_update("a", "newer")
        assert await engine.weight_info("b") == before
        disk.may_weigh.set()
        await loading


async def test_a_commit_waits_for_one_step_and_a_name_that_is_being_committed_is_not_updated_meanwhile():
    disk = Disk()
    async with running(disk) as engine:
        await engine.load_adapter("b", stored("v1"))
        await engine.begin_update("b", "new")
        await engine.apply("b", CHANGED)
        loading = await blocked(disk, engine)
        committing = asyncio.create_task(engine.commit("b", "keep"))
        with pytest.raises(Conflict, match="staged already"):
            await engine.begin_update("b", "newer")
        assert (await engine.weight_info("b")).version == "v1"
        disk.may_weigh.set()
        assert (await committing) == await engine.weight_info("b")
        assert (await engine.weight_info("b")).version == "new"
        await loading


class Watched(dict[str, torch.Tensor]):
    """An update that notes, as it is read, beside whom its reader rests."""

    def items(self) -> ItemsView[str, torch.Tensor]:
        self.beside = rests._beside()
        self.busy = self.beside is not None and self.beside.busy()
        return super().items()


@pytest.mark.parametrize("name", [MODEL, "a"])
async def test_an_update_of_a_model_or_an_adapter_rests_between_its_pieces_while_somebody_samples(name: str):
    async with running(Disk()) as engine:
        await engine.load_adapter("a", stored("v0"))
        await engine.begin_update(name, "new")
        quiet, loaded = (Watched(CHANGED if name == "a" else {"model.norm.weight": torch.ones(64)}) for _ in range(2))
        await engine.apply(name, quiet)
        going = await Going(engine, ask("r", max_tokens=400)).begun()
        await engine.apply(name, loaded)
        assert (quiet.busy, loaded.busy) == (False, True)
        await engine.abort(Abort(request_id="r"))
        await going.ended()


async def test_a_request_waits_for_its_turn_longer_than_for_the_thread():
    disk = Disk()
    async with running(disk) as engine:
        disk.may_load.clear()
        with impatient(engine, step_s=1.0):
            going = Going(engine, ask("r", version="v0", max_tokens=5))
            await asyncio.wait([asyncio.create_task(going.ended())], timeout=2.5)
        assert going.waits
        disk.may_load.set()
        assert len(ids(await going.ended())) == 5


async def test_who_goes_away_before_the_request_has_begun_leaves_nothing_behind():
    disk = Disk()
    async with running(disk) as engine:
        loading = await blocked(disk, engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SHORT_S):
                await answer(engine, ask("r", max_tokens=5))
        disk.may_weigh.set()
        await loading
        await idle(engine)
        assert (await engine.metrics()).tokens_sampled == 0


class Mapped(FusedAdapter):
    """Its factors lie in a file, and then they do not."""

    def __init__(self, whole: FusedAdapter) -> None:
        self.__dict__ |= vars(whole)
        self.gone = False

    def get(self, parameter: str) -> Factors | None:
        if self.gone:
            raise OSError("cannot read '/srv/data/blobs/factors.bin' nor" + " anything else" * 100_000)
        return super().get(parameter)


async def test_a_step_that_breaks_tells_neither_where_the_server_keeps_its_files_nor_all_that_a_library_says():
    disk, mapped = Disk(), Mapped(adapter(DECODER, 0))
    disk.by_version = {**VERSIONS, "v0": mapped}
    async with running(disk) as engine:
        before = await answer(engine, ask("before", version="v0", max_tokens=5))
        mapped.gone = True
        with pytest.raises(WorkerError) as broken:
            await answer(engine, ask("broken", version="v0", max_tokens=5))
        assert broken.value.message.startswith("sampling broke: OSError: cannot read 'factors.bin' nor anything else")
        assert len(broken.value.message) < 1100
        mapped.gone = False
        assert ids(await answer(engine, ask("again", version="v0", max_tokens=5))) == ids(before), "the thread goes on"


async def test_an_engine_that_does_not_end_says_so():

    disk = Disk()
    engine = EmbeddedEngine(DECODER, disk, version="base", deadlines=Deadlines(step_s=SHORT_S))
    await engine.__aenter__()
    loading = await blocked(disk, engine)
    with pytest.raises(Unavailable, match="sampler's thread"):
        await engine.__aexit__(None, None, None)
    disk.may_weigh.set()
    await loading


async def test_who_waits_for_weights_hears_that_the_engine_was_closed():
    disk = Disk()
    async with running(disk) as engine:
        disk.may_load.clear()
        loading = asyncio.create_task(engine.load_adapter("a", stored("v0")))
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="closed"):
        await loading


async def test_weights_that_do_not_come_are_waited_for_so_long():
    disk = Disk()
    async with running(disk, weights_s=SHORT_S) as engine:
        disk.may_load.clear()
        with pytest.raises(Unavailable, match=r"waited 0\.25 s for the weights of `a`"):
            await engine.load_adapter("a", stored("v0"))
        disk.may_load.set()
        while await engine.adapters() != {"a": "v0"}:
            await asyncio.sleep(0)


async def test_a_whole_model_that_comes_too_late_is_not_served_as_an_adapter_either():
    disk = Disk()
    disk.by_version = {"whole": other_model(DECODER, 1)}
    async with running(disk, weights_s=SHORT_S) as engine:
        disk.may_load.clear()
        with pytest.raises(Unavailable, match=r"waited 0\.25 s for the weights of `a`"):
            await engine.load_adapter("a", stored("whole"))
        disk.may_load.set()
        while (await engine.metrics()).versions_in_memory < 2:
            await asyncio.sleep(0)
        assert await engine.adapters() == {}


async def test_a_drain_that_lasts_too_long_names_who_is_in_hand():
    disk = Disk()
    async with running(disk) as engine:
        disk.may_load.clear()
        going = Going(engine, ask("slow", version="v0", max_tokens=5))
        while not (await engine.metrics()).waiting_sequences:
            await asyncio.sleep(0)
        with impatient(engine, drain_s=SHORT_S), pytest.raises(Unavailable, match=r"waited 0\.25 s for requests in hand: 1 .*, slow among them"):
            await engine.pause("drain")
        assert (await engine.metrics()).paused == "drain"
        disk.may_load.set()
        await going.ended()
        await engine.pause("drain")


@asynccontextmanager
async def evicted(disk: Disk) -> AsyncIterator[EmbeddedEngine]:
    """Serves `a` and `b`; the weights of `a` must be read again."""
    async with running(disk, versions_in_memory=1) as engine:
        for name, version in (("a", "v0"), ("b", "v1")):
            await engine.load_adapter(name, stored(version))
        yield engine


async def test_an_update_whose_copy_fails_frees_its_name_and_its_version():
    disk = Disk()
    async with evicted(disk) as engine:
        disk.damaged = True
        with pytest.raises(WorkerError, match="damaged"):
            await engine.begin_update("a", "new")
        disk.damaged = False
        disk.may_load.clear()
        with impatient(engine, weights_s=SHORT_S), pytest.raises(Unavailable, match="version v0 to be read"):
            await engine.begin_update("a", "new")
        disk.may_load.set()
        await engine.begin_update("a", "new")
        assert (await engine.commit("a", "keep")).version == "new"


async def test_an_update_is_no_update_before_its_copy_is_there():
    disk = Disk()
    async with evicted(disk) as engine:
        disk.may_load.clear()
        beginning = asyncio.create_task(engine.begin_update("a", "new"))
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="staged already"):
            await engine.begin_update("a", "other")
        with pytest.raises(Conflict, match="version `new` names other weights"):
            await engine.begin_update(MODEL, "new")
        with pytest.raises(Conflict, match="just being staged"):
            await engine.apply("a", CHANGED)
        with pytest.raises(Conflict, match="just being staged"):
            await engine.commit("a", "keep")
        with pytest.raises(Conflict, match="is staged: commit or cancel it first"):
            await engine.switch("a", stored("v1"), "keep")
        await engine.cancel_update("a")
        disk.may_load.set()
        with pytest.raises(Conflict, match="was cancelled before it was staged"):
            await beginning
        await engine.begin_update("a", "newer")
        assert (await engine.commit("a", "keep")).version == "newer"


async def test_nothing_is_updated_while_other_weights_are_on_their_way():
    disk = Disk()
    async with running(disk) as engine:
        await engine.load_adapter("a", stored("v0"))
        disk.may_load.clear()
        switching = asyncio.create_task(engine.switch("a", stored("v1"), "keep"))
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="just being given other weights"):
            await engine.begin_update("a", "new")
        disk.may_load.set()
        assert (await switching).version == "v1"
        await engine.begin_update("a", "new")
        await engine.cancel_update("a")


async def test_a_commit_that_fails_can_be_made_again_and_is_not_changed_in_between():
    async with running(Disk()) as engine:
        for number in range(UPDATES_IN_MEMORY + 1):
            await engine.load_adapter(f"a{number}", stored("v0"))
            await engine.begin_update(f"a{number}", f"new {number}")
        await engine.apply("a16", CHANGED)
        for number in range(UPDATES_IN_MEMORY):
            await engine.commit(f"a{number}", "keep")
        before = await engine.weight_info("a16")
        with pytest.raises(Conflict, match="versions that were given as tensors are in memory"):
            await engine.commit("a16", "keep")
        with pytest.raises(Conflict, match="a commit of this update has begun"):
            await engine.apply("a16", CHANGED)
        assert await engine.weight_info("a16") == before
        await engine.unload_adapter("a0")
        after = await engine.commit("a16", "keep")
        assert (after.version, after.checksum == before.checksum) == ("new 16", False)


async def test_memory_that_stands_empty_is_given_back_when_nobody_has_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_KEEP_BYTES", 0)
    async with running(Disk()) as engine:
        sampler, passes = engine._sampler, []
        tidy, blocks = sampler.tidy, sampler._cache._blocks
        first = ids(await answer(engine, ask("first", length=300)))
        monkeypatch.setattr(sampler, "tidy", lambda: (tidy(), passes.append(None)))
        await asyncio.sleep(0.2)
        assert len(passes) < 100, "who has nothing to do waits"
        assert blocks.capacity > len(blocks.held)
        sampler._idle_s = 0.01
        assert ids(await answer(engine, ask("again", length=300))) == first
        while blocks.capacity > len(blocks.held):
            await asyncio.sleep(0.01)
        assert ids(await answer(engine, ask("after", length=300))) == first

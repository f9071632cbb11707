"""Versions of a name, one behind the other, on the embedded engine and on a fake: whole snapshots, adapters, and updates given as tensors."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bloomery.infer.engine import Engine
from bloomery.infer.revisions import Revisions
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Unavailable
from bloomery.types.generation import Weights
from bloomery.types.serving import MODEL, version_spans
from tests.infer.hash_engine import Script
from tests.infer.test_embedded import CHANGED, DECODER, SHORT_S, VERSIONS, Disk, blocked, running, stored
from tests.infer.test_engine_protocol import LONG, PATIENCE_S, Going, Stage, answer, ask, fake, ids, stage, tokens_of
from tests.infer.test_versions import other_model
from tests.infer.unhurried import impatient

__all__ = ["stage"]

BASE, WHOLE = Weights(version="base"), Weights(version="whole", key="k")
V0, V1, BROKEN = (Weights(version=version, key="k") for version in ("v0", "v1", "broken"))


async def said(engine: Engine, name: str, request: str) -> list[int]:
    return ids(await answer(engine, ask(request, live=name, max_tokens=8)))


@pytest.fixture(params=["a", MODEL])
async def revisions(stage: Stage, request: pytest.FixtureRequest) -> Revisions:
    return await revisions_of(stage, request.param)


async def revisions_of(stage: Stage, name: str) -> Revisions:
    if name == MODEL:
        return Revisions(stage.engine, MODEL, BASE)
    await stage.engine.load_adapter(name, V0)
    return Revisions(stage.engine, name, V0)


def tensors_for(stage: Stage, name: str) -> Mapping[str, Tensor]:
    part, shape = stage.adapter_part
    return {stage.part: stage.whole(7)[stage.part]} if name == MODEL else {part: torch.ones(shape)}


async def test_a_published_version_is_staged_while_requests_run_flipped_to_and_rolled_back(stage: Stage, revisions: Revisions):
    engine, name, old = stage.engine, revisions._name, revisions.serving.weights
    new = WHOLE if name == MODEL else V1
    before, info = await said(engine, name, "before"), await engine.weight_info(name)
    follower = await Going(engine, ask("follower", live=name, max_tokens=LONG)).begun()
    await revisions.stage(new)
    assert await said(engine, name, "staged") == before
    assert await engine.weight_info(name) == info
    assert (await revisions.flip()).version == new.version
    after = await said(engine, name, "flipped")
    assert after != before
    assert await revisions.roll_back() == info
    assert await said(engine, name, "back") == before
    spans = version_spans(tokens_of(await follower.ended()))
    assert [span.version for span in spans] == [old.version, new.version, old.version]
    # Nothing of it is left but what the name stands for, and the same may be staged again.
    assert await engine.adapters() == ({} if name == MODEL else {name: old.version})
    await revisions.stage(new)
    await revisions.flip()
    assert await said(engine, name, "again") == after


async def test_what_cannot_be_read_is_not_staged_and_what_is_aborted_is_forgotten(stage: Stage, revisions: Revisions):
    engine, name = stage.engine, revisions._name
    before = await said(engine, name, "before")
    with pytest.raises(BloomeryError, match=r"broken|damaged|read"):
        await revisions.stage(BROKEN)
    with pytest.raises(Conflict, match=r"nothing of .* is staged"):
        await revisions.flip()
    await revisions.stage(WHOLE if name == MODEL else V1)
    with pytest.raises(Conflict, match="is staged: flip to it or abort it first"):
        await revisions.stage(WHOLE if name == MODEL else V1)
    await revisions.abort()
    assert await said(engine, name, "after") == before
    with pytest.raises(Conflict, match="nothing to roll"):
        await revisions.roll_back()
    assert await engine.adapters() == ({} if name == MODEL else {name: "v0"})


async def test_adapters_that_were_given_as_tensors_are_rolled_back_to_though_no_disk_holds_them(stage: Stage):
    engine, (part, shape) = stage.engine, stage.adapter_part
    await engine.load_adapter("a", V0)
    revisions = Revisions(engine, "a", V0)
    tokens = {}
    for place, version in enumerate(("first", "second")):
        await revisions.stage_update(version, {part: torch.full(shape, 0.25 + place)})
        assert (await revisions.flip()).version == version
        tokens[version] = await said(engine, "a", version)
    assert (await revisions.roll_back()).version == "first"
    assert await said(engine, "a", "back") == tokens["first"]
    assert await engine.adapters() == {"a": "first"}
    with pytest.raises(Conflict, match="nothing to roll `a` back to"):
        await revisions.roll_back()


async def test_the_version_before_may_be_staged_like_any_other_and_the_one_that_is_served_may_not(stage: Stage):
    engine = stage.engine
    await engine.load_adapter("a", V0)
    revisions = Revisions(engine, "a", V0)
    with pytest.raises(Conflict, match="version `v0` is what `a` serves"):
        await revisions.stage(V0)
    tokens = {"v0": await said(engine, "a", "first")}
    for place, version in enumerate((V1, V0, V1)):
        await revisions.stage(version)
        await revisions.flip()
        assert await said(engine, "a", f"flip-{place}") == tokens.setdefault(version.version, await said(engine, "a", f"same-{place}"))
    assert (await revisions.roll_back()).version == "v0"
    assert await said(engine, "a", "back") == tokens["v0"]
    assert tokens["v0"] != tokens["v1"]
    assert await engine.adapters() == {"a": "v0"}


async def test_an_update_that_does_not_fit_or_is_aborted_leaves_what_is_served_whole(stage: Stage, revisions: Revisions):
    engine, name = stage.engine, revisions._name
    info = await engine.weight_info(name)
    with pytest.raises(BloomeryError):
        await revisions.stage_update("no such tensor", {"nowhere": torch.ones(2)})
    await revisions.stage_update("aborted", tensors_for(stage, name))
    await revisions.abort()
    assert await engine.weight_info(name) == info


async def test_a_whole_model_that_was_given_as_tensors_is_gone_once_another_is_served_and_that_is_said(stage: Stage):
    revisions = Revisions(stage.engine, MODEL, BASE)
    await revisions.stage_update("given", stage.whole(7))
    await revisions.flip()
    assert (await revisions.roll_back()).version == "base"
    await revisions.stage_update("given again", stage.whole(7))
    await revisions.flip()
    await revisions.stage(WHOLE)
    await revisions.flip()
    with pytest.raises(Conflict, match="given as tensors and never published; publish versions that you may want back"):
        await revisions.roll_back()
    assert (await stage.engine.weight_info(MODEL)).version == "whole"


async def test_a_version_that_was_given_and_aborted_may_be_staged_from_the_disk_instead(stage: Stage, revisions: Revisions):
    name, old = revisions._name, revisions.serving.weights
    new = WHOLE if name == MODEL else V1
    await revisions.stage_update(new.version, tensors_for(stage, name))
    await revisions.abort()
    for _ in range(2):
        await revisions.stage(new)
        await revisions.abort()
    await revisions.stage(new)
    assert (await revisions.flip()).version == new.version
    assert (await revisions.roll_back()).version == old.version
    assert await stage.engine.adapters() == ({} if name == MODEL else {name: old.version})


@pytest.mark.parametrize("name", ["a", MODEL])
async def test_an_update_whose_commit_is_refused_may_be_aborted_and_staged_from_the_disk(name: str):
    new = WHOLE if name == MODEL else V1
    async with asyncio.timeout(PATIENCE_S), fake(Script(corrupt={new.version})) as stage:
        revisions = await revisions_of(stage, name)
        old = revisions.serving.weights
        await revisions.stage_update(new.version, tensors_for(stage, name))
        for _ in range(2):
            with pytest.raises(Corrupt, match="is not what was given"):
                await revisions.flip()
        await revisions.abort()
        assert (await stage.engine.weight_info(name)).version == old.version
        await revisions.stage(new)
        assert (await revisions.flip()).version == new.version
        assert (await revisions.roll_back()).version == old.version
        assert await stage.engine.adapters() == ({} if name == MODEL else {name: old.version})


class Unanswered(NamedTuple):
    """Revisions whose flip to `new` was not answered in time, and is done when `released`."""

    stage: Stage
    revisions: Revisions
    name: str
    old: Weights
    new: Weights
    released: asyncio.Event

    async def done(self) -> None:
        self.released.set()
        while (await self.stage.engine.weight_info(self.name)).version != self.new.version:
            await asyncio.sleep(0)

    async def left(self) -> dict[str, str]:
        """Names beside the one that is flipped, which the version before has."""
        return {name: version for name, version in (await self.stage.engine.adapters()).items() if name != self.name}


@asynccontextmanager
async def unanswered(name: str, *, given: bool) -> AsyncIterator[Unanswered]:
    new = WHOLE if name == MODEL else V1
    script = Script(late={new.version})
    async with asyncio.timeout(PATIENCE_S), fake(script) as stage:
        revisions = await revisions_of(stage, name)
        old = revisions.serving.weights
        await (revisions.stage_update(new.version, tensors_for(stage, name)) if given else revisions.stage(new))
        with pytest.raises(Unavailable, match="waited too long"):
            await revisions.flip()
        assert revisions.serving.weights == old
        yield Unanswered(stage, revisions, name, old, new, script.released)


names = pytest.mark.parametrize("name", ["a", MODEL])
kinds = pytest.mark.parametrize("given", [True, False], ids=["given", "from disk"])


@names
@kinds
async def test_a_flip_that_is_done_after_its_deadline_may_be_asked_for_again(name: str, given: bool):
    async with unanswered(name, given=given) as late:
        await late.done()
        assert await late.revisions.flip() == await late.stage.engine.weight_info(name)
        assert late.revisions.serving.weights.version == late.new.version
        assert (await late.revisions.roll_back()).version == late.old.version
        assert await late.left() == {}


@names
@kinds
async def test_or_be_rolled_back_and_is_nothing_to_abort(name: str, given: bool):
    async with unanswered(name, given=given) as late:
        await late.done()
        with pytest.raises(Conflict, match=r"nothing of .* is staged"):
            await late.revisions.abort()
        assert late.revisions.serving.weights.version == late.new.version
    async with unanswered(name, given=given) as late:
        with pytest.raises(Conflict, match="is staged: flip to it or abort it first"):
            await late.revisions.roll_back()
        await late.done()
        assert (await late.revisions.roll_back()).version == late.old.version
        assert await late.left() == {}


@names
async def test_an_abort_is_not_overtaken_by_the_flip_that_was_not_answered(name: str):
    async with unanswered(name, given=False) as late:
        aborting = asyncio.create_task(late.revisions.abort())
        await asyncio.sleep(0)
        await late.done()
        await aborting
        assert (await late.stage.engine.weight_info(name)).version == late.old.version
        assert late.revisions.serving.weights == late.old
        assert await late.left() == {}
        await late.revisions.stage(late.new)


@names
async def test_a_version_is_read_once_and_going_back_reads_no_disk(name: str):
    disk, new = Disk(), WHOLE if name == MODEL else V1
    disk.by_version = {**VERSIONS, WHOLE.version: other_model(DECODER, 1)}
    async with running(disk) as engine:
        if name != MODEL:
            await engine.load_adapter(name, V0)
        revisions = Revisions(engine, name, BASE if name == MODEL else V0)
        before = await said(engine, name, "before")
        await revisions.stage(new)
        read = list(disk.loads)
        assert read.count(new.version) == 1
        await revisions.flip()
        assert await said(engine, name, "flipped") != before
        await revisions.roll_back()
        assert await said(engine, name, "back") == before
        assert disk.loads == read


@kinds
async def test_an_embedded_engine_whose_thread_is_busy_for_too_long_is_asked_what_it_serves(given: bool):
    disk, new = Disk(), "second" if given else WHOLE.version
    disk.by_version = {**VERSIONS, WHOLE.version: other_model(DECODER, 1)}
    async with running(disk) as engine:
        revisions = Revisions(engine, MODEL, BASE)
        norm = {"model.norm.weight": DECODER.norm.detach() * 1.5}
        await revisions.stage_update("first", norm)
        await revisions.flip()
        await (revisions.stage_update("second", norm) if given else revisions.stage(WHOLE))
        loading = await blocked(disk, engine)
        with impatient(engine, step_s=SHORT_S), pytest.raises(Unavailable, match="sampler's thread"):
            await revisions.flip()
        disk.may_weigh.set()
        await loading
        while (await engine.weight_info(MODEL)).version != new:
            await asyncio.sleep(0)
        assert await revisions.flip() == await engine.weight_info(MODEL)
        assert revisions.serving.weights.version == new


async def test_a_version_that_is_held_too_late_for_a_flip_is_held_for_the_next():
    disk = Disk()
    async with running(disk) as engine:
        await engine.load_adapter("b", stored("v1"))
        revisions = Revisions(engine, "b", stored("v1"))
        await revisions.stage_update("new", CHANGED)
        loading = await blocked(disk, engine)
        with impatient(engine, step_s=SHORT_S), pytest.raises(Unavailable, match="sampler's thread"):
            await revisions.flip()
        disk.may_weigh.set()
        await loading
        while len(await engine.adapters()) < 3:
            await asyncio.sleep(0)
        assert (await revisions.flip()).version == "new"
        assert (await revisions.roll_back()).version == "v1"
        assert await engine.adapters() == {"a": "v0", "b": "v1"}

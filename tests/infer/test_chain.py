"""Versions of a name, one behind the other, on the embedded engine and on a fake: whole snapshots, adapters, and updates given as tensors."""

import pytest
import torch

from bloomery.infer.chain import Chain
from bloomery.infer.engine import Engine
from bloomery.types.errors import BloomeryError, Conflict
from bloomery.types.generation import Weights
from bloomery.types.serving import MODEL, version_spans
from tests.infer.test_engine_protocol import LONG, Going, Stage, answer, ask, ids, stage, tokens_of

__all__ = ["stage"]

BASE, WHOLE = Weights(version="base"), Weights(version="whole", key="k")
V0, V1, BROKEN = (Weights(version=version, key="k") for version in ("v0", "v1", "broken"))


async def said(engine: Engine, name: str, request: str) -> list[int]:
    return ids(await answer(engine, ask(request, live=name, max_tokens=8)))


@pytest.fixture(params=["a", MODEL])
async def chain(stage: Stage, request: pytest.FixtureRequest) -> Chain:
    if request.param == MODEL:
        return Chain(stage.engine, MODEL, BASE)
    await stage.engine.load_adapter("a", V0)
    return Chain(stage.engine, "a", V0)


async def test_a_published_version_is_staged_while_requests_run_flipped_to_and_rolled_back(stage: Stage, chain: Chain):
    engine, name, old = stage.engine, chain._name, chain.serving
    new = WHOLE if name == MODEL else V1
    before, info = await said(engine, name, "before"), await engine.weight_info(name)
    follower = await Going(engine, ask("follower", live=name, max_tokens=LONG)).begun()
    await chain.stage(new)
    assert await said(engine, name, "staged") == before
    assert await engine.weight_info(name) == info
    assert (await chain.flip()).version == new.version
    after = await said(engine, name, "flipped")
    assert after != before
    assert await chain.roll_back() == info
    assert await said(engine, name, "back") == before
    spans = version_spans(tokens_of(await follower.ended()))
    assert [span.version for span in spans] == [old.version, new.version, old.version]
    # Nothing of it is left but what the name stands for, and the same may be staged again.
    assert await engine.adapters() == ({} if name == MODEL else {name: old.version})
    await chain.stage(new)
    await chain.flip()
    assert await said(engine, name, "again") == after


async def test_what_cannot_be_read_is_not_staged_and_what_is_aborted_is_forgotten(stage: Stage, chain: Chain):
    engine, name = stage.engine, chain._name
    before = await said(engine, name, "before")
    with pytest.raises(BloomeryError, match=r"broken|damaged|read"):
        await chain.stage(BROKEN)
    with pytest.raises(Conflict, match=r"nothing of .* is staged"):
        await chain.flip()
    await chain.stage(WHOLE if name == MODEL else V1)
    with pytest.raises(Conflict, match="is staged: flip to it or abort it first"):
        await chain.stage(WHOLE if name == MODEL else V1)
    await chain.abort()
    assert await said(engine, name, "after") == before
    with pytest.raises(Conflict, match="nothing to roll"):
        await chain.roll_back()
    assert await engine.adapters() == ({} if name == MODEL else {name: "v0"})


async def test_adapters_that_were_given_as_tensors_are_rolled_back_to_though_no_disk_holds_them(stage: Stage):
    engine, (part, shape) = stage.engine, stage.adapter_part
    await engine.load_adapter("a", V0)
    chain = Chain(engine, "a", V0)
    tokens = {}
    for place, version in enumerate(("first", "second")):
        await chain.stage_update(version, {part: torch.full(shape, 0.25 + place)})
        assert (await chain.flip()).version == version
        tokens[version] = await said(engine, "a", version)
    assert (await chain.roll_back()).version == "first"
    assert await said(engine, "a", "back") == tokens["first"]
    assert await engine.adapters() == {"a": "first"}
    with pytest.raises(Conflict, match="nothing to roll `a` back to"):
        await chain.roll_back()


async def test_the_version_before_may_be_staged_like_any_other_and_the_one_that_is_served_may_not(stage: Stage):
    engine = stage.engine
    await engine.load_adapter("a", V0)
    chain = Chain(engine, "a", V0)
    with pytest.raises(Conflict, match="version `v0` is what `a` serves"):
        await chain.stage(V0)
    tokens = {"v0": await said(engine, "a", "first")}
    for place, version in enumerate((V1, V0, V1)):
        await chain.stage(version)
        await chain.flip()
        assert await said(engine, "a", f"flip-{place}") == tokens.setdefault(version.version, await said(engine, "a", f"same-{place}"))
    assert (await chain.roll_back()).version == "v0"
    assert await said(engine, "a", "back") == tokens["v0"]
    assert tokens["v0"] != tokens["v1"]
    assert await engine.adapters() == {"a": "v0"}


async def test_an_update_that_does_not_fit_or_is_aborted_leaves_what_is_served_whole(stage: Stage, chain: Chain):
    engine, name = stage.engine, chain._name
    info = await engine.weight_info(name)
    with pytest.raises(BloomeryError):
        await chain.stage_update("no such tensor", {"nowhere": torch.ones(2)})
    part, values = (stage.part, stage.whole(7)[stage.part]) if name == MODEL else (stage.adapter_part[0], torch.ones(stage.adapter_part[1]))
    await chain.stage_update("aborted", {part: values})
    await chain.abort()
    assert await engine.weight_info(name) == info


async def test_a_whole_model_that_was_given_as_tensors_is_gone_once_another_is_served_and_that_is_said(stage: Stage):
    chain = Chain(stage.engine, MODEL, BASE)
    await chain.stage_update("given", stage.whole(7))
    await chain.flip()
    assert (await chain.roll_back()).version == "base"
    await chain.stage_update("given again", stage.whole(7))
    await chain.flip()
    await chain.stage(WHOLE)
    await chain.flip()
    with pytest.raises(Conflict, match="given as tensors and never published; publish versions that you may want back"):
        await chain.roll_back()
    assert (await stage.engine.weight_info(MODEL)).version == "whole"

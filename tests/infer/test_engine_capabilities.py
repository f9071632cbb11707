"""What an engine says that it can do, in numbers and policies, is what it does: the embedded one, a fake, and a fake that can do less."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import get_args

import pytest

from bloomery.types.errors import NotSupported
from bloomery.types.generation import Weights
from bloomery.types.serving import MODEL, KvPolicy
from tests.infer.test_engine_protocol import LONG, PATIENCE_S, Going, Stage, answer, ask, embedded, fake, ids


def modest() -> AbstractAsyncContextManager[Stage]:
    """A fake that says of more things that it cannot do them."""
    return fake(kv_policies=("recompute",), max_adapters=2, in_memory=1)


@pytest.fixture(params=[embedded, fake, modest], ids=["embedded", "fake", "modest"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with asyncio.timeout(PATIENCE_S), request.param() as stage:
        yield stage


@pytest.mark.parametrize("policy", get_args(KvPolicy))
async def test_a_policy_is_taken_that_the_engine_says_and_another_is_refused_before_anything_changes(stage: Stage, policy: KvPolicy):
    engine, taken = stage.engine, stage.engine.capabilities().kv_policies
    await engine.begin_update(MODEL, "new")
    swaps = {"new": lambda: engine.commit(MODEL, policy), "whole": lambda: engine.switch(MODEL, Weights(version="whole", key="k"), policy)}
    for version, swap in swaps.items():
        before = await engine.weight_info(MODEL)
        if policy in taken:
            assert (await swap()).version == version
            continue
        with pytest.raises(NotSupported, match="`policy`") as refused:
            await swap()
        assert refused.value.field == "policy"
        assert await engine.weight_info(MODEL) == before
    if policy not in taken:
        assert (await engine.commit(MODEL, taken[0])).version == "new"


async def test_as_many_adapters_are_loaded_as_the_engine_says(stage: Stage):
    engine, most = stage.engine, stage.engine.capabilities().max_adapters
    loaded = [f"a{number}" for number in range(5 if most is None else most)]
    for number, name in enumerate(loaded):
        await engine.load_adapter(name, Weights(version=f"v{number % 2}", key="k"))
    assert list(await engine.adapters()) == loaded
    if most is None:
        return
    with pytest.raises(NotSupported, match="`name`") as refused:
        await engine.load_adapter("another", Weights(version="v0", key="k"))
    assert refused.value.field == "name"
    await engine.unload_adapter(loaded[0])
    await engine.load_adapter("another", Weights(version="v0", key="k"))
    assert set(await engine.adapters()) == {*loaded[1:], "another"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: embedded(versions_in_memory=1), modest], ids=["embedded", "modest"])
async def test_no_more_adapters_are_in_memory_than_the_engine_says_and_who_names_another_waits(
    make: Callable[[], AbstractAsyncContextManager[Stage]],
):
    async with asyncio.timeout(PATIENCE_S), make() as stage:
        engine = stage.engine
        assert engine.capabilities().max_adapters_in_memory == 1
        alone = {version: ids(await answer(engine, ask(f"{version} alone", version=version, max_tokens=LONG))) for version in ("v0", "v1")}
        first = await Going(engine, ask("first", version="v0", max_tokens=LONG)).begun()
        second = Going(engine, ask("second", version="v1", max_tokens=LONG))
        for _ in range(20):
            await asyncio.sleep(0)
            assert (await engine.metrics()).versions_in_memory == 1
        assert second.waits
        assert ids(await first.ended()) == alone["v0"]
        assert ids(await second.ended()) == alone["v1"]
        assert (await engine.metrics()).versions_in_memory == 1

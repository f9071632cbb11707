"""Revisions with proofs: what is not what was published is not staged, and what was written otherwise than it was given is not flipped to.

Faults are those of the kill list, in what delivers, reads, fills and writes weights. Requests run meanwhile, and what is served stays whole.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bloomery.infer.revisions import Revisions
from bloomery.models.published_names import PUBLISHED_PREFIX
from bloomery.types.errors import Conflict, Corrupt
from bloomery.types.generation import Weights
from bloomery.types.serving import MODEL, WeightInfo, version_spans
from tests.engine.faults import FAULTS, Fault, World, world
from tests.infer.test_engine_protocol import LONG, PATIENCE_S, Going, ask, tokens_of
from tests.infer.test_revisions import said
from tests.infer.unhurried import UnhurriedEngine
from tests.train.builders import BASE_HASH

DELIVERED = ("adapter never delivered", "adapter settings not wired", "cached reload of an adapter", "stale file", "alias serving other weights")
"""Faults of adapters."""
WHOLE = ("torn file", "partly written model", "permuted tensor", "cached reload of a model")
"""Of models."""
Put = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Serving(NamedTuple):
    """An engine that serves the version `old` of a world, a request that follows it, and what is to be seen of it."""

    engine: UnhurriedEngine
    revisions: Revisions
    name: str
    follower: Going
    tokens: list[int]
    info: WeightInfo

    async def check_whole(self, request: str) -> None:
        """As if nothing had been tried."""
        assert await said(self.engine, self.name, request) == self.tokens
        assert await self.engine.weight_info(self.name) == self.info
        assert await self.engine.adapters() == ({} if self.name == MODEL else {self.name: self.info.version})

    async def followed(self) -> list[str]:
        """The versions of the request that ran all the while."""
        return [span.version for span in version_spans(tokens_of(await self.follower.ended()))]


@asynccontextmanager
async def serving(made: World, name: str) -> AsyncIterator[Serving]:
    async with asyncio.timeout(PATIENCE_S), UnhurriedEngine(made.base, made.shelf, version=BASE_HASH) as engine:
        revisions = Revisions(engine, MODEL, Weights(version=BASE_HASH))
        if name == MODEL:
            await revisions.stage(made.old)
            await revisions.flip()
        else:
            await engine.load_adapter(name, made.old)
            revisions = Revisions(engine, name, made.old)
        tokens, info = await said(engine, name, "before"), await engine.weight_info(name)
        follower = await Going(engine, ask("follower", live=name, max_tokens=LONG)).begun()
        yield Serving(engine, revisions, name, follower, tokens, info)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in DELIVERED + WHOLE], ids=lambda fault: fault.name.replace(" ", "-"))
async def test_a_sound_version_is_flipped_to_and_one_that_is_not_what_was_published_is_not_even_staged(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(tmp_path, fault.rank)
    async with serving(made, "a" if fault.rank else MODEL) as served:
        revisions = served.revisions
        await revisions.stage(made.first)
        assert (await revisions.flip()).version == made.first.version
        assert await said(served.engine, served.name, "flipped") != served.tokens
        assert await revisions.roll_back() == served.info
        with monkeypatch.context() as patch:
            fault.inject(patch, made)
            with pytest.raises(Corrupt, match=fault.says):
                await revisions.stage(made.new)
        with pytest.raises(Conflict, match=r"nothing of .* is staged"):
            await revisions.flip()
        await served.check_whole("after")
        assert await served.followed() == [made.old.version, made.first.version, made.old.version]


def nothing_arrives(put: Put) -> Put:
    """The copy stays what it was copied from."""
    return lambda places, new: None


def written_past_its_place(put: Put) -> Put:
    """One number more than was given."""

    def past(places: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        put(places, new)
        places[0][(-1,) * places[0].dim()] += 2**-10

    return past


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", MODEL])
@pytest.mark.parametrize("fault", [nothing_arrives, written_past_its_place])
async def test_an_update_that_was_written_otherwise_than_it_was_given_is_not_committed_and_the_engine_goes_on_with_the_version_of_before(
    name: str, fault: Callable[[Put], Put], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(tmp_path, 8 if name == "a" else 0)
    factor = f"{PUBLISHED_PREFIX}layers.1.self_attn.q_proj.lora_B.weight"
    update = {factor: torch.full((64, 8), 0.25)} if name == "a" else {"model.norm.weight": made.base.norm.detach() * 1.5}
    async with serving(made, name) as served:
        revisions = served.revisions
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", fault(torch._foreach_copy_))
            await revisions.stage_update("faulty", update)
        for _ in range(2):
            with pytest.raises(Corrupt, match="are not those of version faulty"):
                await revisions.flip()
        assert await said(served.engine, name, "refused") == served.tokens
        await revisions.abort()
        await served.check_whole("aborted")
        # The same, written as it was given.
        await revisions.stage_update("sound", update)
        assert (await revisions.flip()).version == "sound"
        assert await said(served.engine, name, "flipped") != served.tokens
        assert await revisions.roll_back() == served.info
        await served.check_whole("back")
        assert await served.followed() == [made.old.version, "sound", made.old.version]

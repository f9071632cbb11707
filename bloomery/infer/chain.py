"""The versions of one name in an engine, one behind the other: staged while requests run, flipped to between two steps, and rolled back.

    chain = Chain(engine, "router", serving)
    await chain.stage(Weights(version=manifest.version, key=manifest.key))  # what `sync.publish` wrote, a snapshot of a model or of an adapter
    await chain.flip()
    await chain.roll_back()

A stage that fails, or is aborted, leaves what is served as it is. The version before stays at hand until the next flip, so that going back reads no
disk, and works for adapters that were given as tensors too. One task at a time drives a chain.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

import numpy as np

from bloomery.infer.engine import Engine, Update
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict
from bloomery.types.generation import Generate, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.serving import MODEL, KvPolicy, WeightInfo

_TOKEN: Final = 0
"""Any token is a prompt long enough to have a model read."""


class Chain:
    """Publish, stage, flip, roll back. `serving` is what the name stands for when the chain begins; `policy` what becomes of caches."""

    def __init__(self, engine: Engine, name: str, serving: Weights, *, policy: KvPolicy = "keep") -> None:
        self.serving = serving
        self.staged: Weights | None = None
        self.before: Weights | None = None
        """What `roll_back` goes back to."""
        self._engine, self._name, self._policy = engine, name, policy
        self._given: set[str] = set()
        """Versions that no disk holds."""
        self._held: Counter[str] = Counter()

    async def stage(self, weights: Weights) -> None:
        """Have a published version read, proved and probed."""
        self._refuse_staged()
        if weights.version == self.serving.version:
            raise Conflict(f"version `{weights.version}` is what `{self._name}` serves: stage another one", field="version")
        await self._hold(weights)
        self.staged = weights

    async def stage_update(self, version: str, update: Mapping[str, Update]) -> None:
        """Have a copy of what is served take over tensors or patches; `version` is what it will be called."""
        self._refuse_staged()
        await self._engine.begin_update(self._name, version)
        try:
            await self._engine.apply(self._name, update)
        except BaseException:
            await self._engine.cancel_update(self._name)
            raise
        self._given.add(version)
        self.staged = Weights(version=version)

    async def abort(self) -> None:
        """Forget what is staged."""
        staged = self._expect_staged()
        if staged.version in self._given:
            await self._engine.cancel_update(self._name)
        else:
            await self._let_go(staged)
        self.staged = None

    async def flip(self) -> WeightInfo:
        """Serve what is staged from the next token on; where that fails it stays staged, and what was served stays so."""
        staged, before = self._expect_staged(), self.serving
        given = staged.version in self._given
        await self._hold(before)
        try:
            info = await (self._engine.commit(self._name, self._policy) if given else self._engine.switch(self._name, staged, self._policy))
        except BaseException:
            await self._let_go(before)
            raise
        for unneeded in ([] if given else [staged]) + ([] if self.before is None else [self.before]):
            await self._let_go(unneeded)
        self.serving, self.staged = staged, None
        # An engine lets go of a whole model that it was given when no name stands for it, and only adapters have other names.
        self.before = None if self._name == MODEL and before.version in self._given else before
        return info

    async def roll_back(self) -> WeightInfo:
        """Serve what was served before the last flip; what was flipped to is forgotten."""
        if self.before is None:
            raise Conflict(
                f"there is nothing to roll `{self._name}` back to: it was not flipped since, or what it served was a whole model that was given as "
                "tensors and never published; publish versions that you may want back, and stage those",
                field="name",
            )
        info = await self._engine.switch(self._name, self.before, self._policy)
        await self._let_go(self.before)
        self.serving, self.before = self.before, None
        return info

    async def _hold(self, weights: Weights) -> None:
        """Have an adapter in memory under a name of its own, and a model read once: one that no disk holds is in memory as long as it is served."""
        if self._name != MODEL:
            if not self._held[weights.version]:
                await self._engine.load_adapter(self._aside(weights), weights)
            self._held[weights.version] += 1
        elif weights.version not in self._given:
            prompt = Array.of(np.array([_TOKEN], np.int32))
            asked = Generate(request_id=new_id("generate"), weights=weights, prompt=prompt, params=SamplingParams(max_tokens=1, seed=0))
            async with aclosing(self._engine.generate(asked)) as events:
                async for _ in events:
                    pass

    async def _let_go(self, weights: Weights) -> None:
        if self._name != MODEL:
            self._held[weights.version] -= 1
            if not self._held[weights.version]:
                await self._engine.unload_adapter(self._aside(weights))

    def _aside(self, weights: Weights) -> str:
        return f"{self._name}@{weights.version}"

    def _refuse_staged(self) -> None:
        if self.staged is not None:
            raise Conflict(f"version `{self.staged.version}` of `{self._name}` is staged: flip to it or abort it first", field="name")

    def _expect_staged(self) -> Weights:
        if self.staged is None:
            raise Conflict(f"nothing of `{self._name}` is staged: stage a version first", field="name")
        return self.staged

"""What one name in an engine stands for, one version after another: staged while requests run, flipped to between two steps, and rolled back.

    revisions = Revisions(engine, "router", serving)
    await revisions.stage(Weights(version=manifest.version, key=manifest.key))  # what `sync.publish` wrote, a snapshot of a model or of an adapter
    await revisions.flip()
    await revisions.roll_back()

A stage that fails, or is aborted, leaves what is served as it is. The version before is at hand, as long as others need no room and the engine does
not sleep, so that going back reads no disk; an adapter that was given as tensors stays until the next flip. A flip that was not answered in time may
be done later all the same: the engine is asked which version is served before anything else is done, and who flips or rolls back again gets what he
asked for. One task at a time drives them.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final, NamedTuple

import numpy as np

from bloomery.infer.engine import Engine, Update
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, Conflict
from bloomery.types.generation import Generate, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.serving import MODEL, KvPolicy, WeightInfo

_TOKEN: Final = 0
"""Any token is a prompt long enough to have a model read."""


class Revision(NamedTuple):
    """A version that the name stands, stood or will stand for."""

    weights: Weights
    given: bool = False
    """As tensors: no disk holds it."""


class Revisions:
    """Publish, stage, flip, roll back. `serving` is what the name stands for at first; `policy` what becomes of caches."""

    def __init__(self, engine: Engine, name: str, serving: Weights, *, policy: KvPolicy = "keep") -> None:
        self.serving = Revision(serving)
        self.staged: Revision | None = None
        self.before: Revision | None = None
        """What `roll_back` goes back to."""
        self._engine, self._name, self._policy = engine, name, policy
        self._flipping = False
        """Whether a flip to what is staged was asked for, and did not come back with an answer. What is served is held meanwhile."""
        self._held: Counter[str] = Counter()

    async def stage(self, weights: Weights) -> None:
        """Have a published version read, proved and probed."""
        await self._refuse_staged()
        if weights.version == self.serving.weights.version:
            raise Conflict(f"version `{weights.version}` is what `{self._name}` serves: stage another one", field="version")
        staged = Revision(weights)
        await self._hold(staged)
        self.staged = staged

    async def stage_update(self, version: str, update: Mapping[str, Update]) -> None:
        """Have a copy of what is served take over tensors or patches; `version` is what it will be called."""
        await self._refuse_staged()
        await self._engine.begin_update(self._name, version)
        try:
            await self._engine.apply(self._name, update)
        except BaseException:
            await self._engine.cancel_update(self._name)
            raise
        self.staged = Revision(Weights(version=version), given=True)

    async def abort(self) -> None:
        """Forget what is staged."""
        await self._settle()
        staged = self._expect_staged()
        if staged.given:
            await self._engine.cancel_update(self._name)
        elif self._flipping:
            # The flip may still come. Swaps of one name keep their order: behind it, what is served now is served again.
            await self._engine.switch(self._name, self.serving.weights, self._policy)
        unneeded = [*([] if staged.given else [staged]), *([self.serving] if self._flipping else [])]
        self.staged, self._flipping = None, False
        await self._let_go(*unneeded)

    async def flip(self) -> WeightInfo:
        """Serve what is staged from the next token on; where that fails it stays staged, and what was served stays so."""
        staged = self._expect_staged()
        if not self._flipping:
            await self._hold(self.serving)
            self._flipping = True
        try:
            if staged.given:
                info = await self._engine.commit(self._name, self._policy)
            else:
                info = await self._engine.switch(self._name, staged.weights, self._policy)
        except BloomeryError:
            if (late := await self._settle()) is None:
                raise
            return late
        await self._flipped(staged)
        return info

    async def roll_back(self) -> WeightInfo:
        """Serve what was served before the last flip; what was flipped to is forgotten."""
        if self._flipping:
            await self._refuse_staged()
        if self.before is None:
            raise Conflict(
                f"there is nothing to roll `{self._name}` back to: it was not flipped since, or what it served was a whole model that was given as "
                "tensors and never published; publish versions that you may want back, and stage those",
                field="name",
            )
        before = self.before
        info = await self._engine.switch(self._name, before.weights, self._policy)
        self.serving, self.before = before, None
        await self._let_go(before)
        return info

    async def _settle(self) -> WeightInfo | None:
        """Where a flip was not answered the engine knows whether it was done; its answer, if it was."""
        if self.staged is None or not self._flipping:
            return None
        info = await self._engine.weight_info(self._name)
        if info.version != self.staged.weights.version:
            return None
        await self._flipped(self.staged)
        return info

    async def _flipped(self, staged: Revision) -> None:
        before = self.serving
        unneeded = [*([] if staged.given else [staged]), *([] if self.before is None else [self.before])]
        self.serving, self.staged, self._flipping = staged, None, False
        # An engine lets go of a whole model that it was given when no name stands for it, and only adapters have other names.
        self.before = None if self._name == MODEL and before.given else before
        await self._let_go(*unneeded)

    async def _hold(self, revision: Revision) -> None:
        """Have an adapter in memory under a name of its own, and a model read once: one that no disk holds is in memory as long as it is served."""
        weights = revision.weights
        if self._name != MODEL:
            # One that was asked for and came too late is there already.
            if not self._held[weights.version] and (await self._engine.adapters()).get(self._aside(weights)) != weights.version:
                await self._engine.load_adapter(self._aside(weights), weights)
            self._held[weights.version] += 1
        elif not revision.given:
            prompt = Array.of(np.array([_TOKEN], np.int32))
            asked = Generate(request_id=new_id("generate"), weights=weights, prompt=prompt, params=SamplingParams(max_tokens=1, seed=0))
            async with aclosing(self._engine.generate(asked)) as events:
                async for _ in events:
                    pass

    async def _let_go(self, *unneeded: Revision) -> None:
        if self._name != MODEL:
            for weights, _ in unneeded:
                self._held[weights.version] -= 1
                if not self._held[weights.version]:
                    await self._engine.unload_adapter(self._aside(weights))

    def _aside(self, weights: Weights) -> str:
        return f"{self._name}@{weights.version}"

    async def _refuse_staged(self) -> None:
        await self._settle()
        if self.staged is not None:
            raise Conflict(f"version `{self.staged.weights.version}` of `{self._name}` is staged: flip to it or abort it first", field="name")

    def _expect_staged(self) -> Revision:
        if self.staged is None:
            raise Conflict(f"nothing of `{self._name}` is staged: stage a version first", field="name")
        return self.staged

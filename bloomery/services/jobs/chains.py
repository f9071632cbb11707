"""Chains of jobs: stages of which each begins where one before it ends, checked as a whole before the first of them starts."""

from typing import Final

from sqlalchemy import Connection

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.row_tokens import RowTokens
from bloomery.services.jobs.job_rows import add_job
from bloomery.services.jobs.jobs import Jobs
from bloomery.store.database import Database
from bloomery.types.errors import BloomeryError, InvalidInput
from bloomery.types.ids import new_id
from bloomery.types.jobs import Chain, CreateChain, JobSpec
from bloomery.types.resources import Split

_NO_BEGIN: Final = "begins at no stage before it: name one in `begin.job`"


class Chains:
    """Makes them; what is steered and shown are their jobs."""

    def __init__(self, database: Database, jobs: Jobs, row_tokens: RowTokens) -> None:
        self._database, self._jobs, self._row_tokens = database, jobs, row_tokens

    async def create(self, p: Principal, asked: CreateChain, *, request: Repeatable | None = None) -> Chain:
        """All jobs of a chain: the first waits for a process, the others for what they begin with. What is wrong with one of them makes none."""
        p.require("train")
        if (made := await answer_before(self._database, p, request, Chain)) is not None:
            return made
        resolved = (await self.resolve(p, asked)).stages

        def add(connection: Connection) -> Chain:
            return Chain(jobs=[add_job(connection, p.project, new_id("job"), spec) for spec in resolved])

        chain = await self._database.write(once(p, request, Chain, add))
        self._jobs.queued.tell()
        return chain

    async def resolve(self, p: Principal, asked: CreateChain) -> CreateChain:
        """The stages as their jobs would have them; nothing is made."""
        p.require("train")
        earlier: dict[str, JobSpec] = {}
        names = {spec.name for spec in asked.stages}
        for place, spec in enumerate(asked.stages):
            try:
                if spec.begin is not None and spec.begin.job in names - earlier.keys():
                    raise InvalidInput(f"begins at stage `{spec.begin.job}`, which does not stand before it", field="begin.job")
                if earlier and (spec.begin is None or spec.begin.job not in earlier):
                    raise InvalidInput(_NO_BEGIN, field="begin.job")
                if spec.name in earlier:
                    raise InvalidInput("has the name of a stage before it: give each its own", field="name")
                resolved = await self._jobs.resolve(p, spec, earlier=earlier)
                await self._check_rows(p, resolved)
            except BloomeryError as error:
                field = f"stages.{place}" if error.field is None else f"stages.{place}.{error.field}"
                raise type(error)(f"stage {place + 1} (`{spec.name}`): {error.message}", field=field) from None
            earlier[spec.name] = resolved
        return CreateChain(stages=list(earlier.values()))

    async def _check_rows(self, p: Principal, spec: JobSpec) -> None:
        """Rows that would fail a stage hours from now are refused today: of large splits those that `statistics` measures."""
        splits: tuple[Split, ...] = (spec.data.train, spec.evaluation.split)
        for split in splits:
            assert spec.data.version is not None
            found = await self._row_tokens.statistics(p, spec.data.dataset, spec.data.version, model=spec.base_model, split=split)
            if found.first_refused is not None:
                raise InvalidInput(f"rows of `{split}` cannot be used: {found.first_refused}", field="data")
            if found.longest > spec.room:
                problem = f"a row of `{split}` has {found.longest} tokens, and {spec.room} are taken"
                raise InvalidInput(f"{problem}: leave it out, or raise `max_context`", field="max_context")

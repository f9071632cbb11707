"""What a job would take, before there is one: tokens from its rows, and time from what jobs of its kind took here."""

from statistics import median
from typing import Final, NamedTuple

from sqlalchemy import Connection, select

from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.row_tokens import RowTokens
from bloomery.services.jobs.jobs import Jobs
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.datasets import TokenStatistics
from bloomery.types.estimates import JobEstimate, Prices
from bloomery.types.jobs import JobProgress, JobSpec, JobState
from bloomery.types.methods import Distillation, Reinforcement

LOOKED_AT: Final = 20
"""Ended jobs whose pace counts, the newest."""
_NONE: Final = Prices()


class Estimates:
    """Of specs, resolved or not."""

    def __init__(self, database: Database, jobs: Jobs, datasets: Datasets, row_tokens: RowTokens) -> None:
        self._database, self._jobs, self._datasets, self._row_tokens = database, jobs, datasets, row_tokens

    async def of(self, p: Principal, spec: JobSpec, prices: Prices = _NONE) -> JobEstimate:
        """What it would take; what cannot be done is refused as it is when a job is made."""
        p.require("train")
        resolved = await self._jobs.resolve(p, spec)
        data, evaluation = resolved.data, resolved.evaluation
        assert data.version is not None
        version = await self._datasets.chosen(p, data.dataset, data.version, data.train, split_field="data.train")
        measured = await self._row_tokens.statistics(
            p, data.dataset, data.version, model=resolved.base_model, split=data.train, context=resolved.room
        )
        work = _work(resolved, measured)
        pace = await self._database.read(lambda connection: _pace(connection, p.project, resolved))
        tokens_per_s = prices.tokens_per_s or (median(pace) if pace else None)
        seconds = None if tokens_per_s is None else round(work.tokens / tokens_per_s, 1)
        return JobEstimate(
            rows=measured.rows,
            held_out=min(version.counts.get(f"{evaluation.split}.rows", 0), evaluation.rows),
            steps=work.steps,
            tokens=work.tokens,
            seconds=seconds,
            cost=prices.cost(work.tokens, seconds),
            jobs=len(pace),
            too_long=measured.truncated,
            refused=measured.refused,
        )


class _Work(NamedTuple):
    """Steps, and the tokens that go through the model in all of them."""

    steps: int
    tokens: int


def _work(spec: JobSpec, measured: TokenStatistics) -> _Work:
    """Of reinforcement and distillation at most so many tokens are sampled, besides the prompts."""
    method = spec.method
    if isinstance(method, Reinforcement):
        answers = method.steps * method.groups_per_step * method.group_size
        return _Work(method.steps, round(answers * (measured.mean + method.max_tokens)))
    if isinstance(method, Distillation):
        answers = method.steps * method.prompts_per_step * method.samples
        return _Work(method.steps, round(answers * (measured.mean + method.max_tokens)))
    batches = method.batches
    tokens = round(measured.tokens * batches.epochs)
    if batches.tokens is not None:
        return _Work(max(1, round(tokens / batches.tokens)), tokens)
    assert batches.rows is not None
    return _Work(max(1, round(batches.epochs * measured.rows / batches.rows)), tokens)


def _pace(connection: Connection, project: str, spec: JobSpec) -> list[float]:
    """Tokens a second of ended jobs of this project, method, base model and kind of weights, newest first."""
    table = rows.job.c
    query = select(table.spec, table.progress).where(table.project == project, table.method == spec.method.kind, table.state == JobState.SUCCEEDED)
    found = []
    for row in connection.execute(query.order_by(table.finished_us.desc()).limit(LOOKED_AT)):
        other, progress = JobSpec.model_validate_json(row.spec), JobProgress.model_validate_json(row.progress)
        alike = other.base_model == spec.base_model and bool(other.rank) == bool(spec.rank)
        if alike and progress.tokens and progress.seconds:
            found.append(progress.tokens / progress.seconds)
    return found

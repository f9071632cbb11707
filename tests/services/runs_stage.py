"""Runs over a real database, journal and blobs in a temporary directory, and a fake engine that survives the api."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.engines.connection import Inbox
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.training.active import Patience
from bloomery.services.training.activity import Activity
from bloomery.services.training.checkpoints import Checkpoints
from bloomery.services.training.history import Successor
from bloomery.services.training.run_metrics import RunMetricsReader
from bloomery.services.training.run_rows import RunRow
from bloomery.services.training.runs import Runs
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.store.journal import BOUNDS, Bounds
from bloomery.types.arrays import Array
from bloomery.types.operations import AdamParams, Datum, ForwardBackward, LoraSpec, OptimStep, Result
from tests.services.fake_engine import BASE, VOCABULARY, FakeEngine, fake_base, fake_engine
from tests.store.template import migrated

ME = Principal("default", "key-1", SCOPES)
STRANGER = Principal("other", "key-2", SCOPES)
LORA = LoraSpec(rank=4, seed=1)


@dataclass(frozen=True, kw_only=True)
class Api:
    """One life of an api process."""

    database: Database
    blobs: AsyncBlobs
    link: EngineLink
    activity: Activity
    runs: Runs
    checkpoints: Checkpoints
    run_metrics: RunMetricsReader
    successors: list[Successor]
    """Told so far."""

    async def new_run(self, **options: Any) -> RunRow:
        """A run on the fake base."""
        return await self.runs.create(ME, base_model="tiny", lora=LORA, metadata={}, **options)

    async def results(self, run_id: str, *seqs: int) -> list[Result]:
        """Results of operations that are expected to finish."""
        found = [await self.runs.result(ME, run_id, seq, 120.0) for seq in seqs]
        assert None not in found, await self.runs.waiting_for(ME, run_id)
        return [result for result in found if result is not None]

    async def train(self, run_id: str, first: int, last: int) -> list[Result]:
        """Alternate forward_backward (odd) and optim_step (even), and wait for all."""
        for seq in range(first, last + 1):
            await self.runs.submit(ME, run_id, seq, operation(seq))
        return await self.results(run_id, *range(first, last + 1))

    async def events(self) -> list[str]:
        """Kinds of recorded events."""
        return await self.database.read(lambda connection: list(connection.scalars(select(rows.event.c.kind).order_by(rows.event.c.seq))))

    async def until_events(self, kinds: list[str]) -> None:
        """Let others work until exactly these were recorded."""
        async with asyncio.timeout(240):
            while await self.events() != kinds:
                await asyncio.sleep(0.002)


def pass_time(seconds: float) -> None:
    """For whoever looks at the clock of the loop so much later it is, however long the test takes itself."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


@asynccontextmanager
async def open_api(directory: Path, patience: Patience | None = None, bounds: Bounds = BOUNDS) -> AsyncIterator[Api]:
    """Start an api in this directory; leaving ends it without a farewell, as a death would."""
    inbox: Inbox = asyncio.Queue()
    link = EngineLink(BASE, directory / "s", inbox)
    async with AsyncExitStack() as stack:
        database = stack.enter_context(Database(migrated(directory / "bloomery.db")))
        blobs = AsyncBlobs(Blobs(directory / "blobs"))
        models, checkpoints = Models([fake_base(directory)], {BASE: link}), Checkpoints(database)
        successors: list[Successor] = []
        activity = Activity(
            database=database,
            blobs=blobs,
            directory=directory / "runs",
            links={BASE: link},
            inbox=inbox,
            patience=patience,
            bounds=bounds,
            succeeded=successors.append,
        )
        await stack.enter_async_context(activity)
        await stack.enter_async_context(link)
        runs = Runs(database=database, models=models, checkpoints=checkpoints, activity=activity)
        yield Api(
            database=database,
            blobs=blobs,
            link=link,
            activity=activity,
            runs=runs,
            checkpoints=checkpoints,
            run_metrics=RunMetricsReader(database),
            successors=successors,
        )


def play(directory: Path, story: Callable[[FakeEngine], Awaitable[None]], **options: int) -> None:
    """Run a story beside a fake engine; the story opens the api as often as it likes."""

    async def run() -> None:
        async with fake_engine(directory / "s", Blobs(directory / "blobs"), **options) as engine, asyncio.timeout(240):
            await story(engine)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until the condition holds."""
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.002)


def operation(seq: int) -> ForwardBackward | OptimStep:
    """A computation for odd numbers, a step for even ones, different each."""
    return step(seq * 1e-3) if seq % 2 == 0 else forward_backward(seq)


def forward_backward(first_token: int = 1, *, backward: bool = True) -> ForwardBackward:
    """One datum of four tokens."""
    return ForwardBackward(loss="cross_entropy", loss_config={}, data=(datum([first_token % VOCABULARY, 2, 3, 4]),), backward=backward)


def step(learning_rate: float = 1e-3) -> OptimStep:
    """An optimizer step."""
    return OptimStep(adam=AdamParams(learning_rate=learning_rate))


def datum(tokens: list[int], **changes: Array) -> Datum:
    """A datum of cross_entropy."""
    inputs = {"target_tokens": Array.of(np.asarray(tokens, np.int64)), "weights": Array.of(np.ones(len(tokens), np.float32))}
    return Datum(tokens=Array.of(np.asarray(tokens, np.int32)), inputs=inputs | changes)

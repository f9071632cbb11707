"""Services over a real database and real blobs in a temporary directory, with a base model that no engine holds."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from bloomery.config import ModelConfig, RecordMode
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.data.curation import Curation
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.feedback import Judgements
from bloomery.services.data.span_rows import Inference, RecordedSample
from bloomery.services.data.traffic import Traffic
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.housekeeping.ephemeral import Ephemeral
from bloomery.services.housekeeping.garbage import Garbage
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.staging import Staging
from bloomery.services.weights.target import Target
from bloomery.services.weights.versions import Versions
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.types.generation import Weights
from tests.render.builders import small_config
from tests.store.template import migrated

ME = Principal("default", "key-1", SCOPES)
STRANGER = Principal("other", "key-2", SCOPES)
BASE = "b" * 32
BASE_TARGET = Target(Weights(version=BASE), BASE, None, None, "tiny")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a test plays on."""

    database: Database
    blobs: AsyncBlobs
    deployments: Deployments
    traffic: Traffic
    feedback: Judgements
    datasets: Datasets
    garbage: Garbage
    models: Models
    versions: Versions

    async def reopened_deployments(self) -> Deployments:
        """Those that a process finds which starts now."""
        found = deployments_of(self.database, self.models, self.versions)
        await found.load()
        return found

    async def add_snapshot(self, version: str, *, base_hash: str = BASE, run_id: str = "run-1") -> None:
        """As if a run had published weights."""
        await add_snapshot(self.database, version, base_hash, run_id)


def deployments_of(database: Database, models: Models, versions: Versions) -> Deployments:
    """Nobody is there to load anything."""
    bases: set[str] = set()
    return Deployments(database, models, versions, Staging(Fleet({}, {}, bases)), bases)


async def add_snapshot(database: Database, version: str, base_hash: str, run_id: str, *, project: str = "default") -> None:
    """As if a run of this base had published weights."""
    run = {"id": run_id, "project": project, "base_model": "tiny", "base_hash": base_hash, "lora": "{}", "micro_batch_tokens": 1}
    run |= {"metadata": "{}", "state": "active", "first_seq": 1, "settled_seq": 0, "step": 0, "created_us": 1, "updated_us": 1}
    snapshot = {"id": f"checkpoint-{version}", "project": project, "run_id": run_id, "kind": "snapshot", "state": "ready", "metadata": "{}"}
    snapshot |= {"seq": len(version), "name": f"named-{version}", "key": f"snapshots/{version}.safetensors", "version": version}
    snapshot |= {"size_bytes": 0, "step": 0, "created_us": 1}
    await database.write(lambda connection: connection.execute(insert(rows.run).prefix_with("OR IGNORE"), run))
    await database.write(lambda connection: connection.execute(insert(rows.checkpoint), snapshot))


@asynccontextmanager
async def open_stage(directory: Path, *, mode: RecordMode = "full", capacity: int = 4096) -> AsyncIterator[Stage]:
    """Open everything; leaving closes it."""
    (directory / "config.json").write_text(json.dumps(small_config(100, context=64)))
    config = ModelConfig(alias="tiny", path=str(directory), base_hash=BASE, dtype="float32", threads=1, socket=str(directory / "s"))
    models = Models([config], {BASE: EngineLink(BASE, directory / "s", asyncio.Queue())})
    async with AsyncExitStack() as stack:
        database = stack.enter_context(Database(migrated(directory / "bloomery.db")))
        blobs = AsyncBlobs(Blobs(directory / "blobs"))
        versions = Versions(database, models)
        traffic = await stack.enter_async_context(Traffic(database, blobs, mode, capacity=capacity))
        yield Stage(
            database=database,
            blobs=blobs,
            deployments=deployments_of(database, models, versions),
            models=models,
            traffic=traffic,
            feedback=Judgements(database, traffic),
            datasets=Datasets(database, blobs, Curation(database, blobs, traffic)),
            garbage=Garbage(database, blobs, Ephemeral(database, None), trusted=()),
            versions=versions,
        )


def play(directory: Path, story: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
    """Run a story on a fresh stage."""

    async def run() -> None:
        async with open_stage(directory, **options) as stage:
            await story(stage)

    asyncio.run(run())


def chat(span_id: str, question: str = "q", answer: str = "a", **changes: Any) -> Inference:
    """A served chat completion."""
    known: dict[str, Any] = {
        "id": span_id,
        "project": "default",
        "kind": "chat",
        "target": BASE_TARGET,
        "template_hash": "t",
        "request": {"model": "tiny", "temperature": 0.5, "messages": [{"role": "user", "content": question}]},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop", "logprobs": {"content": ["x"]}}],
        "prompt_tokens": [1, 2, 3],
        "samples": [RecordedSample([4, 5], [-0.25, float("-inf")], "stop")],
        "seed": 7,
        "started_us": 1_000_000_000_000_000,
        "duration_us": 2_000,
        "ttft_us": 500,
        "consent": "train",
    }
    return Inference(**known | changes)

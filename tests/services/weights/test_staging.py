"""A name is moved to weights once everybody who serves them has them in memory, proved: else it stays where it is, and says why."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bloomery.services.engines import link as engine_link
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.training.history import Successor
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.staging import Staging
from bloomery.services.weights.versions import Versions
from bloomery.store.blobs import Blobs
from bloomery.store.database import Database
from bloomery.types.errors import Corrupt, InvalidInput, Unavailable
from bloomery.types.generation import Weights
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import until
from tests.services.stage import ME, add_snapshot

SERVING = ("replica-0", "replica-1")
V1, V2 = (Weights(version=name, key=f"snapshots/{name}.safetensors") for name in ("v1", "v02"))


@dataclass
class Stand:
    """An engine, two replicas, and deployments that they serve."""

    processes: dict[str, FakeEngine]
    links: dict[str, EngineLink]
    deployments: Deployments

    async def live(self) -> tuple[str, int]:
        """What `chat` serves, and as which revision."""
        found = await self.deployments.get(ME, "chat")
        return found.live.version, found.live.number

    def staged(self) -> dict[str, list[Weights]]:
        """By process."""
        return {name: process.staged for name, process in self.processes.items()}


@asynccontextmanager
async def open_stand(directory: Path) -> AsyncIterator[Stand]:
    async with AsyncExitStack() as stack:
        processes, links = {}, {}
        for name in ("engine", *SERVING):
            role = "engine" if name == "engine" else "replica"
            processes[name] = FakeEngine(directory / name, Blobs(directory / "blobs"), role=role)
            await processes[name].start()
            stack.push_async_callback(processes[name].crash)
            link = EngineLink(BASE, directory / name, asyncio.Queue() if name == "engine" else None)
            links[name] = await stack.enter_async_context(link)
            await link.wait_ready(60)
        database = stack.enter_context(Database(directory / "bloomery.db"))
        models = Models([fake_base(directory)], {BASE: links["engine"]})
        deployed: set[str] = set()
        fleet = Fleet({BASE: links["engine"]}, {BASE: {name: links[name] for name in SERVING}}, deployed)
        for version in ("v1", "v02"):
            await add_snapshot(database, version, BASE, "run-1")
        await add_snapshot(database, "foreign", "c" * 32, "run-2")
        yield Stand(processes, links, Deployments(database, models, Versions(database, models), Staging(fleet), deployed))


def play(directory: Path, story: Callable[[Stand], Awaitable[None]]) -> None:
    async def run() -> None:
        async with open_stand(directory) as stand, asyncio.timeout(60):
            await story(stand)

    asyncio.run(run())


def test_every_replica_has_the_weights_before_a_name_is_moved_to_them_and_the_engine_is_not_asked(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        await stand.deployments.create(ME, "chat", "v1", {})
        assert stand.staged() == {"engine": [], "replica-0": [V1], "replica-1": [V1]}
        late = stand.processes["replica-1"]
        late.silent_about_staging = True
        promoting = asyncio.create_task(stand.deployments.promote(ME, "chat", "v02", {}))
        await until(lambda: stand.processes["replica-0"].staged == [V1, V2])
        assert await stand.live() == ("v1", 1)
        assert not promoting.done()
        # It says so late, and then the name moves.
        late.silent_about_staging = False
        late.answer_staging()
        assert (await promoting).live.version == "v02"
        assert (await stand.deployments.rollback(ME, "chat", 1)).live.version == "v1"
        assert stand.staged() == {"engine": [], "replica-0": [V1, V2, V1], "replica-1": [V1, V2, V1]}

    play(tmp_path, story)


def test_what_a_run_publishes_behind_what_is_served_is_in_memory_before_anybody_asks_for_the_move(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        await stand.deployments.create(ME, "chat", "v1", {})
        late = stand.processes["replica-1"]
        late.silent_about_staging = True
        stand.deployments.expect(Successor(ME.project, "v1", BASE, V2))
        await until(lambda: late.asked_to_stage == 2 and stand.processes["replica-0"].staged == [V1, V2])
        assert await stand.live() == ("v1", 1)
        # It may never be asked for, and whoever asks waits until all have it.
        promoting = asyncio.create_task(stand.deployments.promote(ME, "chat", "v02", {}))
        await until(lambda: late.asked_to_stage == 3)
        assert await stand.live() == ("v1", 1)
        late.silent_about_staging = False
        late.answer_staging()
        assert (await promoting).live.version == "v02"

    play(tmp_path, story)


def test_nothing_is_brought_ahead_behind_what_nobody_serves_and_what_fails_ahead_is_told_to_who_asks(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        await stand.deployments.create(ME, "chat", "v1", {})
        replica = stand.processes["replica-0"]
        stand.deployments.expect(Successor(ME.project, "v0", BASE, V2))
        stand.deployments.expect(Successor("another", "v1", BASE, V2))
        stand.deployments.expect(Successor(ME.project, "v1", "another base", V2))
        replica.refuse_to_stage = "tensor `model.norm.weight` is not what the manifest says"
        stand.deployments.expect(Successor(ME.project, "v1", BASE, V2))
        await until(lambda: replica.asked_to_stage == 2)
        with pytest.raises(Corrupt, match="version `v02` cannot be served, and `chat` stays as it is"):
            await stand.deployments.promote(ME, "chat", "v02", {})
        assert stand.staged() == {"engine": [], "replica-0": [V1], "replica-1": [V1, V2, V2]}

    play(tmp_path, story)


def test_weights_that_one_of_them_cannot_prove_are_refused_and_what_was_served_still_is(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        await stand.deployments.create(ME, "chat", "v1", {})
        await stand.deployments.promote(ME, "chat", "v02", {})
        stand.processes["replica-1"].refuse_to_stage = "tensor `model.norm.weight` is not what the manifest says"
        for move in (stand.deployments.promote(ME, "chat", "v1", {}), stand.deployments.rollback(ME, "chat", 1)):
            said = "version `v1` cannot be served, and `chat` stays as it is: tensor `model.norm.weight` is not what the manifest says"
            with pytest.raises(Corrupt, match=re.escape(said)) as refused:
                await move
            assert refused.value.field == "version"
            assert await stand.live() == ("v02", 2)
        with pytest.raises(Corrupt, match="`other` stays as it is"):
            await stand.deployments.create(ME, "other", "v1", {})
        assert await stand.deployments.names(ME) == ["chat"]

    play(tmp_path, story)


def test_who_does_not_say_so_in_time_is_named_and_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "STAGE_S", 0.05)

    async def story(stand: Stand) -> None:
        await stand.deployments.create(ME, "chat", "tiny", {})
        stand.processes["replica-0"].silent_about_staging = True
        with pytest.raises(Unavailable, match=f"the replica of base model {BASE} did not load version v1 within 0.05 s"):
            await stand.deployments.promote(ME, "chat", "v1", {})
        assert await stand.live() == (BASE, 1)

    play(tmp_path, story)


def test_a_replica_that_dies_of_the_weights_or_is_not_there_holds_nobody_up(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        dying, gone = (stand.processes[name] for name in SERVING)
        await gone.crash()
        await until(lambda: not stand.links["replica-1"].ready)
        dying.silent_about_staging = True
        creating = asyncio.create_task(stand.deployments.create(ME, "chat", "v1", {}))
        await until(lambda: dying.asked_to_stage > 0)
        dying.hang_up()
        assert (await creating).live.version == "v1"

    play(tmp_path, story)


def test_what_is_refused_anyway_is_loaded_nowhere(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        await stand.deployments.create(ME, "chat", "tiny", {})
        for process in stand.processes.values():
            process.staged.clear()
        with pytest.raises(InvalidInput, match="belongs to the base model"):
            await stand.deployments.promote(ME, "chat", "foreign", {})
        assert stand.staged() == {"engine": [], "replica-0": [], "replica-1": []}

    play(tmp_path, story)

"""Cards of what is served: who answers, who compares, when, and where the card stays."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from bloomery.services.core import Services
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.weights.fidelity import NAMELESS, TOKENS, TRIES, Cards, Pace, _candidates
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.sync.publish import card_key
from bloomery.types.errors import BloomeryError, Category, Conflict, Corrupt, NotFound, Unavailable
from bloomery.types.ids import new_id
from bloomery.types.operations import SnapshotResult
from tests.services.fake_engine import BASE, FakeEngine
from tests.services.runs_stage import LORA, ME, forward_backward, play, step, until
from tests.services.test_query_plans import plan
from tests.services.test_tenancy import config

AT_ONCE = Pace(idle_s=0, patience_s=0, long_idle_s=0, pause_s=0.005, look_s=0.005)
WHEN_IDLE = Pace(idle_s=0.001, patience_s=3600, long_idle_s=0.001, look_s=0.005)
NEVER_OF_ITSELF = Pace(idle_s=0, patience_s=3600, long_idle_s=0)
AFTER_A_WHILE = Pace(idle_s=3600, patience_s=3600, long_idle_s=0.2)
NAMELESS_AFTER_A_WHILE = replace(AFTER_A_WHILE, long_idle_s=0, nameless_idle_s=0.2)

Story = Callable[[Services, Cards, FakeEngine], Awaitable[None]]


class Counted(Database):
    """Knows how often it was asked."""

    reads = 0

    async def read(self, look: Callable[[Connection], Any]) -> Any:
        self.reads += 1
        return await super().read(look)


def tell(directory: Path, story: Story, pace: Pace, *, work: bool = False) -> None:
    """A story with services and cards of this pace, beside those that keep their own and have not begun. They work of themselves, or do not."""

    async def run(engine: FakeEngine) -> None:
        async with Services.open(config(directory)) as services, cards_of(services, directory, pace, work=work) as cards:
            await until(lambda: services.links[BASE].ready)
            await story(services, cards, engine)

    play(directory, run)


@asynccontextmanager
async def cards_of(
    services: Services,
    directory: Path,
    pace: Pace,
    engines: Mapping[str, EngineLink] | None = None,
    *,
    fleet: Fleet | None = None,
    work: bool = False,
) -> AsyncIterator[Cards]:
    with Counted(directory / "bloomery.db") as database:
        cards = Cards(
            database=database,
            blobs=AsyncBlobs(Blobs(directory / "blobs")),
            models=services.models,
            versions=services.versions,
            deployments=services.deployments,
            fleet=services.fleet if fleet is None else fleet,
            engines=services.links if engines is None else engines,
            pace=pace,
        )
        if not work:
            yield cards
            return
        async with cards:
            yield cards


async def publish(services: Services, name: str | None = None, *, first_token: int = 1) -> str:
    """Weights of a new run, others for another first token."""
    run = await services.runs.create(ME, base_model="tiny", lora=LORA, metadata={})
    await services.runs.submit(ME, run.id, 1, forward_backward(first_token))
    await services.runs.submit(ME, run.id, 2, step())
    await services.runs.snapshot(ME, run.id, 3, name)
    published = await services.runs.result(ME, run.id, 3, 120.0)
    assert isinstance(published, SnapshotResult)
    return published.version


def test_what_is_deployed_is_measured_and_shown_and_stays(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        deployment = await services.deployments.create(ME, "served", version, {})
        async with asyncio.timeout(60):
            while (await cards.on(deployment)).fidelity is None:
                await asyncio.sleep(0.002)
        card = await cards.get(ME, "served")
        assert (await cards.on(deployment)).fidelity == card == await cards.get(ME, version)
        assert (card.mode, card.verdict, card.sequences, card.tokens, card.numerics) == ("exact", "pass", 7, 7 * TOKENS, engine.numerics)
        # Another life of the api finds it on the disk, and measures nothing.
        async with cards_of(services, tmp_path, NEVER_OF_ITSELF) as others:
            assert (await others.on(deployment)).fidelity == card
        assert len(engine.compared) == 1

    tell(tmp_path, story, AT_ONCE, work=True)


def test_the_answers_are_those_of_the_version_and_come_behind_other_work(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        await cards.measure(ME, version)
        (order,) = engine.compared
        assert {request.priority for request in engine.sampled} == {"evaluation"}
        assert {request.weights.version for request in engine.sampled} == {order.weights.version} == {version}
        prompts = [request.prompt.numpy().tolist() for request in engine.sampled for _ in range(request.num_samples)]
        assert [list(answer.tokens[:-TOKENS]) for answer in order.answers] == prompts
        assert all(len(prompt) + TOKENS <= services.models.size(BASE).context for prompt in prompts)

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_a_version_without_a_card_says_how_to_get_one(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        with pytest.raises(NotFound, match="POST to the same path"):
            await cards.get(ME, version)
        assert await cards.measure(ME, version) == await cards.get(ME, version)

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_snapshots_with_a_name_come_behind_what_is_deployed_and_before_those_without(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        nameless, deployed = await publish(services), await publish(services, first_token=2)
        named = await publish(services, "kept", first_token=3)
        await services.deployments.create(ME, "served", deployed, {})
        for version in (deployed, named, nameless):
            wanted = await cards.next()
            assert wanted is not None
            assert (wanted.weights.version, wanted.deployed, wanted.named) == (version, version == deployed, version != nameless)
            await cards.measure(ME, version)
            engine.say(queued_operations=0)
            await until(lambda: services.links[BASE].status.running_sequences == 0)
        assert await cards.next() is None

    tell(tmp_path, story, replace(NEVER_OF_ITSELF, nameless_idle_s=0))


def publish_many(connection: Connection, *, count: int) -> list[str]:
    """Rows without a name like the one that has one, and their versions in the order of their birth."""
    (row,) = connection.execute(select(rows.checkpoint).where(rows.checkpoint.c.name == "kept")).mappings()
    without = [{**row, "id": new_id("checkpoint"), "seq": 100 + turn, "name": None, "version": f"v{turn}"} for turn in range(count)]
    # Those of one millisecond are in no order.
    without = sorted(without, key=lambda row: row["id"])
    connection.execute(insert(rows.checkpoint), without)
    return [row["version"] for row in without]


def test_any_number_of_snapshots_without_a_name_hide_none_that_has_one_and_the_newest_few_are_measured(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        named = await publish(services, "kept")
        without = await cards._database.write(lambda connection: publish_many(connection, count=300))
        found = await cards._database.read(_candidates)
        assert [each.weights.version for each in found] == [named, *without[: -NAMELESS - 1 : -1]]
        assert [each.named for each in found] == [True] + [False] * NAMELESS

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_what_is_deployed_waits_until_nobody_works_but_not_for_ever(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services, "kept")
        await services.deployments.create(ME, "served", version, {})
        engine.say(queued_operations=1)
        await until(lambda: services.links[BASE].status is not None)
        assert await cards.next() is None
        async with cards_of(services, tmp_path, replace(WHEN_IDLE, patience_s=0)) as impatient:
            assert (await impatient.next()).deployed
        engine.say(queued_operations=0)
        await until(lambda: services.links[BASE].status.queued_operations == 0)
        async with asyncio.timeout(60):
            while (wanted := await cards.next()) is None:
                await asyncio.sleep(0.002)
        assert wanted.weights.version == version

    tell(tmp_path, story, WHEN_IDLE)


def test_what_is_not_deployed_is_measured_in_idle_time_alone(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services, "kept")
        engine.say(queued_operations=1)
        await until(lambda: services.links[BASE].status is not None)
        async with cards_of(services, tmp_path, replace(WHEN_IDLE, patience_s=0)) as impatient:
            assert await impatient.next() is None
            engine.say(queued_operations=0)
            await until(lambda: services.links[BASE].status.queued_operations == 0)
            async with asyncio.timeout(60):
                while (wanted := await impatient.next()) is None:
                    await asyncio.sleep(0.002)
        assert wanted.weights.version == version

    tell(tmp_path, story, WHEN_IDLE)


def test_an_engine_is_not_idle_while_it_starts(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        await cards.next()
        assert set(cards._idle_since_s) == {BASE}
        await engine.crash()
        await until(lambda: not services.links[BASE].ready)
        await cards.next()
        assert cards._idle_since_s == {}
        await engine.start()
        await services.links[BASE].wait_ready(60)
        began_s = time.monotonic()
        await cards.next()
        assert cards._idle_since_s[BASE] >= began_s

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_nobody_looks_for_versions_while_none_was_deployed_or_published(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        database = cards._database
        assert isinstance(database, Counted)
        deployment = await services.deployments.create(ME, "served", await publish(services), {})
        await until(lambda: len(engine.compared) == 1)
        async with asyncio.timeout(60):
            while (await cards.on(deployment)).fidelity is None:
                await asyncio.sleep(0.002)
        await turn_often(services, engine)
        before = database.reads
        await turn_often(services, engine)
        assert database.reads == before
        # Each is noticed when it happens.
        await services.deployments.promote(ME, "served", await publish(services, first_token=2), {})
        await until(lambda: len(engine.compared) == 2)
        await publish(services, "kept", first_token=3)
        engine.say(queued_operations=0)
        await until(lambda: len(engine.compared) == 3)

    tell(tmp_path, story, AT_ONCE, work=True)


def test_what_was_just_published_or_deployed_is_not_looked_for_at_once(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        database = cards._database
        assert isinstance(database, Counted)
        await services.deployments.create(ME, "served", await publish(services), {})
        await turn_often(services, engine)
        assert database.reads == 0
        assert cards._outdated

    tell(tmp_path, story, replace(AT_ONCE, look_s=3600), work=True)


async def turn_often(services: Services, engine: FakeEngine) -> None:
    """The engine works and rests again and again."""
    for busy in (True, False) * 10:
        engine.say(queued_operations=int(busy))
        await until(lambda busy=busy: services.links[BASE].works == busy)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("name", "pace"), [("kept", AFTER_A_WHILE), (None, NAMELESS_AFTER_A_WHILE)], ids=["named", "nameless"])
def test_what_waits_for_idle_time_is_measured_when_there_was_enough_of_it_and_nobody_says_more(tmp_path: Path, name: str | None, pace: Pace) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        engine.say(queued_operations=1)
        await until(lambda: services.links[BASE].works)
        version = await publish(services, name)
        # Before anybody can know that it rests.
        began_s = time.monotonic()
        engine.say(queued_operations=0)
        await until(lambda: len(engine.compared) == 1)
        assert time.monotonic() - began_s > max(pace.long_idle_s, pace.nameless_idle_s if name is None else 0) / 2
        assert engine.compared[0].weights.version == version

    tell(tmp_path, story, pace, work=True)


def test_a_card_that_cannot_be_made_is_tried_twice_and_said_to_who_asks(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        engine.refuse_to_compare = Unavailable("no memory for that")
        version = await publish(services)
        deployment = await services.deployments.create(ME, "served", version, {})
        await until(lambda: len(engine.compared) == TRIES)
        assert await cards.next() is None
        assert (await cards.on(deployment)).fidelity is None
        with pytest.raises(Unavailable, match=r"^no memory for that$"):
            await cards.measure(ME, version)

    tell(tmp_path, story, AT_ONCE, work=True)


@pytest.mark.parametrize(("category", "kind"), [("user", Conflict), ("server", Corrupt)])
def test_who_asks_for_a_card_hears_the_samplers_own_error(tmp_path: Path, category: Category, kind: type[BloomeryError]) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        engine.refuse_to_sample = category, kind.code
        with pytest.raises(kind, match=r"^it cannot be served$") as caught:
            await cards.measure(ME, version)
        assert caught.value.field is None, "the request was not the caller's"

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_an_engine_that_dies_while_it_compares_is_an_error_of_that_card(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        engine.silent_about_comparisons = True
        measuring = asyncio.create_task(cards.measure(ME, version))
        await until(lambda: len(engine.compared) == 1)
        engine.hang_up()
        with pytest.raises(Exception, match="went away before it answered"):
            await measuring

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_another_numerics_id_means_another_card(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        await services.deployments.create(ME, "served", "tiny", {})
        await until(lambda: len(engine.compared) == 1)
        engine.numerics = "another machine"
        engine.hang_up()
        await until(lambda: len(engine.compared) == 2)
        async with asyncio.timeout(60):
            while (card := await cards.get(ME, "served")).numerics != "another machine":
                await asyncio.sleep(0.002)
        assert card.numerics == engine.numerics

    tell(tmp_path, story, AT_ONCE, work=True)


@pytest.mark.parametrize(("sampling", "mode"), [("any threads", "exact"), ("one thread", "plain")])
def test_a_card_is_exact_where_trainer_and_sampler_have_the_numerics_of_sampling_in_common(tmp_path: Path, sampling: str, mode: str) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        await services.deployments.create(ME, "served", version, {})
        engine.sampling_numerics = "any threads"
        engine.hang_up()
        replica = FakeEngine(tmp_path / "replica", Blobs(tmp_path / "blobs"), numerics="with one thread", role="replica")
        replica.sampling_numerics = sampling
        await replica.start()
        try:
            async with EngineLink(BASE, replica.socket, None) as link:
                await link.wait_ready()
                await until(lambda: (welcome := services.links[BASE].welcome) is not None and welcome.sampling_numerics == "any threads")
                fleet = Fleet(services.links, {BASE: {"replica": link}}, {BASE})
                async with cards_of(services, tmp_path, NEVER_OF_ITSELF, fleet=fleet) as others:
                    card = await others.measure(ME, "served")
            assert (card.mode, card.numerics) == (mode, engine.numerics)
            assert (len(replica.sampled) > 0, engine.sampled) == (True, [])
        finally:
            await replica.crash()

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_a_card_goes_with_its_version(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services, "kept")
        await cards.measure(ME, version)
        blob = tmp_path / "blobs" / card_key(version)
        await services.garbage.collect(ME, grace_us=-1_000_000)
        assert blob.exists()
        (found,) = [row for row in (await services.checkpoints.list(ME)).checkpoints if row.name == "kept"]
        await services.checkpoints.delete(ME, f"tinker://{found.run_id}/sampler_weights/kept")
        await services.garbage.collect(ME, grace_us=-1_000_000)
        assert not blob.exists()

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_a_card_of_another_form_is_none(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        deployment = await services.deployments.create(ME, "served", version, {})
        Blobs(tmp_path / "blobs").put(card_key(version), b'{"of": "long ago"}')
        assert (await cards.on(deployment)).fidelity is None
        assert (await cards.measure(ME, version)) == (await cards.on(deployment)).fidelity

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_weights_whose_base_is_not_served_cannot_be_measured(tmp_path: Path) -> None:
    async def story(services: Services, cards: Cards, engine: FakeEngine) -> None:
        version = await publish(services)
        async with cards_of(services, tmp_path, NEVER_OF_ITSELF, engines={}) as without:
            with pytest.raises(NotFound, match="is not served: start the server with `--model DIR`"):
                await without.measure(ME, version)

    tell(tmp_path, story, NEVER_OF_ITSELF)


def test_looking_for_what_has_no_card_reads_the_newest_snapshots_and_no_more(tmp_path: Path) -> None:
    found = plan(tmp_path, _candidates)
    assert "SEARCH checkpoint USING INDEX checkpoint_with_name (kind=?)" in found
    assert "SEARCH checkpoint USING INDEX checkpoint_without_name (kind=?)" in found
    assert "SCAN checkpoint" not in found
    assert "SCAN run" not in found

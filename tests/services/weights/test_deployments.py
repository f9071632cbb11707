"""One live revision, whatever happens at once."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from bloomery.services.access.repeats import Repeatable
from bloomery.services.weights.versions import Version
from bloomery.types.errors import BloomeryError, Conflict, Forbidden, InvalidInput, NotFound
from tests.services.stage import BASE, ME, STRANGER, Stage, play


def test_promotion_and_rollback_keep_one_revision_live(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        created = await stage.deployments.create(ME, "router", "tiny", {})
        assert (created.live.number, created.live.version, created.base_model) == (1, BASE, "tiny")
        promoted = await stage.deployments.promote(ME, "router", "v1", {"accuracy": 0.9})
        assert [(revision.number, revision.state) for revision in promoted.revisions] == [(1, "retired"), (2, "live")]
        assert promoted.live.evidence == {"accuracy": 0.9}
        back = await stage.deployments.rollback(ME, "router", 1)
        assert [(revision.number, revision.state) for revision in back.revisions] == [(1, "live"), (2, "retired")]
        assert await stage.deployments.get(ME, "router") == back

    play(tmp_path, story)


def test_every_swap_is_told_however_often_a_revision_comes_and_goes(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "tiny", {})
        await stage.deployments.create(ME, "other", "tiny", {})
        again = Repeatable("key", "hash")
        for _ in range(2):
            await stage.deployments.promote(ME, "router", "v1", {}, request=again)
        for number in (1, 2, 1):
            await stage.deployments.rollback(ME, "router", number)
        with pytest.raises(Conflict):
            await stage.deployments.rollback(ME, "router", 1)
        told = await stage.deployments.swaps(ME, "router")
        assert [(swap.kind, swap.from_revision, swap.to_revision) for swap in told.data] == [
            ("rolled_back", 2, 1),
            ("rolled_back", 1, 2),
            ("rolled_back", 2, 1),
            ("promoted", 1, 2),
            ("created", None, 1),
        ]
        assert {swap.by for swap in told.data} == {ME.key_id}
        page = await stage.deployments.swaps(ME, "router", limit=2, offset=2)
        assert (page.data, page.has_more) == (told.data[2:4], True)
        with pytest.raises(NotFound):
            await stage.deployments.swaps(STRANGER, "router")
        with pytest.raises(Forbidden):
            await stage.deployments.swaps(ME._replace(scopes=frozenset({"infer"})), "router")

    play(tmp_path, story)


def test_a_swap_says_how_long_its_weights_were_staged(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "tiny", {})

        async def slow(name: str, version: Version) -> None:
            begun_s = time.monotonic()
            while time.monotonic() < begun_s + 0.05:
                await asyncio.sleep(0)

        with patch.object(stage.deployments._staging, "stage", slow):
            await stage.deployments.promote(ME, "router", "v1", {})
            await stage.deployments.rollback(ME, "router", 1)
        swaps = (await stage.deployments.swaps(ME, "router")).data
        assert [swap.staging_s >= 0.05 for swap in swaps[:2]] == [True, True]

    play(tmp_path, story)


def test_a_promotion_is_written_in_twelve_statements_however_many_came_before(tmp_path: Path) -> None:
    """Whoever trains waits for each of them, beside the streams of all others."""

    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "tiny", {})
        statements: list[str] = []
        event.listen(stage.database._writer, "before_cursor_execute", lambda *asked: statements.append(asked[2]))
        counts = []
        for turn in range(3):
            statements.clear()
            await stage.deployments.promote(ME, "router", "v1", {}, request=Repeatable(f"key-{turn}", f"hash-{turn}"))
            counts.append(sum(each.startswith(("SELECT", "INSERT", "UPDATE", "DELETE")) for each in statements))
        assert counts == [12, 12, 12]

    play(tmp_path, story)


def test_who_moves_a_name_looks_at_the_database_once_before_it_is_moved(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "tiny", {})
        looks: list[Connection] = []
        event.listen(stage.database._reader, "begin", looks.append)
        await stage.deployments.promote(ME, "router", "v1", {}, request=Repeatable("key-1", "hash-1"))
        await stage.deployments.rollback(ME, "router", 1, request=Repeatable("key-2", "hash-2"))
        assert len(looks) == 2

    play(tmp_path, story)


def test_a_deployment_resolves_to_the_weights_of_its_live_revision(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "v1", {})
        target = await stage.deployments.target(ME, "router")
        assert target is not None
        assert (target.weights.version, target.weights.key, target.revision) == ("v1", "snapshots/v1.safetensors", 1)
        await stage.deployments.promote(ME, "router", "tiny", {})
        moved = await stage.deployments.target(ME, "router")
        assert moved is not None
        assert (moved.weights.version, moved.weights.key, moved.revision) == (BASE, None, 2)
        assert await stage.deployments.target(STRANGER, "router") is None
        assert await (await stage.reopened_deployments()).target(ME, "router") == moved

    play(tmp_path, story)


def test_who_hangs_up_in_the_middle_of_a_promotion_leaves_no_old_target(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "tiny", {})
        stored, finish = asyncio.Event(), asyncio.Event()
        write = stage.database.write

        async def slow(change: Callable[[Connection], Any]) -> Any:
            done = await write(change)
            stored.set()
            await finish.wait()
            return done

        with patch.object(stage.database, "write", slow):
            asking = asyncio.create_task(stage.deployments.promote(ME, "router", "v1", {}))
            await stored.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            finish.set()
            async with asyncio.timeout(60):
                while (target := await stage.deployments.target(ME, "router")) is None or target.revision != 2:
                    await asyncio.sleep(0)

    play(tmp_path, story)


def test_a_version_must_exist_and_be_of_the_same_project_and_base(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.add_snapshot("foreign", base_hash="c" * 32, run_id="run-2")
        await stage.deployments.create(ME, "router", "tiny", {})
        with pytest.raises(NotFound, match="`tiny`"):
            await stage.deployments.promote(ME, "router", "v2", {})
        with pytest.raises(InvalidInput, match="create another deployment"):
            await stage.deployments.promote(ME, "router", "foreign", {})
        with pytest.raises(NotFound):
            await stage.deployments.create(STRANGER, "mine", "v1", {})
        assert len((await stage.deployments.get(ME, "router")).revisions) == 1

    play(tmp_path, story)


def test_names_of_weights_are_base_models_versions_and_sampler_paths(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        assert (await stage.versions.find(ME, "tinker://run-1/sampler_weights/named-v1")).weights.version == "v1"
        assert (await stage.versions.find(ME, BASE)).weights.key is None
        with pytest.raises(InvalidInput, match="not for sampling"):
            await stage.versions.find(ME, "tinker://run-1/weights/named-v1")
        with pytest.raises(InvalidInput, match="no path of weights"):
            await stage.versions.find(ME, "tinker://run-1")

    play(tmp_path, story)


def test_refusals_say_what_to_change(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.deployments.create(ME, "router", "tiny", {})
        for refused, kind in (
            (stage.deployments.create(ME, "router", "tiny", {}), Conflict),
            (stage.deployments.create(ME, "tiny", "tiny", {}), Conflict),
            (stage.deployments.rollback(ME, "router", 1), Conflict),
            (stage.deployments.rollback(ME, "router", 2), NotFound),
            (stage.deployments.promote(ME, "nobody", "tiny", {}), NotFound),
            (stage.deployments.promote(ME._replace(scopes=frozenset({"read"})), "router", "tiny", {}), Forbidden),
        ):
            with pytest.raises(kind):
                await refused

    play(tmp_path, story)


def test_evidence_that_could_not_be_shown_again_is_refused(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        deep: list[object] = []
        for _ in range(400):
            deep = [deep]
        await stage.deployments.create(ME, "router", "tiny", {"why": [["flat enough"]]})
        with pytest.raises(InvalidInput, match="nested"):
            await stage.deployments.promote(ME, "router", "tiny", {"why": deep})
        with pytest.raises(InvalidInput, match="characters"):
            await stage.deployments.create(ME, "other", "tiny", {"why": "x" * 65_536})
        for unsayable in ("\ud800", float("nan"), float("-inf")):
            with pytest.raises(InvalidInput, match="JSON has neither"):
                await stage.deployments.create(ME, "other", "tiny", {"why": [unsayable]})

    play(tmp_path, story)


@settings(max_examples=15, deadline=None)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_after_any_moves_at_once_exactly_one_revision_is_live(moves: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("v1")
        await stage.deployments.create(ME, "router", "tiny", {})
        attempts = [stage.deployments.rollback(ME, "router", move) if move else stage.deployments.promote(ME, "router", "v1", {}) for move in moves]
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        assert all(isinstance(outcome, BloomeryError) or outcome.live for outcome in outcomes)
        final = await stage.deployments.get(ME, "router")
        assert [revision.state for revision in final.revisions].count("live") == 1
        assert [revision.number for revision in final.revisions] == list(range(1, moves.count(0) + 2))
        served = await stage.deployments.target(ME, "router")
        assert served is not None
        assert served.revision == final.live.number

    play(tmp_path_factory.mktemp("stage"), story)

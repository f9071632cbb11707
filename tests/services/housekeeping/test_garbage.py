"""What nobody needs any more goes by itself, what was proved with what it was proved of, and nothing that anything refers to."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from bloomery.services.housekeeping import garbage
from bloomery.store import rows
from bloomery.sync.publish import base_blobs, base_state_key, card_key, manifest_key
from bloomery.types.ids import now_us
from bloomery.types.probe import base_name, probe_key
from tests.services.stage import BASE, ME, Stage, add_snapshot, play

OLD = -60_000_000
"""A grace period that nothing is younger than."""


def test_what_was_proved_of_a_base_goes_when_nothing_belongs_to_it_any_more(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        served = {"project": "default", "alias": "tiny", "base_hash": BASE, "path": "", "created_us": 1}
        await stage.database.write(lambda connection: connection.execute(insert(rows.base_model), served))
        await add_snapshot(stage.database, "v1", "of-a-run", "run-1")
        kept = {*base_blobs(BASE), *base_blobs("of-a-run"), probe_key("v1")}
        gone = {*base_blobs("forgotten"), probe_key("v2")}
        for key in kept | gone:
            await stage.blobs.put(key, b"{}")
        assert (await stage.garbage.collect(ME)).blobs == 0
        assert (await stage.garbage.collect(ME, grace_us=OLD)).blobs == len(gone)
        assert {key for key in kept | gone if stage.blobs.blobs.exists(key)} == kept

    play(tmp_path, story)


def test_a_base_is_kept_in_every_dtype() -> None:
    assert base_state_key(base_name("b", "bfloat16")) in base_blobs("b")
    assert len(base_blobs("b")) == 6


def blobs_of(version: str) -> list[str]:
    return [f"snapshots/{version}.safetensors", manifest_key(version), card_key(version), probe_key(version)]


async def saved(stage: Stage, version: str, *, hours_ago: float = 2.0, base_hash: str = BASE) -> None:
    """A snapshot with a name and its blobs, which were written so long ago."""
    await add_snapshot(stage.database, version, base_hash, f"run-{version}")
    for key in blobs_of(version):
        await written(stage, key, hours_ago)


async def written(stage: Stage, key: str, hours_ago: float) -> None:
    await stage.blobs.put(key, b"{}")
    at_s = time.time() - hours_ago * 3600
    os.utime(stage.blobs.blobs._root / key, (at_s, at_s))


async def change(stage: Stage, statement: Any) -> None:
    await stage.database.write(lambda connection: connection.execute(statement))


async def expire(stage: Stage, *versions: str) -> None:
    await change(stage, update(rows.checkpoint).where(rows.checkpoint.c.version.in_(versions)).values(expires_us=now_us() - 1))


def there(stage: Stage, version: str) -> set[bool]:
    return {stage.blobs.blobs.exists(key) for key in blobs_of(version)}


def test_the_files_of_what_expired_go_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        names = ["one", "three", "seven"]
        for name in [*names, "kept-on"]:
            await saved(stage, name)
        await expire(stage, *names)
        assert (await stage.garbage.expire()).blobs == 3 * len(blobs_of("one"))
        assert [there(stage, name) for name in names] == [{False}] * 3
        assert there(stage, "kept-on") == {True}
        left = await stage.database.read(lambda connection: connection.scalars(select(rows.checkpoint.c.version)).all())
        assert left == ["kept-on"]

    monkeypatch.setattr(garbage, "ROWS_AT_ONCE", 2)
    play(tmp_path, story)


def test_no_file_goes_that_anything_refers_to_or_that_was_written_again(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for version in ("deployed", "sampled", "loaded", "elsewhere"):
            await saved(stage, version)
        await saved(stage, "rewritten", hours_ago=0.1)
        await stage.deployments.create(ME, "served", "deployed", {})
        sampler = {"id": "s:sample:0", "project": "default", "session_id": "s", "seq": 0, "base_model": "tiny", "base_hash": BASE}
        sampler |= {"created_us": now_us()}
        await change(stage, insert(rows.sampling_session).values(**sampler, version="sampled", key=blobs_of("sampled")[0]))
        other = {"project": "default", "run_id": "run-x", "state": "ready", "metadata": "{}", "size_bytes": 0, "step": 0, "created_us": 1}
        loaded = {"id": "checkpoint-x", "seq": 1, "kind": "source", "key": blobs_of("loaded")[0]}
        copied = {"id": "checkpoint-y", "seq": 2, "kind": "snapshot", "name": "copy", "key": blobs_of("elsewhere")[0], "version": "elsewhere"}
        for row in (loaded, copied):
            await change(stage, insert(rows.checkpoint).values(**other, **row))
        expired = ["deployed", "sampled", "loaded", "rewritten"]
        await expire(stage, *expired)
        await change(stage, update(rows.checkpoint).where(rows.checkpoint.c.id == "checkpoint-elsewhere").values(expires_us=1))
        await stage.garbage.expire()
        assert [there(stage, version) for version in ("deployed", "sampled", "elsewhere", "rewritten")] == [{True}] * 4
        # What a run began with are the weights alone: nobody serves them under that version any more.
        assert [stage.blobs.blobs.exists(key) for key in blobs_of("loaded")] == [True, False, False, False]

    play(tmp_path, story)


def test_housekeeping_finds_the_files_of_what_was_deleted_now_and_then(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for version, hours_ago in (("old", 30), ("new", 20), ("kept", 30), ("later", 30)):
            await saved(stage, version, hours_ago=hours_ago)
        await change(stage, delete(rows.checkpoint).where(rows.checkpoint.c.version.in_(["old", "new"])))
        assert (await stage.garbage.tidy()).blobs == len(blobs_of("old"))
        assert [there(stage, version) for version in ("old", "new", "kept")] == [{False}, {True}, {True}]
        await change(stage, delete(rows.checkpoint).where(rows.checkpoint.c.version == "later"))
        assert (await stage.garbage.tidy()).blobs == 0
        stage.garbage._swept_us -= garbage.SWEEP_EVERY_US
        assert (await stage.garbage.tidy()).blobs == len(blobs_of("later"))

    play(tmp_path, story)

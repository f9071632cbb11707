"""What was proved goes with what it was proved of."""

from pathlib import Path

from sqlalchemy import insert

from bloomery.store import rows
from bloomery.sync.publish import base_blobs, base_state_key
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

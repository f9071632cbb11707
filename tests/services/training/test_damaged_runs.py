"""A run whose files are damaged: found once, said once, told to whoever asks, and none of the server's directories with it."""

import logging
from pathlib import Path

import pytest

from bloomery.store.journal import Bounds
from bloomery.types.errors import Stopped, Unavailable
from tests.services.fake_engine import FakeEngine
from tests.services.runs_stage import ME, Api, open_api, operation, play

ALL_OLD = Bounds(ttl_s=-60, segment_bytes=1)


def harmed(segment: Path) -> bytes:
    """A bit of its first record is another one; what it was."""
    whole = segment.read_bytes()
    segment.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    return whole


def said_of(run_id: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR and run_id in record.getMessage()]


def read_by_nobody(segment: Path, how: str) -> None:
    """In its place lies what no reading of a file gets bytes from."""
    segment.unlink()
    if how == "directory":
        segment.mkdir()
    else:
        # The memory of a process has no byte at its beginning: an input/output error.
        segment.symlink_to(segment if how == "loop" else "/proc/self/mem")


async def trained_for_long(api: Api, run_id: str) -> None:
    """Several checkpoints lie behind it, so that its oldest results may go."""
    for first in range(1, 25, 4):
        await api.train(run_id, first, first + 3)
        await api.activity.stored(10)


async def refusals(api: Api, run_id: str) -> set[str]:
    """What whoever asks for the run is told, by each verb."""
    told = set()
    for ask in (api.runs.result(ME, run_id, 1, 1.0), api.runs.submit(ME, run_id, 5, operation(5)), api.runs.unload(ME, run_id)):
        with pytest.raises(Stopped) as refused:
            await ask
        told.add(refused.value.message)
    return told


def test_damage_is_found_once_and_told_without_reading_the_files_again_until_the_server_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 3)
            await api.activity.stored(10)
        segment = next((tmp_path / "runs" / run.id).glob("ops-*"))
        whole = harmed(segment)
        async with open_api(tmp_path) as api:
            (told,) = await refusals(api, run.id)
            # Files are brought back while the server is down: in between they are nobody's business.
            segment.write_bytes(whole)
            assert await refusals(api, run.id) == {told}
            shown = await api.runs.get(ME, run.id)
            assert (shown.state, shown.error) == ("broken", told)
            assert told.startswith(f"run `{run.id}`, segment {segment.name}: record 1 at offset 0 does not match its checksum")
            assert str(tmp_path) not in told
            assert said_of(run.id, caplog) == [f"run {run.id}: {told}"]
        async with open_api(tmp_path) as api:
            assert await api.train(run.id, 4, 4)
            assert (await api.runs.get(ME, run.id)).state == "active"

    play(tmp_path, story)


@pytest.mark.slow
def test_housekeeping_goes_on_behind_a_damaged_run_that_nobody_uses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=Bounds(segment_bytes=1)) as api:
            runs = [await api.new_run() for _ in range(2)]
            for run in runs:
                await trained_for_long(api, run.id)
        damaged, healthy = (tmp_path / "runs" / run.id for run in runs)
        harmed(min(damaged.glob("results-*")))
        before = len(list(healthy.glob("results-*")))
        async with open_api(tmp_path, bounds=ALL_OLD) as api:
            for _ in range(2):
                await api.activity.tidy()
            assert len(list(healthy.glob("results-*"))) < before
            assert (await api.runs.get(ME, damaged.name)).state == "broken"
            assert len(said_of(damaged.name, caplog)) == 1

    play(tmp_path, story)


def test_a_run_in_use_whose_results_are_damaged_is_stopped_by_housekeeping_and_stays_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=ALL_OLD) as api:
            runs = [await api.new_run() for _ in range(2)]
            for run in runs:
                await trained_for_long(api, run.id)
            damaged, healthy = runs
            harmed(min((tmp_path / "runs" / damaged.id).glob("results-*"), key=lambda path: int(path.stem.split("-")[1])))
            before = len(list((tmp_path / "runs" / healthy.id).glob("results-*")))
            for _ in range(2):
                await api.activity.tidy()
            assert len(list((tmp_path / "runs" / healthy.id).glob("results-*"))) < before
            assert (await api.runs.get(ME, damaged.id)).state == "broken"
            with pytest.raises(Stopped, match=f"run `{damaged.id}`, segment results-"):
                await api.runs.submit(ME, damaged.id, 25, operation(25))
            assert len(said_of(damaged.id, caplog)) == 1

    play(tmp_path, story)


def test_what_cannot_be_journaled_is_told_without_the_servers_directories(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            (tmp_path / "runs" / run.id / "ops-000000000001.seg").touch()
            with pytest.raises(Unavailable, match=r"operation 1 cannot be journaled: .*: 'ops-000000000001\.seg'$"):
                await api.runs.submit(ME, run.id, 1, operation(1))

    play(tmp_path, story)


@pytest.mark.parametrize("lane", ["ops", "results"])
@pytest.mark.parametrize("how", ["directory", "loop", "input/output error"])
def test_a_segment_that_cannot_be_read_stops_its_run_and_neither_the_server_nor_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, lane: str
) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            damaged, healthy = [await api.new_run() for _ in range(2)]
            for run in (damaged, healthy):
                await api.train(run.id, 1, 3)
            await api.activity.stored(10)
        (segment,) = (tmp_path / "runs" / damaged.id).glob(f"{lane}-*")
        read_by_nobody(segment, how)
        async with open_api(tmp_path) as api:
            (told,) = await refusals(api, damaged.id)
            assert told.startswith(f"run `{damaged.id}`, segment {segment.name}: it cannot be read (")
            assert str(tmp_path) not in told
            assert (await api.runs.get(ME, damaged.id)).error == told
            assert await api.train(healthy.id, 4, 4)
            assert said_of(damaged.id, caplog) == [f"run {damaged.id}: {told}"]

    play(tmp_path, story)


def test_a_segment_that_becomes_unreadable_stops_its_run_where_it_is_read_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=Bounds(segment_bytes=1)) as api:
            runs = [await api.new_run() for _ in range(2)]
            for run in runs:
                await trained_for_long(api, run.id)
        async with open_api(tmp_path, bounds=ALL_OLD) as api:
            await api.runs.result(ME, runs[0].id, 24, 1.0)
            for run in runs:
                first = min((tmp_path / "runs" / run.id).glob("results-*"), key=lambda path: int(path.stem.split("-")[1]))
                read_by_nobody(first, "input/output error")
            await api.activity.tidy()
            for run in runs:
                assert (await api.runs.get(ME, run.id)).state == "broken"
                (said,) = said_of(run.id, caplog)
                assert "segment results-" in said
                assert "cannot be read" in said

    play(tmp_path, story)


def test_a_run_whose_directory_is_something_else_is_stopped(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 3)
            await api.activity.stored(10)
        (tmp_path / "runs" / run.id).rename(tmp_path / "kept")
        (tmp_path / "runs" / run.id).symlink_to(tmp_path / "runs" / run.id)
        async with open_api(tmp_path) as api:
            (told,) = await refusals(api, run.id)
            assert told == f"run `{run.id}`: its directory is none; bring it back from a backup, then stop and start the server"

    play(tmp_path, story)

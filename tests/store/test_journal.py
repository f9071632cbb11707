"""What was acknowledged is there, what was cut off is not, and damage is never mistaken for either."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.store.journal import Journal, JournaledResult, extent, result_bytes, trim
from bloomery.store.segments import HEADER_BYTES
from bloomery.types.errors import Corrupt, Gone, NotFound
from bloomery.types.operations import Failed, Operation, Rejected


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_what_was_appended_is_there_after_opening_again(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _fill(tmp_path, pool, operations=[1, 2, 3], results=[1, 2])
    assert _read(tmp_path, pool) == ({1: _op(1), 2: _op(2), 3: _op(3)}, {1: _done(1), 2: _done(2)})
    assert extent(tmp_path) == (3, 2)


def test_operations_may_arrive_in_any_order(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _fill(tmp_path, pool, operations=[3, 2, 5, 1, 4], segment_bytes=1)
    assert set(_read(tmp_path, pool)[0]) == {1, 2, 3, 4, 5}
    # A segment ends only where nothing is missing, so that segments never overlap.
    assert [path.name for path in sorted(tmp_path.glob("ops-*"))] == ["ops-000000000003.seg"]


def test_a_new_segment_begins_at_the_size_limit(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _fill(tmp_path, pool, operations=[1, 2, 3], segment_bytes=1)
    assert len(list(tmp_path.glob("ops-*"))) == 3
    assert set(_read(tmp_path, pool)[0]) == {1, 2, 3}


@pytest.mark.parametrize("lane", ["ops", "results"])
def test_a_record_cut_anywhere_is_dropped_and_all_before_it_kept(
    tmp_path: Path, pool: ThreadPoolExecutor, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    _fill(source, pool, operations=[1, 2, 3], results=[1, 2] if lane == "ops" else [1, 2, 3])
    (segment,) = source.glob(f"{lane}-*")
    whole = segment.read_bytes()
    last = _last_record_start(whole)
    for length in range(last, len(whole)):
        copy = tmp_path / f"cut-{length}"
        shutil.copytree(source, copy)
        os.truncate(copy / segment.name, length)
        caplog.clear()
        found = _read(copy, pool)[0 if lane == "ops" else 1]
        assert set(found) == {1, 2}
        assert ("cut off" in caplog.text) == (length > last)
        _fill(copy, pool, operations=[3] if lane == "ops" else [], results=[3] if lane == "results" else [])
        assert set(_read(copy, pool)[0 if lane == "ops" else 1]) == {1, 2, 3}


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_an_operation_whose_result_is_known_is_damaged_wherever_it_is_cut_and_its_file_stays_as_it_was(
    tmp_path: Path, pool: ThreadPoolExecutor, segment_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(tmp_path, pool, operations=[1, 2, 3], results=[1, 2, 3], segment_bytes=segment_bytes)
    segment = max(tmp_path.glob("ops-*"))
    whole = segment.read_bytes()
    last = _last_record_start(whole)
    for length in range(last + 1, len(whole)):
        segment.write_bytes(whole[:length])
        with pytest.raises(Corrupt, match=f"{segment.name}: operation 3 at offset {last} is damaged, yet its result is known"):
            _read(tmp_path, pool)
        assert segment.read_bytes() == whole[:length]
    # What came behind it and has no result may have been cut off.
    segment.write_bytes(whole)
    _fill(tmp_path, pool, operations=[4], segment_bytes=segment_bytes)
    segment = max(tmp_path.glob("ops-*"))
    os.truncate(segment, segment.stat().st_size - HEADER_BYTES)
    assert not [record for record in caplog.records if record.name.startswith("bloomery.store")]
    assert set(_read(tmp_path, pool)[0]) == {1, 2, 3}


def test_a_record_of_which_only_zeros_reached_the_disk_is_dropped(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _fill(tmp_path, pool, operations=[1, 2])
    with next(tmp_path.glob("ops-*")).open("ab") as file:
        file.write(bytes(5000))
    assert set(_read(tmp_path, pool)[0]) == {1, 2}


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_found_wherever_it_is(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("flip")
    with ThreadPoolExecutor(2) as pool:
        _fill(directory, pool, operations=[1, 2, 3], results=[1, 2, 3], segment_bytes=data.draw(st.sampled_from([1, 1 << 20])))
        segment = data.draw(st.sampled_from(sorted(directory.glob("*.seg"))))
        content = bytearray(segment.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        segment.write_bytes(content)
        # The payload of the very last record alone may have been an interrupted append: of an operation whose result is known it was not.
        if segment == max(directory.glob("results-*")) and place >= _last_record_start(content) + HEADER_BYTES:
            assert set(_read(directory, pool)[1]) == {1, 2}
            return
        with pytest.raises(Corrupt, match=f"{segment.name}.*offset"):
            _read(directory, pool)


def test_damage_after_opening_is_found_when_the_record_is_read(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool)
        await journal.append_operation(1, _op(1))
        (segment,) = tmp_path.glob("ops-*")
        content = bytearray(segment.read_bytes())
        content[-1] ^= 1
        segment.write_bytes(content)
        with pytest.raises(Corrupt, match="offset 0"):
            await journal.operation(1)
        with pytest.raises(NotFound):
            await journal.operation(2)
        await journal.close()

    asyncio.run(story())


def test_a_segment_whose_first_append_met_a_full_disk_is_none(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool)
        for seq in range(1, 7):
            await journal.append_operation(seq, _op(seq))
        await journal.append_results({seq: _done(seq) for seq in range(1, 7)})
        await journal.drop_operations(6)
        with _full_disk(), pytest.raises(OSError, match="too large"):
            await journal.append_operation(9, _op(9))
        assert not list(tmp_path.glob("ops-*"))
        await journal.append_operation(7, _op(7))
        await journal.append_results({7: _done(7)})
        await journal.drop_operations(3)
        for seq in (8, 9):
            await journal.append_operation(seq, _op(seq))
        await journal.close()

    asyncio.run(story())
    assert [path.name for path in sorted(tmp_path.glob("ops-*"))] == ["ops-000000000007.seg", "ops-000000000008.seg"]
    last = tmp_path / "ops-000000000008.seg"
    os.truncate(last, last.stat().st_size - 1)
    assert set(_read(tmp_path, pool)[0]) == {7, 8}


@contextmanager
def _full_disk() -> Iterator[None]:
    """As far as this process can tell: no file gets more than a few bytes."""
    signals, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, signals)


def test_dropping_removes_only_segments_that_a_checkpoint_covers(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool)
        for seq in (1, 2, 3):
            await journal.append_operation(seq, _op(seq))
        await journal.drop_operations(2)  # 3 shares their segment
        assert journal.has_operation(1)
        await journal.append_operation(4, _op(4))
        await journal.drop_operations(3)
        assert [seq for seq in range(1, 5) if journal.has_operation(seq)] == [4]
        await journal.drop_operations(4)
        await journal.append_operation(5, _op(5))
        assert journal.last_operation == 5
        await journal.close()

    asyncio.run(story())
    assert set(_read(tmp_path, pool)[0]) == {5}


def test_results_outlive_their_operations_until_their_time_is_over(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool, segment_bytes=1)
        for seq in (1, 2, 3):
            await journal.append_results({seq: _done(seq)})
        await journal.drop_results(before_us=_done(2).done_us)
        with pytest.raises(Gone, match="operation 1"):
            await journal.result(1)
        assert await journal.result(2) == _done(2)
        await journal.drop_results(before_us=_done(99).done_us)
        assert await journal.result(3) == _done(3)
        assert journal.last_result == 3
        await journal.close()

    asyncio.run(story())


def test_what_brought_an_operation_is_known_while_anything_of_it_is_there(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool, segment_bytes=1)
        for seq in (1, 2, 3):
            await journal.append_operation(seq, _op(seq), request=b"" if seq == 2 else b"asked %d" % seq)
        assert [await journal.request(seq) for seq in range(5)] == [b"", b"asked 1", b"", b"asked 3", b""]
        await journal.append_results({1: msgspec.structs.replace(_done(1), request=b"asked 1"), 2: _done(2)})
        # Dropped behind the journal's back, as between a look at what is here and reading it.
        for path in tmp_path.glob("ops-*1.seg"):
            path.unlink()
        assert await journal.request(1) == b"asked 1"
        for path in tmp_path.glob("results-*1.seg"):
            path.unlink()
        assert await journal.request(1) == b""
        await journal.close()

    asyncio.run(story())


def test_old_results_of_a_closed_journal_are_trimmed_down_to_the_last_segment(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _fill(tmp_path, pool, results=[1, 2, 3], segment_bytes=1)
    trim(tmp_path, before_us=_done(2).done_us)
    assert set(_read(tmp_path, pool)[1]) == {2, 3}
    trim(tmp_path, before_us=_done(99).done_us)
    assert set(_read(tmp_path, pool)[1]) == {3}


def test_of_too_many_bytes_the_oldest_that_were_told_go_first_then_the_oldest(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool, segment_bytes=1)
        for seq in range(1, 8):
            await journal.append_results({seq: _done(seq)})
        each = journal.result_bytes // 7
        assert journal.result_bytes == sum(path.stat().st_size for path in tmp_path.glob("results-*"))
        await journal.bound_results(5 * each, {3, 4, 5}, before=8)
        assert _held(journal) == [1, 2, 5, 6, 7]
        with pytest.raises(Gone, match="the result of operation 3 was dropped"):
            await journal.result(3)
        await journal.bound_results(3 * each, {5}, before=8)
        assert _held(journal) == [2, 6, 7]
        # From the sixth on they are still needed, and the last says how far the run came.
        await journal.bound_results(0, set(), before=6)
        assert _held(journal) == [6, 7]
        await journal.bound_results(0, set(), before=8)
        assert (_held(journal), journal.last_result) == ([7], 7)
        await journal.append_results({8: _done(8)})
        assert journal.result_bytes == 2 * each
        await journal.close()

    asyncio.run(story())
    assert set(_read(tmp_path, pool)[1]) == {7, 8}


def test_a_result_that_is_dropped_while_it_is_about_to_be_read_is_gone(tmp_path: Path) -> None:
    async def story(pool: ThreadPoolExecutor) -> None:
        journal, may_drop = Journal(tmp_path, pool, segment_bytes=1), threading.Event()
        for seq in (1, 2):
            await journal.append_results({seq: _done(seq)})
        # The one thread drops first, whatever is asked of it meanwhile.
        held = pool.submit(may_drop.wait, 60)
        while not held.running():
            await asyncio.sleep(0)
        dropping = asyncio.create_task(journal.bound_results(0, set(), before=3))
        while pool._work_queue.empty():
            await asyncio.sleep(0)
        assert journal.has_result(1)
        reading = asyncio.create_task(journal.result(1))
        while pool._work_queue.qsize() < 2:
            await asyncio.sleep(0)
        may_drop.set()
        with pytest.raises(Gone, match="the result of operation 1 was dropped"):
            await reading
        await dropping
        await journal.close()

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(story(pool))


def test_results_that_a_replay_needs_stay_however_old_and_many_they_are(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def story() -> None:
        journal = Journal(tmp_path, pool, segment_bytes=1)
        for seq in (1, 2, 3, 4):
            await journal.append_operation(seq, _op(seq))
            await journal.append_results({seq: _done(seq)})
        await journal.drop_operations(through=2)
        await journal.drop_results(before_us=_done(99).done_us)
        await journal.bound_results(0, {1, 2, 3, 4}, before=5)
        assert _held(journal) == [3, 4]
        await journal.close()

    asyncio.run(story())
    trim(tmp_path, before_us=_done(99).done_us, most_bytes=0)
    assert set(_read(tmp_path, pool)[1]) == {3, 4}


def test_a_closed_journal_is_trimmed_to_the_bytes_that_it_may_have(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    _fill(tmp_path, pool, results=[1, 2, 3, 4], segment_bytes=1)
    held = result_bytes(tmp_path)
    assert held == sum(path.stat().st_size for path in tmp_path.glob("results-*"))
    trim(tmp_path, before_us=0, most_bytes=held // 2)
    assert set(_read(tmp_path, pool)[1]) == {3, 4}


def test_a_full_disk_takes_nothing_back_and_promises_nothing(tmp_path: Path) -> None:
    """The child may write 4096 bytes per file: the append that does not fit fails, those before it stay, smaller ones go on."""
    script = """
import asyncio, resource, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from bloomery.store.journal import Journal
from bloomery.types.operations import Rejected

async def story():
    with ThreadPoolExecutor(1) as pool:
        journal = Journal(Path(sys.argv[1]), pool)
        await journal.append_operation(1, Rejected(message="a" * 1000))
        try:
            await journal.append_operation(2, Rejected(message="b" * 8000))
        except OSError:
            await journal.append_operation(3, Rejected(message="c" * 1000))
            await journal.close()
            print("refused")

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
asyncio.run(story())
"""
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout == "refused\n"
    with ThreadPoolExecutor(1) as pool:
        assert set(_read(tmp_path, pool)[0]) == {1, 3}


WRITER = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from bloomery.store.journal import Journal, JournaledResult
from bloomery.types.operations import Failed, Rejected

def done(seq):
    return JournaledResult(result=Failed(message=f"{seq}", category="user"), numerics="n", seconds=0.0, done_us=seq)

async def one(journal, seq):
    await journal.append_operation(seq, Rejected(message=f"{seq}" * 50))
    print("o", seq, flush=True)

async def story():
    with ThreadPoolExecutor(2) as pool:
        journal = Journal(Path(sys.argv[1]), pool, segment_bytes=600)
        first = max(journal.last_operation, journal.last_result) + 1
        for seq in range(first, first + 9, 3):
            await asyncio.gather(one(journal, seq + 2), one(journal, seq + 1), one(journal, seq))
            await journal.append_results({n: done(n) for n in range(seq, seq + 3)})
            print("r", seq + 2, flush=True)
            await journal.drop_operations(seq + 2)
        await journal.close()

asyncio.run(story())
"""


@pytest.mark.parametrize(
    "point", ["journal.operation.written", "journal.operation.synced", "journal.result.written", "journal.result.synced", "segment.dropped"]
)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path, pool: ThreadPoolExecutor, point: str, nth: int) -> None:
    directory, marker = tmp_path / "journal", tmp_path / "marker"
    environment = {**os.environ, "BLOOMERY_FAILPOINTS": f"{point}@{nth}:{marker}"}
    killed = subprocess.run([sys.executable, "-c", WRITER, str(directory)], capture_output=True, text=True, env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert marker.exists()
    operations, results = _read(directory, pool)
    told = [line.split() for line in killed.stdout.splitlines()]
    newest_result = max((int(seq) for kind, seq in told if kind == "r"), default=-1)
    assert set(range(newest_result + 1)) <= set(results)
    dropped_through = min(operations, default=newest_result + 1) - 1
    assert dropped_through <= newest_result
    assert {int(seq) for kind, seq in told if kind == "o" and int(seq) > dropped_through} <= set(operations)


def _fill(
    directory: Path, pool: ThreadPoolExecutor, *, operations: Sequence[int] = (), results: Sequence[int] = (), segment_bytes: int = 1 << 20
) -> None:
    async def story() -> None:
        journal = Journal(directory, pool, segment_bytes=segment_bytes)
        for seq in operations:
            await journal.append_operation(seq, _op(seq))
        for seq in results:
            await journal.append_results({seq: _done(seq)})
        await journal.close()

    asyncio.run(story())


def _read(directory: Path, pool: ThreadPoolExecutor) -> tuple[dict[int, Operation], dict[int, JournaledResult]]:
    async def story() -> tuple[dict[int, Operation], dict[int, JournaledResult]]:
        journal = Journal(directory, pool)
        operations = {seq: await journal.operation(seq) for seq in range(200) if journal.has_operation(seq)}
        results = {seq: await journal.result(seq) for seq in range(200) if journal.has_result(seq)}
        await journal.close()
        return operations, results

    return asyncio.run(story())


def _held(journal: Journal) -> list[int]:
    return [seq for seq in range(20) if journal.has_result(seq)]


def _op(seq: int) -> Rejected:
    return Rejected(message=f"operation {seq}")


def _done(seq: int) -> JournaledResult:
    return JournaledResult(result=Failed(message=f"result {seq}", category="user"), numerics="here", seconds=0.5, done_us=1_000_000 + seq)


def _last_record_start(content: bytes | bytearray) -> int:
    offset = last = 0
    while offset < len(content):
        last = offset
        offset += HEADER_BYTES + int.from_bytes(content[offset : offset + 4], "little")
    return last

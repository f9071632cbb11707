import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain.download import Downloads, FetchConfig
from bloomery.sync.chain.objects import Ref, keep
from bloomery.types.errors import Corrupt, NotFound, Unavailable
from bloomery.types.objects import Objects
from tests.sync.chain.faults import Faulty, Part

DATA = bytes(range(256)) * 40 + b"end"
CONFIG = FetchConfig(range_bytes=1000, at_once=3, hedge_first_s=60, hedge_least_s=60)


@pytest.fixture
def ref(folder: Folder) -> Ref:
    return keep(folder, DATA)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """What hangs goes on when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_an_object_is_fetched_in_ranges_once(objects: Objects, tmp_path: Path) -> None:
    ref, counted = keep(objects, DATA), Faulty(objects)
    with Downloads(counted, tmp_path / "here", CONFIG) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA
        assert downloads.fetch(ref).read_bytes() == DATA
        assert downloads.fetched_bytes == len(DATA)
    assert dict(counted.parts) == {(ref.key, start): 1 for start in range(0, len(DATA), 1000)}
    with Downloads(counted, tmp_path / "here", CONFIG) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA
    assert counted.bytes == len(DATA)
    assert [path.name for path in (tmp_path / "here").iterdir()] == [ref.blake3]


def test_a_request_that_hangs_is_asked_again_and_the_first_answer_is_taken(folder: Folder, ref: Ref, tmp_path: Path, over: threading.Event) -> None:
    first = threading.Lock()

    def slow(part: Part, key: str, start: int, stop: int) -> bytes:
        if start == 2000 and first.acquire(blocking=False):
            over.wait()
            return b"too late"
        return part(key, start, stop)

    store = Faulty(folder, slow)
    with Downloads(store, tmp_path / "here", FetchConfig(range_bytes=1000, at_once=3, hedge_first_s=0.01)) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA
        assert downloads.hedged >= 1
        assert downloads.fetched_bytes == len(DATA)
    assert store.parts[ref.key, 2000] == 2
    assert not over.is_set()


def test_nobody_is_asked_twice_who_answers_in_time(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    with Downloads(folder, tmp_path / "here", FetchConfig(range_bytes=1000, hedge_first_s=60, hedge_least_s=60)) as downloads:
        downloads.fetch(ref)
        assert downloads.hedged == 0


def test_the_patience_is_that_of_the_slowest_of_twenty(tmp_path: Path, folder: Folder) -> None:
    with Downloads(folder, tmp_path / "here", FetchConfig(hedge_first_s=7, hedge_least_s=0.5)) as downloads:
        assert downloads._patience_s() == 7
        downloads._latencies.extend(float(second) for second in range(1, 101))
        assert downloads._patience_s() == 95
        downloads._latencies.clear()
        downloads._latencies.extend([0.1] * 50)
        assert downloads._patience_s() == 0.5


def test_a_refusal_is_no_answer_while_another_request_is_on_its_way(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    asked, refused, lock = threading.Event(), threading.Event(), threading.Lock()
    seen: list[int] = []

    def flaky(part: Part, key: str, start: int, stop: int) -> bytes:
        if start != 0:
            return part(key, start, stop)
        with lock:
            seen.append(1)
            first = len(seen) == 1
        if first:
            # Refused when it has been asked for again, and before that is answered.
            asked.wait(60)
            refused.set()
            raise Unavailable("the first one broke")
        asked.set()
        refused.wait(60)
        return part(key, start, stop)

    with Downloads(Faulty(folder, flaky), tmp_path / "here", FetchConfig(range_bytes=1000, hedge_first_s=0.01)) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA


def test_what_was_fetched_before_a_failure_is_not_fetched_again(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    def broken(part: Part, key: str, start: int, stop: int) -> bytes:
        if start >= 5000:
            raise Unavailable(f"away at {start}")
        return part(key, start, stop)

    with Downloads(Faulty(folder, broken), tmp_path / "here", CONFIG) as downloads, pytest.raises(Unavailable, match="away at"):
        downloads.fetch(ref)
    counted = Faulty(folder)
    with Downloads(counted, tmp_path / "here", CONFIG) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA
    assert {start for _, start in counted.parts} == {start for start in range(5000, len(DATA), 1000)}


def test_ranges_of_another_size_are_no_help(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    def broken(part: Part, key: str, start: int, stop: int) -> bytes:
        if start:
            raise Unavailable("away")
        return part(key, start, stop)

    with Downloads(Faulty(folder, broken), tmp_path / "here", CONFIG) as downloads, pytest.raises(Unavailable):
        downloads.fetch(ref)
    with Downloads(folder, tmp_path / "here", FetchConfig(range_bytes=700)) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA


def test_a_partial_file_that_lost_what_its_list_names_is_fetched_anew(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / f"{ref.blake3}.part").write_bytes(bytes(len(DATA)))
    (here / f"{ref.blake3}.ranges").write_text("".join(f"1000 {place}\n" for place in range(4)) + "1000 ")
    with Downloads(folder, here, CONFIG) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA


@pytest.mark.parametrize("what", ["damaged", "cut", "longer"])
def test_an_object_that_is_not_what_its_name_says_is_refused_and_named(folder: Folder, ref: Ref, tmp_path: Path, what: str) -> None:
    folder.put(ref.key, {"damaged": DATA[:-1] + b"x", "cut": DATA[:-1], "longer": b"x" + DATA}[what])
    with Downloads(folder, tmp_path / "here", CONFIG) as downloads:
        with pytest.raises(Corrupt, match=f"folder `store`: `{ref.key}`"):
            downloads.fetch(ref)
        assert not (tmp_path / "here" / ref.blake3).exists()
        folder.put(ref.key, DATA)
        assert downloads.fetch(ref).read_bytes() == DATA


def test_an_object_that_is_missing_is_named(objects: Objects, tmp_path: Path) -> None:
    ref = Ref(blake3="a" * 64, size=5000)
    with Downloads(objects, tmp_path / "here", CONFIG) as downloads, pytest.raises(NotFound, match=f"{objects.name}: there is no object `{ref.key}`"):
        downloads.fetch(ref)


def test_a_store_that_never_answers_is_named_at_the_deadline(folder: Folder, ref: Ref, tmp_path: Path, over: threading.Event) -> None:
    def deaf(part: Part, key: str, start: int, stop: int) -> bytes:
        over.wait()
        return b""

    config = FetchConfig(range_bytes=5000, at_once=1, hedge_first_s=0.01, deadline_s=0.05)
    with Downloads(Faulty(folder, deaf), tmp_path / "here", config) as downloads:
        with pytest.raises(Unavailable, match=rf"`{ref.key}`: bytes 0 to 5000 did not come within 0\.05 s"):
            downloads.fetch(ref)
        over.set()


def test_a_store_that_goes_on_answering_may_take_longer_than_the_deadline_for_a_large_object(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    seconds = [0.0]

    def slow(part: Part, key: str, start: int, stop: int) -> bytes:
        seconds[0] += 4
        return part(key, start, stop)

    config = FetchConfig(range_bytes=1000, at_once=1, hedge_first_s=60, hedge_least_s=60, deadline_s=5)
    with Downloads(Faulty(folder, slow), tmp_path / "here", config, clock=lambda: seconds[0]) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA
    assert seconds[0] == 4 * 11


def test_never_more_is_held_than_is_stated(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    """Every request waits until as many are there as may be: more would show, and fewer would hang."""
    held, most, lock = [0], [0], threading.Lock()
    full = threading.Barrier(3)

    def counting(part: Part, key: str, start: int, stop: int) -> bytes:
        with lock:
            held[0] += stop - start
            most[0] = max(most[0], held[0])
        if start < 9000:
            full.wait(60)
        data = part(key, start, stop)
        with lock:
            held[0] -= stop - start
        return data

    config = FetchConfig(range_bytes=1000, at_once=3, hedge_first_s=60)
    with Downloads(Faulty(folder, counting), tmp_path / "here", config) as downloads:
        assert downloads.fetch(ref).read_bytes() == DATA
    assert 3000 <= most[0] <= config.memory_bytes == 6000


def test_what_is_not_needed_any_more_is_removed(folder: Folder, ref: Ref, tmp_path: Path) -> None:
    other = keep(folder, b"other")
    with Downloads(folder, tmp_path / "here", CONFIG) as downloads:
        downloads.fetch(ref)
        downloads.fetch(other)
        downloads.keep_only([other])
    assert [path.name for path in (tmp_path / "here").iterdir()] == [other.blake3]

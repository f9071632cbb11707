"""What is removed nobody can need, and not before its time."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Barrier

import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain.lease import Lease
from bloomery.sync.chain.manifest import sequence_of
from bloomery.sync.chain.objects import keep
from bloomery.sync.chain.plan import read_versions
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.sync.chain.readers import leave, name_version
from bloomery.sync.chain.receiver import ReceiveConfig, Receiver
from bloomery.sync.chain.retention import RetainConfig, Swept, sweep
from bloomery.types.errors import Conflict, Corrupt, InvalidInput
from bloomery.types.objects import Objects, Stored
from tests.sync.chain.faults import Slow
from tests.sync.chain.models import RUN, empty, version, which

PUBLISH = PublishConfig(base_every=3, base_after_s=1e9, base_share=1e9, span_share=100)
AT_ONCE = RetainConfig(grace_s=0)
LATER = RetainConfig(grace_s=3600)


def chain(objects: Objects, upto: int) -> Publisher:
    publisher = Publisher.open(objects, RUN, holder="trainer", config=PUBLISH)
    newest = publisher.newest
    for number in range(newest.manifest.sequence + 1 if newest else 0, upto + 1):
        publisher.publish(version(number - 1) if number else None, version(number))
    return publisher


def swept(objects: Objects, publisher: Publisher, config: RetainConfig = AT_ONCE) -> Swept:
    """Rounds until nothing is left to do."""
    total = Swept([], [], [])
    while any(found := sweep(objects, publisher.lease, trusted=(), config=config)):
        total = Swept(*(one + two for one, two in zip(total, found, strict=True)))
        if config.grace_s:
            break
    return total


def numbers(objects: Objects) -> list[int]:
    return [number for found in objects.list("v") if (number := sequence_of(found.key)) is not None]


def join(objects: Objects, folder: Path, to: int) -> int | None:
    weights = empty()
    with Receiver.open(objects, weights, RUN, folder=folder) as receiver:
        receiver.join(to)
    return which(weights)


def test_what_lies_before_the_older_of_two_bases_goes_and_the_rest_can_be_read(objects: Objects, tmp_path: Path) -> None:
    publisher = chain(objects, 10)
    swept(objects, publisher)
    assert numbers(objects) == [6, 7, 8, 9, 10]
    named = {ref.key for link in read_versions(objects, RUN, ()).values() for step in link.manifest.steps for ref in (step.object, step.parts) if ref}
    assert {found.key for found in objects.list("obj")} == named
    assert objects.list("gc/tombstones") == []
    assert [join(objects, tmp_path / str(number), number) for number in numbers(objects)] == [6, 7, 8, 9, 10]
    assert publisher.publish(version(10), version(11)).sequence == 11
    assert swept(objects, publisher) == Swept([], [], [])


class Turns:
    """A folder that notes whether somebody had the turn when a key was removed or a version committed; behind a removal the lease is let go."""

    def __init__(self, inner: Folder, lease: Lease) -> None:
        self.inner, self.lease, self.seen = inner, lease, list[bool]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def create(self, key: str, data: bytes) -> str | None:
        if key.startswith("v/"):
            self._note()
        return self.inner.create(key, data)

    def delete(self, key: str) -> None:
        if key.startswith(("v/", "obj/")):
            self._note()
        self.inner.delete(key)
        if key.startswith("gc/"):
            self.lease.release()

    def _note(self) -> None:
        self.seen.append(self.lease._turn.locked())


def test_of_a_writer_and_his_own_sweep_beside_it_each_waits_for_the_turn_and_who_let_go_of_the_lease_removes_nothing_more(folder: Folder) -> None:
    publisher = chain(folder, 10)
    swept(folder, publisher, LATER)
    watched = Turns(folder, publisher.lease)
    publisher._objects = watched  # type: ignore[assignment]
    publisher.publish(version(10), version(11))
    assert watched.seen == [True]
    with pytest.raises(Conflict, match="has lost the lease"):
        sweep(watched, publisher.lease, trusted=(), config=AT_ONCE)  # type: ignore[arg-type]
    assert watched.seen == [True, True], "one key went before the lease did"
    assert numbers(folder) == list(range(1, 12))


def test_nothing_is_removed_before_its_time(folder: Folder) -> None:
    publisher = chain(folder, 10)
    there = [found.key for found in folder.list("obj")]
    first = swept(folder, publisher, LATER)
    assert first.removed == []
    assert [sequence_of(key) for key in first.buried] == list(range(6))
    again = swept(folder, publisher, LATER)
    assert again == Swept([], [], [])
    assert [found.key for found in folder.list("obj")] == there
    assert numbers(folder) == list(range(11))


def test_what_a_reader_holds_stays_with_the_base_behind_it_until_it_leaves(objects: Objects) -> None:
    publisher = chain(objects, 10)
    name_version(objects, "slow", 4)
    swept(objects, publisher)
    assert numbers(objects) == list(range(3, 11))
    leave(objects, "slow")
    swept(objects, publisher)
    assert numbers(objects) == [6, 7, 8, 9, 10]


def test_what_many_readers_hold_is_read_side_by_side(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = chain(folder, 10)
    for number in (9, 4, 7):
        name_version(folder, f"sampler-{number}", number)
    together, get = Barrier(3), folder.get

    def answered(key: str, *, at_most: int) -> tuple[bytes, str]:
        if key.startswith("readers/"):
            # Who is asked alone waits in vain for the others.
            together.wait(30)
        return get(key, at_most=at_most)

    monkeypatch.setattr(folder, "get", answered)
    swept(folder, publisher)
    assert numbers(folder) == list(range(3, 11))


def test_readers_say_what_they_hold_under_a_name_that_is_one(folder: Folder, tmp_path: Path) -> None:
    chain(folder, 4)
    with Receiver.open(folder, empty(), RUN, folder=tmp_path / "reader", config=ReceiveConfig(name="sampler-0")) as receiver:
        receiver.join()
        chain(folder, 10)
        publisher = Publisher.open(folder, RUN, holder="trainer", config=PUBLISH)
        swept(folder, publisher)
        assert numbers(folder) == list(range(3, 11))
        receiver.stage()
        receiver.flip()
        assert numbers(folder) == list(range(3, 11))
        receiver.settle()
        swept(folder, publisher)
        assert numbers(folder) == [6, 7, 8, 9, 10]
    with pytest.raises(InvalidInput, match="no key of an object"):
        Receiver.open(folder, empty(), RUN, folder=tmp_path / "other", config=ReceiveConfig(name="../../v"))


def test_a_reader_that_is_opened_again_tells_again_what_it_holds(folder: Folder, tmp_path: Path) -> None:
    chain(folder, 4)
    weights, config = empty(), ReceiveConfig(name="sampler-0")
    for _ in range(2):
        with Receiver.open(folder, weights, RUN, folder=tmp_path / "reader", config=config) as receiver:
            receiver.join(4)
        assert [found.key for found in folder.list("readers")] == ["readers/sampler-0"]
        leave(folder, "sampler-0")
    publisher = chain(folder, 10)
    with Receiver.open(folder, weights, RUN, folder=tmp_path / "reader", config=config) as receiver:
        receiver.join(4)
    swept(folder, publisher)
    assert numbers(folder) == list(range(3, 11))


def test_a_reader_that_told_nothing_for_long_has_left(folder: Folder) -> None:
    publisher = chain(folder, 10)
    name_version(folder, "gone", 4)
    aged(folder, "readers/gone", 2 * 86_400)
    swept(folder, publisher)
    assert numbers(folder) == [6, 7, 8, 9, 10]
    assert folder.list("readers") == []


def test_an_object_that_is_named_after_all_loses_its_tombstone(folder: Folder, tmp_path: Path) -> None:
    publisher = chain(folder, 0)
    stray = keep(folder, b"stray")
    ahead = Publisher.open(Folder(tmp_path / "other"), RUN, holder="trainer", config=PUBLISH)
    ahead.publish(None, version(0))
    delta = ahead.publish(version(0), version(1)).manifest.steps[0].object
    folder.put(delta.key, ahead._objects.get(delta.key, at_most=delta.size)[0])
    assert set(sweep(folder, publisher.lease, trusted=(), config=LATER).buried) == {stray.key, delta.key}
    publisher.publish(version(0), version(1))
    assert sweep(folder, publisher.lease, trusted=(), config=LATER).kept == [delta.key]
    swept(folder, publisher)
    assert folder.head(stray.key) is None
    assert join(folder, tmp_path / "reader", 1) == 1


def test_what_was_put_again_after_its_tombstone_is_young_and_stays(folder: Folder) -> None:
    publisher = chain(folder, 0)
    stray = keep(folder, b"stray")
    sweep(folder, publisher.lease, trusted=(), config=LATER)
    keep(folder, b"stray")
    found = sweep(folder, publisher.lease, trusted=(), config=AT_ONCE)
    assert found.removed == []
    assert folder.head(stray.key) is not None


class Busy:
    """A store in which something happens after a folder was listed."""

    def __init__(self, inner: Objects, folder: str, then: Callable[[], None]) -> None:
        self.inner, self.name, self._folder, self._then = inner, inner.name, folder, then

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        found = self.inner.list(folder, after=after)
        if folder == self._folder:
            self._then()
        return found


def test_what_is_put_again_while_a_sweep_runs_stays(folder: Folder) -> None:
    publisher = chain(folder, 0)
    stray, other = keep(folder, b"stray"), keep(folder, b"other")
    sweep(folder, publisher.lease, trusted=(), config=LATER)

    def put_again() -> None:
        keep(folder, b"stray")
        aged(folder, stray.key, -10)

    assert sweep(Busy(folder, "obj", put_again), publisher.lease, trusted=(), config=AT_ONCE).removed == [other.key]
    assert folder.head(stray.key) is not None
    assert folder.list("gc/tombstones") == []


def aged(folder: Folder, key: str, seconds: int) -> None:
    """Have it been put so long before it was."""
    path = folder._root / key
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - seconds * 10**9))


@pytest.mark.parametrize("said", [b"\xff", b"{}", bytes(10_000)])
def test_while_it_cannot_be_read_what_a_reader_holds_all_versions_stay_and_sweeps_go_on(
    folder: Folder, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    publisher = chain(folder, 10)
    stray = keep(folder, b"stray")
    folder.put("readers/sampler-0", said)
    assert swept(folder, publisher).removed == [stray.key]
    assert "`readers/sampler-0` is not what a reader holds" in caplog.text
    assert numbers(folder) == list(range(11))
    aged(folder, "readers/sampler-0", 2 * 86_400)
    swept(folder, publisher)
    assert numbers(folder) == [6, 7, 8, 9, 10]


def test_only_who_has_the_lease_sweeps(folder: Folder) -> None:
    publisher = chain(folder, 10)
    chain(folder, 10)
    with pytest.raises(Conflict, match="lost the lease"):
        sweep(folder, publisher.lease, trusted=(), config=AT_ONCE)
    assert numbers(folder) == list(range(11))


def test_a_sweep_keeps_the_lease_while_it_removes(folder: Folder) -> None:
    slow = Slow(folder, 5)
    with Publisher.open(folder, RUN, holder="trainer", config=PUBLISH) as publisher:
        publisher.publish(None, version(0))
    keep(folder, b"stray")
    with Publisher.open(slow, RUN, holder="trainer", config=PublishConfig(term_s=0.1)) as publisher:
        assert len(swept(slow, publisher).removed) == slow.waited == 1


def test_nothing_of_a_chain_that_cannot_be_read_is_removed(folder: Folder) -> None:
    publisher = chain(folder, 10)
    folder.put("v/000000000009", b"{}")
    before = len(folder.list("obj"))
    with pytest.raises(Corrupt, match="is no manifest"):
        sweep(folder, publisher.lease, trusted=(), config=AT_ONCE)
    assert len(folder.list("obj")) == before


def test_half_written_files_of_long_ago_are_removed(folder: Folder) -> None:
    publisher = chain(folder, 0)
    left = folder._root / "obj" / "half#1"
    left.write_bytes(b"half")
    sweep(folder, publisher.lease, trusted=(), config=LATER)
    assert left.exists()
    sweep(folder, publisher.lease, trusted=(), config=AT_ONCE)
    assert not left.exists()

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain.keys import Ed25519Private, HmacKey
from bloomery.sync.chain.manifest import Manifest, key
from bloomery.sync.chain.publisher import PublishConfig, Published, Publisher
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.codec import delta, states
from bloomery.sync.state_hash import Bits, StateHash, hash_elements
from bloomery.types.errors import Conflict, Corrupt, Forbidden, Unavailable
from bloomery.types.objects import Objects
from tests.sync.chain.faults import Broken, Slow
from tests.sync.chain.models import LAYOUT, OTHER, RUN, drawn, empty, version, which
from tests.sync.codec.weights import copied, same

NO_BASES = PublishConfig(base_every=10**6, base_after_s=1e9, base_share=1e9, span_share=100)
HMAC, OTHER_KEY, ED = HmacKey(b"secret of sixteen"), HmacKey(b"another of sixteen"), Ed25519Private(bytes(range(32)))


def kinds(published: Published) -> list[tuple[str, int | None]]:
    return [(step.kind, step.start) for step in published.manifest.steps]


def published(objects: Objects, upto: int, *, config: PublishConfig = NO_BASES, signer: HmacKey | None = None) -> list[Published]:
    with Publisher.open(objects, RUN, holder="trainer", config=config, signer=signer) as publisher:
        return [publisher.publish(version(number - 1) if number else None, version(number)) for number in range(upto + 1)]


def joined(objects: Objects, folder: Path, to: int | None = None) -> int | None:
    weights = empty()
    with Receiver.open(objects, weights, RUN, folder=folder) as receiver:
        receiver.join(to)
    return which(weights)


def test_a_chain_begins_with_a_base_and_goes_on_with_deltas_and_merged_ones(objects: Objects, tmp_path: Path) -> None:
    done = published(objects, 16)
    assert [each.sequence for each in done] == list(range(17))
    assert kinds(done[0]) == [("base", None)]
    assert [kinds(each) for each in done[1:]] == [
        [("delta", number - 1)] + [("merged", number - span) for span in (4, 16) if number % span == 0] for number in range(1, 17)
    ]
    assert {each.manifest.base for each in done} == {0}
    assert all(after.manifest.parent == before.hash for before, after in pairwise(done))
    assert all(after.manifest.old_root == before.manifest.new_root for before, after in pairwise(done))
    assert joined(objects, tmp_path / "reader") == 16


@pytest.mark.parametrize(
    ("config", "based"),
    [
        (PublishConfig(base_every=3, base_share=1e9), [0, 3, 6]),
        (PublishConfig(base_share=0.0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (PublishConfig(base_share=1e9), [0]),
        # The clock goes on by a second a look.
        (PublishConfig(base_after_s=5.0, base_share=1e9), [0, 5]),
    ],
)
def test_bases_come_by_number_time_and_size(folder: Folder, config: PublishConfig, based: list[int]) -> None:
    seconds = iter(range(10**6))
    with Publisher.open(folder, RUN, holder="trainer", config=config, clock=lambda: float(next(seconds))) as publisher:
        found = [publisher.publish(version(number - 1) if number else None, version(number)) for number in range(8)]
    numbers = [each.sequence for each in found if ("base", None) in kinds(each)]
    assert numbers == based
    assert [each.manifest.base for each in found] == [max(number for number in numbers if number <= each.sequence) for each in found]


def test_a_base_that_is_wanted_comes_with_the_next_version(folder: Folder) -> None:
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
        publisher.publish(None, version(0))
        publisher.want_base()
        assert kinds(publisher.publish(version(0), version(1))) == [("delta", 0), ("base", None)]
        assert kinds(publisher.publish(version(1), version(2))) == [("delta", 1)]


def test_the_same_step_again_is_the_version_that_is_there(folder: Folder) -> None:
    before = published(folder, 2)
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
        again = publisher.publish(version(1), version(2))
        assert (again.sequence, again.hash, again.put_bytes) == (2, before[2].hash, 0)
        assert publisher.publish(None, version(2)).put_bytes == 0
        assert publisher.publish(version(2), version(3)).sequence == 3
    assert len(folder.list("v")) == 4


def test_a_step_that_the_same_writer_publishes_again_is_the_version_that_is_there(folder: Folder) -> None:
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
        publisher.publish(None, version(0))
        first = publisher.publish(version(0), version(1))
        again = publisher.publish(version(0), version(1))
        assert (again.hash, again.put_bytes) == (first.hash, 0)
        assert kinds(publisher.publish(version(1), version(2))) == [("delta", 1)]


@pytest.mark.parametrize("in_both", [False, True])
def test_what_changed_behind_the_writers_back_is_no_part_of_the_version_before(folder: Folder, tmp_path: Path, in_both: bool) -> None:
    """In weights that were published, in a chunk that the step leaves alone: nothing but a look at all of them shows it."""
    old, new, weights = copied(version(1)), copied(version(2)), empty()
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
        publisher.publish(None, version(0))
        publisher.publish(version(0), old)
        for each in (old, new) if in_both else (old,):
            each["f"][7] ^= 1
        assert kinds(publisher.publish(old, new)) == [("base", None)]
        assert kinds(publisher.publish(new, version(3))) == [("delta", 2)]
    with Receiver.open(folder, weights, RUN, folder=tmp_path / "reader") as receiver:
        receiver.join(2)
    assert same(weights, new)
    assert joined(folder, tmp_path / "late") == 3


def test_weights_that_were_published_are_not_hashed_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(bits: Bits, first: int = 0) -> StateHash:
        hashed.append(first)
        return hash_elements(bits, first)

    for module in (delta, states):
        monkeypatch.setattr(module, "hash_elements", counted)
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
        publisher.publish(None, version(0))
        assert len(hashed) == LAYOUT.chunk_count
        found = [publisher.publish(version(number - 1), version(number)) for number in range(1, 5)]
    assert kinds(found[-1]) == [("delta", 3), ("merged", 0)]
    assert len(hashed) == LAYOUT.chunk_count


def test_threads_make_the_same_versions(tmp_path: Path) -> None:
    alone, threads = (
        [each.hash for each in published(Folder(tmp_path / str(workers)), 16, config=replace(NO_BASES, workers=workers))] for workers in (1, 3)
    )
    assert alone == threads


def test_merged_deltas_begin_anew_after_a_restart(folder: Folder, tmp_path: Path) -> None:
    published(folder, 6)
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
        found = [publisher.publish(version(number - 1), version(number)) for number in range(7, 21)]
    assert {each.sequence: [start for kind, start in kinds(each) if kind == "merged"] for each in found if len(each.manifest.steps) > 1} == {
        12: [8],
        16: [12],
        20: [16],
    }
    assert joined(folder, tmp_path / "reader") == 20


def test_a_trainer_that_went_back_starts_anew_from_a_base(folder: Folder, tmp_path: Path) -> None:
    published(folder, 5)
    with Receiver.open(folder, empty(), RUN, folder=tmp_path / "reader") as receiver:
        receiver.join()
        with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
            forked = publisher.publish(version(2), version(3))
            assert (forked.sequence, kinds(forked), forked.manifest.old_root) == (6, [("base", None)], None)
            assert kinds(publisher.publish(version(3), version(4))) == [("delta", 6)]
        receiver.stage()
        assert which(receiver.weights) == 5
        receiver.flip()
        assert which(receiver.weights) == 4
        assert receiver.sequence == 7


def test_another_layout_starts_anew_and_readers_of_the_old_one_are_told(folder: Folder, tmp_path: Path) -> None:
    published(folder, 1)
    with Receiver.open(folder, empty(), RUN, folder=tmp_path / "reader") as receiver:
        receiver.join()
        with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as publisher:
            assert kinds(publisher.publish(version(1), drawn(OTHER))) == [("base", None)]
        with pytest.raises(Conflict, match=f"version 2 has tensors of layout {OTHER.hash}, and these weights have {LAYOUT.hash}"):
            receiver.stage()
        assert which(receiver.weights) == receiver.sequence == 1


def test_a_writer_whose_lease_was_taken_is_refused_at_its_next_commit(objects: Objects) -> None:
    first = Publisher.open(objects, RUN, holder="trainer", config=NO_BASES)
    first.publish(None, version(0))
    second = Publisher.open(objects, RUN, holder="trainer", config=NO_BASES)
    with pytest.raises(Conflict, match="`trainer` has lost the lease of run `run-1`, epoch 1"):
        first.publish(version(0), version(1))
    assert second.publish(version(0), version(2)).manifest.epoch == 2
    assert len(objects.list("v")) == 2


def test_a_writer_keeps_the_lease_while_it_encodes_and_stores(folder: Folder) -> None:
    slow = Slow(folder, 5)
    with Publisher.open(slow, RUN, holder="trainer", config=replace(NO_BASES, term_s=0.1)) as publisher:
        publisher.publish(None, version(0))
        assert slow.waited == 2
        publisher.publish(version(0), version(1))
        assert slow.waited == 3


def test_why_a_block_ended_is_told_whatever_becomes_of_the_lease(folder: Folder) -> None:
    broken = Broken(folder)

    def fail() -> None:
        broken.lost = 1
        raise RuntimeError("the trainer is gone")

    with pytest.raises(RuntimeError, match="the trainer is gone"), Publisher.open(broken, RUN, holder="trainer", config=NO_BASES):
        fail()
    broken.lost = 0
    with Publisher.open(broken, RUN, holder="trainer", config=NO_BASES):
        Publisher.open(folder, RUN, holder="trainer", config=NO_BASES)
    with pytest.raises(Unavailable, match="the answer was lost"), Publisher.open(broken, RUN, holder="trainer", config=NO_BASES):
        broken.lost = 1


class Away:
    """A store that does not answer the next commits, whether it has taken them or not."""

    def __init__(self, inner: Objects, *, taken: bool) -> None:
        self.inner, self.name, self._taken = inner, inner.name, taken
        self.lost_commits = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def create(self, key: str, data: bytes) -> str | None:
        lost, self.lost_commits = self.lost_commits, max(0, self.lost_commits - 1)
        if lost and not self._taken:
            raise Unavailable("the store is away")
        found = self.inner.create(key, data)
        if lost:
            raise Unavailable("the answer was lost")
        return found


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("signer", [None, HMAC, ED], ids=["unsigned", "hmac", "ed25519"])
def test_a_step_that_was_not_answered_is_published_again_with_its_merged_deltas(
    folder: Folder, tmp_path: Path, taken: bool, signer: HmacKey | None
) -> None:
    store = Away(folder, taken=taken)
    with Publisher.open(store, RUN, holder="trainer", config=NO_BASES, signer=signer) as publisher:
        for number in range(3):
            publisher.publish(version(number - 1) if number else None, version(number))
        store.lost_commits = 1
        with pytest.raises(Unavailable):
            publisher.publish(version(2), version(3))
        # What is made of the step now is something else than what may be there.
        publisher.want_base()
        again = publisher.publish(version(2), version(3))
        assert kinds(again) == [("delta", 2)] + ([] if taken else [("base", None)])
        assert (again.put_bytes == 0) == taken
        assert ("merged", 0) in kinds(publisher.publish(version(3), version(4)))
    assert joined(folder, tmp_path / "reader") == 4


class Interrupted:
    """Somebody else writes between a writer's last look at his lease and his commit."""

    def __init__(self, inner: Objects) -> None:
        self.inner, self.name = inner, inner.name
        self.before_commit = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def create(self, name: str, data: bytes) -> str | None:
        if name.startswith("v/"):
            self.before_commit()
        return self.inner.create(name, data)


def test_of_two_writers_who_both_think_that_they_may_one_commits(objects: Objects, tmp_path: Path) -> None:
    store = Interrupted(objects)
    first = Publisher.open(store, RUN, holder="trainer", config=NO_BASES)
    first.publish(None, version(0))

    def other() -> None:
        with Publisher.open(objects, RUN, holder="trainer", config=NO_BASES) as second:
            second.publish(version(0), version(1))

    store.before_commit = other
    with pytest.raises(Conflict, match=f"another writer has created `{key(1)}`"):
        first.publish(version(0), version(2))
    assert joined(objects, tmp_path / "reader") == 1
    newest = Manifest.from_json(objects.get(key(1), at_most=10**6)[0], "here")
    assert newest.epoch == 2


def test_a_late_commit_of_a_lower_epoch_is_followed_or_refused_but_never_overwritten(folder: Folder) -> None:
    """The lease changes hands between a writer's last look and his commit, which comes before that of the new one."""
    store = Interrupted(folder)
    first = Publisher.open(store, RUN, holder="trainer", config=NO_BASES)
    first.publish(None, version(0))
    taken = []
    store.before_commit = lambda: taken.append(Publisher.open(folder, RUN, holder="trainer", config=NO_BASES))
    assert first.publish(version(0), version(1)).sequence == 1
    with pytest.raises(Conflict, match=f"another writer has created `{key(1)}`"):
        taken[0].publish(version(0), version(2))
    with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as third:
        forked = third.publish(version(0), version(2))
        assert (forked.sequence, forked.manifest.epoch, kinds(forked)) == (2, 3, [("base", None)])


class Torn:
    """A store that says that it has put what it has not, or less."""

    def __init__(self, inner: Objects, kept: int | None) -> None:
        self.inner, self.name, self._kept = inner, inner.name, kept

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        if self._kept is not None:
            self.inner.put(name, bytes(data)[: self._kept])


@pytest.mark.parametrize("kept", [None, 10])
def test_a_torn_upload_is_never_committed(objects: Objects, kept: int | None) -> None:
    with (
        Publisher.open(Torn(objects, kept), RUN, holder="trainer", config=NO_BASES) as publisher,
        pytest.raises(Unavailable, match=rf"{objects.name}: `obj/\w+` was put with \d+ bytes, and (nothing|10) is there"),
    ):
        publisher.publish(None, version(0))
    assert objects.list("v") == []


@pytest.mark.parametrize(("signer", "trusted"), [(HMAC, HMAC), (ED, ED.public)])
def test_a_reader_with_a_key_takes_what_that_key_signed_and_nothing_else(folder: Folder, tmp_path: Path, signer: HmacKey, trusted: HmacKey) -> None:
    published(folder, 2, signer=signer)
    with Receiver.open(folder, empty(), RUN, folder=tmp_path / "right", trusted=[trusted]) as receiver:
        assert receiver.join() == 2
    weights = empty()
    with Receiver.open(folder, weights, RUN, folder=tmp_path / "wrong", trusted=[OTHER_KEY]) as receiver:
        with pytest.raises(Forbidden, match=f"`v/0+` says that `{signer.name}` signed it"):
            receiver.join()
        assert not (tmp_path / "wrong" / "objects").exists() or not list((tmp_path / "wrong" / "objects").iterdir())
    assert which(weights) is None


def test_an_unsigned_version_is_refused_where_a_key_is_asked_for(folder: Folder, tmp_path: Path) -> None:
    published(folder, 1, signer=HMAC)
    with Receiver.open(folder, empty(), RUN, folder=tmp_path / "reader", trusted=[HMAC]) as receiver:
        receiver.join()
        with Publisher.open(folder, RUN, holder="trainer", config=NO_BASES) as intruder:
            intruder.publish(version(1), version(2))
        with pytest.raises(Forbidden, match=f"`{key(2)}` is not signed"):
            receiver.stage()
        assert which(receiver.weights) == 1
    with pytest.raises(Forbidden, match="is not signed"):
        Publisher.open(folder, RUN, holder="trainer", trusted=[HMAC])


def test_a_writer_refuses_a_chain_that_contradicts_itself(folder: Folder) -> None:
    published(folder, 2)
    middle = Manifest.from_json(folder.get(key(1), at_most=10**6)[0], "here")
    folder.put(key(1), msgspec.structs.replace(middle, epoch=2).to_json())
    with pytest.raises(Corrupt, match=f"`{key(2)}` follows another version 1"):
        Publisher.open(folder, RUN, holder="trainer")

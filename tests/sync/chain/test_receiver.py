"""What reaches live weights, and what does not: each refusal leaves them as they were."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.store.objects import Folder
from bloomery.sync import state_kernel
from bloomery.sync.chain import flipping
from bloomery.sync.chain.download import FetchConfig
from bloomery.sync.chain.manifest import Manifest, key
from bloomery.sync.chain.objects import MAX_BYTES, Ref, keep
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.sync.chain.receiver import ReceiveConfig, Receiver
from bloomery.sync.chain.staging import STAGED
from bloomery.sync.codec import kernels
from bloomery.sync.codec.choose import Codec
from bloomery.sync.codec.delta import Choice, encode
from bloomery.sync.codec.kernels import available
from bloomery.sync.codec.layout import Chunk, Layout, MemoryWeights
from bloomery.sync.codec.states import root_of, states_of
from bloomery.sync.state_hash import Bits
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Gone, NotFound
from bloomery.types.objects import Objects
from tests.sync.chain.faults import Faulty
from tests.sync.chain.models import LAYOUT, OTHER, RUN, copied, drawn, empty, in_files, same, stepped, version, which
from tests.sync.codec.hostile import Opened, bomb

CONFIG = PublishConfig(base_every=10**6, base_after_s=1e9, base_share=1e9, span_share=100)
SMALL = ReceiveConfig(fetch=FetchConfig(range_bytes=1000))


def publish(objects: Objects, upto: int, run: str = RUN) -> None:
    """The versions that are not there yet."""
    with Publisher.open(objects, run, holder="trainer", config=CONFIG) as publisher:
        newest = publisher.newest
        for number in range(newest.manifest.sequence + 1 if newest else 0, upto + 1):
            publisher.publish(version(number - 1) if number else None, version(number))


def reader(objects: Objects, folder: Path, weights: Any = None, config: ReceiveConfig = SMALL) -> Receiver:
    return Receiver.open(objects, empty() if weights is None else weights, RUN, folder=folder / "reader", config=config)


def rewritten(objects: Objects, number: int, **fields: Any) -> None:
    """A manifest that says otherwise, as whoever may write to the store can."""
    manifest = Manifest.from_json(objects.get(key(number), at_most=10**6)[0], "here")
    objects.put(key(number), msgspec.structs.replace(manifest, **fields).to_json())


def test_a_reader_follows_step_by_step_and_a_late_one_takes_the_short_way(objects: Objects, tmp_path: Path) -> None:
    publish(objects, 1)
    early = reader(objects, tmp_path / "early")
    assert early.join() == 1
    for number in range(2, 19):
        publish(objects, number)
        assert early.stage() == number
        assert which(early.weights) == number - 1
        assert early.flip().sequence == number
        assert which(early.weights) == number
    assert early.stage() is None
    with Publisher.open(objects, "run-1", holder="trainer", config=CONFIG) as publisher:
        for number in range(19, 21):
            publisher.publish(version(number - 1), version(number))
    counted = Faulty(objects)
    late = reader(counted, tmp_path / "late")
    assert late.join() == 20
    assert which(late.weights) == 20
    early.stage()
    early.flip()
    assert same(early.weights, late.weights)
    early.close()
    late.close()


def test_who_comes_late_fetches_merged_deltas_instead_of_every_step(folder: Folder, tmp_path: Path) -> None:
    with Publisher.open(folder, RUN, holder="trainer", config=CONFIG) as publisher:
        for number in range(18):
            publisher.publish(version(number - 1) if number else None, version(number))
    counted = Faulty(folder)
    with reader(counted, tmp_path) as late:
        late.join()
        assert which(late.weights) == 17
    # A base, sixteen steps at once, and one.
    assert len({name for name, _ in counted.parts}) == 3


def test_weights_that_are_a_version_already_join_without_its_base(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 2)
    counted = Faulty(folder)
    with reader(counted, tmp_path, copied(version(1))) as receiver:
        assert receiver.join() == 2
        assert which(receiver.weights) == 2
    (newest,) = (step for step in Manifest.from_json(folder.get(key(2), at_most=10**6)[0], "here").steps)
    assert counted.bytes == newest.object.size


def test_what_is_aborted_changes_nothing_and_can_be_staged_again(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 2)
    with reader(folder, tmp_path) as receiver:
        receiver.join(1)
        receiver.stage()
        receiver.abort()
        assert (receiver.staged, which(receiver.weights)) == (None, 1)
        with pytest.raises(Conflict, match="nothing is staged"):
            receiver.flip()
        receiver.stage()
        receiver.flip()
        assert which(receiver.weights) == 2


class Failing:
    """Weights of which a write fails in the middle, when it is due."""

    def __init__(self, inner: MemoryWeights) -> None:
        self.inner, self.layout = inner, inner.layout
        self.due = -1

    def read(self, chunk: Chunk) -> Bits:
        return self.inner.read(chunk)

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        self.due -= 1
        if self.due == 0:
            self.inner.write(chunk, indices[:1], values[:1])
            raise RuntimeError("the memory is gone")
        self.inner.write(chunk, indices, values)


def test_what_one_delta_changes_is_staged_without_a_copy_of_a_chunk_and_to_the_bit_as_with_one(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(folder, 1)
    with reader(folder, tmp_path) as receiver:
        receiver.join()
        publish(folder, 2)
        compared: list[int] = []
        through = flipping.through
        monkeypatch.setattr(flipping, "through", lambda hops, chunk, start: compared.append(chunk.number) or through(hops, chunk, start))  # type: ignore[func-returns-value]
        staged = []
        for told in (flipping._says_what_differs, lambda hops, chunk: False):
            monkeypatch.setattr(flipping, "_says_what_differs", told)
            assert receiver.stage() == 2
            staged.append((tmp_path / "reader" / STAGED).read_bytes())
            assert compared == ([] if len(staged) == 1 else [chunk.number for chunk in LAYOUT.chunks()])
            receiver.abort()
        assert staged[0] == staged[1]


def test_a_flip_that_fails_is_taken_back_as_a_whole(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 2)
    weights = Failing(empty())
    with reader(folder, tmp_path, weights) as receiver:
        receiver.join(1)
        receiver.stage()
        weights.due = 4
        with pytest.raises(RuntimeError, match="the memory is gone"):
            receiver.flip()
        assert (receiver.sequence, which(weights.inner)) == (1, 1)
        receiver.flip()
        assert (receiver.sequence, which(weights.inner)) == (2, 2)


@pytest.mark.parametrize("to", [1, 2])
def test_what_a_join_that_failed_left_is_no_version(folder: Folder, tmp_path: Path, to: int) -> None:
    publish(folder, 2)
    weights = Failing(empty())
    with reader(folder, tmp_path, weights) as receiver:
        receiver.join(1)
        weights.due = 3
        with pytest.raises(RuntimeError, match="the memory is gone"):
            receiver.join(2)
        assert receiver.sequence is None
        assert receiver.join(to) == to
        assert which(weights.inner) == to


def test_back_to_the_version_before_and_forth_again(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 3)
    with reader(folder, tmp_path) as receiver:
        receiver.join(1)
        with pytest.raises(Conflict, match="no flip"):
            receiver.roll_back()
        receiver.stage()
        receiver.flip()
        assert receiver.roll_back().sequence == 1
        assert (receiver.sequence, which(receiver.weights)) == (1, 1)
        with pytest.raises(Conflict, match="led to version 3, and the weights hold 1: it was taken back"):
            receiver.roll_back()
        receiver.stage(2)
        receiver.flip()
        assert which(receiver.weights) == 2


def test_a_version_that_turns_out_bad_is_left_while_the_next_one_is_staged(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 3)
    with reader(folder, tmp_path, in_files(tmp_path / "weights")) as receiver:
        receiver.join(1)
        receiver.stage(2)
        receiver.flip()
        receiver.stage(3)
    # What was staged is forgotten with the process, and the way back is not.
    with reader(folder, tmp_path, in_files(tmp_path / "weights")) as receiver:
        assert receiver.sequence == 2
        receiver.stage(3)
        assert receiver.roll_back().sequence == 1
        assert (receiver.staged, which(receiver.weights)) == (None, 1)
        receiver.stage(3)
        receiver.flip()
        assert which(receiver.weights) == 3
        assert receiver.roll_back().sequence == 1
        assert which(receiver.weights) == 1
        receiver.stage(3)
        receiver.abort()
        receiver.join(2)
        with pytest.raises(Conflict, match="led to version 3, and the weights hold 2: it was taken back, or they joined"):
            receiver.roll_back()


def test_files_are_opened_as_the_version_that_they_are_and_memory_has_to_join_again(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 2)
    with reader(folder, tmp_path, in_files(tmp_path / "weights")) as receiver:
        receiver.join()
    with reader(Faulty(folder, _never), tmp_path, in_files(tmp_path / "weights")) as again:
        assert again.sequence == 2
    with reader(folder, tmp_path) as forgotten:
        assert forgotten.sequence is None
        with pytest.raises(Conflict, match="join first"):
            forgotten.stage()
        assert forgotten.join() == 2


def _never(*asked: object) -> bytes:
    raise AssertionError(f"nobody should have asked for {asked}")


def replayed(store: Objects) -> None:
    """The newest version, once more under the next number."""
    store.put(key(4), store.get(key(3), at_most=10**6)[0])


def skipped(store: Objects) -> None:
    publish(store, 5)
    store.delete(key(4))


def stale_epoch(store: Objects) -> None:
    after(store, epoch=1)


def after(store: Objects, **fields: Any) -> None:
    """A fourth version that fits the third, but for these fields."""
    data, _ = store.get(key(3), at_most=10**6)
    third = Manifest.from_json(data, "here")
    delta = encode(version(3), version(4))
    step = msgspec.structs.replace(third.steps[0], start=3, object=keep(store, delta))
    fitting = {"sequence": 4, "parent": third.hash, "old_root": third.new_root, "new_root": root(version(4)), "steps": (step,)}
    store.put(key(4), msgspec.structs.replace(third, **{**fitting, **fields}).to_json())


def root(weights: MemoryWeights) -> str:
    return str(root_of(states_of(weights)))


def object_of(store: Objects, data: bytes) -> dict[str, Any]:
    """A step from the third version to the fourth, whatever it is."""
    third = Manifest.from_json(store.get(key(3), at_most=10**6)[0], "here")
    return {"steps": (msgspec.structs.replace(third.steps[0], start=3, object=keep(store, data)),)}


def leading_elsewhere() -> bytes:
    """What the fourth version is to be, but for one chunk, whose payload is of another fourth version."""
    lies, other = (Opened(encode(version(3), new)) for new in (version(4), stepped(version(3), 99)))
    for field in ("codec", "changed", "length"):
        lies.records[0][field] = other.records[0][field]
    lies.payloads[0] = other.payloads[0]
    return lies.sealed()


def exploding() -> bytes:
    """The same, but for one chunk, of whose gaps there are 3,000 bytes by its own account, and 90 MB in the frame."""
    opened = Opened(encode(version(3), version(4)))
    (chunk,) = (chunk for chunk in LAYOUT.chunks() if chunk.numel == 3000)
    frame = bomb(claims=3000, blocks=700)
    opened.payloads[chunk.number][:] = struct.pack("<8I", 3000, 0, 0, 0, len(frame), 0, 0, 0) + frame
    opened.records[chunk.number]["codec"], opened.records[chunk.number]["length"] = Codec.FAST_ZSTD, len(opened.payloads[chunk.number])
    return opened.sealed()


def damaged(store: Objects) -> None:
    publish(store, 4)
    ref = Manifest.from_json(store.get(key(4), at_most=10**6)[0], "here").steps[0].object
    data, _ = store.get(ref.key, at_most=ref.size)
    store.put(ref.key, data[:200] + bytes([data[200] ^ 1]) + data[201:])


def endless(store: Objects) -> None:
    publish(store, 4)
    step = Manifest.from_json(store.get(key(4), at_most=10**6)[0], "here").steps[0]
    rewritten(store, 4, steps=(msgspec.structs.replace(step, object=msgspec.structs.replace(step.object, size=MAX_BYTES)),))


def missing(store: Objects) -> None:
    publish(store, 4)
    store.delete(Manifest.from_json(store.get(key(4), at_most=10**6)[0], "here").steps[0].object.key)


REFUSED: dict[str, tuple[Callable[[Objects], None], type[BloomeryError], str]] = {
    "replayed": (replayed, Corrupt, "is version 3: it was put where another one belongs"),
    "skipped": (skipped, Gone, f"`{key(4)}` is missing, and there are versions before and behind it"),
    "of another run": (lambda store: after(store, run="run-2"), Conflict, "is of run `run-2`, not of `run-1`"),
    "stale epoch": (stale_epoch, Corrupt, "has epoch 1, and the version before it 4: its writer had lost the lease"),
    "of another parent": (lambda store: after(store, parent="0" * 64), Corrupt, "follows another version 3"),
    "from another state": (lambda store: after(store, old_root="0" * 32), Corrupt, "starts from state"),
    "to another state": (lambda store: after(store, new_root="0" * 32), Corrupt, "leads to state"),
    "a delta from elsewhere": (lambda store: after(store, **object_of(store, encode(version(1), version(4)))), Corrupt, "starts from state"),
    "of another model": (
        lambda store: after(store, **object_of(store, encode(drawn(OTHER), drawn(OTHER, 1)))),
        Corrupt,
        "is of another model: `a` is",
    ),
    "between two layouts": (lambda store: after(store, layout=OTHER.hash), Corrupt, "is a delta between two layouts"),
    "behind another base": (lambda store: after(store, base=1), Corrupt, "newest base is that of version 1, and the version before it says 0"),
    "a base as a delta": (lambda store: after(store, **object_of(store, encode(None, version(4)))), Corrupt, "is a base"),
    "a payload that leads elsewhere": (
        lambda store: after(store, **object_of(store, leading_elsewhere())),
        Corrupt,
        "chunk 0 comes to state .*, and should come to",
    ),
    "a bomb": (lambda store: after(store, **object_of(store, exploding())), Corrupt, "a stream of 3000 bytes: "),
    "no delta": (lambda store: after(store, **object_of(store, b"x" * 500)), Corrupt, "begins with other bytes"),
    "damaged": (damaged, Corrupt, "is not what its name says: it is damaged"),
    "endless": (endless, Corrupt, f"is named with {MAX_BYTES} bytes, and no object of these weights has more than"),
    "missing": (missing, NotFound, "there is no object `obj/"),
    "an old copy": (lambda store: store.delete(key(3)), Corrupt, "ends with version 2, and version 3 was taken before"),
    "no manifest": (lambda store: store.put(key(4), b"{}"), Corrupt, "is no manifest of a chain"),
    "too large a manifest": (lambda store: store.put(key(4), bytes(10**6)), Corrupt, "nothing of the kind has more than"),
}


STORES = [(what, "folder") for what in REFUSED] + [(what, "s3") for what in ("replayed", "skipped", "damaged", "missing", "an old copy")]
"""A bucket has answers of its own to what is missing, cut off or listed."""


@pytest.mark.parametrize(("what", "objects"), STORES, indirect=["objects"])
def test_what_is_refused_leaves_the_weights_as_they_were(objects: Objects, tmp_path: Path, what: str) -> None:
    damage, error, reason = REFUSED[what]
    for number in range(4):
        publish(objects, number)
    with reader(objects, tmp_path) as receiver:
        receiver.join()
        damage(objects)
        with pytest.raises(error, match=reason):
            receiver.stage()
        assert (receiver.sequence, receiver.staged, which(receiver.weights)) == (3, None, 3)
        with pytest.raises(Conflict, match="nothing is staged"):
            receiver.flip()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda store: store.delete(key(3)), "ends with version 2, and version 3 was taken before"),
        (lambda store: rewritten(store, 3, signed_by="x"), f"`{key(3)}` is another one than was taken before"),
    ],
    ids=["an old copy", "the past rewritten"],
)
def test_what_was_taken_is_remembered_over_a_restart(folder: Folder, tmp_path: Path, damage: Callable[[Objects], None], reason: str) -> None:
    publish(folder, 3)
    with reader(folder, tmp_path) as receiver:
        receiver.join()
    damage(folder)
    with reader(folder, tmp_path) as receiver, pytest.raises(Corrupt, match=reason):
        receiver.join()


@pytest.mark.parametrize("damage", ["obj/../../secret", "/etc/passwd", "../" * 10 + "a", "a" * 63, "A" * 64])
def test_names_of_objects_that_climb_are_no_names(folder: Folder, tmp_path: Path, damage: str) -> None:
    publish(folder, 1)
    data, _ = folder.get(key(1), at_most=10**6)
    name = Manifest.from_json(data, "here").steps[0].object.blake3
    folder.put(key(1), data.replace(name.encode(), damage.encode()))
    with reader(folder, tmp_path) as receiver, pytest.raises(Corrupt, match="is no manifest of a chain"):
        receiver.join()


def flipped_bit(weights: MemoryWeights, name: str, place: int = 3) -> None:
    weights[name][place] ^= 1


@pytest.mark.parametrize("name", ["c", "f"])
def test_scrubs_come_to_a_flipped_bit_and_mend_it(objects: Objects, tmp_path: Path, name: str) -> None:
    publish(objects, 5)
    with reader(objects, tmp_path, config=ReceiveConfig(fetch=FetchConfig(range_bytes=1000), scrub_share=4)) as receiver:
        receiver.join()
        assert isinstance(receiver.weights, MemoryWeights)
        flipped_bit(receiver.weights, name)
        seen = [receiver.scrub() for _ in range(4)]
        assert {number for each in seen for number in each.checked} == set(range(LAYOUT.chunk_count))
        assert len([number for each in seen for number in each.mended]) == 1
        assert which(receiver.weights) == 5
        assert all(not receiver.scrub().mended for _ in range(4))


def test_of_a_base_only_the_damaged_chunk_is_fetched(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 1)
    counted = Faulty(folder)
    with reader(counted, tmp_path, config=ReceiveConfig(fetch=FetchConfig(range_bytes=1000), scrub_share=1)) as receiver:
        receiver.join()
        flipped_bit(receiver.weights, "a")
        before = counted.bytes
        assert len(receiver.scrub().mended) == 1
        base = Manifest.from_json(folder.get(key(0), at_most=10**6)[0], "here").steps[0].object.size
        assert counted.bytes - before < base / 2
        assert which(receiver.weights) == 1


def test_a_damaged_base_mends_nothing(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 1)
    with reader(folder, tmp_path, config=ReceiveConfig(scrub_share=1)) as receiver:
        receiver.join()
        ref = Manifest.from_json(folder.get(key(0), at_most=10**6)[0], "here").steps[0].object
        data = bytearray(folder.get(ref.key, at_most=ref.size)[0])
        data[-100:-40] = bytes(60)
        folder.put(ref.key, bytes(data))
        flipped_bit(receiver.weights, "g")
        there = copied(receiver.weights)
        with pytest.raises(Corrupt, match="is not what the list of its parts says: chunk 6 is damaged"):
            receiver.scrub()
        assert same(receiver.weights, there)


def rebased(store: Objects, **fields: Any) -> None:
    """The first version, and the second as it follows it, with other objects in the base."""
    (step,) = Manifest.from_json(store.get(key(0), at_most=10**6)[0], "here").steps
    rewritten(store, 0, steps=(msgspec.structs.replace(step, **fields),))
    rewritten(store, 1, parent=Manifest.from_json(store.get(key(0), at_most=10**6)[0], "here").hash)


def long_list(store: Objects) -> None:
    rebased(store, parts=keep(store, bytes(320_000)))


def long_head(store: Objects) -> None:
    """Of 2**32 - 1 chunks."""
    base = base_of(store)
    data = bytearray(store.get(base.key, at_most=base.size)[0]) + bytes(320_000)
    data[12:16] = b"\xff" * 4
    rebased(store, object=keep(store, bytes(data)))


def base_of(store: Objects) -> Ref:
    return Manifest.from_json(store.get(key(0), at_most=10**6)[0], "here").steps[0].object


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (long_list, "is named with 320000 bytes, and the list of parts of these weights has"),
        (long_head, r"says that its head has 2\d{11} bytes, and that of a base of these weights has"),
    ],
)
def test_what_a_base_claims_takes_no_memory_before_it_is_proved(
    folder: Folder, tmp_path: Path, damage: Callable[[Objects], None], reason: str
) -> None:
    publish(folder, 1)
    damage(folder)
    counted = Faulty(folder)
    with reader(counted, tmp_path, copied(version(1)), ReceiveConfig(scrub_share=1)) as receiver:
        # The weights are this version already, so no base is fetched for it.
        receiver.join()
        flipped_bit(receiver.weights, "a")
        before = counted.bytes
        with pytest.raises(Corrupt, match=reason):
            receiver.scrub()
        assert counted.bytes - before < 10_000


@pytest.mark.parametrize("kernels_of", available())
def test_a_flip_hashes_what_changes_and_nothing_else(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_of: str) -> None:
    whole: list[int] = []
    changed: list[int] = []
    sums, change = state_kernel.sums, state_kernel.change
    publish(folder, 1)
    with reader(folder, tmp_path) as receiver, kernels.only(available()[kernels_of]):
        receiver.join()
        publish(folder, 2)
        monkeypatch.setattr(state_kernel, "sums", lambda bits, *given: whole.append(len(bits)) or sums(bits, *given))  # type: ignore[func-returns-value]
        monkeypatch.setattr(state_kernel, "change", lambda at, *given: changed.append(len(at)) or change(at, *given))  # type: ignore[func-returns-value]
        receiver.stage()
        flipped = receiver.flip()
        assert which(receiver.weights) == 2
    assert 0 < flipped.elements < LAYOUT.elements / 25
    assert whole == []
    # Others than numpy hash what they decode in the same pass.
    assert sum(changed) == (flipped.elements if kernels_of == "numpy" else 0)


@pytest.mark.parametrize("codec", ["raw", "fast", "auto"])
def test_a_flipped_bit_that_a_delta_builds_on_is_mended_with_the_flip_or_by_the_next_scrubs(folder: Folder, tmp_path: Path, codec: Choice) -> None:
    """Differences build on whatever is there, and hashes that are updated by differences do not tell."""
    config = replace(CONFIG, codec=codec)
    with Publisher.open(folder, RUN, holder="trainer", config=config) as publisher:
        for number in range(3):
            publisher.publish(version(number - 1) if number else None, version(number))
    with reader(folder, tmp_path, config=ReceiveConfig(scrub_share=1)) as receiver:
        receiver.join(1)
        changed = int(np.flatnonzero(version(1)["c"] != version(2)["c"])[0])
        flipped_bit(receiver.weights, "c", changed)
        receiver.stage()
        receiver.flip()
        assert which(receiver.weights) == 2 or codec != "raw"
        receiver.scrub()
        assert which(receiver.weights) == 2


def test_whoever_goes_back_over_a_flipped_bit_goes_to_what_should_have_been_there(folder: Folder, tmp_path: Path) -> None:
    with Publisher.open(folder, RUN, holder="trainer", config=replace(CONFIG, codec="raw")) as publisher:
        for number in range(3):
            publisher.publish(version(number - 1) if number else None, version(number))
    with reader(folder, tmp_path) as receiver:
        receiver.join(1)
        one, two = version(1)["c"], version(2)["c"]
        changed, kept = int(np.flatnonzero(one != two)[0]), int(np.flatnonzero(one == two)[0])
        flipped_bit(receiver.weights, "c", changed)
        flipped_bit(receiver.weights, "c", kept)
        # As if this element had been in the next version already.
        receiver.weights["c"][np.flatnonzero(one != two)[1]] = two[np.flatnonzero(one != two)[1]]
        receiver.stage()
        receiver.flip()
        assert which(receiver.weights) == 2
        receiver.roll_back()
        assert which(receiver.weights) == 1


def test_a_chunk_that_no_one_has_any_more_is_told(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 1)
    with reader(folder, tmp_path, config=ReceiveConfig(scrub_share=1)) as receiver:
        receiver.join()
        folder.delete(Manifest.from_json(folder.get(key(0), at_most=10**6)[0], "here").steps[0].object.key)
        flipped_bit(receiver.weights, "a")
        with pytest.raises(NotFound, match="there is no object `obj/"):
            receiver.scrub()


def test_the_folder_of_another_reader_is_refused(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 1)
    with reader(folder, tmp_path) as receiver:
        receiver.join()
    with pytest.raises(Corrupt, match="give each reader a folder of its own"):
        Receiver.open(folder, empty(), "run-2", folder=tmp_path / "reader")
    with pytest.raises(Corrupt, match="give each reader a folder of its own"):
        Receiver.open(folder, MemoryWeights.zeros(OTHER), RUN, folder=tmp_path / "reader")
    (tmp_path / "reader" / "state.json").write_bytes(b"{}")
    with pytest.raises(Corrupt, match="remove the folder to join anew"):
        Receiver.open(folder, empty(), RUN, folder=tmp_path / "reader")


def test_a_chain_that_is_not_there_yet_is_told(objects: Objects, tmp_path: Path) -> None:
    with reader(objects, tmp_path) as receiver:
        with pytest.raises(NotFound, match="holds no version of run `run-1` yet"):
            receiver.join()
        publish(objects, 1)
        with pytest.raises(Gone, match="there is no version 7: there are 0 to 1"):
            receiver.join(7)


def test_no_weights_at_all_are_a_chain_too(folder: Folder, tmp_path: Path) -> None:
    nothing = Layout.of({})
    with Publisher.open(folder, RUN, holder="trainer", config=CONFIG) as publisher:
        publisher.publish(None, MemoryWeights.zeros(nothing))
    with Receiver.open(folder, MemoryWeights.zeros(nothing), RUN, folder=tmp_path / "reader") as receiver:
        assert receiver.join() == 0
        assert receiver.scrub().checked == []

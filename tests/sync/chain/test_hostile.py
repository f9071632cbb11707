"""Objects that lie, as the next version of a chain whose manifest vouches for each of them: no reader serves what one makes of its weights."""

import random
from collections import Counter
from itertools import count
from pathlib import Path

import msgspec
import pytest

from bloomery.sync.chain.manifest import Manifest, Step
from bloomery.sync.chain.objects import keep
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.codec import layout as layout_module
from bloomery.sync.codec.container import Head
from bloomery.sync.codec.delta import CHOICES, encode
from bloomery.sync.codec.layout import MemoryWeights
from bloomery.sync.codec.states import root_of, states_of
from bloomery.types.errors import BloomeryError, Corrupt
from tests.sync.chain.memory import Memory
from tests.sync.chain.models import RUN
from tests.sync.codec.hostile import tampered
from tests.sync.codec.test_hostile import CHUNK, pair
from tests.sync.codec.weights import copied, same


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "CHUNK_ELEMENTS", CHUNK)


class Vouched:
    """A chain of one version, and whatever is put behind it."""

    def __init__(self, old: MemoryWeights, new: MemoryWeights) -> None:
        self.store, self._promised = Memory(), str(root_of(states_of(new)))
        step = Step(kind="base", start=None, object=keep(self.store, encode(None, old)))
        fields = {"old_root": None, "new_root": str(root_of(states_of(old))), "layout": old.layout.hash, "steps": (step,)}
        self._first = Manifest(run=RUN, epoch=1, sequence=0, parent=None, base=0, **fields)
        self.store.put(self._first.key, self._first.to_json())
        self._second = self._first

    def follow(self, data: bytes) -> None:
        """Have an object be the second version, by a manifest that says of it what its own head does."""
        root, based = self._promised, False
        try:
            head = Head.parse(data)
            root, based = str(head.new_root), head.kind == "base"
        except Corrupt:
            pass
        step = Step(kind="base" if based else "delta", start=None if based else 0, object=keep(self.store, data))
        fields = {"base": int(based), "old_root": None if based else self._first.new_root, "new_root": root, "steps": (step,)}
        self._second = msgspec.structs.replace(self._first, sequence=1, parent=self._first.hash, **fields)
        self.store.put(self._second.key, self._second.to_json())

    def end(self) -> None:
        """Remove it."""
        self.store.delete(self._second.key)
        self.store.delete(self._second.steps[0].object.key)


def ended(error: BloomeryError, ends: Counter[str]) -> None:
    assert len(error.message) < 1000
    ends[type(error).__name__] += 1
    # Of these all was right that can be told before a chunk is decoded.
    ends["led elsewhere"] += "and should come to" in error.message


def staged(objects: int, seed: int, folder: Path) -> Counter[str]:
    """Tampered objects of every codec, staged beside weights that are in use; how it ended how often."""
    rng, names = random.Random(seed), count()
    old, new = pair(seed)
    foreign, sound = encode(*pair(seed + 1), "fast"), [encode(old, new, choice) for choice in CHOICES]
    chain, ends = Vouched(old, new), Counter[str]()

    def serving() -> tuple[MemoryWeights, Receiver]:
        weights = copied(old)
        reader = Receiver.open(chain.store, weights, RUN, folder=folder / str(next(names)))
        assert reader.join(0) == 0
        return weights, reader

    live, receiver = serving()
    for _ in range(objects):
        chain.follow(tampered(rng.choice(sound), rng.choice([foreign, *sound]), rng))
        try:
            assert receiver.stage() == 1
        except BloomeryError as error:
            ended(error, ends)
        else:
            # Another way to say the same: what it leads to is what it should.
            ends["staged"] += 1
            assert same(live, old)
            receiver.flip()
            assert same(live, new)
            receiver.close()
            live, receiver = serving()
        assert (receiver.sequence, receiver.staged) == (0, None)
        assert same(live, old)
        chain.end()
        assert receiver.stage() is None
    receiver.close()
    return ends


def joined(objects: int, seed: int, folder: Path) -> Counter[str]:
    """The same, and bases, for a reader that has nothing yet, and takes the first that it can; then it takes what nobody tampered with."""
    rng, names = random.Random(seed), count()
    old, new = pair(seed)
    foreign = encode(*pair(seed + 1), "fast")
    sound = [encode(before, new, choice) for choice in CHOICES for before in (old, None)]
    chain, ends = Vouched(old, new), Counter[str]()

    def waiting() -> tuple[MemoryWeights, Receiver]:
        weights = MemoryWeights.zeros(old.layout)
        return weights, Receiver.open(chain.store, weights, RUN, folder=folder / str(next(names)))

    weights, receiver = waiting()
    for _ in range(objects):
        chain.follow(tampered(rng.choice(sound), rng.choice([foreign, *sound]), rng))
        try:
            assert receiver.join() == 1
        except BloomeryError as error:
            ended(error, ends)
            assert receiver.sequence is None
        else:
            ends["joined"] += 1
            assert same(weights, new)
            receiver.close()
            weights, receiver = waiting()
        chain.end()
        receiver.look()
    chain.follow(sound[0])
    assert receiver.join() == 1
    assert same(weights, new)
    receiver.close()
    return ends


def test_a_sample_of_objects_that_lie_is_staged_by_nobody(tmp_path: Path) -> None:
    ends = staged(1000, 7, tmp_path)
    assert ends["Corrupt"] > 800
    assert ends["led elsewhere"] > 25
    assert ends["staged"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_hundred_thousand_objects_that_lie_are_staged_by_nobody(seed: int, tmp_path: Path) -> None:
    ends = staged(12_500, seed, tmp_path)
    assert ends["led elsewhere"] > 500


def test_a_sample_of_objects_that_lie_makes_no_reader_believe_that_it_has_a_version(tmp_path: Path) -> None:
    ends = joined(300, 8, tmp_path)
    assert ends["Corrupt"] > 200
    assert ends["led elsewhere"] > 10
    assert ends["joined"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_objects_that_lie_make_no_reader_believe_that_it_has_a_version(seed: int, tmp_path: Path) -> None:
    ends = joined(1500, seed, tmp_path)
    assert ends["led elsewhere"] > 60

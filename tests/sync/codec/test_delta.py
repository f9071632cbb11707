"""Deltas of random weights of every dtype by every codec: applied, applied again, broken off, merged and turned around."""

from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.sync.codec import container
from bloomery.sync.codec import layout as layout_module
from bloomery.sync.codec.applying import apply, patch, plan, stage
from bloomery.sync.codec.delta import CHOICES, BaseWeights, Delta, encode, write
from bloomery.sync.codec.layout import MemoryWeights
from bloomery.sync.codec.merge import invert, merge
from bloomery.sync.codec.numbers import NUMBERS
from bloomery.sync.codec.states import states_of
from bloomery.sync.state_hash import hash_elements, total
from bloomery.types.errors import Conflict, Corrupt, InvalidInput
from tests.sync.codec.weights import Watched, copied, layout_of, random_weights, same, stepped

DISTANCES = ("fast", "fast+zstd")
CHUNK = 64
SIZES = {"empty": (0, 3), "one": (), "some": (3, 7), "a.chunk": (CHUNK,), "many": (5, 43)}
LAW = settings(max_examples=12, deadline=None)
SEEDS = st.integers(0, 2**32)
SHARES = st.sampled_from([0.0, 0.02, 0.3, 1.0])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "CHUNK_ELEMENTS", CHUNK)


def layout_with(*dtypes: str) -> layout_module.Layout:
    return layout_of({f"{dtype}.{name}": (dtype, shape) for dtype in dtypes for name, shape in SIZES.items()})


MIXED = ("BF16", "F32", "F8_E4M3", "U8")


def delta_of(old: MemoryWeights, new: MemoryWeights, codec: str = "auto") -> Delta:
    return Delta.parse(encode(old, new, codec))


def history(seed: int, steps: int, share: float = 0.05) -> list[MemoryWeights]:
    rng = np.random.default_rng(seed)
    found = [random_weights(layout_with(*MIXED), rng)]
    while len(found) <= steps:
        found.append(stepped(found[-1], rng, share))
    return found


@pytest.mark.parametrize("codec", CHOICES)
def test_what_is_applied_is_what_was_encoded(codec):
    @LAW
    @given(seed=SEEDS, share=SHARES)
    def holds(seed, share):
        rng = np.random.default_rng(seed)
        old = random_weights(layout_with(*NUMBERS), rng)
        new = stepped(old, rng, share)
        delta = delta_of(old, new, codec)
        live = copied(old)
        states = apply([delta], live)
        assert same(live, new)
        assert states.tolist() == states_of(new).tolist()
        # The other way, chunk by chunk, by several threads.
        copy = copied(old)
        assert (
            patch([delta], copy, workers=3) == delta.new_root == total(hash_elements(new.read(chunk), chunk.first) for chunk in new.layout.chunks())
        )
        assert same(copy, new)

    holds()


@pytest.mark.parametrize("codec", CHOICES)
def test_applying_twice_is_applying_once(codec):
    @LAW
    @given(seed=SEEDS)
    def holds(seed):
        old, new = history(seed, 1)
        delta, live = delta_of(old, new, codec), copied(old)
        apply([delta], live)
        assert plan([delta], live).todo.tolist() == []
        apply([delta], live)
        patch([delta], live)
        assert same(live, new)

    holds()


@pytest.mark.parametrize("codec", CHOICES)
def test_what_is_broken_off_between_two_chunks_goes_on(codec):
    class Killed(Exception):
        pass

    @LAW
    @given(seed=SEEDS, after=st.integers(0, 4))
    def holds(seed, after):
        old, new = history(seed, 1, 0.3)
        delta, live = delta_of(old, new, codec), copied(old)
        written = []

        def write_some(chunk, indices, values):
            if len(written) == after:
                raise Killed
            written.append(chunk.number)

        with pytest.raises(Killed):
            apply([delta], Watched(live, write_some))
        left = plan([delta], live)
        assert set(written) <= set(left.done.tolist())
        assert left.damaged.tolist() == []
        apply([delta], live)
        assert same(live, new)

    holds()


@LAW
@given(seed=SEEDS)
def test_a_chunk_that_was_written_in_part_is_named_and_the_rest_is_left_alone(seed):
    old, new = history(seed, 1, 0.5)
    delta, live = delta_of(old, new), copied(old)
    torn = live["BF16.many"]
    torn[:] = old["BF16.many"] ^ 1
    before = copied(live)
    assert len(plan([delta], live).damaged)
    with pytest.raises(Conflict, match=r"in no state that it knows, first chunk \d+ \(from element"):
        apply([delta], live)
    assert same(live, before)


@pytest.mark.parametrize("codec", CHOICES)
def test_several_deltas_are_applied_as_one_from_wherever_the_weights_are(codec):
    @LAW
    @given(seed=SEEDS, at=st.integers(0, 3), mixed=st.booleans())
    def holds(seed, at, mixed):
        states = history(seed, 3)
        deltas = [delta_of(*pair, codec) for pair in pairwise(states)]
        live = copied(states[at])
        if mixed:
            # Each chunk somewhere else: as a copy that was broken off is, or one put together of several.
            rng = np.random.default_rng(seed)
            for chunk in live.layout.chunks():
                source = states[rng.integers(0, 4)].read(chunk)
                live.write(chunk, np.arange(chunk.numel, dtype=np.uint32), source)
        one, other = copied(live), copied(live)
        apply(deltas, one)
        patch(deltas, other)
        assert same(one, states[-1])
        assert same(other, states[-1])

    holds()


@pytest.mark.parametrize("codec", CHOICES)
def test_merging_with_the_old_weights_gives_the_bytes_of_the_first_and_the_last(codec):
    @LAW
    @given(seed=SEEDS)
    def holds(seed):
        states = history(seed, 3)
        deltas = [delta_of(*pair, codec) for pair in pairwise(states)]
        assert merge(deltas, states[0], codec) == encode(states[0], states[-1], codec)

    holds()


@pytest.mark.parametrize("first", [*DISTANCES, "raw", "planes"])
@pytest.mark.parametrize("second", [*DISTANCES, "raw", "planes"])
def test_merging_without_the_old_weights_leads_to_the_same(first, second):
    @LAW
    @given(seed=SEEDS, share=SHARES)
    def holds(seed, share):
        states = history(seed, 3, share)
        deltas = [delta_of(*pair, codec) for pair, codec in zip(pairwise(states), (first, second, first), strict=True)]
        merged = Delta.parse(merge(deltas))
        assert (merged.old_root, merged.new_root) == (deltas[0].old_root, deltas[-1].new_root)
        live = copied(states[0])
        apply([merged], live)
        assert same(live, states[-1])

    holds()


def far_apart(seed: int, steps: int) -> list[MemoryWeights]:
    """So few changes that distances are always shorter than what is there now."""
    rng = np.random.default_rng(seed)
    found = [random_weights(layout_of({"a": ("BF16", (3, 100)), "b": ("F32", (300,))}), rng)]
    while len(found) <= steps:
        found.append(stepped(found[-1], rng, 0.01))
    return found


@pytest.mark.parametrize("codec", DISTANCES)
def test_distances_merged_by_name_without_the_old_weights_are_the_bytes_of_the_first_and_the_last(codec):
    @LAW
    @given(seed=SEEDS)
    def holds(seed):
        states = far_apart(seed, 4)
        assert merge([delta_of(*pair, codec) for pair in pairwise(states)], codec=codec) == encode(states[0], states[-1], codec)

    holds()


def test_sums_of_distances_that_are_longer_than_all_elements_are_read():
    rng = np.random.default_rng(1)
    states = [random_weights(layout_with("BF16", "F32"), rng)]
    while len(states) <= 60:
        states.append(stepped(states[-1], rng, 0.1, wild=1.0))
    for codec in DISTANCES:
        merged = Delta.parse(merge([delta_of(*pair, codec) for pair in pairwise(states)], codec=codec))
        assert max(record.length / merged.layout.chunk(record.number).size_bytes for record in merged.records) > 1.2
        live = copied(states[0])
        apply([merged], live)
        assert same(live, states[-1])


def test_there_and_back_is_nothing():
    @LAW
    @given(seed=SEEDS, codec=st.sampled_from(sorted(CHOICES)))
    def holds(seed, codec):
        old, new = history(seed, 1)
        there, back = delta_of(old, new, codec), delta_of(new, old, codec)
        merged = Delta.parse(merge([there, back], old))
        assert (merged.head.changed, merged.head.payload_bytes) == (0, 0)

    holds()


@pytest.mark.parametrize("codec", CHOICES)
def test_an_inverse_leads_back_and_is_the_delta_the_other_way(codec):
    @LAW
    @given(seed=SEEDS, share=SHARES)
    def holds(seed, share):
        old, new = history(seed, 1, share)
        delta = delta_of(old, new, codec)
        inverse = invert(delta, old, codec)
        assert inverse == encode(new, old, codec)
        live = copied(new)
        apply([Delta.parse(inverse)], live)
        assert same(live, old)

    holds()


@pytest.mark.parametrize("codec", DISTANCES)
def test_distances_turn_around_without_weights(codec):
    @LAW
    @given(seed=SEEDS)
    def holds(seed):
        old, new = far_apart(seed, 1)
        assert invert(delta_of(old, new, codec)) == encode(new, old, codec)

    holds()


def test_chunks_that_say_nothing_of_what_was_before_do_not_turn_around_alone():
    old, new = history(1, 1)
    with pytest.raises(InvalidInput, match=r"do not say what was there before \(the first is `raw`\)"):
        invert(delta_of(old, new, "raw"))
    with pytest.raises(Conflict, match="a base starts from nothing"):
        invert(Delta.parse(encode(None, new)))


def test_what_is_counted_within_old_weights_is_not_merged_without_them():
    states = history(1, 2)
    deltas = [delta_of(*pair, "tight") for pair in pairwise(states)]
    with pytest.raises(InvalidInput, match="chunks are `tight`, which counts within the old weights"):
        merge(deltas)
    with pytest.raises(InvalidInput, match="nothing is written as `tight`"):
        merge([delta_of(*pair, "fast") for pair in pairwise(states)], codec="tight")


@LAW
@given(seed=SEEDS, steps=st.integers(0, 2))
def test_a_base_makes_weights_of_anything_and_takes_deltas_up(seed, steps):
    states = history(seed, steps)
    base = Delta.parse(encode(None, states[0]))
    deltas = [base, *(delta_of(*pair) for pair in pairwise(states))]
    for live in (MemoryWeights.zeros(base.layout), random_weights(base.layout, np.random.default_rng(seed + 1)), copied(states[-1])):
        apply(deltas, live)
        assert same(live, states[-1])
    assert merge(deltas) == encode(None, states[-1])


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_all_elements_of_a_chunk_are_read_and_written_without_those_before(codec):
    @LAW
    @given(seed=SEEDS)
    def holds(seed):
        new = random_weights(layout_with(*NUMBERS), np.random.default_rng(seed))
        delta, found = Delta.parse(encode(None, new, codec)), MemoryWeights.zeros(new.layout)
        for chunk in new.layout.chunks():
            if delta.records[chunk.number].codec in container.WHOLE:
                found.write_all(chunk, delta.elements(chunk.number))
        assert same(found, new)
        assert states_of(BaseWeights(delta)).tolist() == states_of(new).tolist()

    holds()


def test_a_base_of_zeros_makes_zeros_of_anything():
    live = random_weights(layout_with("BF16"), np.random.default_rng(0))
    base = Delta.parse(encode(None, MemoryWeights.zeros(live.layout)))
    assert base.head.payload_bytes == 0
    patch([base], live)
    assert same(live, MemoryWeights.zeros(live.layout))


@LAW
@given(seed=SEEDS)
def test_equal_weights_give_equal_bytes_by_any_number_of_threads(seed):
    old, new = history(seed, 1)
    file = BytesIO()
    told = []
    written = write(file, old, new, workers=4, told=told.append)
    assert file.getvalue() == encode(copied(old), copied(new)) == encode(old, new, states=states_of(old))
    assert [chunk.number for chunk in told] == list(range(new.layout.chunk_count))
    assert written.changed == sum(int((old[tensor.name] != new[tensor.name]).sum()) for tensor in old.layout.tensors)
    assert written.head.size_bytes == len(file.getvalue())


def test_deltas_that_do_not_follow_each_other_are_refused():
    states = history(1, 3)
    first, second, third = (delta_of(*pair) for pair in pairwise(states))
    with pytest.raises(Conflict, match=r"delta 2 does not begin where delta 1 ends: \d+ chunks differ, first chunk 0"):
        plan([first, third], states[0])
    with pytest.raises(Conflict, match="delta 2 is a base"):
        merge([first, Delta.parse(encode(None, states[1]))])
    other = random_weights(layout_with("BF16"), np.random.default_rng(0))
    with pytest.raises(Conflict, match=r"delta 3 is of another model than those before it: `F32\.a\.chunk` is missing"):
        plan([first, second, delta_of(other, other)], states[0])


def test_weights_of_another_model_are_refused_and_left_alone():
    old, new = history(1, 1)
    delta = delta_of(old, new)
    other = random_weights(layout_with("BF16"), np.random.default_rng(0))
    before = copied(other)
    for refused in (apply, patch, stage, plan):
        with pytest.raises(Conflict, match=r"the weights are of another model than the delta: `F32\.a\.chunk` is missing"):
            refused([delta], other)
    assert same(other, before)
    with pytest.raises(Conflict, match="a delta is of weights with the same tensors"):
        encode(old, other)
    # The same tensors, and other numbers in them.
    foreign = random_weights(old.layout, np.random.default_rng(99))
    before = copied(foreign)
    with pytest.raises(Conflict, match=f"of {old.layout.chunk_count} chunks are in no state that it knows"):
        apply([delta], foreign)
    with pytest.raises(Conflict, match="a chunk is in no state that it knows"):
        patch([delta], foreign)
    with pytest.raises(Conflict, match="not those that the first delta starts from"):
        merge([delta], foreign)
    with pytest.raises(Conflict, match="not those that the first delta starts from"):
        invert(delta, foreign)
    assert same(foreign, before)


def test_known_states_stand_for_reading_the_weights():
    old, new = history(1, 1)
    delta, live = delta_of(old, new), copied(old)
    states = apply([delta], live, states_of(old))
    assert states.tolist() == states_of(new).tolist()
    assert plan([delta], live, states).done.tolist() == list(range(live.layout.chunk_count))


def test_a_payload_that_leads_elsewhere_is_refused_before_anything_is_written():
    """Whoever makes an object can make it whole: only what comes of it shows."""
    states = history(1, 2, 0.3)
    delta = delta_of(states[0], states[1])
    lying = BytesIO()
    records = delta.records.array.copy()
    last = int(np.flatnonzero(records["codec"])[-1])
    records["new"][last] += 1
    entries = [
        container.Entry(record.codec, bytes(delta.payload(record.number)), record.changed, record.h_old, record.h_new)
        for record in container.Records(records, delta.head.head_bytes)
    ]
    container.write(lying, "delta", delta.layout, entries)
    live = copied(states[0])
    for refused in (apply, stage):
        with pytest.raises(Corrupt, match="does not lead where it says"):
            refused([Delta.parse(lying.getvalue())], live)
        assert same(live, states[0])

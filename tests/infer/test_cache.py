"""Contents follow their samples through blocks, nobody sees what a former one left there, and what is kept is what it says."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.blocks import NOBODYS, blocks_for
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import LEAST_SHARED, Fork, Kept, Sample, Stem, in_common
from bloomery.infer.prefixes import MAX_KEPT
from bloomery.models.config import DecoderConfig
from bloomery.models.pads import BLOCK_PLACES
from tests.train.builders import decoder

CONFIG: DecoderConfig = decoder().config
KEPT_TOKENS = 700


def sample_of(number: int, *, length: int = 600) -> Sample:
    return Sample("r", number, Stem("v", np.zeros(length, np.int32)), length, length - 1)


def write(cache: KeyValueCache, sample: Sample, values: list[int]) -> None:
    """Keys and values as a function of the token at their place."""
    start, stop = sample.cached, sample.cached + len(values)
    cache.advance(sample, stop)
    blocks, places = cache.find(torch.full((len(values),), cache.slot(sample)), torch.arange(start, stop))
    cache.keys_NBKPE[:, blocks, :, places] = torch.tensor(values, dtype=torch.float32)[:, None, None, None]
    cache.values_NBKPE[:, blocks, :, places] = -torch.tensor(values, dtype=torch.float32)[:, None, None, None]
    sample.cached = stop


def read(cache: KeyValueCache, blocks: list[int]) -> torch.Tensor:
    """What lies in these blocks, place after place."""
    for storage in (cache.keys_NBKPE, cache.values_NBKPE):
        assert (storage[:, blocks] == storage[:1, blocks, :1, :, :1]).all()
    assert torch.equal(cache.keys_NBKPE[:, blocks], -cache.values_NBKPE[:, blocks])
    return cache.keys_NBKPE[0, blocks, 0, :, 0].flatten()


def begin(cache: KeyValueCache, source: Sample | Kept, number: int, tokens: int) -> Sample:
    sample = sample_of(number)
    cache.place(sample)
    cache.fork([Fork(sample, source, tokens)])
    return sample


def stem_of(tokens: list[int]) -> Stem:
    return Stem("v", np.array(tokens, np.int32))


COMMANDS = st.sampled_from(["place", "place", "grow", "grow", "grow", "cut", "fork", "fork", "release", "leave", "leave", "take over", "idle"])


@settings(max_examples=100, deadline=None)
@given(commands=st.lists(st.tuples(COMMANDS, st.integers(0, 99)), max_size=60), cache_tokens=st.sampled_from([0, 900, 6000]))
def test_contents_follow_their_samples(commands, cache_tokens):
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=cache_tokens, kept_tokens=KEPT_TOKENS)
    content: dict[Sample, list[int]] = {}
    left: list[list[int]] = []
    for number, (command, pick) in enumerate(commands):
        placed = list(content)
        sample = placed[pick % len(placed)] if placed else sample_of(number)
        if command == "place":
            cache.place(sample := sample_of(number))
            content[sample] = []
        elif command == "take over":
            if cache.kept:
                source = cache.kept[pick % len(cache.kept)]
                tokens = max(1, len(source.stem.tokens) - pick)
                content[begin(cache, source, number, tokens)] = source.stem.tokens[:tokens].tolist()
        elif command == "idle":
            for each in placed:
                cache.release(each)
            content.clear()
        elif not placed:
            continue
        elif command == "grow":
            new = [(number + each) % 97 + 1 for each in range(pick)]
            write(cache, sample, new)
            content[sample] = content[sample] + new
        elif command == "cut":
            # Of what it alone has.
            shared = [each for each in sample.blocks if cache._blocks.holders(each) > 1]
            tokens = max(sample.cached - pick, len(shared) * BLOCK_PLACES)
            assert cache.cut(sample, min(tokens, sample.cached))
            content[sample] = content[sample][: sample.cached]
        elif command == "fork":
            tokens = sample.cached * pick // 99
            content[begin(cache, sample, number, tokens)] = content[sample][:tokens]
        else:
            if command == "leave":
                cache.keep(sample, stem_of(content[sample]))
                left.append(content[sample])
            cache.release(sample)
            assert not sample.blocks
            del content[sample]
    assert set(cache.samples) == set(content)
    for sample, tokens in content.items():
        assert sample.cached == len(tokens)
        assert read(cache, sample.blocks).tolist() == tokens + [0.0] * (len(sample.blocks) * BLOCK_PLACES - len(tokens))
        table = cache.tables_SM[cache.slot(sample)]
        assert table.tolist() == sample.blocks + [NOBODYS] * (len(table) - len(sample.blocks))
    assert (cache.tables_SM[len(content) :] == NOBODYS).all()
    assert (read(cache, [NOBODYS]) == 0).all()
    for kept in cache.kept:
        blocks = cache._prefixes.use(kept).blocks
        assert read(cache, blocks)[: len(kept.stem.tokens)].tolist() == kept.stem.tokens.tolist()
        assert any(tokens[: len(kept.stem.tokens)] == kept.stem.tokens.tolist() for tokens in left)
    assert cache._prefixes.blocks <= KEPT_TOKENS // BLOCK_PLACES
    known = {block for sample in content for block in sample.blocks} | set(cache._prefixes._held)
    assert set(cache._blocks.held) == known, "nobody can let go of the others"


def test_what_a_sample_begins_with_lies_there_once_and_of_the_block_that_it_goes_on_in_it_has_a_copy():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 14)
    source = sample_of(0)
    cache.place(source)
    write(cache, source, list(range(1, 301)))
    forks = [begin(cache, source, number, 299) for number in (1, 2, 3)]
    whole = 299 // BLOCK_PLACES
    assert all(fork.blocks[:whole] == source.blocks[:whole] for fork in forks)
    assert len({fork.blocks[whole] for fork in [source, *forks]}) == 4
    assert len(cache._blocks.held) == whole + 4
    write(cache, forks[0], [7] * 40)
    cache.release(source)
    assert read(cache, forks[1].blocks)[:300].tolist() == [*range(1, 300), 0]
    assert read(cache, forks[0].blocks)[:340].tolist() == [*range(1, 300), *[7] * 40, 0]
    for fork in forks:
        cache.release(fork)
    assert not cache._blocks.held


def test_storage_follows_the_tokens_that_there_are_and_not_the_longest_sequence():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 20)
    samples = [sample_of(number) for number in range(9)]
    for sample in samples:
        cache.place(sample)
    cache.advance(samples[0], 200_000)
    for sample in samples[1:]:
        cache.advance(sample, 10)
    assert len(cache._blocks.held) == blocks_for(200_000) + 8
    assert cache.storage.places >= 200_000
    for sample in samples[1:]:
        cache.release(sample)
    cache.shrink()
    assert cache.storage.places >= 200_000, "nothing is given back of what somebody needs"
    cache.release(samples[0])
    cache.shrink()
    assert cache.keys_NBKPE.shape[1] == 1, "much idle memory is given back"


@pytest.mark.parametrize(("samples", "length"), [(1, 512), (9, 512), (3, 2048), (1, 20_000)])
def test_storage_stays_within_the_bound_but_for_one_who_needs_more(samples, length):
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 13)
    for number in range(samples):
        cache.place(sample := sample_of(number))
        cache.advance(sample, length)
    needed, bound = samples * blocks_for(length), (1 << 13) // BLOCK_PLACES
    assert needed <= cache._blocks.capacity <= cache.keys_NBKPE.shape[1] - 1 <= max(bound, 5 * needed // 4)


def test_storage_moves_for_one_who_needs_more_than_the_bound_and_for_nobody_else():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 16)
    cache.place(sample := sample_of(0))
    places = []
    for length in (1, 1 << 10, 1 << 14, 1 << 16, 1 << 17):
        write(cache, sample, [length % 997] * (length - sample.cached))
        places.append((cache.storage.keys, cache.storage.values))
    assert len(set(places[:-1])) == 1
    assert places[-1] != places[0]
    assert read(cache, sample.blocks)[[0, 1, 1 << 10, 1 << 14, 1 << 16]].tolist() == [
        length % 997 for length in (1, 1 << 10, 1 << 14, 1 << 16, 1 << 17)
    ]


def test_memory_that_only_what_is_kept_still_needs_is_given_back_and_its_contents_stay():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 20, kept_tokens=1 << 10)
    large, small = sample_of(0), sample_of(1)
    for sample in (large, small):
        cache.place(sample)
    cache.advance(large, 300_000)
    write(cache, small, list(range(1, 201)))
    cache.keep(small, stem_of(list(range(1, 201))))
    cache.release(small)
    cache.release(large)
    cache.shrink()
    (kept,) = cache.kept
    assert cache._blocks.capacity == blocks_for(200)
    assert read(cache, begin(cache, kept, 2, 190).blocks)[:191].tolist() == [*range(1, 191), 0]


def test_what_there_is_no_memory_to_move_is_let_go_of(monkeypatch):
    def exhausted(*_: object) -> torch.Tensor:
        raise MemoryError

    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 20, kept_tokens=1 << 10)
    large = sample_of(0)
    kept_of(cache, 1)
    cache.place(large)
    cache.advance(large, 300_000)
    cache.release(large)
    with monkeypatch.context() as patch:
        patch.setattr("bloomery.infer.cache.large_pages", exhausted)
        cache.shrink()
    assert (len(cache.kept), cache._blocks.capacity) == (0, 0)
    assert kept_of(cache, 5) == [(5, 100)]


def kept_of(cache: KeyValueCache, *starts: int, length: int = 100) -> list[tuple[int, int]]:
    """Run sequences one after the other; the first token and the length of what is kept."""
    for start in starts:
        cache.place(sample := sample_of(start))
        tokens = list(range(start, start + length))
        write(cache, sample, tokens)
        cache.keep(sample, stem_of(tokens))
        cache.release(sample)
    return [(int(each.stem.tokens[0]), len(each.stem.tokens)) for each in cache.kept]


def test_the_longest_unused_goes_first_block_by_block():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 17, kept_tokens=10 * BLOCK_PLACES)
    length = 3 * BLOCK_PLACES + 4
    assert kept_of(cache, 1, 2, length=length) == [(1, length), (2, length)]
    assert kept_of(cache, 3, length=length) == [(1, 2 * BLOCK_PLACES), (2, length), (3, length)]
    cache.release(begin(cache, cache.kept[0], 9, 50))
    assert kept_of(cache, 4, length=length) == [(3, length), (1, 2 * BLOCK_PLACES), (4, length)]
    assert [(first, len(each.stem.tokens)) for first, each in zip((3, 1, 4), cache.kept, strict=True)] == kept_of(cache)


def test_those_who_run_get_the_blocks_of_what_is_kept_but_for_those_that_they_begin_with():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=12 * BLOCK_PLACES, kept_tokens=8 * BLOCK_PLACES)
    kept_of(cache, 1, 2, length=4 * BLOCK_PLACES)
    sample = begin(cache, cache.kept[0], 3, 2 * BLOCK_PLACES)
    cache.advance(sample, 10 * BLOCK_PLACES)
    assert cache._blocks.capacity == 12
    assert [len(each.stem.tokens) for each in cache.kept] == [4 * BLOCK_PLACES]
    cache.advance(sample, 12 * BLOCK_PLACES)
    assert [(int(each.stem.tokens[0]), len(each.stem.tokens)) for each in cache.kept] == [(1, 2 * BLOCK_PLACES)]
    assert read(cache, sample.blocks)[: 2 * BLOCK_PLACES].tolist() == list(range(1, 2 * BLOCK_PLACES + 1))


def test_whoever_begins_at_the_same_time_as_others_finds_all_that_was_planned():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=6 * BLOCK_PLACES, kept_tokens=6 * BLOCK_PLACES)
    length = 2 * BLOCK_PLACES + 9
    kept_of(cache, 1, 1001, length=length)
    samples = [sample_of(number) for number in range(2)]
    for sample in samples:
        cache.place(sample)
    cache.fork([Fork(sample, kept, length - 2) for sample, kept in zip(samples, cache.kept, strict=True)])
    for sample, first in zip(samples, (1, 1001), strict=True):
        assert read(cache, sample.blocks)[: length - 1].tolist() == [*range(first, first + length - 2), 0]


def test_a_block_that_others_had_holds_zeros_for_who_gets_it():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=8 * BLOCK_PLACES)
    first, second = sample_of(0), sample_of(1)
    cache.place(first)
    write(cache, first, [7] * 5 * BLOCK_PLACES)
    before = set(first.blocks)
    cache.release(first)
    cache.place(second)
    write(cache, second, [3])
    cache.advance(second, 3 * BLOCK_PLACES)
    assert set(second.blocks) < before
    assert read(cache, second.blocks).tolist() == [3] + [0] * (3 * BLOCK_PLACES - 1)


def test_little_and_far_too_much_is_not_kept_and_the_number_is_bounded():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 17, kept_tokens=1 << 14)
    assert kept_of(cache, 1, length=LEAST_SHARED - 1) == []
    assert kept_of(cache, 2, length=(1 << 14) + 1) == []
    starts = [10_000 + 50 * number for number in range(MAX_KEPT + 3)]
    kept = kept_of(cache, *starts, length=LEAST_SHARED)
    assert (len(kept), kept[-1]) == (MAX_KEPT, (starts[-1], LEAST_SHARED))
    assert all(first < second for first, second in pairwise(kept))


def test_a_longer_sequence_replaces_its_beginning():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 17, kept_tokens=1000)
    kept_of(cache, 5, length=60)
    kept_of(cache, 5, length=90)
    kept_of(cache, 5, length=70)
    assert [len(each.stem.tokens) for each in cache.kept] == [90]
    assert len(cache._blocks.held) == blocks_for(90)
    cache.forget_kept()
    assert not cache.kept
    assert not cache._blocks.held


@pytest.mark.slow
@given(lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_nothing_that_is_whole_is_kept_twice(lengths):
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 17, kept_tokens=1 << 14)
    for mark, length in lengths:
        kept_of(cache, 1000 * mark, length=length)
    for each in cache.kept:
        assert all(in_common(each.stem, other.stem) < len(each.stem.tokens) for other in cache.kept if other is not each)

"""Slots stay compact, contents follow their samples, nothing of a former tenant remains, and what is kept is what it says."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.cache import MAX_KEPT, KeyValueCache
from bloomery.infer.plan import LEAST_SHARED, Sample, Stem, in_common
from bloomery.models.config import DecoderConfig
from tests.train.builders import decoder

CONFIG: DecoderConfig = decoder().config
KEPT_TOKENS = 700


def sample_of(number: int, *, length: int = 600) -> Sample:
    return Sample("r", number, Stem("v", np.zeros(length, np.int32)), length, length - 1)


def write(cache: KeyValueCache, sample: Sample, values: list[int]) -> None:
    """Keys and values as a function of the token at their place."""
    slot, filled = cache.slot(sample), slice(sample.cached, sample.cached + len(values))
    cache.keys_NSKLE[:, slot, :, filled] = torch.tensor(values, dtype=torch.float32)[:, None]
    cache.values_NSKLE[:, slot, :, filled] = -torch.tensor(values, dtype=torch.float32)[:, None]
    sample.cached += len(values)


def stem_of(tokens: list[int]) -> Stem:
    return Stem("v", np.array(tokens, np.int32))


COMMANDS = st.sampled_from(["place", "place", "grow", "grow", "fork", "release", "leave", "leave", "take over"])


@settings(max_examples=80, deadline=None)
@given(commands=st.lists(st.tuples(COMMANDS, st.integers(0, 99)), max_size=60))
def test_contents_follow_their_samples(commands):
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=6 * 512, kept_tokens=KEPT_TOKENS)
    content: dict[Sample, list[int]] = {}
    left: list[list[int]] = []
    for number, (command, pick) in enumerate(commands):
        placed = list(content)
        if command == "place":
            sample = sample_of(number)
            cache.place(sample)
            cache.reserve(10)
            content[sample] = []
        elif command == "take over" and cache.kept:
            source, target = cache.kept[pick % len(cache.kept)], sample_of(number)
            tokens = max(1, len(source.stem.tokens) - pick)
            cache.place(target)
            cache.reserve(tokens)
            cache.fork(source, target, tokens)
            content[target] = source.stem.tokens[:tokens].tolist()
        elif placed and command != "take over":
            sample = placed[pick % len(placed)]
            if command == "grow":
                new = [pick % 3 + 1] * 90
                cache.reserve(sample.cached + len(new))
                write(cache, sample, new)
                content[sample] += new
            elif command == "fork":
                target, tokens = sample_of(number), min(7, sample.cached)
                cache.place(target)
                cache.reserve(10)
                cache.fork(sample, target, tokens)
                content[target] = content[sample][:tokens]
            else:
                if command == "leave":
                    cache.keep(sample, stem_of(content[sample]))
                    left.append(content[sample])
                cache.release(sample)
                del content[sample]
    assert set(cache.samples) == set(content)
    for sample, tokens in content.items():
        keys = cache.keys_NSKLE[:, cache.slot(sample)]
        assert torch.equal(keys[0, 0, : len(tokens), 0], torch.tensor(tokens, dtype=torch.float32))
        assert sample.cached == len(tokens)
        assert (keys[:, :, len(tokens) :] == 0).all()
    assert (cache.keys_NSKLE[:, len(content) :] == 0).all()
    assert torch.equal(cache.keys_NSKLE, -cache.values_NSKLE)
    assert sum(len(each.stem.tokens) for each in cache.kept) <= KEPT_TOKENS
    assert all(each.stem.tokens.tolist() in left for each in cache.kept)
    for each in cache.kept:
        assert all(in_common(each.stem, other.stem) < len(each.stem.tokens) for other in cache.kept if other is not each), "said twice"
    fitting = [tokens for tokens in left if LEAST_SHARED <= len(tokens) <= KEPT_TOKENS]
    if fitting:
        assert any(each.stem.tokens.tolist()[: len(fitting[-1])] == fitting[-1] for each in cache.kept), "the latest stays"


def test_storage_grows_in_key_pads_and_idle_slots_give_much_memory_back():
    cache = KeyValueCache(CONFIG, dtype=torch.float32)
    samples = [sample_of(number) for number in range(3)]
    cache.place(samples[0])
    cache.reserve(1)
    assert cache.keys_NSKLE.shape[3] == 512
    for sample in samples[1:]:
        cache.place(sample)
    cache.reserve(60_000)
    assert cache.keys_NSKLE.shape[3] == 60_416
    for sample in samples:
        cache.release(sample)
    assert cache.keys_NSKLE.numel() == 0


@pytest.mark.parametrize(("samples", "length", "slots"), [(1, 512, 8), (9, 512, 16), (1, 2048, 4), (3, 2048, 4), (1, 8192, 1), (1, 20_000, 1)])
def test_slots_beyond_those_in_use_stay_within_the_bound(samples, length, slots):
    cache = KeyValueCache(CONFIG, dtype=torch.float32, cache_tokens=1 << 13)
    for number in range(samples):
        cache.place(sample_of(number))
    cache.reserve(length)
    storages = (cache.keys_NSKLE, cache.values_NSKLE, cache.experts_NSKLE, cache.expert_weights_NSKLE)
    assert [storage.shape[1] for storage in storages] == [slots] * 4


def kept_of(cache: KeyValueCache, *starts: int, length: int = 100) -> list[int]:
    """Run sequences one after the other; the first tokens of what is kept."""
    for start in starts:
        sample = sample_of(start)
        cache.place(sample)
        cache.reserve(length)
        tokens = list(range(start, start + length))
        write(cache, sample, tokens)
        cache.keep(sample, stem_of(tokens))
        cache.release(sample)
    return [int(each.stem.tokens[0]) for each in cache.kept]


def test_the_longest_unused_goes_first():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, kept_tokens=300)
    assert kept_of(cache, 1, 2, 3) == [1, 2, 3]
    target = sample_of(9)
    cache.place(target)
    cache.reserve(100)
    cache.fork(cache.kept[0], target, 50)
    assert kept_of(cache, 4) == [3, 1, 4]
    assert kept_of(cache, 1, 5) == [4, 1, 5]


def test_little_and_far_too_much_is_not_kept_and_the_number_is_bounded():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, kept_tokens=1 << 14)
    assert kept_of(cache, 1, length=LEAST_SHARED - 1) == []
    assert kept_of(cache, 2, length=(1 << 14) + 1) == []
    starts = [10_000 + 50 * number for number in range(MAX_KEPT + 3)]
    kept = kept_of(cache, *starts, length=LEAST_SHARED)
    assert (len(kept), kept[-1]) == (MAX_KEPT, starts[-1])
    assert all(first < second for first, second in pairwise(kept))


def test_a_longer_sequence_replaces_its_beginning():
    cache = KeyValueCache(CONFIG, dtype=torch.float32, kept_tokens=1000)
    kept_of(cache, 5, length=60)
    kept_of(cache, 5, length=90)
    kept_of(cache, 5, length=70)
    assert [len(each.stem.tokens) for each in cache.kept] == [90]
    cache.clear()
    assert not cache.kept

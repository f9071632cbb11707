"""Slots stay compact, contents follow their samples, and nothing of a former tenant remains."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Sample
from bloomery.models.config import DecoderConfig
from tests.train.builders import decoder

CONFIG: DecoderConfig = decoder().config


def write(cache: KeyValueCache, sample: Sample, tokens: int, value: float) -> None:
    slot = cache.slot(sample)
    cache.keys_NSKLE[:, slot, :, sample.cached : tokens] = value
    cache.values_NSKLE[:, slot, :, sample.cached : tokens] = -value
    sample.cached = tokens


@settings(max_examples=40, deadline=None)
@given(commands=st.lists(st.tuples(st.sampled_from(["place", "place", "grow", "fork", "release"]), st.integers(0, 99)), max_size=40))
def test_contents_follow_their_samples(commands):
    cache = KeyValueCache(CONFIG, dtype=torch.float32)
    content: dict[Sample, list[tuple[int, float]]] = {}
    for number, (command, pick) in enumerate(commands):
        placed = list(content)
        if command == "place":
            sample = Sample("r", number, shared=5, length=600)
            cache.place(sample)
            cache.reserve(10)
            content[sample] = []
            continue
        if not placed:
            continue
        sample = placed[pick % len(placed)]
        if command == "grow":
            cache.reserve(sample.cached + 100)
            content[sample].append((sample.cached + 100, float(number + 1)))
            write(cache, sample, sample.cached + 100, float(number + 1))
        elif command == "fork":
            target = Sample("r", number, shared=min(7, sample.cached), length=600)
            cache.place(target)
            cache.reserve(10)
            cache.fork(sample, target)
            content[target] = [(target.shared, content[sample][0][1])] if target.shared else []
        else:
            cache.release(sample)
            del content[sample]
    assert set(cache.samples) == set(content)
    for sample, parts in content.items():
        keys, start = cache.keys_NSKLE[:, cache.slot(sample)], 0
        for stop, value in parts:
            assert (keys[:, :, start:stop] == value).all()
            start = stop
        assert start == sample.cached
        assert (keys[:, :, start:] == 0).all()
    assert (cache.keys_NSKLE[:, len(content) :] == 0).all()
    assert torch.equal(cache.keys_NSKLE, -cache.values_NSKLE)


def test_storage_grows_in_key_pads_and_an_idle_cache_gives_much_memory_back():
    cache = KeyValueCache(CONFIG, dtype=torch.float32)
    samples = [Sample("r", index, shared=0, length=9) for index in range(3)]
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

"""Whatever becomes of the blocks of a sequence (they are shared, copied, kept, evicted, lost and computed anew), its bits are the trainer's."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from bloomery.infer import attention
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.kernel_probe import probe
from bloomery.models.load import fill, stored_tensors
from bloomery.models.native import attention as native_attention
from bloomery.models.pads import BLOCK_PLACES
from tests.infer.builders import Adapters, Answer, adapter, full_logprobs, generate, prompt, request
from tests.train.builders import decoder

BLOCK = BLOCK_PLACES
VERSIONS = ("base", "v1")

MakeSampler = Callable[[Limits], Sampler]


def windowed(dtype: torch.dtype) -> Decoder:
    """Every other layer sees a few tokens back, over the borders of blocks."""
    plain = decoder(dtype=dtype)
    other = Decoder(replace(plain.config, windows=(BLOCK + 9, None)), dtype=dtype).requires_grad_(False)
    fill(other, stored_tensors(plain))
    return other


@pytest.fixture(scope="module", params=["kernels", "torch", "torch, one sample at a time", "bfloat16", "bfloat16, one sample at a time"])
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    """Attention by kernels, and by torch where there are none or another dtype; both sides of a comparison are computed alike."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in request.param:
            patch.setattr(native_attention, "attends", lambda *tensors: False)
        if "one" in request.param:
            patch.setattr(attention, "_NEAR_BYTES", 1)
        yield windowed(torch.bfloat16 if "bfloat16" in request.param else torch.float32)


@pytest.fixture
def sampler(model: Decoder) -> MakeSampler:
    form, weights = probe(model).form, {"v1": adapter(model, 1)}
    return lambda limits: Sampler(model, Adapters(model, weights), limits, form=form)


def assert_the_trainers(model: Decoder, tokens: list[int], answer: Answer, version: str = "base") -> None:
    weights = None if version == "base" else adapter(model, 1)
    assert answer.tokens
    for index, sampled in answer.tokens.items():
        whole = [*tokens, *sampled]
        assert answer.logprobs[index] == full_logprobs(model, whole, weights)[len(tokens) - 1 :].tolist(), index


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 5 * BLOCK + 7])
def test_forks_begin_and_go_on_anywhere_in_a_block(model: Decoder, sampler: MakeSampler, length: int) -> None:
    engine = sampler(Limits(slots=6, token_budget=64))
    asks = [request(f"r{number}", prompt(length), num_samples=3, seed=number, max_tokens=BLOCK + 3) for number in range(2)]
    found = generate(engine, *asks)
    for each in found.values():
        assert_the_trainers(model, prompt(length), each)
    assert len({tuple(tokens) for each in found.values() for tokens in each.tokens.values()}) == 6
    assert engine.tokens_prefilled == length - 1


def test_a_group_whose_prompt_fits_once_runs_together(model: Decoder, sampler: MakeSampler) -> None:
    tokens = prompt(8 * BLOCK + 5)
    engine = sampler(Limits(slots=8, token_budget=600, cache_tokens=(8 + 8 * 2) * BLOCK, kept_tokens=0))
    answer = generate(engine, request("group", tokens, num_samples=8, max_tokens=BLOCK))["group"]
    assert_the_trainers(model, tokens, answer)
    assert (engine.preemptions, engine.tokens_prefilled) == (0, len(tokens) - 1)


def test_who_loses_his_blocks_in_the_middle_says_the_same(model: Decoder, sampler: MakeSampler) -> None:
    engine = sampler(Limits(slots=8, token_budget=48, cache_tokens=13 * BLOCK))
    asks = [request(f"r{n}", prompt(40 + 23 * n), num_samples=2, seed=n, max_tokens=50, version=VERSIONS[n % 2]) for n in range(3)]
    found = generate(engine, *asks)
    assert engine.preemptions > 0
    for each in asks:
        assert_the_trainers(model, each.prompt.numpy().tolist(), found[each.request_id], each.weights.version)


def test_what_is_found_after_a_part_of_it_had_to_go_says_the_same(model: Decoder, sampler: MakeSampler) -> None:
    engine = sampler(Limits(slots=2, token_budget=600, cache_tokens=12 * BLOCK))
    first, other = prompt(6 * BLOCK + 9), prompt(7 * BLOCK)
    generate(engine, request("first", first, max_tokens=5))
    generate(engine, request("other", other, max_tokens=5))
    for version, found in (("base", 4 * BLOCK), ("v1", 0)):
        answer = generate(engine, request(f"again {version}", first, max_tokens=BLOCK, version=version, seed=9))[f"again {version}"]
        assert_the_trainers(model, first, answer, version)
        assert answer.found == found


@pytest.mark.slow
def test_many_who_come_and_go_through_a_small_cache_all_get_the_bits_of_whole_forwards(model: Decoder, sampler: MakeSampler) -> None:
    engine = sampler(Limits(slots=5, token_budget=52, cache_tokens=24 * BLOCK))
    stems = [prompt(3 * BLOCK + 11, seed) for seed in range(2)]
    prompts = {f"r{n}": [*stems[n % 2][: 20 + 17 * n], *prompt(1 + 9 * n % 40, n)] for n in range(12)}
    asks = [request(f"r{n}", prompts[f"r{n}"], num_samples=1 + n % 3, seed=n, max_tokens=9 + 5 * n, version=VERSIONS[n // 2 % 2]) for n in range(12)]
    found: dict[str, Answer] = {}
    for first, second, third in zip(asks[::3], asks[1::3], asks[2::3], strict=True):
        found |= generate(engine, first, second, third)
    for each in asks:
        assert_the_trainers(model, prompts[each.request_id], found[each.request_id], each.weights.version)
    assert engine.cache_usage == 0

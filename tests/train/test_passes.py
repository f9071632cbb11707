"""Several runs in one pass: each keeps the bits that it has alone."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from bloomery.models import attention, native
from bloomery.models.decoder import Decoder
from bloomery.models.families import parse_config
from bloomery.train import batch, passes
from bloomery.train.passes import Share, compute, goes_with
from bloomery.train.run import TrainableRun
from bloomery.types.operations import ForwardBackward, LoraSpec, RunSpec
from tests.models.builders import NEMOTRON
from tests.train import builders
from tests.train.builders import BASE_HASH, VOCAB, datum, learn, supervised

RANKS = (1, 2, 3, 8, 16, 17, 33, 64, 128)
LENGTHS = (1, 3, 4, 15, 17, 31, 64, 65, 100, 130)
LONG = (500, 511, 512, 513, 600, 767, 768, 769, 900)


class Tenant:
    """A run that has learned something already, and a batch of its own."""

    def __init__(self, model, number: int, lora: LoraSpec, operation: ForwardBackward) -> None:
        spec = RunSpec(run_id=f"run-{number}", base_hash=BASE_HASH, lora=lora, micro_batch_tokens=1024)
        self.run = TrainableRun(model, spec, builders.MemoryShelf())
        masters = self.run.weights.masters
        masters.add_(torch.randn(masters.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
        self.run.weights.refresh()
        self.operation = operation

    def share(self) -> Share:
        return next(self.run.execute(self.operation))

    def numbers(self, share: Share, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and gradients of a share that was computed."""
        share.weights.gather_gradients()
        gradients = share.weights.gradients.clone()
        share.weights.clear_gradients()
        return logprobs.clone(), gradients


def random_tenant(model, chance: random.Random, number: int) -> Tenant:
    rank, unembed, attn = chance.choice(RANKS), chance.random() < 0.7, chance.random() < 0.8
    return Tenant(model, number, LoraSpec(rank=rank, seed=number, train_unembed=unembed, train_attn=attn), batch_of(chance, number))


def batch_of(chance: random.Random, number: int) -> ForwardBackward:
    kind = chance.random()
    if kind < 0.15:
        lengths = [chance.choice(LONG)]
    elif kind < 0.4:
        # So few rows that a product alone takes another kernel than in company, were they not padded.
        lengths = [chance.randint(1, 3)]
    else:
        lengths = [chance.choice(LENGTHS) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.6:
        return learn(supervised(lengths, seed=number))
    noise = np.random.default_rng(number)
    rollouts = [
        datum(noise.integers(0, VOCAB, n), noise.integers(0, VOCAB, n), logprobs=noise.normal(-3, 1, n), advantages=noise.normal(0, 1, n))
        for n in lengths
    ]
    return learn(tuple(rollouts), loss="importance_sampling")


def together(tenants: Sequence[Tenant]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    shares = [tenant.share() for tenant in tenants]
    for tenant, share, computed in zip(tenants, shares, compute(shares), strict=True):
        yield tenant.numbers(share, computed.logprobs_RK)


def differences(model, *, count: int, seed: int) -> list[str]:
    """Who has other numbers in company than alone."""
    chance = random.Random(seed)
    return apart([random_tenant(model, chance, number) for number in range(count)])


def apart(tenants: Sequence[Tenant]) -> list[str]:
    """The same, of these."""
    company = list(together(tenants))
    found = []
    for tenant, (logprobs, gradients) in zip(tenants, company, strict=True):
        alone_logprobs, alone_gradients = next(together([tenant]))
        if not (torch.equal(logprobs, alone_logprobs) and torch.equal(gradients, alone_gradients)):
            found.append(tenant.run.spec.run_id)
    return found


@pytest.fixture(scope="module")
def model():
    return builders.decoder()


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (5, 1), (9, 2), (32, 3)])
def test_a_run_has_the_bits_in_company_that_it_has_alone(model, count, seed):
    assert differences(model, count=count, seed=seed) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[64] * 8, [5, 64, 64, 64, 7, 7, 64], [1] * 3])
def test_updates_that_are_one_batch_have_the_bits_that_each_has_alone(lengths, dtype):
    model = builders.decoder(dtype=dtype)
    tenants = [
        Tenant(model, number, LoraSpec(rank=8, seed=number), learn(supervised([length], seed=number))) for number, length in enumerate(lengths)
    ]
    assert apart(tenants) == []


def test_company_changes_no_bit_in_half_precision():
    assert differences(builders.decoder(dtype=torch.bfloat16), count=6, seed=4) == []


def test_company_changes_no_bit_of_a_model_with_experts():
    assert differences(builders.decoder(experts=True), count=6, seed=5) == []


def test_company_changes_no_bit_of_a_model_with_states():
    config = parse_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M*M-", **NEMOTRON})
    model = Decoder(config, dtype=torch.float32).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert differences(model, count=6, seed=5) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
def test_random_company_changes_no_bit(model, seed):
    assert differences(model, count=random.Random(seed).choice((3, 8, 16, 32)), seed=seed) == []


def test_a_pad_that_is_too_small_is_noticed(model, monkeypatch):
    # Planted on purpose: then a run of one row is computed by another kernel alone than in company, where the kernels are torch's.
    monkeypatch.setattr(native, "available", lambda *tensors: False)
    for module in (attention, batch, passes):
        monkeypatch.setattr(module, "ROW_PAD", 1)
    assert differences(model, count=32, seed=3) != []


@pytest.mark.skipif(not native.multiplies(torch.empty(0)), reason="no native products here")
def test_a_product_that_depends_on_the_number_of_rows_is_noticed(model, monkeypatch):
    multiply = native.product_unpacked

    def worse(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return multiply(x_RI, weight_OI) * (1 + 2**-20 * (len(x_RI) > 100))

    monkeypatch.setattr(native, "product_unpacked", worse)
    assert differences(model, count=8, seed=3) != []


def test_a_pass_has_one_decoder_and_one_direction(model):
    one, two, other = builders.run(model), builders.run(model), builders.run(builders.decoder())
    share = next(one.execute(learn(supervised([9]))))
    assert goes_with(share, next(two.execute(learn(supervised([5])))))
    assert not goes_with(share, next(two.execute(learn(supervised([5]), backward=False))))
    assert not goes_with(share, next(other.execute(learn(supervised([5])))))


def test_a_pass_that_is_computed_again_adds_no_gradient_twice(model):
    tenant = random_tenant(model, random.Random(7), 7)
    share = tenant.share()
    compute([share])
    twice = tenant.numbers(share, compute([share])[0].logprobs_RK)
    assert torch.equal(twice[1], next(together([tenant]))[1])

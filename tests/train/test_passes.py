"""Several runs in one pass: each keeps the bits that it has alone."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from bloomery.models import attention, native
from bloomery.models.decoder import Decoder
from bloomery.models.families import parse_config
from bloomery.train import batch, passes
from bloomery.train.passes import Share, compute, goes_with
from bloomery.types.losses import CUSTOM, LOSSES, TARGETS
from bloomery.types.operations import LoraSpec
from tests.models.builders import NEMOTRON
from tests.train import builders
from tests.train.builders import finish, learn, supervised
from tests.train.company import PARTS, RANKS, Tenant, apart, random_company, together


def with_states() -> Decoder:
    config = parse_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M*M-", **NEMOTRON})
    model = Decoder(config, dtype=torch.float32).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


MODELS: dict[str, Callable[[], Decoder]] = {
    "dense": builders.decoder,
    "half": lambda: builders.decoder(dtype=torch.bfloat16),
    "experts at the end": lambda: builders.decoder(experts=True),
    "experts before": lambda: builders.decoder(experts=True, sparse_layer=0),
    "states": with_states,
}
COUNTS = (3, 8, 16, 32)


@pytest.fixture(scope="module")
def model():
    return builders.decoder()


@pytest.mark.parametrize(("count", "seed"), [(2, 3), (5, 1), (9, 2), (32, 0)])
def test_a_run_has_the_bits_in_company_that_it_has_alone(model, count, seed):
    assert apart(random_company(model, count=count, seed=seed)) == []


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "dense"])
def test_company_changes_no_bit_of_models_of_other_kinds(kind):
    assert apart(random_company(MODELS[kind](), count=16, seed=5)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
@pytest.mark.parametrize("kind", MODELS)
def test_random_company_changes_no_bit(kind, seed):
    assert apart(random_company(MODELS[kind](), count=random.Random(seed).choice(COUNTS), seed=seed)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[64] * 8, [5, 64, 64, 64, 7, 7, 64], [1] * 3])
def test_updates_that_are_one_batch_have_the_bits_that_each_has_alone(lengths, dtype):
    model = builders.decoder(dtype=dtype)
    tenants = [
        Tenant(model, number, LoraSpec(rank=8, seed=number), learn(supervised([length], seed=number))) for number, length in enumerate(lengths)
    ]
    assert apart(tenants) == []


def test_the_company_is_of_every_kind():
    """What is drawn above: else what it shows would be less than it says."""
    tenants = random_company(builders.decoder(experts=True), count=32, seed=0)
    specs, operations = [tenant.run.spec.lora for tenant in tenants], [tenant.operation for tenant in tenants]
    assert {operation.loss for operation in operations} == {*LOSSES, CUSTOM}
    assert {operation.backward for operation in operations if operation.loss == CUSTOM} == {True, False}
    assert {tuple(part for part in ("attn", "mlp", "unembed") if getattr(spec, f"train_{part}")) for spec in specs} == set(PARTS)
    assert {spec.rank for spec in specs} == {0, *RANKS}
    data = [one for operation in operations for one in operation.data]
    assert {one.inputs[TARGETS].shape[1:] for one in data} >= {(), (2,), (5,)}
    spans = (range(1, 4), range(4, 257), range(257, 513), range(513, 769), range(769, 1025))
    assert all(any(one.tokens.shape[0] in span for one in data) for span in spans)
    assert {(one.routing is not None, one.routing_weights is not None) for one in data} == {(False, False), (True, False), (True, True)}
    assert {(each.return_routing, each.return_routing_weights) for each in operations} == {(False, False), (True, False), (True, True)}
    teams: list[list[Share]] = []
    learned = [bool(outcome.gradients.any()) for outcome in together(tenants, teams)]
    assert learned.count(True) > len(tenants) / 2
    large = [team for team in teams if len(team) > 5]
    assert {team[0].backward for team in large} == {True, False}
    widths = [Counter(share.packed.targets_RK.shape[1] for share in team) for team in large]
    assert all(len(counts) > 1 for counts in widths)
    assert any(runs > 1 for counts in widths for width, runs in counts.items() if width > 1)


def test_a_pad_that_is_too_small_is_noticed(model, monkeypatch):
    # Planted on purpose: then a run of one row is computed by another kernel alone than in company, where the kernels are torch's.
    monkeypatch.setattr(native, "available", lambda *tensors: False)
    for module in (attention, batch, passes):
        monkeypatch.setattr(module, "ROW_PAD", 1)
    assert apart(random_company(model, count=32, seed=0)) != []


@pytest.mark.skipif(not native.multiplies(torch.empty(0)), reason="no native products here")
def test_a_product_that_depends_on_the_number_of_rows_is_noticed(model, monkeypatch):
    multiply = native.product_unpacked

    def worse(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return multiply(x_RI, weight_OI) * (1 + 2**-20 * (len(x_RI) > 100))

    monkeypatch.setattr(native, "product_unpacked", worse)
    assert apart(random_company(model, count=8, seed=3)) != []


def test_a_pass_has_one_decoder_and_one_direction(model):
    one, two, other = builders.run(model), builders.run(model), builders.run(builders.decoder())
    share = next(one.execute(learn(supervised([9]))))
    assert goes_with(share, next(two.execute(learn(supervised([5])))))
    assert not goes_with(share, next(two.execute(learn(supervised([5]), backward=False))))
    assert not goes_with(share, next(other.execute(learn(supervised([5])))))


def test_a_pass_that_is_computed_again_adds_no_gradient_twice(model):
    twice, once = builders.run(model), builders.run(model)
    share = next(twice.execute(learn(supervised([9]))))
    compute([share])
    compute([share])
    twice.weights.gather_gradients()
    finish(once, learn(supervised([9])))
    assert once.weights.gradients.any()
    assert torch.equal(twice.weights.gradients, once.weights.gradients)

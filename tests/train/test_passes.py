"""Several runs in one pass: each keeps the bits that it has alone."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from bloomery.models.decoder import Decoder
from bloomery.models.families import parse_config
from bloomery.train.passes import compute, goes_with
from bloomery.types.losses import CUSTOM, LOSSES, TARGETS
from bloomery.types.operations import LoraSpec
from tests.models.builders import NEMOTRON
from tests.train import builders
from tests.train.builders import finish, learn, supervised
from tests.train.company import BORDERS, EVERY_KIND, LEARNING_RANKS, PARTS, RANKS, Compared, Tenant, apart, compared, random_company


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


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(2, 3), (5, 1), (9, 2)])
def test_a_run_has_the_bits_in_company_that_it_has_alone(model, count, seed):
    assert apart(random_company(model, count=count, seed=seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count", "seed"), [("dense", 32, 11), *((kind, EVERY_KIND, 11) for kind in MODELS)])
def test_company_of_every_kind_changes_no_bit(kind, count, seed):
    tenants = random_company(MODELS[kind](), count=count, seed=seed)
    found = compared(tenants)
    assert found.apart == []
    # Of these very runs: else what they show would be less than it says.
    assert_all_that_is_dealt_met(tenants, found)
    assert_all_that_is_drawn_is_there(tenants)
    assert_passes_are_large_and_mixed(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
@pytest.mark.parametrize("kind", MODELS)
def test_random_company_changes_no_bit(kind, seed):
    tenants = random_company(MODELS[kind](), count=random.Random(seed).choice(COUNTS), seed=seed)
    found = compared(tenants)
    assert found.apart == []
    if len(tenants) >= EVERY_KIND:
        assert_all_that_is_dealt_met(tenants, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[64] * 8, [5, 64, 64, 64, 7, 7, 64], [1] * 3])
def test_updates_that_are_one_batch_have_the_bits_that_each_has_alone(lengths, dtype):
    model = builders.decoder(dtype=dtype)
    tenants = [
        Tenant(model, number, LoraSpec(rank=8, seed=number), learn(supervised([length], seed=number))) for number, length in enumerate(lengths)
    ]
    assert apart(tenants) == []


def assert_all_that_is_dealt_met(tenants: list[Tenant], found: Compared) -> None:
    """Every loss, part and rank, and every border in a backward that others share."""
    specs = [tenant.run.spec.lora for tenant in tenants]
    assert {tenant.operation.loss for tenant in tenants} == {*LOSSES, CUSTOM}
    assert {tuple(part for part in ("attn", "mlp", "unembed") if getattr(spec, f"train_{part}")) for spec in specs} == set(PARTS)
    assert {spec.rank for spec in specs} >= set(RANKS)
    shared = [share for team in found.teams if len(team) > 1 for share in team]
    assert {share.weights.spec.rank for share in shared} == set(RANKS)
    assert {length for share in shared if share.backward for length in share.packed.lengths} >= set(BORDERS)
    learned = {spec.rank for spec, learned in zip(specs, found.learned, strict=True) if learned}
    assert found.learned.count(True) > len(tenants) / 2
    assert learned >= set(LEARNING_RANKS)


def assert_all_that_is_drawn_is_there(tenants: list[Tenant]) -> None:
    """What comes up with these seeds, though it need not."""
    operations, sparse = [tenant.operation for tenant in tenants], tenants[0].run.weights.decoder.config.routing is not None
    assert 0 in {tenant.run.spec.lora.rank for tenant in tenants}
    assert {operation.backward for operation in operations if operation.loss == CUSTOM} == {True, False}
    data = [one for operation in operations for one in operation.data]
    assert {one.inputs[TARGETS].shape[1:] for one in data} >= {(), (2,), (5,)}
    spans = (range(1, 4), range(4, 257), range(257, 513), range(513, 769), range(769, 1025))
    assert all(any(one.tokens.shape[0] in span for one in data) for span in spans)
    said = {(False, False), (True, False), (True, True)} if sparse else {(False, False)}
    assert {(one.routing is not None, one.routing_weights is not None) for one in data} == said
    assert {(each.return_routing, each.return_routing_weights) for each in operations} == said


def assert_passes_are_large_and_mixed(found: Compared) -> None:
    """The largest backward has several widths of targets, and several runs of one; forwards have company too."""
    largest = {backward: max((team for team in found.teams if team[0].backward is backward), key=len, default=[]) for backward in (True, False)}
    assert len(largest[False]) > 1
    assert any(length > 512 for share in largest[False] for length in share.packed.lengths)
    assert len(largest[True]) > len(found.learned) / 4
    widths = Counter(share.packed.targets_RK.shape[1] for share in largest[True])
    assert len(widths) > 1
    assert any(width > 1 and runs > 1 for width, runs in widths.items())


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

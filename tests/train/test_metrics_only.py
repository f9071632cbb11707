"""Operations that ask for metrics alone: the same bits of metrics, gradients and weights, and nothing is made for rows without loss."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bloomery.models.decoder import Decoder
from bloomery.train.passes import compute
from bloomery.train.run import TrainableRun
from bloomery.types.losses import LOSSES, RATIO_MASK
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult, LoraSpec
from bloomery.types.wire import encode
from tests.train import builders
from tests.train.builders import VOCAB, datum, finish, learn, step, supervised
from tests.train.company import Tenant, together

LENGTHS = [9, 30, 4, 17, 1]
BUDGET = 40
"""Several micro-batches per operation."""
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "dense, LoRA": ({}, 8),
    "dense, all parameters": ({}, 0),
    "experts, LoRA": ({"experts": True}, 8),
    "experts, all parameters": ({"experts": True}, 0),
    "dense in bfloat16, all parameters": ({"dtype": torch.bfloat16}, 0),
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return builders.decoder()


def metrics_only(operation: ForwardBackward) -> ForwardBackward:
    return msgspec.structs.replace(operation, return_logprobs=False)


def gradients(run: TrainableRun) -> torch.Tensor:
    return run.weights.gradients.clone()


def without_outputs(result: object) -> ForwardBackwardResult:
    assert isinstance(result, ForwardBackwardResult), result
    return msgspec.structs.replace(result, outputs=({},) * len(result.outputs))


def rollouts(lengths: list[int], *, masks: bool) -> tuple[Datum, ...]:
    """Sampled data of which a third has no advantage; every other one of those is in the ratio of its sequence, where `masks` say so."""
    noise = np.random.default_rng(3)
    data = []
    for length in lengths:
        inputs = {"logprobs": noise.normal(-5, 1, length), "advantages": noise.normal(0, 1, length) * (noise.random(length) < 0.7)}
        if masks:
            inputs[RATIO_MASK] = (inputs["advantages"] != 0) | (np.arange(length) % 2 == 0)
        data.append(datum(noise.integers(0, VOCAB, length), noise.integers(0, VOCAB, length), **inputs))
    return tuple(data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_the_same_bits_whether_it_asks_for_logprobs_or_not(kind: str) -> None:
    form, rank = KINDS[kind]
    asking, silent = (builders.run(builders.decoder(**form), budget=BUDGET, rank=rank) for _ in range(2))
    for seed in range(3):
        operation = learn(supervised(LENGTHS, seed=seed))
        assert finish(silent, metrics_only(operation)) == without_outputs(finish(asking, operation))
        assert torch.equal(gradients(silent), gradients(asking))
        assert finish(silent, step()) == finish(asking, step())
    assert silent.weights_digest() == asking.weights_digest()


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_same_metrics_and_gradients(model: Decoder, name: str, backward: bool) -> None:
    sampled = "logprobs" in LOSSES[name].inputs
    data = rollouts(LENGTHS, masks=RATIO_MASK in LOSSES[name].masks) if sampled else supervised(LENGTHS)
    asking, silent = builders.run(model, budget=BUDGET), builders.run(model, budget=BUDGET)
    operation = learn(data, loss=name, backward=backward)
    assert finish(silent, metrics_only(operation)) == without_outputs(finish(asking, operation))
    assert torch.equal(gradients(silent), gradients(asking))
    assert bool(gradients(silent).any()) == backward


def test_tenants_that_ask_for_different_things_share_a_pass(model: Decoder) -> None:
    tenants = [Tenant(model, number, LoraSpec(rank=4 + number, seed=number), learn(supervised([20 + number, 7], seed=number))) for number in range(4)]
    alone, teams = [together([tenant])[0] for tenant in tenants], []
    for tenant in tenants[::2]:
        tenant.operation = metrics_only(tenant.operation)
    for number, (found, whole) in enumerate(zip(together(tenants, teams), alone, strict=True)):
        told = msgspec.msgpack.decode(whole.result, type=ForwardBackwardResult)
        assert found.result == encode(told if number % 2 else without_outputs(told))
        assert torch.equal(found.gradients, whole.gradients)
    assert [len(team) for team in teams] == [4]


@pytest.mark.parametrize("backward", [True, False])
def test_rows_without_loss_are_not_finished(model: Decoder, monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    finished: list[int] = []
    original = Decoder.finish
    monkeypatch.setattr(Decoder, "finish", lambda self, trunk, *rest: finished.append(len(trunk.x_RD)) or original(self, trunk, *rest))
    operation = learn(supervised([30, 30]), backward=backward)
    compute([next(builders.run(model).execute(operation))])
    everything = sum(finished)
    finished.clear()
    compute([next(builders.run(model).execute(metrics_only(operation)))])
    # A third of the rows has no loss.
    assert (everything, finished) == (60, [40])


def test_soft_targets_and_data_without_any_loss(model: Decoder) -> None:
    noise = np.random.default_rng(5)
    weights = noise.normal(size=(6, 3)) * np.array([[0], [1], [1], [0], [1], [1]])
    soft = datum(noise.integers(0, VOCAB, 6), noise.integers(0, VOCAB, (6, 3)), weights=weights)
    for data in ((soft, *supervised([8])), supervised([8, 5], weight=0.0)):
        asking, silent = builders.run(model), builders.run(model)
        assert finish(silent, metrics_only(learn(data))) == without_outputs(finish(asking, learn(data)))
        assert torch.equal(gradients(silent), gradients(asking))
        assert silent.at_rest == asking.at_rest


def test_the_routing_is_told_without_logprobs_too() -> None:
    model = builders.decoder(experts=True)
    operation = msgspec.structs.replace(learn(supervised(LENGTHS)), return_routing=True)
    whole, told = (finish(builders.run(model, budget=BUDGET), each) for each in (operation, metrics_only(operation)))
    assert isinstance(whole, ForwardBackwardResult)
    assert isinstance(told, ForwardBackwardResult)
    assert told.outputs == tuple({"routing": output["routing"]} for output in whole.outputs)

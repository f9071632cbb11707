"""Routing of a mixture of experts: reported by a forward, replayed by another."""

import msgspec
import numpy as np
import pytest
import torch

from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult
from bloomery.types.routing import RoutingShape, check_routing
from tests.train import builders
from tests.train.builders import finish, gradients, learn, step, supervised

SHAPE = RoutingShape(sparse_layers=(1,), top_k=2, experts=4)


@pytest.fixture(scope="module")
def model():
    return builders.decoder(experts=True)


def asking(data: tuple[Datum, ...], *, backward: bool = True) -> ForwardBackward:
    return msgspec.structs.replace(learn(data, backward=backward), return_routing=True)


def routed(data: tuple[Datum, ...], routing: list[np.ndarray]) -> tuple[Datum, ...]:
    return tuple(msgspec.structs.replace(datum, routing=Array.of(chosen)) for datum, chosen in zip(data, routing, strict=True))


def routing_of(result: ForwardBackwardResult) -> list[np.ndarray]:
    return [output["routing"].numpy() for output in result.outputs]


def test_a_forward_reports_the_experts_of_every_token(model):
    data = supervised([9, 30, 4])
    found = routing_of(finish(builders.run(model, budget=32), asking(data, backward=False)))
    assert [chosen.shape for chosen in found] == [(9, 1, 2), (30, 1, 2), (4, 1, 2)]
    for datum, chosen in zip(data, found, strict=True):
        check_routing(Array.of(chosen), datum.tokens.shape[0], SHAPE, "routing")
    assert "routing" not in finish(builders.run(model), learn(data)).outputs[0]


def test_replaying_the_own_routing_changes_no_bit(model):
    data = supervised([9, 30, 4])
    free, replayed = builders.run(model), builders.run(model)
    result = finish(free, asking(data))
    again = finish(replayed, asking(routed(data, routing_of(result))))
    assert again == result
    for name, gradient in gradients(free).items():
        assert torch.equal(gradient, gradients(replayed)[name])


def test_a_given_routing_is_followed_and_reaches_the_experts_it_names(model):
    data = supervised([12])
    elsewhere = np.tile(np.array([[[0, 3]]], np.int32), (12, 1, 1))
    trained = builders.run(model)
    result = finish(trained, asking(routed(data, [elsewhere])))
    assert np.array_equal(routing_of(result)[0], elsewhere)
    assert not np.array_equal(result.outputs[0]["logprobs"].numpy(), finish(builders.run(model), learn(data)).outputs[0]["logprobs"].numpy())
    finish(trained, step())
    finish(trained, learn(routed(data, [elsewhere])))
    touched = gradients(trained)["layers.1.mlp.down_proj.lora_A"].abs().sum((1, 2))
    assert (touched[[0, 3]] > 0).all()
    assert (touched[[1, 2]] == 0).all()


def test_tokens_without_a_routing_are_routed_freely(model):
    data = supervised([12])
    free = routing_of(finish(builders.run(model), asking(data)))[0]
    half = free.copy()
    half[6:] = -1
    half[:6] = [2, 1]
    found = routing_of(finish(builders.run(model), asking(routed(data, [half]))))[0]
    assert np.array_equal(found[:6], half[:6])
    # Later tokens see other neighbours now, but nobody told them where to go.
    assert (found[6:] >= 0).all()


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (np.zeros((5, 1, 2), np.int32), r"expected integers \[4, 1, 2\]"),
        (np.zeros((4, 1, 2), np.float32), "expected integers"),
        (np.full((4, 1, 2), [0, 4], np.int32), "experts from 0 to 3"),
        (np.full((4, 1, 2), [-1, 1], np.int32), "or -1 for all of a layer"),
        (np.full((4, 1, 2), [1, 1], np.int32), "one expert twice"),
    ],
)
def test_a_routing_that_means_nothing_is_refused(routing, message):
    with pytest.raises(InvalidInput, match=message):
        check_routing(Array.of(routing), 4, SHAPE, "routing")


def test_a_dense_model_takes_none():
    with pytest.raises(InvalidInput, match="no experts"):
        check_routing(Array.of(np.zeros((4, 1, 2), np.int32)), 4, None, "routing")

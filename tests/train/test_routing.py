"""Routing of a mixture of experts, with its weights: reported by a forward, replayed by another."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from bloomery.services.engines.models import Size
from bloomery.types.arrays import Array
from bloomery.types.checks import check_forward_backward
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult
from bloomery.types.routing import RoutingShape, check_routing, check_routing_weights
from tests.train import builders
from tests.train.builders import finish, gradients, learn, logprobs, step, supervised

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


def weighing(data: tuple[Datum, ...], *, backward: bool = True) -> ForwardBackward:
    return msgspec.structs.replace(asking(data, backward=backward), return_routing_weights=True)


def weighed(data: tuple[Datum, ...], routing: list[np.ndarray], weights: list[np.ndarray]) -> tuple[Datum, ...]:
    return tuple(
        msgspec.structs.replace(datum, routing_weights=Array.of(values)) for datum, values in zip(routed(data, routing), weights, strict=True)
    )


def weights_of(result: ForwardBackwardResult) -> list[np.ndarray]:
    return [output["routing_weights"].numpy() for output in result.outputs]


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
        (np.zeros((5, 1, 2), np.int32), r"expected integers \[4, 1, 2\]: tokens, sparse layers, experts"),
        (np.zeros((4, 1, 2), np.float32), "expected integers"),
        (np.full((4, 1, 2), [0, 4], np.int32), "experts from 0 to 3"),
        (np.full((4, 1, 2), [-1, 1], np.int32), "or -1 for all of a layer"),
        (np.full((4, 1, 2), [1, 1], np.int32), "one expert twice in one layer: name 2 different ones"),
    ],
)
def test_a_routing_that_means_nothing_is_refused(routing, message):
    with pytest.raises(InvalidInput, match=message):
        check_routing(Array.of(routing), 4, SHAPE, "routing")


def test_a_dense_model_takes_none():
    with pytest.raises(InvalidInput, match="no experts"):
        check_routing(Array.of(np.zeros((4, 1, 2), np.int32)), 4, None, "routing")


def test_a_forward_reports_what_the_experts_were_weighed_with(model):
    data = supervised([9, 30, 4])
    result = finish(builders.run(model, budget=32), weighing(data, backward=False))
    assert [set(output) for output in result.outputs] == [{"logprobs", "elementwise_loss", "routing", "routing_weights"}] * 3
    assert routing_of(result)[0].tolist() == routing_of(finish(builders.run(model), asking(data, backward=False)))[0].tolist()
    for datum, chosen, weights in zip(data, routing_of(result), weights_of(result), strict=True):
        check_routing_weights(Array.of(weights), Array.of(chosen), datum.tokens.shape[0], SHAPE, "routing_weights")
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol=1e-6)
    assert "routing_weights" not in finish(builders.run(model), asking(data)).outputs[0]


def test_given_weights_are_used_as_they_are_and_told_back(model):
    data = supervised([12, 9])
    free = finish(builders.run(model), weighing(data))
    same = finish(builders.run(model), weighing(weighed(data, routing_of(free), weights_of(free))))
    assert same == free
    other = [weights * np.float32([0.5, 2.0]) for weights in weights_of(free)]
    moved = finish(builders.run(model), weighing(weighed(data, routing_of(free), other)))
    assert all(map(np.array_equal, weights_of(moved), other))
    assert not any(map(np.array_equal, logprobs(moved), logprobs(free)))


@pytest.mark.parametrize("rank", [0, 8])
def test_no_gradient_goes_through_given_weights(model, rank):
    """Neither into the router, nor through it into the layers below; experts, and whatever lies above, learn as ever."""
    data = supervised([12])
    told = finish(builders.run(model), weighing(data))
    experts_alone, both = builders.run(model, rank=rank), builders.run(model, rank=rank)
    if rank:
        for trained in (experts_alone, both):
            # The first factors get no gradient while the second ones are 0.
            builders.train(trained, [learn(data), step()])
    finish(experts_alone, learn(routed(data, routing_of(told))))
    finish(both, learn(weighed(data, routing_of(told), weights_of(told))))
    through, past = gradients(experts_alone), gradients(both)
    below = [name for name in through if name.startswith("layers.0.") or "layers.1.self_attn." in name]
    assert below
    assert not any(torch.equal(through[name], past[name]) for name in below)
    assert all(past[name].any() for name in below)
    if rank == 0:
        (router,) = (name for name in through if name.endswith("mlp.router"))
        assert through[router].any()
        assert not past[router].any()
        assert all(torch.equal(through[name], past[name]) for name in through if name.startswith("layers.1.mlp.") and name != router)


def test_data_with_weights_leave_others_of_their_batch_alone(model):
    data = supervised([12, 9, 30])
    free = finish(builders.run(model), weighing(data))
    elsewhere = [np.full((len(chosen), 1, 2), [0, 3], np.int32) for chosen in routing_of(free)]
    other = [weights * np.float32(0.5) for weights in weights_of(free)]
    mixed = (*weighed(data[:1], elsewhere[:1], other[:1]), *routed(data[1:2], elsewhere[1:2]), data[2])
    together = finish(builders.run(model), weighing(mixed))
    for number, datum in enumerate(mixed):
        assert finish(builders.run(model), weighing((datum,))).outputs == (together.outputs[number],)
    assert np.array_equal(weights_of(together)[0], other[0])
    assert not np.array_equal(weights_of(together)[1], other[1])
    assert together.outputs[2] == free.outputs[2]


def test_where_experts_are_free_the_router_weighs(model):
    data = supervised([12])
    free = finish(builders.run(model), weighing(data))
    chosen, weights = routing_of(free)[0].copy(), weights_of(free)[0].copy()
    chosen[6:], weights[6:] = -1, 0
    assert finish(builders.run(model), weighing(weighed(data, [chosen], [weights]))) == free


def test_weights_are_rounded_to_the_compute_dtype():
    model, data = builders.decoder(dtype=torch.bfloat16, experts=True), supervised([12])
    free = finish(builders.run(model), weighing(data))
    shifted = [weights * np.float32(1 + 2**-12) for weights in weights_of(free)]
    assert finish(builders.run(model), weighing(weighed(data, routing_of(free), shifted))) == free


ROUTED = np.array([[[0, 1]], [[2, 3]], [[-1, -1]], [[1, 0]]], np.int32)
WEIGHED = np.array([[[0.5, 0.5]], [[1.0, 0.0]], [[0, 0]], [[0.25, 2.0]]], np.float32)


def test_weights_that_fit_are_taken_and_negative_ones_where_the_model_has_them():
    check_routing_weights(Array.of(WEIGHED), Array.of(ROUTED), 4, SHAPE, "routing_weights")
    check_routing_weights(Array.of(-WEIGHED), Array.of(ROUTED), 4, SHAPE._replace(signed_weights=True), "routing_weights")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (WEIGHED[:3], r"float32\[3, 1, 2\], expected float32\[4, 1, 2\]"),
        (WEIGHED[..., :1], r"expected float32\[4, 1, 2\]"),
        (WEIGHED.astype(np.int32), r"int32\[4, 1, 2\], expected float32"),
        (np.where(WEIGHED == 2, np.float32(np.nan), WEIGHED), "holds nan, which is not finite in bfloat16: send the weights as they were told"),
        (np.where(WEIGHED == 2, np.float32(np.inf), WEIGHED), "not finite"),
        (np.where(WEIGHED == 2, np.float32(-0.25), WEIGHED), "holds -0.25: the weights of this model's experts are at least 0"),
        (WEIGHED + np.float32(0.5), "leaves the router free: give 0 there"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, message):
    with pytest.raises(InvalidInput, match=message):
        check_routing_weights(Array.of(weights), Array.of(ROUTED), 4, SHAPE, "routing_weights")


def test_weights_without_experts_are_refused_and_so_are_those_of_a_dense_model():
    with pytest.raises(InvalidInput, match="experts that are not named: send the `routing`"):
        check_routing_weights(Array.of(WEIGHED), None, 4, SHAPE, "routing_weights")
    with pytest.raises(InvalidInput, match="no experts to weigh"):
        check_routing_weights(Array.of(WEIGHED), None, 4, None, "routing_weights")


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (learn((msgspec.structs.replace(supervised([4])[0], routing_weights=Array.of(WEIGHED)),)), "data[0].loss_fn_inputs.routing_weights"),
        (learn(weighed(supervised([4]), [ROUTED], [-WEIGHED])), "data[0].loss_fn_inputs.routing_weights"),
        (msgspec.structs.replace(learn(supervised([4])), return_routing_weights=True), "loss_fn_config.return_routing_weights"),
    ],
)
def test_the_door_names_the_field_at_fault(operation, field):
    with pytest.raises(InvalidInput) as refused:
        check_forward_backward(operation, Size(context=64, vocab_size=300, width=64, routing=SHAPE))
    assert refused.value.field == field
    check_forward_backward(weighing(weighed(supervised([4]), [ROUTED], [WEIGHED])), Size(context=64, vocab_size=300, width=64, routing=SHAPE))


def test_factors_of_experts_may_make_weights_negative(model):
    """Gemma 4 multiplies each weight with a trained number."""
    experts = model.config.experts
    beside = dataclasses.replace(model.config, experts=dataclasses.replace(experts, beside_mlp=True))
    assert [config.routing.signed_weights for config in (model.config, beside)] == [False, True]

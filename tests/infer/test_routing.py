"""The routing that a sampler tells, with its weights, is that of a forward over the same tokens, and giving it back to the trainer changes no bit."""

import copy
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
import torch

from bloomery.infer.plan import Limits
from bloomery.models.decoder import Decoder
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, PromptRouted, SampledToken
from bloomery.types.operations import Datum, ForwardBackward
from bloomery.types.routing import check_routing, check_routing_weights
from tests.infer.builders import adapter, answers, drain, full_routed, prompt, request, sampler
from tests.infer.routed import FREE, Told, asking
from tests.train import builders
from tests.train.builders import datum, finish, gradients, learn

ASKED: dict[str, object] = {"routing": True, "routing_weights": True}


@pytest.fixture(scope="module")
def model():
    return builders.decoder(experts=True)


@pytest.fixture(scope="module")
def adapters(model):
    return {f"v{seed}": adapter(model, seed) for seed in range(2)}


def assert_as_a_forward(model: Decoder, each: Generate, told: Told, adapters: Mapping[str, object]) -> None:
    beginning = each.prompt.numpy().tolist()
    for sample in range(each.num_samples):
        experts, weights = full_routed(model, beginning + told.tokens[sample], adapters.get(each.weights.version))
        assert np.array_equal(told.routing[sample][:-1], experts[:-1]), (each.request_id, sample)
        assert np.array_equal(told.weights[sample][:-1], weights[:-1]), (each.request_id, sample)
        assert (told.routing[sample][-1] == FREE).all()
        assert (told.weights[sample][-1] == 0).all()


def test_it_is_that_of_a_forward_over_the_same_tokens_whatever_the_company(model, adapters):
    versions = ("base", "v0", "v1")
    requests = [
        request(f"r{length}", prompt(length), version=versions[n % 3], seed=n, max_tokens=6, asked=ASKED)
        for n, length in enumerate((1, 2, 5, 77, 333, 513))
    ]
    bystander = request("quiet", prompt(40), max_tokens=5)
    engine = sampler(model, adapters)
    engine.submit(bystander)
    told = asking(*requests, engine=engine)
    for each in requests:
        assert_as_a_forward(model, each, told[each.request_id], adapters)
        assert len(np.unique(told[each.request_id].routing[0][:-1])) > 2 or each.prompt.shape[0] < 5
    assert {routing.shape[1:] for each in told.values() for routing in each.routing.values()} == {(1, 2)}


def test_weights_of_half_precision_are_those_that_were_multiplied_with(adapters):
    model = builders.decoder(dtype=torch.bfloat16, experts=True)
    each = request("r", prompt(77), num_samples=2, max_tokens=6, asked=ASKED)
    told = asking(each, engine=sampler(model))["r"]
    assert_as_a_forward(model, each, told, {})
    assert np.array_equal(told.weights[0], torch.from_numpy(told.weights[0]).bfloat16().float().numpy())


def test_whoever_asks_for_the_experts_alone_is_told_no_weights(model):
    told = asking(request("r", prompt(30), asked={"routing": True}), engine=sampler(model))["r"]
    assert told.routing[0].shape == (38, 1, 2)
    assert told.weights == {}


def test_whoever_does_not_ask_is_told_nothing(model):
    engine = sampler(model)
    engine.submit(request("r", prompt(30)))
    events = drain(engine)
    assert [event for event in events if isinstance(event, PromptRouted)] == []
    assert {(event.fed_experts, event.fed_expert_weights) for event in events if isinstance(event, SampledToken)} == {(None, None)}


def test_asking_changes_no_token_and_no_logprob(model, adapters):
    each = request("r", prompt(90), version="v0", num_samples=3, max_tokens=9)
    engine, curious = sampler(model, adapters), sampler(model, adapters)
    engine.submit(each)
    curious.submit(msgspec.structs.replace(each, routing=True, routing_weights=True))
    assert answers(drain(curious)) == answers(drain(engine))


def test_what_is_taken_over_from_others_tells_it_too(model, adapters):
    """Neither who computed a beginning, nor when, nor whether that one asked: what is told is what a forward says."""
    engine = sampler(model, adapters)
    engine.submit(request("silent", prompt(200), version="v0", max_tokens=12))
    continuation = answers(drain(engine))["silent"].tokens[0]
    turn = prompt(200) + continuation[:-1] + prompt(30, seed=9)
    requests = [
        request("same", prompt(200), version="v0", seed=3, max_tokens=5, asked=ASKED),
        request("turn", turn, version="v0", seed=4, num_samples=2, max_tokens=5, asked=ASKED),
        request("branch", turn[:150] + prompt(20, seed=5), version="v0", max_tokens=5, asked=ASKED),
    ]
    told = asking(*requests, engine=engine)
    assert told["same"].found == 199
    assert told["turn"].found == 211
    assert told["branch"].found == 150
    for each in requests:
        assert_as_a_forward(model, each, told[each.request_id], adapters)


@pytest.mark.slow
def test_siblings_chunks_and_preemption_change_nothing(model, adapters):
    requests = [
        request("long", prompt(700), version="v0", max_tokens=20, asked=ASKED | {"prompt_logprobs": True}),
        request("group", prompt(450), version="v1", num_samples=4, max_tokens=80, seed=4, asked=ASKED),
        request("short", prompt(9), max_tokens=40, asked=ASKED),
    ]
    engine = sampler(model, adapters, Limits(slots=3, token_budget=40, cache_tokens=20 * BLOCK_PLACES))
    told = asking(*requests, engine=engine)
    assert engine.preemptions > 0
    for each in requests:
        assert_as_a_forward(model, each, told[each.request_id], adapters)
    assert len({tuple(tokens) for tokens in told["group"].tokens.values()}) == 4


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("length", [1, 70])
def test_a_prompt_alone_and_a_single_token_have_theirs(model, max_tokens, length):
    scored = {"prompt_logprobs": True} if max_tokens == 0 and length > 1 else {}
    each = request("r", prompt(length), max_tokens=max_tokens, asked=ASKED | scored)
    engine = sampler(model)
    for _ in range(2):
        told = asking(each, engine=engine)["r"]
        assert told.routing[0].shape == (length + max_tokens, 1, 2)
        assert_as_a_forward(model, each, told, {})


def test_giving_it_back_to_the_trainer_changes_no_bit(model):
    each = request("r", prompt(60), num_samples=3, max_tokens=25, seed=8, asked=ASKED)
    told = asking(each, engine=sampler(model))["r"]
    data = tuple(_supervised(prompt(60) + told.tokens[sample]) for sample in range(3))
    routed = tuple(msgspec.structs.replace(one, routing=Array.of(told.routing[n][:-1])) for n, one in enumerate(data))
    weighed = tuple(msgspec.structs.replace(one, routing_weights=Array.of(told.weights[n][:-1])) for n, one in enumerate(routed))
    for one in weighed:
        check_routing(one.routing, one.tokens.shape[0], model.config.routing, "routing")
        check_routing_weights(one.routing_weights, one.routing, one.tokens.shape[0], model.config.routing, "routing_weights")
    free, replayed = builders.run(model), builders.run(model)
    result = finish(free, _telling(data))
    assert finish(replayed, _telling(routed)) == result
    assert finish(builders.run(model), _telling(weighed)) == result
    assert [output["routing"].numpy().tolist() for output in result.outputs] == [told.routing[n][:-1].tolist() for n in range(3)]
    assert [output["routing_weights"].numpy().tolist() for output in result.outputs] == [told.weights[n][:-1].tolist() for n in range(3)]
    assert all(torch.equal(gradient, gradients(replayed)[name]) for name, gradient in gradients(free).items())


def test_with_its_weights_it_gives_the_samplers_bits_whatever_the_trainers_router_has_become(model):
    told = asking(request("r", prompt(60), num_samples=3, max_tokens=25, seed=8, asked=ASKED), engine=sampler(model))["r"]
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.layers[1].mlp.router += 0.05 * torch.randn(4, 64, generator=torch.Generator().manual_seed(3))

    def differences(**given: bool) -> float:
        data = tuple(told.rollout(sample, **given) for sample in range(3))
        return finish(builders.run(moved), learn(data, loss="importance_sampling")).metrics["logprob_diff:max"]

    assert differences(routing=True, weights=True) == 0
    assert differences() > differences(routing=True) > 0


def test_a_whole_routing_leaves_the_last_token_of_a_longer_datum_free(model):
    """In a conversation the last token of a turn is followed by others: its row says that nobody fed it yet."""
    told = asking(request("r", prompt(20), max_tokens=6, asked=ASKED), engine=sampler(model))["r"]
    tokens = prompt(20) + told.tokens[0] + prompt(5, seed=3)
    routing = np.concatenate([told.routing[0], np.full((4, 1, 2), FREE, np.int32)])
    weights = np.concatenate([told.weights[0], np.zeros((4, 1, 2), np.float32)])
    data = (_supervised(tokens),)
    replayed = _telling((msgspec.structs.replace(data[0], routing=Array.of(routing), routing_weights=Array.of(weights)),))
    assert finish(builders.run(model), replayed) == finish(builders.run(model), _telling(data))


def test_a_dense_model_has_none():
    engine = sampler(builders.decoder())
    engine.submit(request("r", prompt(5), asked=ASKED))
    (failure,) = drain(engine)
    assert (failure.category, "no experts" in failure.message) == ("user", True)


def _supervised(tokens: Sequence[int]) -> Datum:
    return datum(np.array(tokens[:-1]), np.array(tokens[1:]), weights=np.ones(len(tokens) - 1))


def _telling(data: tuple[Datum, ...]) -> ForwardBackward:
    return msgspec.structs.replace(learn(data), return_routing=True, return_routing_weights=True)

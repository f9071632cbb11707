"""Routing of a mixture of experts through the SDK: `loss_fn_inputs["routing"]` in and out, asked for by `return_routing`; of samples by a header.

Its weights go the same ways.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tokenizers import Tokenizer, models

from tests.live import LiveServer, running_server
from tests.models.builders import saved
from tests.sdk import connected

TOKENS = [7, 3, 300, 12, 5, 41]
PROMPT = list(range(7, 47))
EXPERTS = 8
ASKING = {"return_routing": 1.0}
ASKING_WEIGHTS = ASKING | {"return_routing_weights": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("experts")
    model = saved("qwen3_moe", place / "mixture")
    words = {f"w{index}": index for index in range(320)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(model / "tokenizer.json"))
    with running_server(place / "data", "--model", str(model)) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with connected(server, headers={"x-bloomery-routing": "true", "x-bloomery-routing-weights": "true"}) as found:
        yield found


def routing_of(server: LiveServer, sequence: tinker.SampledSequence) -> tinker.TensorData:
    """Which experts the tokens of the prompt and of the sample went to."""
    return told(server, f"{sequence.sequence_id}/routing")


def weights_of(server: LiveServer, sequence: tinker.SampledSequence) -> tinker.TensorData:
    """What the answers of these experts were multiplied with."""
    return told(server, f"{sequence.sequence_id}/routing/weights")


def told(server: LiveServer, path: str) -> tinker.TensorData:
    answer = httpx.get(f"{server.url}/api/v1/samples/{path}", headers={"x-api-key": server.key})
    assert answer.status_code == 200, answer.text
    return tinker.TensorData(**answer.json())


@pytest.mark.contract("any loss", "loss_fn_inputs.routing", "loss_fn_config.return_routing")
def test_routing_goes_out_and_comes_back(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4, seed=3).result()
    plain = run.forward([datum()], "cross_entropy").result()
    assert set(plain.loss_fn_outputs[0]) == {"logprobs", "elementwise_loss"}
    told = run.forward([datum()], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    routing = told["routing"].to_numpy()
    assert routing.shape[0] == len(TOKENS)
    replayed = run.forward_backward([datum(routing)], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    assert replayed["logprobs"].data == told["logprobs"].data == plain.loss_fn_outputs[0]["logprobs"].data
    elsewhere = (routing + 1) % EXPERTS
    moved = run.forward([datum(elsewhere)], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    assert np.array_equal(moved["routing"].to_numpy(), elsewhere)
    assert moved["logprobs"].data != told["logprobs"].data


@pytest.mark.contract("any loss", "loss_fn_inputs.routing_weights", "loss_fn_config.return_routing_weights")
def test_weights_go_out_and_come_back(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4, seed=3).result()
    told = run.forward([datum()], "cross_entropy", ASKING_WEIGHTS).result().loss_fn_outputs[0]
    routing, weights = told["routing"].to_numpy(), told["routing_weights"].to_numpy()
    assert weights.shape == routing.shape
    assert weights.dtype == np.float32
    replayed = run.forward_backward([datum(routing, weights)], "cross_entropy", ASKING_WEIGHTS).result().loss_fn_outputs[0]
    assert replayed["logprobs"].data == told["logprobs"].data
    assert np.array_equal(replayed["routing_weights"].to_numpy(), weights)
    moved = run.forward([datum(routing, weights[..., ::-1].copy())], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    assert moved["logprobs"].data != told["logprobs"].data
    assert set(moved) == {"logprobs", "elementwise_loss", "routing"}


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-routing-weights")
@pytest.mark.contract("GET /api/v1/samples/{sequence_id}/routing/weights")
def test_experts_and_weights_of_the_sampler_give_its_very_log_probabilities(server: LiveServer, client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4, seed=3).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 2, tinker.SamplingParams(max_tokens=9, seed=5)).result()
    for sequence in answer.sequences:
        routing, weights = routing_of(server, sequence).to_numpy(), weights_of(server, sequence).to_numpy()
        assert weights.shape == routing.shape
        assert (weights[-1] == 0).all()
        free, given = rollout(sequence, routing, weights)
        told = run.forward([free], "importance_sampling", ASKING_WEIGHTS).result().loss_fn_outputs[0]
        assert np.array_equal(told["routing_weights"].to_numpy(), weights[:-1])
        metrics = run.forward_backward([given], "importance_sampling").result().metrics
        assert metrics["logprob_diff:max"] == metrics["k3:sum"] == 0


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-routing")
@pytest.mark.contract("GET /api/v1/samples/{sequence_id}/routing")
def test_the_trainer_replays_the_routing_of_the_sampler(server: LiveServer, client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4, seed=3).result()
    run.forward_backward([datum()], "cross_entropy")
    run.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    # The second time the sampler knows the prompt: what it tells of it was computed the first time.
    for known in (0, len(PROMPT) - 1):
        answer = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 3, tinker.SamplingParams(max_tokens=9, seed=5)).result()
        assert answer.prompt_cache_hit_tokens == known
        rollouts = [rollout(sequence, routing_of(server, sequence).to_numpy()) for sequence in answer.sequences]
        told = run.forward([free for free, _ in rollouts], "importance_sampling", ASKING).result()
        replayed = run.forward_backward([given for _, given in rollouts], "importance_sampling").result()
        for sequence, (_, given), free, again in zip(answer.sequences, rollouts, told.loss_fn_outputs, replayed.loss_fn_outputs, strict=True):
            assert np.array_equal(given.loss_fn_inputs["routing"].to_numpy(), free["routing"].to_numpy())
            assert list(again["logprobs"].data) == list(free["logprobs"].data)
            assert list(again["logprobs"].data)[-len(sequence.tokens) :] == sequence.logprobs


def test_a_scored_prompt_has_a_routing_too(server: LiveServer, client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="mixture").result()
    answer = sampler.sample(tinker.ModelInput.from_ints(TOKENS), 1, tinker.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
    routing = routing_of(server, answer.sequences[0]).to_numpy()
    assert routing.shape == (len(TOKENS) + 1, 2, 2)
    assert [(row == -1).all() for row in routing] == [False] * len(TOKENS) + [True]


def test_bad_routing_is_a_user_error_and_the_run_goes_on(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4).result()
    for routing, message in ((np.zeros((2, 2, 2), np.int64), "expected integers"), (np.full((6, 2, 2), 99), "names experts from 0 to")):
        with pytest.raises(tinker.RequestFailedError, match=message):
            run.forward([datum(routing)], "cross_entropy").result()
    weights = np.ones((6, 2, 2), np.float32)
    for routing, given, message in ((None, weights, "experts that are not named"), (np.full((6, 2, 2), [0, 1]), -weights, "at least 0")):
        with pytest.raises(tinker.RequestFailedError, match=message):
            run.forward([datum(routing, given)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="ask for `return_routing` too"):
        run.forward([datum()], "cross_entropy", {"return_routing_weights": 1.0}).result()
    with pytest.raises(tinker.RequestFailedError, match="must be 0 or 1"):
        run.forward([datum()], "cross_entropy", {"return_routing": 2.0}).result()
    assert run.forward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0


def rollout(sequence: tinker.SampledSequence, routing: np.ndarray, weights: np.ndarray | None = None) -> tuple[tinker.Datum, tinker.Datum]:
    """A datum of a sampled sequence, without its routing and with it: row i of both is for the token at position i."""
    tokens = PROMPT + sequence.tokens
    assert len(routing) == len(tokens)
    assert (routing[-1] == -1).all()
    before = [0.0] * (len(PROMPT) - 1)
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "logprobs": before + sequence.logprobs,
        "advantages": before + [1.0] * len(sequence.tokens),
    }
    given = inputs | {"routing": tinker.TensorData.from_numpy(routing[:-1])}
    if weights is not None:
        given["routing_weights"] = tinker.TensorData.from_numpy(weights[:-1])
    model_input = tinker.ModelInput.from_ints(tokens[:-1])
    return tuple(tinker.Datum(model_input=model_input, loss_fn_inputs=each) for each in (inputs, given))


def datum(routing: np.ndarray | None = None, weights: np.ndarray | None = None) -> tinker.Datum:
    inputs = {"target_tokens": [*TOKENS[1:], 9], "weights": [1.0] * len(TOKENS)}
    if routing is not None:
        inputs["routing"] = tinker.TensorData.from_torch(torch.from_numpy(routing.astype(np.int64)))
    if weights is not None:
        inputs["routing_weights"] = tinker.TensorData.from_torch(torch.from_numpy(weights))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)

"""What is sampled at a temperature and trained at it, through the unmodified SDK and our own client: one distribution, to the bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from bloomery.client import Client
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.losses import LOSSES
from bloomery.types.operations import Datum
from tests.live import LiveServer
from tests.sdk import connected
from tests.tinker.contract_entries import loss
from tests.tinker.test_losses_live import ADVANTAGE, MODEL, PROMPT, for_loss, gradient_norm, sampled

T = 0.7
SAMPLED = [name for name, form in LOSSES.items() if "logprobs" in form.inputs]


@pytest.fixture(scope="module")
def run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """With an adapter that has learnt something: a fresh one is the base."""
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    tokens = run.get_tokenizer().encode(PROMPT)
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    run.forward_backward([types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return run


@pytest.fixture(scope="module")
def sampler(run: tinker.TrainingClient) -> tinker.SamplingClient:
    return run.save_weights_and_get_sampling_client().result()


def drawn(run: tinker.TrainingClient, sampler: tinker.SamplingClient, temperature: float) -> types.Datum:
    prompt = run.get_tokenizer().encode(PROMPT)
    params = types.SamplingParams(max_tokens=24, seed=5, temperature=temperature, stop=[])
    (sequence,) = sampler.sample(prompt=types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result().sequences
    padding = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + sequence.tokens,
            "logprobs": [0.0] * padding + list(sequence.logprobs or []),
            "advantages": [0.0] * padding + [ADVANTAGE] * len(sequence.tokens),
        },
    )


@pytest.fixture(scope="module")
def rollout(run: tinker.TrainingClient, sampler: tinker.SamplingClient) -> types.Datum:
    return drawn(run, sampler, T)


@pytest.mark.parametrize("name", SAMPLED)
def test_on_policy_no_bit_is_apart_at_the_temperature_that_was_drawn_at(run: tinker.TrainingClient, rollout: types.Datum, name: str) -> None:
    metrics = run.forward_backward([rollout], name, {"temperature": T}).result().metrics
    assert (metrics["k3:sum"], metrics["logprob_diff:max"], metrics["ratio:sum"]) == (0, 0, sampled(rollout))
    assert gradient_norm(run) > 0
    apart = run.forward([rollout], name).result().metrics
    assert apart["k3:sum"] > 1e-3
    assert apart["logprob_diff:max"] > 0.1


@pytest.mark.contract(loss("cross_entropy"), "loss_fn_config.temperature")
def test_cross_entropy_scores_and_trains_at_a_temperature(run: tinker.TrainingClient, rollout: types.Datum) -> None:
    data, config = [for_loss(rollout, "cross_entropy")], {"temperature": T}
    (own,), (cold,) = (run.forward(data, "cross_entropy", options).result().loss_fn_outputs for options in ({}, config))
    count = sampled(rollout)
    # A forward computes attention as the sampler does.
    assert cold["logprobs"].to_numpy()[-count:].tolist() == rollout.loss_fn_inputs["logprobs"].to_numpy()[-count:].tolist()
    assert own["logprobs"].to_numpy()[-count:].tolist() != rollout.loss_fn_inputs["logprobs"].to_numpy()[-count:].tolist()
    run.forward_backward(data, "cross_entropy", config).result()
    learnt = gradient_norm(run)
    run.forward_backward([rollout], "reinforce", config).result()
    # The attention kernels of cross-entropy and of the others differ.
    assert learnt == pytest.approx(gradient_norm(run), rel=1e-4)


def test_operations_of_one_step_may_have_several_temperatures(run: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    data = {temperature: drawn(run, sampler, temperature) for temperature in (0.5, 1.0, 1.7)}
    asked = [run.forward_backward([one], "ppo", {"temperature": temperature}) for temperature, one in data.items()]
    assert [future.result().metrics["k3:sum"] for future in asked] == [0, 0, 0]
    assert gradient_norm(run) > 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.001, 1000.0, float("nan"), float("inf")])
def test_a_temperature_that_nothing_can_be_trained_at_is_refused_by_name(
    run: tinker.TrainingClient, rollout: types.Datum, temperature: float
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"`loss_fn_config\.temperature` is \S+: it must be from 0\.01 to 100"):
        run.forward([rollout], "ppo", {"temperature": temperature}).result()
    assert run.forward([rollout], "ppo", {"temperature": T}).result().metrics["k3:sum"] == 0


@pytest.mark.parametrize("rank", [4, 0])
def test_our_own_client_trains_at_a_temperature_adapters_and_all_parameters(live_server: LiveServer, rank: int) -> None:
    with Client(live_server.url, live_server.key) as client:
        run = client.create_run(MODEL, rank=rank, seed=2)
        digests = []
        for step in range(3):
            prompt, version = list(range(100, 120)), run.save_snapshot().result().version
            (sequence,) = client.sampler(version).sample(prompt, max_tokens=16, seed=step, temperature=T, stop=()).result().sequences
            tokens, padding = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
            inputs = {
                "target_tokens": np.array(tokens[1:], np.int64),
                "logprobs": np.array([*padding, *sequence.logprobs], np.float32),
                "advantages": np.array([*padding, *[1.0, -1.0] * 8], np.float32),
            }
            datum = Datum(tokens=Array.of(np.array(tokens[:-1], np.int32)), inputs={name: Array.of(values) for name, values in inputs.items()})
            metrics = run.forward_backward([datum], "importance_sampling", {"temperature": T}).result().metrics
            assert (metrics["k3:sum"], metrics["logprob_diff:max"]) == (0, 0)
            run.optim_step(1e-2).result()
            digests.append(run.save_checkpoint(f"step-{step}").result().digest)
            again = client.sampler(version).score(tokens, temperature=T).prompt_logprobs()
            assert list(again[len(prompt) :]) == list(sequence.logprobs)
        assert len(set(digests)) == 3
        with pytest.raises(InvalidInput, match=r"`loss_fn_config\.temperature` is 0\.0: it must be from 0\.01 to 100"):
            run.forward([datum], "importance_sampling", {"temperature": 0.0}).result()
        with pytest.raises(InvalidInput, match=r"got `bool` - at `\$\.loss_config"):
            run.forward([datum], "importance_sampling", {"temperature": True})


@pytest.fixture(scope="module")
def scoring(live_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with connected(live_server, headers={"x-bloomery-scored-temperature": str(T)}) as found:
        yield found


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-scored-temperature")
def test_a_prompt_is_scored_at_the_temperature_of_the_header(
    scoring: tinker.ServiceClient, run: tinker.TrainingClient, sampler: tinker.SamplingClient, rollout: types.Datum
) -> None:
    path = run.save_weights_for_sampler("scored").result().path
    tokens = [*rollout.model_input.to_ints(), rollout.loss_fn_inputs["target_tokens"].data[-1]]
    told = scoring.create_sampling_client(model_path=path).result().compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    count = sampled(rollout)
    assert np.array(told[-count:], np.float32).tolist() == rollout.loss_fn_inputs["logprobs"].to_numpy()[-count:].tolist()
    assert told[-count:] != sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[-count:]


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-scored-temperature", refused="out of range, and where nothing of a prompt is asked")
def test_a_temperature_that_no_prompt_is_scored_at_is_refused_by_the_headers_name(live_server: LiveServer, scoring: tinker.ServiceClient) -> None:
    tokens = types.ModelInput.from_ints([1, 2, 3])
    with pytest.raises(tinker.BadRequestError, match="of which nothing is asked") as refused:
        scoring.create_sampling_client(base_model=MODEL).result().sample(tokens, 1, types.SamplingParams(max_tokens=1)).result()
    assert refused.value.body["field"] == "x-bloomery-scored-temperature"
    for wrong in ("0", "nan", "101", "warm"):
        with connected(live_server, headers={"x-bloomery-scored-temperature": wrong}) as client, pytest.raises(tinker.BadRequestError) as refused:
            client.create_sampling_client(base_model=MODEL).result().compute_logprobs(tokens).result()
        assert refused.value.body["field"].removeprefix("header.") == "x-bloomery-scored-temperature"

"""Every loss through the unmodified SDK and our own client against `bloomery up` with the shipped model, on what the sampler sampled."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import tinker
from tinker import types

from bloomery.client import Client
from bloomery.types.arrays import Array
from bloomery.types.losses import LOSSES
from bloomery.types.operations import Datum
from tests.live import LiveServer

MODEL = "bloomery-tiny"
PROMPT = "json.dumps turns an object into "
OF_THE_SDK = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
ADVANTAGE = 0.5


@pytest.fixture(scope="module")
def run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()


@pytest.fixture(scope="module")
def rollout(run: tinker.TrainingClient) -> types.Datum:
    """One sample of the run, as the recipes of the cookbook make it a datum."""
    prompt = run.get_tokenizer().encode(PROMPT)
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=12, seed=5)
    (sequence,) = sampler.sample(prompt=types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result().sequences
    padding = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": [0] * padding + sequence.tokens,
            "logprobs": [0.0] * padding + list(sequence.logprobs or []),
            "advantages": [0.0] * padding + [ADVANTAGE] * len(sequence.tokens),
        },
    )


def for_loss(rollout: types.Datum, name: str) -> types.Datum:
    inputs = dict(rollout.loss_fn_inputs)
    if name == "cross_entropy":
        return replace(rollout, loss_fn_inputs={"target_tokens": inputs["target_tokens"], "weights": inputs["advantages"]})
    return rollout


def sampled(rollout: types.Datum) -> int:
    """Tokens that the sampler chose."""
    return int(np.count_nonzero(rollout.loss_fn_inputs["advantages"].to_numpy()))


def gradient_norm(run: tinker.TrainingClient) -> float:
    """Of what was accumulated; the weights stay."""
    metrics = run.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    assert metrics is not None
    return metrics["grad_norm"]


@pytest.mark.parametrize("name", OF_THE_SDK)
def test_on_policy_every_loss_has_the_gradient_of_the_policy(run: tinker.TrainingClient, rollout: types.Datum, name: str) -> None:
    run.forward_backward([for_loss(rollout, "cross_entropy")], "cross_entropy").result()
    plain = gradient_norm(run)
    result = run.forward_backward([for_loss(rollout, name)], name).result()
    assert result.metrics["tokens:sum"] == sampled(rollout)
    assert "loss:sum" in result.metrics
    # The attention kernels of cross-entropy and of the others differ.
    assert gradient_norm(run) == pytest.approx(plain, rel=1e-4)


def test_thresholds_come_as_options_or_as_tensors(run: tinker.TrainingClient, rollout: types.Datum) -> None:
    shifted = rollout.loss_fn_inputs["logprobs"].to_numpy() - np.float32(0.25)
    length = rollout.model_input.length
    off_policy = replace(rollout, loss_fn_inputs={**rollout.loss_fn_inputs, "logprobs": shifted})
    by_default = run.forward_backward([off_policy], "ppo").result().metrics
    by_option = run.forward_backward([off_policy], "ppo", {"clip_high_threshold": 1.5}).result().metrics
    wide = replace(off_policy, loss_fn_inputs={**off_policy.loss_fn_inputs, "clip_high_threshold": [1.5] * length})
    assert run.forward_backward([wide], "ppo").result().metrics == by_option
    assert (by_default["clipped:sum"], by_option["clipped:sum"]) == (sampled(rollout), 0)


def test_a_client_is_told_that_stable_reinforce_is_our_own(
    run: tinker.TrainingClient, rollout: types.Datum, caplog: pytest.LogCaptureFixture
) -> None:
    count = sampled(rollout)
    prompt = rollout.model_input.length - count + 1
    spans = {
        "model_input": [types.PromptProvenanceSpan(sequence_id="a", length=prompt), types.SampledProvenanceSpan(sequence_id="a", length=count - 1)],
        "loss_fn_inputs": [
            types.PromptProvenanceSpan(sequence_id="a", offset=1, length=prompt - 1),
            types.SampledProvenanceSpan(sequence_id="a", length=count),
        ],
    }
    with caplog.at_level(logging.WARNING, logger="tinker"):
        run.forward_backward([rollout], "importance_sampling").result()
        assert "stable_reinforce" not in caplog.text
        result = run.forward_backward([rollout.with_provenance(**spans)], "stable_reinforce", {"kl_coeff": 0.02}).result()
    assert result.metrics["clipped:sum"] == 0
    assert "Deprecation notice: stable_reinforce has no public definition" in caplog.text


def test_a_mistaken_option_fails_by_name_and_the_run_goes_on(run: tinker.TrainingClient, rollout: types.Datum) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"`loss_fn_config\.clip_high_threshold` is 0\.2: .* \(1\.2, not 0\.2\)"):
        run.forward_backward([rollout], "ppo", {"clip_high_threshold": 0.2}).result()
    with pytest.raises(tinker.RequestFailedError, match="an earlier operation failed"):
        run.optim_step(types.AdamParams(learning_rate=0.0)).result()
    run.forward_backward([rollout], "ppo").result()
    assert gradient_norm(run) > 0


def test_our_own_client_has_all_losses(live_server: LiveServer, rollout: types.Datum) -> None:
    own = Client(live_server.url, live_server.key).create_run(MODEL, rank=4, seed=2)
    inputs = {name: Array.of(tensor.to_numpy()) for name, tensor in for_loss(rollout, "ppo").loss_fn_inputs.items()}
    datum = Datum(tokens=Array.of(np.asarray(rollout.model_input.to_ints(), np.int32)), inputs=inputs)
    losses = {name: own.forward([datum], name).result().metrics["loss:sum"] for name in LOSSES if name != "cross_entropy"}
    # On policy the losses made of ratios are minus the sum of the advantages.
    for name in ("importance_sampling", "ppo", "gspo", "dapo", "dppo"):
        assert losses[name] == pytest.approx(-ADVANTAGE * sampled(rollout), rel=1e-4)
    for name in ("dro", "stable_reinforce", "reinforce"):
        assert losses[name] == pytest.approx(losses["cispo"], rel=1e-4)


@pytest.mark.contract("any loss", "loss_fn_config.return_logprobs")
def test_who_asks_for_metrics_alone_gets_the_same_metrics_and_weights(client: tinker.ServiceClient, rollout: types.Datum) -> None:
    digests = []
    for config in ({}, {"return_logprobs": 0.0}):
        run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=4).result()
        results = [run.forward_backward([for_loss(rollout, name)] * 2, name, config).result() for name in ("cross_entropy", "ppo")]
        norm = run.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
        digests.append(([result.metrics for result in results], norm, run.forward([rollout], "ppo").result().loss_fn_outputs[0]["logprobs"].data))
        expected: list[set[str]] = [set(), set()] if config else [{"elementwise_loss", "logprobs"}, {"logprobs"}]
        assert [set(result.loss_fn_outputs[0]) for result in results] == expected
        assert all(len(result.loss_fn_outputs) == 2 for result in results)
    assert digests[0] == digests[1]
    with pytest.raises(tinker.RequestFailedError, match=r"return_logprobs` is 0\.5: it must be 0 or 1"):
        run.forward([rollout], "ppo", {"return_logprobs": 0.5}).result()


def test_our_own_client_gets_metrics_alone_and_the_same_weights(live_server: LiveServer, rollout: types.Datum) -> None:
    inputs = {name: Array.of(tensor.to_numpy()) for name, tensor in for_loss(rollout, "cross_entropy").loss_fn_inputs.items()}
    data = [Datum(tokens=Array.of(np.asarray(rollout.model_input.to_ints(), np.int32)), inputs=inputs)]
    ends = []
    for rank in (4, 0):
        for logprobs in (True, False):
            run = Client(live_server.url, live_server.key).create_run(MODEL, rank=rank, seed=2)
            learned, scored = run.forward_backward(data, logprobs=logprobs).result(), run.forward(data, logprobs=logprobs).result()
            run.optim_step(1e-2)
            ends.append((learned.metrics, scored.metrics, run.save_checkpoint("end").result().digest))
            assert [len(result.outputs[0]) for result in (learned, scored)] == ([2, 2] if logprobs else [0, 0])
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]

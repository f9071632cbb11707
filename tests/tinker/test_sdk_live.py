"""The unmodified SDK against `bloomery up` with the shipped model: training trains, and what is trained is what is sampled."""

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.live import LiveServer, running_server
from tests.sdk import connected

MODEL = "bloomery-tiny"
TEXT = "json.dumps turns an object into text; it is the inverse of json.loads."
ADAM = types.AdamParams(learning_rate=5e-3)


@pytest.fixture(scope="module")
def bit_exact(live_server: LiveServer) -> bool:
    """Whether the engine claims here that trainer and sampler give the same bits."""
    status = httpx.get(f"{live_server.url}/api/v1/status", headers={"x-api-key": live_server.key}).json()
    return bool(status["engines"][0]["detail"]["bit_exact"])


def new_run(client: tinker.ServiceClient, seed: int = 1) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=8, seed=seed).result()


@pytest.fixture(scope="module")
def tokens(client: tinker.ServiceClient) -> list[int]:
    return new_run(client).get_tokenizer().encode(TEXT)


def shifted(tokens: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


def supervised(tokens: list[int], weight: float = 1.0) -> types.Datum:
    return shifted(tokens, weights=[weight] * (len(tokens) - 1))


def logprobs_of(result: types.ForwardBackwardOutput) -> np.ndarray:
    return result.loss_fn_outputs[0]["logprobs"].to_numpy()


def forward(run: tinker.TrainingClient, tokens: list[int]) -> np.ndarray:
    return logprobs_of(run.forward([supervised(tokens)], "cross_entropy").result())


def train(run: tinker.TrainingClient, tokens: list[int], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = run.forward_backward([supervised(tokens)], "cross_entropy")
        run.optim_step(ADAM).result()
        losses.append(loss.result().metrics["loss:sum"])
    return losses


@pytest.fixture(scope="module")
def trained(client: tinker.ServiceClient, tokens: list[int]) -> tinker.TrainingClient:
    run = new_run(client)
    losses = train(run, tokens, 25)
    assert losses[-1] < 0.1 * losses[0]
    return run


@pytest.mark.contract("loss cross_entropy", "loss_fn_inputs.weights")
def test_a_fresh_run_is_the_base_model_and_its_loss_is_the_sum_of_its_tokens(client: tinker.ServiceClient, tokens: list[int]) -> None:
    run = new_run(client)
    result = run.forward([supervised(tokens)], "cross_entropy").result()
    logprobs = logprobs_of(result)
    assert result.metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-5)
    assert result.loss_fn_outputs[0]["elementwise_loss"].to_numpy() == pytest.approx(-logprobs)
    base = client.create_sampling_client(base_model=MODEL).result().compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert base[0] is None
    # The two may only differ where the machine does not give the same bits to both; then by rounding.
    assert np.asarray(base[1:], np.float32) == pytest.approx(logprobs, abs=1e-3)


def test_training_recites_what_it_was_taught(trained: tinker.TrainingClient, tokens: list[int]) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    start = 8
    params = types.SamplingParams(max_tokens=len(tokens) - start, temperature=0.0)
    answer = sampler.sample(types.ModelInput.from_ints(tokens[:start]), 1, params).result()
    assert answer.sequences[0].tokens == tokens[start:]


def test_sampler_and_trainer_agree_about_every_token(trained: tinker.TrainingClient, tokens: list[int], bit_exact: bool) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(types.ModelInput.from_ints(tokens[:6]), 3, types.SamplingParams(max_tokens=20, seed=7, stop=[])).result()
    tolerance = 0.0 if bit_exact else 1e-3
    for sequence in answer.sequences:
        assert len(sequence.tokens) == 20
        whole = tokens[:6] + sequence.tokens
        by_trainer = forward(trained, whole)
        by_prefill = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        assert np.asarray(sequence.logprobs, np.float32) == pytest.approx(by_trainer[5:], abs=tolerance, rel=0)
        assert np.asarray(by_prefill[1:], np.float32) == pytest.approx(by_trainer, abs=tolerance, rel=0)


@pytest.mark.contract("loss importance_sampling", "loss_fn_inputs.logprobs", "loss_fn_inputs.advantages")
@pytest.mark.contract("loss cross_entropy", "loss_fn_inputs.weights")
def test_on_policy_importance_sampling_is_weighted_cross_entropy(client: tinker.ServiceClient, tokens: list[int]) -> None:
    advantage = 0.5
    by_weights, by_ratio = new_run(client), new_run(client)
    policy = forward(by_ratio, tokens).tolist()
    by_weights.forward_backward([supervised(tokens, advantage)], "cross_entropy")
    result = by_ratio.forward_backward([shifted(tokens, logprobs=policy, advantages=[advantage] * len(policy))], "importance_sampling")
    steps = [run.optim_step(ADAM) for run in (by_weights, by_ratio)]
    # The ratio is 1 on policy, so the loss is minus the advantages and the gradients are those of weights equal to them.
    assert result.result().metrics["loss:sum"] == pytest.approx(-advantage * len(policy), rel=1e-5)
    norms = [step.result().metrics["grad_norm"] for step in steps]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert forward(by_weights, tokens) == pytest.approx(forward(by_ratio, tokens), abs=1e-4)


@pytest.mark.contract("loss importance_sampling", "loss_fn_inputs.logprobs", "loss_fn_inputs.advantages")
def test_off_policy_importance_sampling_weighs_by_the_ratio(client: tinker.ServiceClient, tokens: list[int]) -> None:
    run = new_run(client)
    random = np.random.default_rng(0)
    policy = forward(run, tokens) + random.normal(0, 0.3, len(tokens) - 1)
    advantages = random.normal(0, 1, len(tokens) - 1)
    datum = shifted(tokens, logprobs=policy.tolist(), advantages=advantages.tolist())
    result = run.forward_backward([datum], "importance_sampling").result()
    expected = -(np.exp(logprobs_of(result).astype(np.float64) - policy.astype(np.float32)) * advantages.astype(np.float32)).sum()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_a_run_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(client: tinker.ServiceClient, tokens: list[int]) -> None:
    run = new_run(client)
    train(run, tokens, 3)
    path = run.save_state("three").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    weights_only = client.create_training_client_from_state(path).result()
    here = forward(run, tokens)
    assert np.array_equal(forward(resumed, tokens), here)
    assert np.array_equal(forward(weights_only, tokens), here)
    for each in (run, resumed, weights_only):
        train(each, tokens, 1)
    after = forward(run, tokens)
    assert np.array_equal(forward(resumed, tokens), after)
    # Without the optimizer's averages the next step is another one.
    assert not np.array_equal(forward(weights_only, tokens), after)


def test_published_weights_stay_what_they_are(client: tinker.ServiceClient, tokens: list[int]) -> None:
    run = new_run(client)
    train(run, tokens, 2)
    path = run.save_weights_for_sampler("two").result().path
    prompt = types.ModelInput.from_ints(tokens)
    before = client.create_sampling_client(model_path=path).result().compute_logprobs(prompt).result()
    train(run, tokens, 2)
    assert client.create_sampling_client(model_path=path).result().compute_logprobs(prompt).result() == before
    newer = run.save_weights_and_get_sampling_client().result()
    assert sum(newer.compute_logprobs(prompt).result()[1:]) > sum(before[1:])


@pytest.mark.contract("POST /api/v1/asample", "sampling_params.seed")
def test_a_seed_fixes_the_samples(client: tinker.ServiceClient, tokens: list[int]) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()

    def draw(seed: int) -> list[list[int]]:
        answer = sampler.sample(types.ModelInput.from_ints(tokens[:4]), 2, types.SamplingParams(max_tokens=12, seed=seed, stop=[])).result()
        return [sequence.tokens for sequence in answer.sequences]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_the_likeliest_tokens_come_first_and_the_sampled_one_is_among_all(client: tinker.ServiceClient, tokens: list[int]) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    answer = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2).result()
    assert answer.topk_prompt_logprobs[0] is None
    for row, token, logprob in zip(answer.topk_prompt_logprobs[1:], tokens[1:], answer.prompt_logprobs[1:], strict=True):
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
        assert logprob <= row[0][1] + 1e-4
        assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-4)
    sequence = answer.sequences[0]
    assert [row[0][0] for row in sequence.topk_logprobs] == sequence.tokens
    assert [row[0][1] for row in sequence.topk_logprobs] == pytest.approx(sequence.logprobs, abs=1e-4)


def test_samples_end_with_the_stop_that_was_asked_for(trained: tinker.TrainingClient, tokens: list[int]) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    tokenizer = trained.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokens[:8])

    def recite(stop: list) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=len(tokens), temperature=0.0, stop=stop)
        return sampler.sample(prompt, 1, params).result().sequences[0]

    by_text = recite(["inverse"])
    assert by_text.stop_reason == "stop"
    assert tokenizer.decode(by_text.tokens).rstrip().endswith("inverse")
    assert tokens[: 8 + len(by_text.tokens)] == tokens[:8] + by_text.tokens
    by_token = recite([tokens[12]])
    assert (by_token.stop_reason, by_token.tokens) == ("stop", tokens[8:13])


def test_a_refused_operation_leaves_the_weights_as_they_were(client: tinker.ServiceClient, tokens: list[int]) -> None:
    run = new_run(client)
    train(run, tokens, 2)
    before = forward(run, tokens)
    for refused in (
        lambda: run.forward_backward([supervised([1, 2, 10**6])], "cross_entropy"),
        lambda: run.forward_backward([supervised(tokens)], "no_such_loss"),
        lambda: run.optim_step(types.AdamParams(learning_rate=float("nan"))),
    ):
        with pytest.raises(tinker.RequestFailedError) as failure:
            refused().result()
        assert failure.value.category is types.RequestErrorCategory.User
    assert np.array_equal(forward(run, tokens), before)


def test_a_refused_step_save_or_forward_can_be_asked_for_again(client: tinker.ServiceClient, tokens: list[int]) -> None:
    plain, refused = new_run(client), new_run(client)
    refused.save_state("taken").result()
    for run in (plain, refused):
        run.forward_backward([supervised(tokens)], "cross_entropy").result()
    for request in (
        lambda: refused.optim_step(types.AdamParams(learning_rate=float("nan"))),
        lambda: refused.save_state("taken"),
        lambda: refused.forward([supervised(tokens)], "crossentropy"),
        lambda: refused.forward([supervised([1, 2, 10**6])], "cross_entropy"),
    ):
        with pytest.raises(tinker.RequestFailedError):
            request().result()
    for run in (plain, refused):
        run.optim_step(ADAM).result()
    assert np.array_equal(forward(plain, tokens), forward(refused, tokens))


def test_a_step_does_not_use_what_is_left_of_a_refused_batch(client: tinker.ServiceClient, tokens: list[int]) -> None:
    run = new_run(client)
    before = forward(run, tokens)
    good, bad = supervised(tokens), supervised([1, 2, 10**6])
    futures = [run.forward_backward([datum], "cross_entropy") for datum in (good, bad)]
    step = run.optim_step(ADAM)
    futures[0].result()
    for failed in (futures[1], step):
        with pytest.raises(tinker.RequestFailedError, match="token id"):
            failed.result()
    assert np.array_equal(forward(run, tokens), before)
    assert train(run, tokens, 3)[-1] < -before.sum()


@pytest.mark.slow
def test_the_client_trains_on_through_the_death_of_either_process(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server, connected(server) as client:
        undisturbed, killed = new_run(client), new_run(client)
        tokens = killed.get_tokenizer().encode(TEXT)
        train(undisturbed, tokens, 12)
        sampler = killed.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=200, seed=3, stop=[])
        expected = sampler.sample(types.ModelInput.from_ints(tokens[:4]), 1, params).result().sequences[0].tokens
        for name in ("api", "engine-bloomery-tiny"):
            steps = [killed.forward_backward([supervised(tokens)], "cross_entropy") and killed.optim_step(ADAM) for _ in range(6)]
            sample = sampler.sample(types.ModelInput.from_ints(tokens[:4]), 1, params)
            steps[0].result()
            os.kill(server.pid(name), signal.SIGKILL)
            assert [step.result().metrics["optimizer_step"] for step in steps][-1] == (6.0 if name == "api" else 12.0)
            assert sample.result().sequences[0].tokens == expected
        assert np.array_equal(forward(killed, tokens), forward(undisturbed, tokens))
        assert [child["restarts"] for child in server.children().values()] == [1, 1]

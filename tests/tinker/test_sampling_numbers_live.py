"""The unmodified SDK against `bloomery up`: what is said of a prompt and of samples is what `transformers` and the trainer say."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from bloomery.client.sample_message import read_answer
from bloomery.models.tiny import PATH
from tests.live import LiveServer, running_server, wait_until
from tests.sdk import connected

MODEL = "bloomery-tiny"
CONTEXT = 2048
ROUNDING = 2e-3
"""Between two implementations of the same model in float32."""
TEXT = "json.dumps turns an object into text; it is the inverse of json.loads. The quick brown fox jumps over the lazy dog, again and again."


class Live(NamedTuple):
    """A server with a run that is not its base model any more, and a sampler of its weights."""

    client: tinker.ServiceClient
    run: tinker.TrainingClient
    trained: tinker.SamplingClient
    base: tinker.SamplingClient
    tokens: list[int]
    bit_exact: bool


def trained_on(server: LiveServer) -> Iterator[Live]:
    with connected(server) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=3).result()
        tokens = run.get_tokenizer().encode(TEXT)
        for _ in range(3):
            run.forward_backward([supervised(tokens, np.asarray(tokens[1:]))], "cross_entropy").result()
            run.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        trained = run.save_weights_and_get_sampling_client().result()
        status = httpx.get(f"{server.url}/api/v1/status", headers={"x-api-key": server.key}).json()
        exact = bool(status["engines"][0]["detail"]["bit_exact"])
        yield Live(client, run, trained, client.create_sampling_client(base_model=MODEL).result(), tokens, exact)


@pytest.fixture(scope="module")
def live(live_server: LiveServer) -> Iterator[Live]:
    yield from trained_on(live_server)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running_server(tmp_path_factory.mktemp("half") / "data", "--dtype", "bfloat16") as server:
        yield from trained_on(server)


def supervised(tokens: list[int], targets: np.ndarray) -> types.Datum:
    inputs = {"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(np.ones(targets.shape, np.float32))}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[: len(targets)]), loss_fn_inputs=inputs)


def prompt_of(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


@pytest.fixture(scope="module")
def table(live: Live) -> np.ndarray:
    """The base model's log-probabilities of every token after every token of the text [P, V]."""
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([live.tokens])).logits[0].log_softmax(-1).numpy()


# Against transformers


@pytest.mark.contract(
    "POST /api/v1/asample",
    "num_samples",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs.data",
    "prompt_alt_tokens_k",
)
def test_all_that_is_said_of_a_prompt_is_what_transformers_says(live: Live, table: np.ndarray) -> None:
    tokens, length = live.tokens, len(live.tokens)
    ids = np.random.default_rng(0).integers(0, 4096, (length - 1, 3))
    ids[::2, 1] = -1
    answer = live.base.sample(
        prompt_of(tokens),
        2,
        types.SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=3,
        target_prompt_logprobs=types.TensorData.from_numpy(ids),
        prompt_alt_tokens_k=2,
    ).result()
    rows = np.arange(length - 1)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert np.asarray(answer.prompt_logprobs[1:]) == pytest.approx(table[rows, tokens[1:]], abs=ROUNDING)
    top = answer.topk_prompt_logprobs_np
    assert top is not None
    assert (top.token_ids[0].tolist(), top.logprobs[0].tolist()) == ([0] * 4, [-99999.0] * 4)
    assert top.logprobs[1:] == pytest.approx(np.sort(table[:-1])[:, :-5:-1], abs=ROUNDING)
    assert top.logprobs[1:] == pytest.approx(np.take_along_axis(table[:-1], top.token_ids[1:].astype(np.int64), 1), abs=ROUNDING)
    assert answer.target_prompt_logprobs is not None
    expected = np.where(ids == -1, 0.0, table[rows[:, None], ids])
    assert answer.target_prompt_logprobs.to_numpy() == pytest.approx(expected, abs=ROUNDING)
    assert answer.prompt_alt_tokens is not None
    drawn = answer.prompt_alt_tokens.tokens.to_numpy()
    assert drawn.shape == (length - 1, 2)
    assert answer.prompt_alt_tokens.logprobs.to_numpy() == pytest.approx(np.take_along_axis(table[:-1], drawn, 1), abs=ROUNDING)
    # A draw is the likeliest token about as often as that is probable.
    assert 0.5 < (drawn == table[:-1].argmax(1)[:, None]).mean() / np.exp(table[:-1].max(1)).mean() < 1.5
    for sequence in answer.sequences:
        assert sequence.logprobs == pytest.approx([table[-1, sequence.tokens[0]]], abs=ROUNDING)
        assert sequence.topk_logprobs_np is not None
        assert sequence.topk_logprobs_np.logprobs[0] == pytest.approx(np.sort(table[-1])[:-4:-1], abs=ROUNDING)


@pytest.mark.contract("POST /api/v1/asample", "target_prompt_logprobs.sparse_crow_indices", "target_prompt_logprobs.sparse_col_indices")
def test_sparse_targets_are_answered_like_dense_ones(live: Live) -> None:
    ids = torch.full((len(live.tokens) - 1, 40), -1)
    ids[3, 7], ids[20, 0], ids[-1, 39] = 5, 6, 7
    params = types.SamplingParams(max_tokens=1)
    tensors = types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)
    dense, sparse = (live.trained.sample(prompt_of(live.tokens), 1, params, target_prompt_logprobs=each).result() for each in tensors)
    assert dense.target_prompt_logprobs is not None
    assert sparse.target_prompt_logprobs is not None
    assert len(sparse.target_prompt_logprobs.data) == 3
    assert torch.equal(dense.target_prompt_logprobs.to_torch(), sparse.target_prompt_logprobs.to_torch())


@pytest.mark.contract("POST /api/v1/asample", "sampling_params.temperature", "sampling_params.top_k", "sampling_params.top_p")
def test_temperature_zero_and_a_top_k_of_one_take_the_likeliest_token(live: Live, table: np.ndarray) -> None:
    prompt = prompt_of(live.tokens)
    expected = [int(table[-1].argmax())]
    for params in ({"temperature": 0.0, "top_k": -1}, {"top_k": 1, "seed": 5}, {"top_p": 1e-6, "seed": 6}):
        answer = live.base.sample(prompt, 1, types.SamplingParams(max_tokens=1, **params)).result()
        assert answer.sequences[0].tokens == expected


def test_log_probabilities_are_those_of_the_distribution_that_was_drawn_from(live: Live, table: np.ndarray) -> None:
    prompt, last = prompt_of(live.tokens), table[-1].astype(np.float64)
    for params, kept in (({"temperature": 0.5}, len(last)), ({"temperature": 2.0}, len(last)), ({"temperature": 0.7, "top_k": 3}, 3)):
        scaled = last / params["temperature"]
        scaled[np.argsort(-scaled)[kept:]] = -np.inf
        expected = scaled - np.log(np.exp(scaled).sum())
        answer = live.base.sample(prompt, 4, types.SamplingParams(max_tokens=1, seed=3, **params)).result()
        for sequence in answer.sequences:
            assert sequence.logprobs == pytest.approx([expected[sequence.tokens[0]]], abs=ROUNDING)
    greedy = live.base.sample(prompt, 1, types.SamplingParams(max_tokens=1, temperature=0.0)).result().sequences[0]
    assert greedy.logprobs == pytest.approx([last.max()], abs=ROUNDING)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_answer_says_whose_log_probabilities_it_shows(
    live: Live, live_server: LiveServer, table: np.ndarray, temperature: float, ours: bool
) -> None:
    """Over the bare contract: the SDK keeps headers of answers to itself."""
    kept, last = 3, table[-1].astype(np.float64)
    drawn_from = np.where(last < np.sort(last)[-kept], -np.inf, last / (temperature or 1.0))
    expected = {"raw_logprobs": last, "processed_logprobs": drawn_from - np.log(np.exp(drawn_from).sum())}
    params: dict[str, Any] = {"max_tokens": 1, "seed": 3, "temperature": temperature, "top_k": kept}
    sampler = live.client.create_sampling_client(base_model=MODEL).result()
    body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 1000}
    if ours:
        answer = answer_of(live_server, "/samples", body | params | {"prompt": live.tokens, "drafts": [[], [], [], []]})
    else:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": live.tokens}]}
        answer = answer_of(live_server, "/asample", body | {"prompt": prompt, "num_samples": 4, "sampling_params": params})
    mode = answer.headers["x-bloomery-logprobs"]
    assert mode == ("processed_logprobs" if temperature else "raw_logprobs")
    for sequence in read_answer(answer.content).sequences:
        assert sequence.logprobs == pytest.approx([expected[mode][sequence.tokens[0]]], abs=ROUNDING)


def answer_of(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    """Of a sample that is asked for here."""
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": server.key}, timeout=60) as http:
        begun = http.post(path, json=body).raise_for_status().json()
        return http.post("/retrieve_future", json={"request_id": begun["request_id"]}).raise_for_status()


# Against the trainer


@pytest.mark.parametrize("server", ["live", pytest.param("half", marks=pytest.mark.slow)])
def test_targets_and_the_end_of_a_prompt_are_scored_as_the_trainer_scores_them(server: str, request: pytest.FixtureRequest) -> None:
    live: Live = request.getfixturevalue(server)
    tokens, run = live.tokens, live.run
    ids = np.random.default_rng(1).integers(0, 4096, (len(tokens) - 1, 4))
    by_trainer = run.forward([supervised(tokens, ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    own = run.forward([supervised(tokens, np.asarray(tokens[1:]))], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    tolerance = 0.0 if live.bit_exact else ROUNDING
    params = types.SamplingParams(max_tokens=1)
    answer = live.trained.sample(prompt_of(tokens), 1, params, target_prompt_logprobs=types.TensorData.from_numpy(ids)).result()
    assert answer.target_prompt_logprobs is not None
    assert answer.target_prompt_logprobs.to_numpy() == pytest.approx(by_trainer, abs=tolerance, rel=0)
    for last in (1, 7, len(tokens) - 1):
        # The second time the beginning lies there already.
        for _ in range(2):
            scores = live.trained.compute_logprobs(prompt_of(tokens), prompt_logprobs_last_n=last).result()
            assert scores[:-last] == [None] * (len(tokens) - last)
            assert np.asarray(scores[-last:], np.float32) == pytest.approx(own[-last:], abs=tolerance, rel=0)


# Work that is not done twice


def test_equal_prompts_of_many_requests_are_computed_once_and_answered_as_alone(live: Live) -> None:
    prompts = [live.tokens[start : start + 24] for start in (0, 1, 2)]
    params = [types.SamplingParams(max_tokens=6, seed=seed, stop=[]) for seed in range(18)]
    together = [live.trained.sample(prompt_of(prompts[n % 3]), 1, each) for n, each in enumerate(params)]
    answers = [answer.result() for answer in together]
    hits = [answer.prompt_cache_hit_tokens for answer in answers]
    # Every prompt is computed by one request at most: another may have left it there.
    assert sum(23 - hit for hit in hits) <= 3 * 23
    assert max(hits) == 23
    fresh = live.run.save_weights_and_get_sampling_client().result()
    for n in (0, 7, 17):
        alone = fresh.sample(prompt_of(prompts[n % 3]), 1, params[n]).result()
        assert [(each.tokens, each.logprobs) for each in alone.sequences] == [(each.tokens, each.logprobs) for each in answers[n].sequences]


@pytest.mark.contract("POST /api/v1/asample", "prompt_logprobs_last_n")
def test_scores_of_the_end_of_a_known_prompt_do_not_compute_its_beginning(live: Live) -> None:
    context = live.tokens * 8
    live.base.compute_logprobs(prompt_of(context)).result()
    answer = live.base.sample(
        prompt_of([*context, *live.tokens[:5]]), 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, prompt_logprobs_last_n=5
    ).result()
    assert answer.prompt_cache_hit_tokens == len(context) - 1
    assert answer.prompt_logprobs is not None
    assert sum(value is not None for value in answer.prompt_logprobs) == 5


# Where samples end


@pytest.mark.contract("POST /api/v1/asample", "sampling_params.stop")
def test_the_first_of_several_stop_strings_ends_a_sample_and_is_part_of_it(live: Live) -> None:
    tokenizer = live.run.get_tokenizer()
    params = types.SamplingParams(max_tokens=40, seed=21, stop=[])
    (free,) = live.base.sample(prompt_of(live.tokens), 1, params).result().sequences
    text, ends = "", []
    for count in range(1, 41):
        text = tokenizer.decode(free.tokens[:count])
        ends.append(len(text))
    # A text from the middle of one token to the middle of another, a few further on.
    begin, end = ends[9] + 1, ends[13] + 1
    stop = text[begin:end]
    assert len(stop) > 3
    first = text.find(stop) + len(stop)
    expected = next(count for count in range(1, 41) if len(tokenizer.decode(free.tokens[:count])) >= first)
    (stopped,) = live.base.sample(prompt_of(live.tokens), 1, params.model_copy(update={"stop": ["never said", stop]})).result().sequences
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[:expected], "stop")
    assert stopped.logprobs == free.logprobs[:expected]  # type: ignore[index]
    assert stop in tokenizer.decode(stopped.tokens)


def test_without_a_number_of_tokens_the_context_ends_a_sample(live: Live) -> None:
    nearly = (live.tokens * (CONTEXT // len(live.tokens) + 1))[: CONTEXT - 3]
    (sequence,) = live.base.sample(prompt_of(nearly), 1, types.SamplingParams(seed=1, stop=[])).result().sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (3, "length")


@pytest.mark.slow
def test_samples_survive_the_death_of_the_api(tmp_path: Path) -> None:
    params = [types.SamplingParams(max_tokens=150, seed=seed, stop=[]) for seed in range(80)]
    with running_server(tmp_path / "data") as server, connected(server) as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        prompt = prompt_of(list(range(40, 60)))
        expected = [sampler.sample(prompt, 2, each).result() for each in params[:3]]
        wait_until(lambda: sampled(server) >= 3 * 2 * 150)
        answers = under_way(server, lambda: [sampler.sample(prompt, 2, each) for each in params])
        os.kill(server.pid("api"), signal.SIGKILL)
        os.kill(server.pid(f"engine-{MODEL}"), signal.SIGCONT)
        found = [answer.result(timeout=180) for answer in answers]
        for mine, theirs in zip(found, expected, strict=False):
            assert [(each.tokens, each.logprobs) for each in mine.sequences] == [(each.tokens, each.logprobs) for each in theirs.sequences]
        assert {len(sequence.tokens) for answer in found for sequence in answer.sequences} == {150}
        wait_until(lambda: server.children()["api"]["restarts"] == 1)


def under_way(server: LiveServer, begin: Callable[[], list[Any]]) -> list[Any]:
    """Answers of which some are still to come, with the engine held in the middle of them; begun anew where a quick one was done before."""
    engine = server.pid(f"engine-{MODEL}")
    while True:
        before = sampled(server)
        answers = begin()
        wait_until(lambda before=before: sampled(server) > before + 50)
        os.kill(engine, signal.SIGSTOP)
        if not all(answer.future().done() for answer in answers):
            return answers
        os.kill(engine, signal.SIGCONT)


def sampled(server: LiveServer) -> int:
    """Tokens since the engine started."""
    status = httpx.get(f"{server.url}/api/v1/status", headers={"x-api-key": server.key}).json()
    return int(status["engines"][0]["detail"]["tokens_sampled"])

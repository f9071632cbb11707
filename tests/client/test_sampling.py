"""Rollouts through the client: token ids, log-probabilities that the trainer agrees with to the bit, versions, deadlines and restarts."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bloomery.client import Client
from bloomery.recipes.advantages import Weighed
from bloomery.recipes.rollouts import Problem, Rollout
from bloomery.types.errors import InvalidInput, NotFound, Unavailable
from tests.api.server import Server, serving
from tests.live import LiveServer
from tests.services.runs_stage import datum

BASE = "bloomery-tiny"
PROMPT = tuple(range(100, 120))


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        yield client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def test_a_group_has_token_ids_with_their_log_probabilities_and_says_how_it_ended(client: Client) -> None:
    sampled = client.sampler(BASE).sample(PROMPT, num_samples=4, max_tokens=6, seed=1, stop=()).result()
    assert [len(sequence.tokens) for sequence in sampled.sequences] == [len(sequence.logprobs) for sequence in sampled.sequences] == [6] * 4
    assert all(-100 < logprob <= 0 for sequence in sampled.sequences for logprob in sequence.logprobs)
    assert not any(sequence.stopped for sequence in sampled.sequences)
    assert len({sequence.tokens for sequence in sampled.sequences}) > 1
    first = sampled.sequences[0].tokens[0]
    stopped = client.sampler(BASE).sample(PROMPT, max_tokens=6, seed=1, stop=(first,)).result().sequences[0]
    assert (stopped.tokens, stopped.stopped) == ((first,), True)


def test_a_seed_gives_the_same_tokens_from_any_sampler_of_the_same_weights(client: Client) -> None:
    first, again = (client.sampler(BASE).sample(PROMPT, num_samples=3, max_tokens=8, seed=7).result() for _ in range(2))
    assert first == again
    assert client.sampler(BASE).sample(PROMPT, num_samples=3, max_tokens=8, seed=8).result() != first


def test_sampled_log_probabilities_are_the_trainers_to_the_bit(client: Client) -> None:
    run = client.create_run(BASE, rank=4, seed=1)
    version = run.save_snapshot().result().version
    sampled = client.sampler(version).sample(PROMPT, max_tokens=8, seed=3, stop=()).result()
    sequence = sampled.sequences[0]
    rollout = Rollout("0", Problem("p", PROMPT), sequence.tokens, sequence.logprobs, (version,) * 8, stopped=False)
    scored = run.forward([Weighed(rollout.segments[0], np.ones(8, dtype=np.float32)).datum], "importance_sampling").result()
    assert sampled.version == version
    assert scored.outputs[0]["logprobs"].numpy()[len(PROMPT) - 1 :].tolist() == list(sequence.logprobs)
    assert scored.metrics["k3:sum"] == 0


def test_a_sampler_keeps_its_weights_when_its_run_moves_on(client: Client) -> None:
    run = client.create_run(BASE, rank=4, seed=1)
    old = client.sampler(run.save_snapshot().result().version)
    before = old.sample(PROMPT, max_tokens=8, seed=3).result()
    run.forward_backward([datum([*PROMPT])])
    run.optim_step(1e-2)
    new = client.sampler(run.save_snapshot().result().version)
    assert old.sample(PROMPT, max_tokens=8, seed=3).result() == before
    moved = new.sample(PROMPT, max_tokens=8, seed=3).result()
    assert moved.version != before.version
    assert moved.sequences[0].logprobs != before.sequences[0].logprobs


def test_a_text_is_scored_by_the_weights_themselves(client: Client) -> None:
    sampler = client.sampler(BASE)
    sequence = sampler.sample(PROMPT, max_tokens=8, seed=3, stop=()).result().sequences[0]
    scored = sampler.score(PROMPT + sequence.tokens).prompt_logprobs()
    assert math.isnan(scored[0])
    assert list(scored[len(PROMPT) :]) == list(sequence.logprobs)


def test_what_is_asked_wrongly_is_refused_as_such(client: Client) -> None:
    with pytest.raises(NotFound, match="no model `nobody`"):
        client.sampler("nobody")
    with pytest.raises(InvalidInput, match="ids are from 0 to"):
        client.sampler(BASE).sample([1 << 20], max_tokens=4, seed=1)
    with pytest.raises(InvalidInput, match="top_p"):
        client.sampler(BASE).sample(PROMPT, max_tokens=4, seed=1, top_p=2)


def test_a_sample_that_is_not_there_in_time_is_cancelled(client: Client) -> None:
    pending = client.sampler(BASE).sample(PROMPT, max_tokens=1500, seed=1, num_samples=32, stop=())
    with pytest.raises(Unavailable, match="was not there within 0 s and is cancelled"):
        pending.result(timeout_s=0)


def test_a_sample_that_a_restart_lost_is_asked_for_again_and_is_the_same(server: Server) -> None:
    with server.client() as client:
        sampler = client.sampler("tiny")
        expected = sampler.sample([1, 2, 3], max_tokens=5, seed=9).result()
        pending = sampler.sample([1, 2, 3], max_tokens=5, seed=9)
        server.stop()
        server.start()
        assert pending.result() == expected

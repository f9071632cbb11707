"""Rollouts through the client: token ids, log-probabilities that the trainer agrees with to the bit, versions, deadlines and restarts."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_drafts_change_nothing_but_the_time(client: Client) -> None:
    run = client.create_run(BASE, rank=4, seed=1)
    old = client.sampler(run.save_snapshot().result().version)
    asked: dict[str, Any] = {"num_samples": 3, "max_tokens": 40, "seed": 7, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
    before = old.sample(PROMPT, **asked).result()
    run.forward_backward([datum([*PROMPT])])
    run.optim_step(1e-2)
    new = client.sampler(run.save_snapshot().result().version)
    plain = new.sample(PROMPT, **asked).result()
    drafts = [sequence.tokens for sequence in before.sequences]
    reused = new.sample(PROMPT, **asked, drafts=drafts).result()
    assert (reused.version, reused.sequences) == (plain.version, plain.sequences)
    assert reused.kept == tuple(_in_common(*pair) for pair in zip(drafts, (each.tokens for each in plain.sequences), strict=True))
    right = new.sample(PROMPT, **asked, drafts=[sequence.tokens for sequence in plain.sequences]).result()
    assert right.sequences == plain.sequences
    assert right.kept == tuple(len(sequence.tokens) for sequence in plain.sequences)
    some = new.sample(PROMPT, **asked, drafts=[(), plain.sequences[1].tokens[:5], (4095,) * 40]).result()
    assert some.sequences == plain.sequences
    assert some.kept[:2] == (0, min(5, len(plain.sequences[1].tokens)))
    assert plain.kept == ()


def _in_common(first: Sequence[int], second: Sequence[int]) -> int:
    differs = [place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    return differs[0] if differs else min(len(first), len(second))


def test_kept_tokens_are_counted(client: Client, live_server: LiveServer) -> None:
    def counted() -> tuple[float, float]:
        text = httpx.get(f"{live_server.url}/metrics", headers={"x-api-key": live_server.key}).text
        found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
        return found["bloomery:draft_tokens_total"], found["bloomery:draft_tokens_kept_total"]

    before = counted()
    truth = client.sampler(BASE).sample(PROMPT, max_tokens=8, seed=1, stop=()).result().sequences[0].tokens
    client.sampler(BASE).sample(PROMPT, max_tokens=8, seed=1, stop=(), drafts=[(*truth[:5], (truth[5] + 1) % 4096, 1)]).result()
    assert tuple(now - then for now, then in zip(counted(), before, strict=True)) == (7, 5)


def test_a_sample_with_drafts_is_found_under_its_number_like_any_other(client: Client, live_server: LiveServer) -> None:
    headers = {"x-api-key": live_server.key}
    sampler = client.sampler(BASE)
    body = {"sampling_session_id": sampler._id, "seq_id": 900, "prompt": list(PROMPT), "drafts": [[1], []], "max_tokens": 4, "seed": 1}
    begun = [httpx.post(f"{live_server.url}/api/v1/samples", json=body, headers=headers).json() for _ in range(2)]
    assert begun[0] == begun[1]
    assert httpx.post(f"{live_server.url}/api/v1/samples", json=body | {"sampling_session_id": "none"}, headers=headers).status_code == 404


@pytest.mark.parametrize(
    ("drafts", "says"),
    [
        ([(1,), (2,)], "2 for 1 samples"),
        ([(1,) * 9], "a sample has 8 at most"),
        ([(4096,)], "ids are from 0 to 4095"),
        ([(-1,)], "greater than or equal to 0"),
    ],
    ids=str,
)
def test_drafts_that_cannot_be_some_are_refused(client: Client, drafts: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        client.sampler(BASE).sample(PROMPT, max_tokens=8, seed=1, drafts=drafts).result()


def test_a_score_tells_the_likeliest_token_of_each_place_where_it_is_asked(client: Client) -> None:
    sampler = client.sampler(BASE)
    scored = sampler.score(PROMPT, likeliest=True).scored()
    assert scored.logprobs[1:] == sampler.score(PROMPT).prompt_logprobs()[1:]
    assert len(scored.likeliest) == len(PROMPT)
    for token, own, likeliest in zip(PROMPT[1:], scored.logprobs[1:], scored.likeliest[1:], strict=True):
        assert likeliest.logprob >= own
        assert (likeliest.logprob == own) is (likeliest.token == token)
    # Greedy sampling gives that very token.
    greedy = sampler.sample(PROMPT, max_tokens=1, seed=1, temperature=0.0).result().sequences[0].tokens[0]
    assert sampler.score((*PROMPT, 0), likeliest=True).scored().likeliest[-1].token == greedy
    assert sampler.score(PROMPT).scored().likeliest == ()

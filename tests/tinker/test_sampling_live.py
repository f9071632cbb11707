"""The unmodified SDK against `bloomery up`: several samples of one request come out the same in any company, and nobody's samples stop."""

from typing import Any

import httpx
import pytest
from tinker import types

from tests.live import LiveServer, wait_until
from tests.sdk import connected

MODEL = "bloomery-tiny"
PROMPT = types.ModelInput.from_ints(list(range(40, 60)))


def status(server: LiveServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/api/v1/status", headers={"x-api-key": server.key}).json()
    detail: dict[str, Any] = answer["engines"][0]["detail"]
    return detail


def spans_of(server: LiveServer, session_id: str) -> list[dict[str, Any]]:
    found = httpx.get(f"{server.url}/api/v1/spans", params={"kind": "sample", "limit": 50}, headers={"x-api-key": server.key}).json()["data"]
    return [span for span in found if span["session_id"] == session_id]


def drawn(answer: types.SampleResponse) -> list[tuple[list[int], list[float]]]:
    return [(sequence.tokens, sequence.logprobs or []) for sequence in answer.sequences]


def test_four_samples_of_one_seed_are_the_same_alone_and_in_company(live_server: LiveServer) -> None:
    params = types.SamplingParams(max_tokens=24, seed=11, stop=[])
    with connected(live_server) as client, connected(live_server) as other:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        alone = drawn(sampler.sample(PROMPT, 4, params).result())
        crowd = [sampler.sample(PROMPT, 3, params.model_copy(update={"seed": seed, "max_tokens": 7 + seed})) for seed in range(6)]
        in_company = sampler.sample(PROMPT, 4, params)
        elsewhere = other.create_sampling_client(base_model=MODEL).result().sample(PROMPT, 4, params)
        assert drawn(in_company.result()) == drawn(elsewhere.result()) == alone
        assert len({tuple(tokens) for tokens, _ in alone}) == 4
        assert drawn(sampler.sample(PROMPT, 2, params).result()) == alone[:2]
        assert drawn(sampler.sample(PROMPT, 4, params.model_copy(update={"seed": 12})).result()) != alone
        for each in crowd:
            each.result()


def test_closing_the_client_in_the_middle_of_a_sample_stops_the_engine(live_server: LiveServer) -> None:
    samples, most = 16, 1900
    with connected(live_server) as client:
        session = client.holder.get_session_id()
        sampler = client.create_sampling_client(base_model=MODEL).result()
        # What the engine says of itself comes a second late, so it is let say first that it rests, and then that it is at this.
        wait_until(lambda: status(live_server)["running_sequences"] == 0)
        before = status(live_server)["tokens_sampled"]
        answer = sampler.sample(PROMPT, samples, types.SamplingParams(max_tokens=most, stop=[]))
        wait_until(lambda: status(live_server)["running_sequences"] > 0)
        begun = status(live_server)["tokens_sampled"]
        wait_until(lambda: status(live_server)["tokens_sampled"] > begun)
        client.close("interrupted").result()
        wait_until(lambda: status(live_server)["running_sequences"] == 0)
        wait_until(lambda: spans_of(live_server, session) != [])
        (span,) = spans_of(live_server, session)
        assert span["status"] == "cancelled"
        assert 0 < span["out_tokens"] < samples * most
        # A few of the test before may be among them.
        assert status(live_server)["tokens_sampled"] - before < samples * most
        with pytest.raises(RuntimeError, match="closed"):
            answer.result(timeout=30)

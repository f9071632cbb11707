"""Samples of the Training API, with the unmodified SDK over a fake engine: what they wait for, what is recorded of them, and what ends them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from bloomery.config import RecordMode
from bloomery.services.access.principal import Allowance
from bloomery.services.clients.sessions import Sessions
from bloomery.services.weights.versions import Version
from bloomery.store.database import READERS, Database
from bloomery.types.errors import NotFound
from bloomery.types.generation import GenerateFailed, Weights
from bloomery.types.ids import new_id
from bloomery.types.protocol import SamplerEvents
from tests.live import wait_until
from tests.render.builders import byte_level
from tests.sdk import connected
from tests.services.fake_engine import BASE
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served
from tests.tinker.samples import ENDLESS, FIRST_SAMPLED, ME, ask, get, letters, sampler_of, span_of

# What a sample waits for


@contextmanager
def no_reading(server: Served) -> Iterator[None]:
    """Every reader of the database is busy meanwhile."""
    busy, free = threading.Barrier(READERS + 1), threading.Event()

    def hold(_: object) -> None:
        busy.wait(120)
        free.wait(300)

    database = server.services.sessions._database
    reading = [asyncio.run_coroutine_threadsafe(database.read(hold), server.loop) for _ in range(READERS)]
    busy.wait(120)
    try:
        yield
    finally:
        free.set()
        for each in reading:
            each.result(120)


def test_a_sample_waits_for_no_database(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    ask(sampler).result()
    with no_reading(server):
        answers = [ask(sampler, seed=seed) for seed in range(5)]
        assert [len(answer.result(timeout=120).sequences[0].tokens) for answer in answers] == [2] * 5


def test_samples_count_against_the_limits_of_their_key_once(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    allowance = Allowance(requests=3, tokens=40)
    made = server.do(lambda: server.services.auth.create(ME, new_id("key"), frozenset({"infer"}), allowance=allowance))

    def sample(seq: int, prompt: int) -> httpx.Response:
        body: dict[str, Any] = {"sampling_session_id": sampler._sampling_session_id, "seq_id": seq, "sampling_params": {"max_tokens": 2}}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1] * prompt}]}
        return httpx.post(f"{server.url}/api/v1/asample", json=body, headers={"x-api-key": made.key})

    assert [sample(1000, 20).status_code for _ in range(5)] == [200] * 5
    refused = sample(1001, 25)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limit_exceeded")
    assert "40 tokens per minute and this prompt takes 25" in refused.json()["error"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    hopeless = sample(1002, 41)
    assert (hopeless.status_code, hopeless.json()["field"]) == (400, "prompt")
    assert [sample(seq, 1).status_code for seq in (1003, 1004, 1005)] == [200, 200, 429]


def test_a_remembered_sampler_is_still_its_projects_alone(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    ask(sampler).result()
    key = server.do(lambda: server.services.auth.create(ME, "stranger", frozenset({"infer"}), project="elsewhere")).key
    body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 99, "prompt": {"chunks": []}, "sampling_params": {}}
    answer = httpx.post(f"{server.url}/api/v1/asample", json=body, headers={"x-api-key": key})
    assert (answer.status_code, "no sampling session" in answer.text) == (404, True)


def test_the_samplers_in_memory_are_the_latest_used_and_the_others_are_read_again(tmp_path: Path) -> None:
    async def story(database: Database) -> None:
        sessions = Sessions(database, remembered=2)
        session = await sessions.create(ME, tags=[], user_metadata={}, sdk_version="0")
        version = Version(Weights(version="v"), BASE, "tiny")
        made = [await sessions.create_sampling(ME, session.id, seq, version, None) for seq in range(3)]
        for number in (0, 1, 0, 2):
            assert await sessions.get_sampling(ME, made[number].id) == made[number]
        assert [key[1] for key in sessions._samplers] == [made[0].id, made[2].id]
        assert await sessions.get_sampling(ME, made[1].id) == made[1]
        with pytest.raises(NotFound):
            await sessions.get_sampling(ME._replace(project="other"), made[1].id)
        assert len(sessions._samplers) == 2

    with Database(tmp_path / "bloomery.db") as database:
        asyncio.run(story(database))


# What is recorded


def test_a_rollout_is_recorded_without_its_content(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    answer = ask(sampler, (1, 2, 3), 2, max_tokens=4).result()
    detail = span_of(server, answer)
    span = detail["span"]
    assert (span["kind"], span["status"], span["finish_reason"], span["seed"]) == ("sample", "ok", "length", 7)
    assert (span["in_tokens"], span["out_tokens"]) == (3, 8)
    assert (span["model"], span["version"], span["base_hash"], span["deployment"]) == (MODEL, BASE, BASE, None)
    assert span["session_id"] == service.holder.get_session_id()
    assert 0 <= span["ttft_us"] <= span["duration_us"]
    assert (span["consent"], span["episode_id"], span["has_body"], detail["body"]) == ("none", None, False, None)
    assert span["retention_until_us"] == span["started_us"] + 7 * 86_400_000_000


def test_a_run_is_known_by_the_version_of_its_weights(server: Served, service: tinker.ServiceClient) -> None:
    run = service.create_lora_training_client(base_model=MODEL, rank=8).result()
    path = run.save_weights_for_sampler("rolled").result().path
    span = span_of(server, ask(service.create_sampling_client(model_path=path).result()).result())["span"]
    assert (span["model"], span["base_hash"]) == (path, BASE)
    assert span["version"] != BASE


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-consent", "x-bloomery-episode")
def test_consent_keeps_the_content_with_token_ids_and_log_probabilities(server: Served) -> None:
    with connected(server, headers={"x-bloomery-consent": "train", "x-bloomery-episode": "episode-1"}) as consenting:
        prompt = letters("The fox")
        answer = ask(sampler_of(consenting), prompt, 2, max_tokens=3, temperature=0.5).result()
    detail = span_of(server, answer)
    span, body = detail["span"], detail["body"]
    assert (span["consent"], span["episode_id"], span["redacted"]) == ("train", "episode-1", False)
    assert span["retention_until_us"] == span["started_us"] + 30 * 86_400_000_000
    assert body["tokens"]["prompt"] == prompt
    tokens = [[FIRST_SAMPLED + 10 * sample + position for position in range(3)] for sample in range(2)]
    assert body["tokens"]["samples"] == [{"tokens": each, "logprobs": [-1.0] * 3, "finish_reason": "length"} for each in tokens]
    assert body["request"]["prompt"] == "The fox"
    assert (body["request"]["sampling_params"]["temperature"], body["request"]["num_samples"]) == (0.5, 2)
    spelled = [byte_level().decode(each, skip_special_tokens=False) for each in tokens]
    assert body["choices"] == [{"index": index, "text": text, "finish_reason": "length"} for index, text in enumerate(spelled)]
    assert [item["id"] for item in get(server, "/spans?episode=episode-1")["data"]] == [span["id"]]


def test_how_a_rollout_ended_is_recorded(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    # The tokens of this sample of the fake spell text.
    stopped = ask(sampler, samples=17, max_tokens=8, stop=byte_level().decode([FIRST_SAMPLED + 161, FIRST_SAMPLED + 162])).result()
    assert stopped.sequences[16].stop_reason == "stop"
    assert span_of(server, stopped)["span"]["out_tokens"] == 16 * 8 + 3
    asked = len(server.engine.sampled)
    failing = ask(sampler, ENDLESS, max_tokens=3)
    wait_until(lambda: len(server.engine.sampled) > asked)
    failed = GenerateFailed(request_id=server.engine.sampled[-1].request_id, message="the weights melted", category="server")
    server.loop.call_soon_threadsafe(server.engine._post, SamplerEvents(events=(failed,)))
    with pytest.raises(tinker.RequestFailedError, match="melted"):
        failing.result(timeout=120)
    newest = get(server, "/spans?limit=1")["data"][0]
    assert (newest["status"], newest["error_code"], newest["finish_reason"], newest["out_tokens"]) == ("error", "worker", None, 2)


@pytest.mark.parametrize("headers", [{"x-bloomery-consent": "yes"}, {"x-bloomery-episode": "e" * 257}])
def test_a_header_that_is_none_is_refused_by_name(server: Served, headers: dict[str, str]) -> None:
    with connected(server, headers=headers) as client, pytest.raises(tinker.BadRequestError, match=next(iter(headers))):
        ask(sampler_of(client)).result()


def test_a_secret_is_kept_neither_as_text_nor_as_token_ids(tmp_path: Path) -> None:
    secret = "ada@example.com"
    prompt = letters(f"mail {secret}")
    with served(tmp_path, record="full") as server:
        with connected(server, headers={"x-bloomery-consent": "eval"}) as client:
            detail = span_of(server, ask(sampler_of(client), prompt).result())
        assert detail["span"]["redacted"]
        assert (detail["body"]["request"]["prompt"], detail["body"]["tokens"]) == ("mail [email]", None)
    assert str(prompt).encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(("mode", "spans"), [("metadata", 1), ("off", 0)])
def test_less_is_recorded_where_the_server_records_less(tmp_path: Path, mode: RecordMode, spans: int) -> None:
    with served(tmp_path, record=mode) as server, connected(server, headers={"x-bloomery-consent": "train"}) as client:
        ask(sampler_of(client)).result()
        recorded = get(server, "/spans")["data"]
        assert [(span["kind"], span["has_body"]) for span in recorded] == [("sample", False)] * spans


def test_lists_show_the_kinds_that_are_asked_for(tmp_path: Path) -> None:
    with served(tmp_path, record="full") as server, connected(server) as client:
        ask(sampler_of(client)).result()
        served_answer = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}, headers={"x-api-key": KEY})
        assert served_answer.status_code == 200, served_answer.text
        kinds = {
            query: [span["kind"] for span in get(server, f"/spans{query}")["data"]] for query in ("", "?kind=sample", "?kind=chat&kind=completion")
        }
        assert kinds == {"": ["completion", "sample"], "?kind=sample": ["sample"], "?kind=chat&kind=completion": ["completion"]}
        assert httpx.get(f"{server.url}/api/v1/spans?kind=rollout", headers={"x-api-key": KEY}).status_code == 400


def test_a_rollout_can_be_judged(server: Served, service: tinker.ServiceClient) -> None:
    span_id = span_of(server, ask(sampler_of(service)).result())["span"]["id"]
    given = httpx.post(f"{server.url}/api/v1/feedback", json={"target": span_id, "metric": "reward", "value": 0.5}, headers={"x-api-key": KEY})
    assert given.status_code == 201, given.text
    assert [each["value"] for each in get(server, f"/spans/{span_id}")["feedback"]] == [0.5]


def test_a_sample_that_is_submitted_again_after_a_restart_replaces_its_record(tmp_path: Path) -> None:
    def sample(server: Served, body: dict[str, Any]) -> None:
        headers = {"x-api-key": KEY, "x-bloomery-consent": "eval"}
        accepted = httpx.post(f"{server.url}/api/v1/asample", json=body, headers=headers)
        done = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": accepted.json()["request_id"]}, headers=headers)
        assert done.status_code == 200, done.text

    with served(tmp_path, record="full") as first, connected(first) as client:
        sampler = sampler_of(client)._sampling_session_id
        body = {"sampling_session_id": sampler, "seq_id": 5, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
        sample(first, body | {"sampling_params": {"max_tokens": 1, "seed": 1}})
        assert get(first, f"/spans/{sampler}:5")["span"]["seed"] == 1
    with served(tmp_path, record="full") as second:
        sample(second, body | {"sampling_params": {"max_tokens": 2, "seed": 2}})
        detail = get(second, f"/spans/{sampler}:5")
        assert (detail["span"]["seed"], len(detail["body"]["tokens"]["samples"][0]["tokens"])) == (2, 2)
        assert get(second, "/status")["traffic"]["failed"] == 0


# What ends a sample


def test_closing_the_client_stops_its_samples_in_the_engine_and_keeps_what_was_sampled(server: Served) -> None:
    asked, aborted = len(server.engine.sampled), len(server.engine.aborted)
    with connected(server) as leaving, connected(server) as staying:
        session, other = leaving.holder.get_session_id(), staying.holder.get_session_id()
        futures = [ask(sampler_of(each), ENDLESS, 2, max_tokens=3) for each in (leaving, leaving, staying)]
        wait_until(lambda: len(server.engine.sampled) == asked + 3)
        leaving.close("interrupted").result()
        wait_until(lambda: len(server.engine.aborted) == aborted + 2)
        spans = {span["session_id"]: span for span in get(server, "/spans?kind=sample&limit=10")["data"]}
        assert other not in spans
        assert (spans[session]["status"], spans[session]["finish_reason"], spans[session]["out_tokens"]) == ("cancelled", None, 4)
    wait_until(lambda: len(server.engine.aborted) == aborted + 3)
    requests = {request.request_id for request in server.engine.sampled[asked:]}
    assert {(abort.request_id, abort.sample) for abort in server.engine.aborted[aborted:]} == {(request, None) for request in requests}
    for future in futures:
        with pytest.raises(Exception, match="closed"):
            future.result(timeout=120)


@pytest.mark.contract("POST /api/v1/client/dynamic_config")
@pytest.mark.contract("POST /api/v1/cancel_future", "request_id")
def test_cancelling_the_future_of_a_sample_stops_it_in_the_engine(server: Served) -> None:
    asked, aborted = len(server.engine.sampled), len(server.engine.aborted)
    with connected(server) as client:
        sampler = sampler_of(client)

        async def give_up() -> None:
            async def wait() -> None:
                await ask(sampler, ENDLESS, max_tokens=3)

            waiting = asyncio.create_task(wait())
            async with asyncio.timeout(60):
                while len(server.engine.sampled) == asked:
                    await asyncio.sleep(0.01)
            # A client cancels what it has the name of: after this answer it has that of the sample too.
            sampler_of(client)
            waiting.cancel()
            await asyncio.wait({waiting})

        asyncio.run(give_up())
        wait_until(lambda: len(server.engine.aborted) == aborted + 1)
    assert server.engine.aborted[-1].request_id == server.engine.sampled[-1].request_id

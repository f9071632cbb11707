"""Every inference leaves a span, however it ends; work that nobody waits for stops."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from bloomery.types.resources import Price
from tests.api.server import KEY
from tests.live import wait_until
from tests.openai.server import END, ScriptedServer, logprob_at
from tests.openai.test_contract import USER, chat, complete, tokens_of
from tests.render.builders import CHATML
from tests.services.fake_engine import BASE

STALLED = {"model": "tiny", "messages": USER, "stream": True}


def test_a_span_holds_all_that_was_sampled(sdk: OpenAI, server: ScriptedServer) -> None:
    answer = chat(sdk, seed=11, metadata={"team": "blue"}, user="u-1", logprobs=True)
    detail = server.span(answer.id)
    span, body = detail["span"], detail["body"]
    assert (span["kind"], span["status"], span["finish_reason"], span["seed"]) == ("chat", "ok", "stop", 11)
    assert (span["version"], span["base_hash"]) == (BASE, BASE)
    assert span["template_hash"] == server.services.models.tokenizer(BASE).template_hash
    assert (span["in_tokens"], span["out_tokens"]) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert 0 <= span["ttft_us"] <= span["duration_us"]
    assert span["tags"] == {"team": "blue", "user": "u-1"}
    sampled = [*tokens_of("It is 36."), END]
    logprobs = [logprob_at(position) for position in range(len(sampled))]
    assert body["tokens"]["prompt"] == server.scripted.requests[0].prompt.numpy().tolist()
    assert body["tokens"]["samples"] == [{"tokens": sampled, "logprobs": logprobs, "finish_reason": "stop"}]
    assert body["request"]["messages"] == USER
    assert body["choices"][0]["message"]["content"] == "It is 36."
    assert "logprobs" not in body["choices"][0]


def test_a_drawn_seed_is_recorded_and_gives_the_same_request_again(sdk: OpenAI, server: ScriptedServer) -> None:
    seed = server.span(chat(sdk).id)["span"]["seed"]
    chat(sdk, seed=seed)
    assert [request.params.seed for request in server.scripted.requests] == [seed, seed]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, ("none", None)),
        ({}, {"store": True}, ("eval", None)),
        ({"x-bloomery-consent": "train"}, {}, ("train", None)),
        ({"x-bloomery-consent": "none"}, {"store": True}, ("none", None)),
        ({"x-bloomery-episode": "e-1"}, {"metadata": {"episode": "e-2"}}, ("none", "e-1")),
        ({}, {"metadata": {"episode": "e-2"}, "store": False}, ("none", "e-2")),
    ],
)
def test_consent_and_episode_are_the_callers(
    sdk: OpenAI, server: ScriptedServer, headers: dict[str, str], body: dict[str, Any], expected: Any
) -> None:
    span = server.span(chat(sdk, extra_headers=headers, **body).id)["span"]
    assert (span["consent"], span["episode_id"]) == expected


@pytest.mark.parametrize("headers", [{"x-bloomery-consent": "yes"}, {"x-bloomery-episode": "e" * 257}])
def test_bad_headers_are_refused_by_name(sdk: OpenAI, headers: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, extra_headers=headers)
    assert refused.value.param in headers


def test_feedback_takes_the_id_of_an_answer(sdk: OpenAI, server: ScriptedServer) -> None:
    answer = chat(sdk)
    given = server.http.post("/api/v1/feedback", json={"target": answer.id, "metric": "thumbs", "value": False})
    assert given.status_code in (200, 201), given.text
    assert [item["value"] for item in server.span(answer.id)["feedback"]] == [False]


def test_each_of_several_prompts_has_a_span_of_its_own(sdk: OpenAI, server: ScriptedServer) -> None:
    answer = complete(sdk, prompt=["The", "quick"], n=2, seed=3)
    first, second = server.span(answer.id), server.span(f"{answer.id}-1")
    assert (first["span"]["parent_id"], second["span"]["parent_id"]) == (None, answer.id)
    assert [detail["body"]["request"]["prompt"] for detail in (first, second)] == ["The", "quick"]
    assert [detail["body"]["tokens"]["prompt"] for detail in (first, second)] == [tokens_of("The"), tokens_of("quick")]
    assert [detail["span"]["seed"] for detail in (first, second)] == [3, 4]
    assert [choice["index"] for choice in second["body"]["choices"]] == [2, 3]
    assert second["span"]["template_hash"] is None


def cut_off(server: ScriptedServer, *, stream: bool) -> httpx.Response | None:
    """Ask, and hang up while the answer is on its way."""
    if not stream:
        with server.asking("/v1/chat/completions", STALLED | {"stream": False}):
            return None
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=STALLED, headers={"x-api-key": KEY}, timeout=60) as answer:
        lines = answer.iter_lines()
        while "36" not in next(lines):
            pass
        return answer


@pytest.mark.parametrize("stream", [False, True])
def test_work_stops_when_the_client_hangs_up_and_what_was_sampled_is_kept(server: ScriptedServer, stream: bool) -> None:
    server.scripted.script.stall_after = len(tokens_of("It is 36"))
    cut_off(server, stream=stream)
    wait_until(lambda: bool(server.scripted.aborted))
    assert server.scripted.aborted[0].sample is None
    assert server.scripted.aborted[0].request_id == server.scripted.requests[0].request_id
    newest = server.http.get("/api/v1/spans", params={"limit": 1}).json()["data"][0]
    assert (newest["status"], newest["finish_reason"], newest["out_tokens"]) == ("cancelled", None, len(tokens_of("It is 36")))
    body = server.span(newest["id"])["body"]
    assert body["choices"][0]["message"]["content"] == "It is 36"
    assert body["tokens"]["samples"][0]["tokens"] == tokens_of("It is 36")


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.fail_after = 3
    with pytest.raises(openai.APIError, match="the weights melted"):
        list(chat(sdk, stream=True))
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=STALLED, headers={"x-api-key": KEY}) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert '"error"' in lines[-1]
    assert "[DONE]" not in "".join(lines)
    newest = server.http.get("/api/v1/spans", params={"limit": 1}).json()["data"][0]
    assert (newest["status"], newest["error_code"], newest["out_tokens"]) == ("error", "worker", 3)


def test_an_error_before_the_first_token_has_a_status(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.fail_after = 0
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="the weights melted"):
            chat(sdk, stream=stream)


@pytest.mark.slow
def test_a_hostile_template_costs_its_own_requests_only(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path)
    template = (
        "{% if 'loop' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}" + CHATML
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with server.listening(), server.sdk() as sdk:
        with pytest.raises(openai.BadRequestError, match="1 s of processor time"):
            chat(sdk, messages=[{"role": "user", "content": "loop"}])
        assert chat(sdk).choices[0].message.content == "It is 36."
        assert complete(sdk).choices[0].text == "It is 36."


def test_a_priced_request_costs_what_its_key_is_charged_for(sdk: OpenAI, server: ScriptedServer) -> None:
    price = Price(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=1000.0)
    with server.client() as client:
        client.deployments.create("priced", "tiny")
        client.deployments.set_price("priced", price)
    said = ("a rather long answer", "short", "a long answer")
    server.scripted.script.says = said
    best = complete(sdk, model="priced", best_of=3, n=1)
    span = server.span(best.id)["span"]
    assert span["out_tokens"] == best.usage.completion_tokens == sum(len(tokens_of(text)) + 1 for text in said)
    assert span["cost_usd"] == price.of(best.usage.prompt_tokens, best.usage.completion_tokens)
    # Nothing is charged where nothing came, and the prompt with the first token.
    server.scripted.script.fail_after = 0
    with pytest.raises(openai.InternalServerError, match="the weights melted"):
        complete(sdk, model="priced")
    newest = server.http.get("/api/v1/spans", params={"limit": 1}).json()["data"][0]
    assert (newest["status"], newest["cost_usd"], newest["in_tokens"] > 0) == ("error", 0.0, True)
    server.scripted.script.fail_after = 3
    with pytest.raises(openai.InternalServerError, match="the weights melted"):
        complete(sdk, model="priced")
    newest = server.http.get("/api/v1/spans", params={"limit": 1}).json()["data"][0]
    assert (newest["out_tokens"], newest["cost_usd"]) == (3, price.of(newest["in_tokens"], 3))

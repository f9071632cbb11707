"""How tokens are chosen and what is told about them, as the `openai` SDK asks for it; what is not OpenAI's goes through `extra_body`."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.live import wait_until
from tests.openai.server import END, OTHER_TOKEN, PROCESSED_LOGPROB, RANK, ScriptedServer, logprob_at
from tests.openai.test_contract import chat, complete, tokens_of
from tests.render.builders import byte_level

SHAPES: dict[str, Any] = {"presence_penalty": -1.5, "frequency_penalty": 0.5, "logit_bias": {"50": -100, "7": 2.5}}
ENGINE: dict[str, Any] = {"min_p": 0.05, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [40, 41], "top_k": 5}


def test_every_option_reaches_the_engine(sdk: OpenAI, server: ScriptedServer) -> None:
    chat(sdk, extra_body=ENGINE, **SHAPES)
    complete(sdk, extra_body=ENGINE, **SHAPES)
    for request in server.scripted.requests:
        params = request.params
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.5, 0.5, 1.2)
        assert (params.logit_bias, params.min_p, params.top_k) == (((50, -100.0), (7, 2.5)), 0.05, 5)
        assert (params.min_tokens, params.stop_tokens) == (2, (END, 40, 41))


@pytest.mark.parametrize("off", [0, -1])
def test_a_top_k_that_is_off_leaves_all_tokens(sdk: OpenAI, server: ScriptedServer, off: int) -> None:
    chat(sdk, extra_body={"top_k": off})
    complete(sdk, extra_body={"top_k": off})
    sdk.responses.create(model="tiny", input="x", extra_body={"top_k": off})
    assert [(request.params.top_k, request.params.truncates) for request in server.scripted.requests] == [(0, False)] * 3


def test_what_is_not_asked_changes_nothing(sdk: OpenAI, server: ScriptedServer) -> None:
    chat(sdk)
    params = server.scripted.requests[0].params
    assert not params.penalises
    assert not params.truncates
    assert (params.logit_bias, params.min_tokens, params.stop_tokens) == ((), 0, (END,))


def test_an_end_token_that_is_ignored_is_text_like_any_other(sdk: OpenAI, server: ScriptedServer) -> None:
    assert chat(sdk, extra_body={"ignore_eos": True}).choices[0].message.content == "It is 36.<|im_end|>"
    assert server.scripted.requests[-1].params.stop_tokens == ()
    chat(sdk, extra_body={"ignore_eos": True, "stop_token_ids": [9, 9]})
    assert server.scripted.requests[-1].params.stop_tokens == (9,)


def test_a_stop_token_of_the_callers_is_no_text(sdk: OpenAI, server: ScriptedServer) -> None:
    tokens = tokens_of("one six!")
    server.scripted.script.says = ("one six!",)
    for stream in (False, True):
        answer = complete(sdk, extra_body={"stop_token_ids": [tokens[-1]]}, stream=stream, logprobs=0)
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == byte_level().decode(tokens[:-1])
        shown = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.tokens]
        assert "".join(shown) == byte_level().decode(tokens[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_waits_for_the_least_number_of_tokens(sdk: OpenAI, server: ScriptedServer, stream: bool) -> None:
    said = "END one END two"
    server.scripted.script.says = (said,)
    least = len(tokens_of("END one"))
    answer = complete(sdk, stop="END", extra_body={"min_tokens": least}, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == "END one "
    assert parts[-1].choices[0].finish_reason == "stop"
    wait_until(lambda: bool(server.scripted.aborted))
    assert complete(sdk, stop="END").choices[0].text == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("mode", "expected"), [(None, logprob_at(0)), ("raw_logprobs", logprob_at(0)), ("processed_logprobs", PROCESSED_LOGPROB)])
def test_log_probabilities_are_those_that_are_asked_for_and_say_which(sdk: OpenAI, stream: bool, mode: str | None, expected: float) -> None:
    extra = {"logprobs_mode": mode} if mode else {}
    answer = chat(sdk, logprobs=True, top_logprobs=2, extra_body=extra, stream=stream)
    told = next(part.choices[0].logprobs for part in (answer if stream else [answer]) if part.choices[0].logprobs)
    assert told.logprobs_mode == (mode or "raw_logprobs")
    assert told.content[0].logprob == told.content[0].top_logprobs[0].logprob == expected
    answer = complete(sdk, logprobs=2, extra_body=extra, stream=stream)
    told = next(part.choices[0].logprobs for part in (answer if stream else [answer]) if part.choices[0].logprobs)
    assert told.logprobs_mode == (mode or "raw_logprobs")
    assert told.token_logprobs[0] == told.top_logprobs[0][told.tokens[0]] == expected


def test_processed_log_probabilities_are_refused_of_a_prompt_that_nobody_drew(sdk: OpenAI, server: ScriptedServer) -> None:
    asked = {"logprobs": 1, "extra_body": {"logprobs_mode": "processed_logprobs"}}
    for more in ({}, {"stream": True}, {"max_tokens": 0}):
        with pytest.raises(openai.BadRequestError, match="leave out `echo`, or ask for `raw_logprobs`") as refused:
            complete(sdk, echo=True, **asked, **more)
        assert refused.value.param == "logprobs_mode"
    assert server.scripted.requests == []
    raw = complete(sdk, echo=True, logprobs=1, extra_body={"logprobs_mode": "raw_logprobs"}).choices[0].logprobs
    assert (raw.logprobs_mode, raw.token_logprobs[:2]) == ("raw_logprobs", [None, logprob_at(1)])
    drawn = complete(sdk, echo=False, **asked).choices[0].logprobs
    assert (drawn.logprobs_mode, set(drawn.token_logprobs)) == ("processed_logprobs", {PROCESSED_LOGPROB})


def test_the_best_of_several_have_the_highest_log_probability_per_token(sdk: OpenAI, server: ScriptedServer) -> None:
    # Every further token of an answer is less likely here.
    said = ("a rather long answer", "short", "a long answer", "the very longest answer of all")
    server.scripted.script.says = said
    raw = complete(sdk, prompt=["The", "A"], best_of=4, n=2, logprobs=0)
    assert [choice.text for choice in raw.choices] == ["short", "a long answer"] * 2
    assert [choice.index for choice in raw.choices] == [0, 1, 2, 3]
    assert [request.num_samples for request in server.scripted.requests] == [4, 4]
    assert raw.usage.completion_tokens == 2 * sum(len(tokens_of(text)) + 1 for text in said)
    body = server.span(raw.id)["body"]
    assert [choice["text"] for choice in body["choices"]] == ["short", "a long answer"]
    assert len(body["tokens"]["samples"]) == 2
    only = complete(sdk, best_of=3, extra_body={"logprobs_mode": "processed_logprobs"}, logprobs=0)
    assert [choice.text for choice in only.choices] == ["short"]
    assert [choice.text for choice in complete(sdk, best_of=2, n=2).choices] == list(said[:2])


def test_an_echo_is_streamed_as_it_is_answered_whole(sdk: OpenAI) -> None:
    asked = {"prompt": ["The quick 🔥", "A"], "n": 2, "echo": True, "logprobs": 1}
    whole = complete(sdk, **asked)
    texts, tokens, offsets, reasons = ([[] for _ in range(4)] for _ in range(4))
    for chunk in complete(sdk, stream=True, **asked):
        choice = chunk.choices[0]
        texts[choice.index].append(choice.text)
        tokens[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
        offsets[choice.index] += choice.logprobs.text_offset
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    for choice in whole.choices:
        told = choice.logprobs
        assert "".join(texts[choice.index]) == choice.text
        assert tokens[choice.index] == list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))
        assert offsets[choice.index] == told.text_offset
        assert reasons[choice.index] == [choice.finish_reason]
    scored = list(complete(sdk, prompt="The quick", echo=True, logprobs=0, max_tokens=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in scored) == "The quick"
    assert scored[-1].choices[0].finish_reason == "length"


def test_a_prompt_is_told_token_by_token(sdk: OpenAI, server: ScriptedServer) -> None:
    prompts = ["The quick", "A"]
    answer = complete(sdk, prompt=prompts, n=2, extra_body={"prompt_logprobs": 2})
    for choice in answer.choices:
        ids = tokens_of(prompts[choice.index // 2])
        first, *others = choice.prompt_logprobs
        assert first is None
        assert len(others) == len(ids) - 1
        for position, (token, row) in enumerate(zip(ids[1:], others, strict=True), 1):
            expected = {"logprob": logprob_at(position), "rank": 1, "decoded_token": byte_level().decode([token])}
            assert row == {
                str(token): expected,
                str(OTHER_TOKEN): {"logprob": logprob_at(position) - 1, "rank": 2, "decoded_token": byte_level().decode([OTHER_TOKEN])},
            }
    table = chat(sdk, extra_body={"prompt_logprobs": 0}).prompt_logprobs
    sent = server.scripted.requests[-1].prompt.numpy().tolist()
    assert [None if row is None else {int(token): told["rank"] for token, told in row.items()} for row in table] == [
        None,
        *({token: RANK} for token in sent[1:]),
    ]
    assert "prompt_logprobs" not in chat(sdk).model_extra


def test_echo_and_prompt_log_probabilities_have_widths_of_their_own(sdk: OpenAI, server: ScriptedServer) -> None:
    choice = complete(sdk, prompt="The quick", echo=True, logprobs=0, extra_body={"prompt_logprobs": 2}).choices[0]
    assert server.scripted.requests[-1].prompt_top_k == 2
    assert all(top is None or len(top) == 1 for top in choice.logprobs.top_logprobs)
    assert [len(row) for row in choice.prompt_logprobs[1:]] == [2] * (len(tokens_of("The quick")) - 1)
    silent = complete(sdk, prompt="The quick", echo=True, extra_body={"prompt_logprobs": 1}).choices[0]
    assert silent.logprobs is None
    assert silent.text.startswith("The quick")


def test_a_refusal_is_the_sdks_own_error(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="leave out `stream`") as refused:
        complete(sdk, best_of=3, stream=True)
    assert refused.value.param == "best_of"
    with pytest.raises(openai.BadRequestError, match="unknown field") as refused:
        chat(sdk, extra_body={"use_beam_search": True})
    assert refused.value.param == "use_beam_search"

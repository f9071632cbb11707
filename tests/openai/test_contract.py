"""The unmodified `openai` SDK against the real app."""

from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import OpenAI

from bloomery.api.routes.openai.requests import MAX_BODY_BYTES, parse_chat
from tests.live import wait_until
from tests.openai.server import CONTEXT, END, OTHER_TOKEN, ScriptedServer, logprob_at
from tests.render.builders import byte_level
from tests.services.fake_engine import BASE

USER = [{"role": "user", "content": "What is 12 times 3?"}]
UNICODE = "Grüße aus 東京 🔥👍🏽!"


def tokens_of(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


def chat(sdk: OpenAI, **options: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "tiny", "messages": USER} | options)


def complete(sdk: OpenAI, **options: Any) -> Any:
    return sdk.completions.create(**{"model": "tiny", "prompt": "The quick", "max_tokens": 100} | options)


def test_a_chat_completion_names_the_weights_that_gave_it(sdk: OpenAI, server: ScriptedServer) -> None:
    raw = sdk.chat.completions.with_raw_response.create(model="tiny", messages=USER)
    answer = raw.parse()
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", "tiny", BASE)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "It is 36.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    prompt = server.services.models.tokenizer(BASE).render_prompt(USER)
    assert server.scripted.requests[0].prompt.numpy().tolist() == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens_of("It is 36.")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert raw.headers["x-bloomery-version"] == BASE
    assert "x-bloomery-deployment" not in raw.headers
    assert raw.headers["x-request-id"].startswith("request-")


@pytest.mark.parametrize("text", ["It is 36.", UNICODE, ""])
def test_a_stream_says_what_the_whole_answer_says(sdk: OpenAI, server: ScriptedServer, text: str) -> None:
    server.scripted.script.says = (text,)
    chunks = list(chat(sdk, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat(sdk).choices[0].message.content == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.system_fingerprint for chunk in chunks} == {BASE}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_counts_tokens_when_asked_and_ends_with_done(sdk: OpenAI, server: ScriptedServer) -> None:
    *chunks, last = chat(sdk, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == len(tokens_of("It is 36.")) + 1
    assert all(chunk.usage is None for chunk in chunks)
    body = {"model": "tiny", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {sdk.api_key}"}) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.headers["x-bloomery-version"] == BASE
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert '"usage":null' in lines[0]


def test_several_choices_are_kept_apart(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.says = ("one", "two 🔥", "three")
    assert [choice.message.content for choice in chat(sdk, n=3).choices] == ["one", "two 🔥", "three"]
    texts = dict.fromkeys(range(3), "")
    for chunk in chat(sdk, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == ["one", "two 🔥", "three"]


def test_parameters_reach_the_engine(sdk: OpenAI, server: ScriptedServer) -> None:
    chat(sdk, temperature=0.25, top_p=0.5, seed=7, max_completion_tokens=3, n=2, extra_body={"top_k": 9})
    request = server.scripted.requests[0]
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.25, 0.5, 9)
    assert (request.params.seed, request.params.max_tokens, request.num_samples) == (7, 3, 2)
    assert request.params.stop_tokens == (END,)


def test_defaults_are_those_of_the_contract(sdk: OpenAI, server: ScriptedServer) -> None:
    chat(sdk)
    sdk.completions.create(model="tiny", prompt="The")
    talking, completing = (request.params for request in server.scripted.requests)
    assert (talking.temperature, talking.top_p, talking.top_k) == (1.0, 1.0, 0)
    assert talking.max_tokens == CONTEXT - len(server.scripted.requests[0].prompt.numpy())
    assert completing.max_tokens == 16
    assert talking.seed != completing.seed


def test_length_is_said_to_be_the_reason(sdk: OpenAI) -> None:
    assert chat(sdk, max_tokens=2).choices[0].finish_reason == "length"
    assert complete(sdk, max_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_choice_and_is_not_part_of_it(sdk: OpenAI, server: ScriptedServer, stream: bool) -> None:
    server.scripted.script.says = ("one, END and more", "two")
    answer = chat(sdk, n=2, stop=["END", "!"], stream=stream, logprobs=True)
    texts, reasons, shown = ["", ""], ["", ""], ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
            reasons[choice.index] = choice.finish_reason or ""
            shown[choice.index] += "".join(token.token for token in choice.logprobs.content) if choice.logprobs else ""
    assert texts == shown == ["one, ", "two"]
    assert reasons == ["stop", "stop"]
    wait_until(lambda: bool(server.scripted.aborted))
    assert server.scripted.aborted[0].sample == 0


def test_logprobs_spell_the_answer(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.says = (UNICODE,)
    shown = chat(sdk, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in shown) == UNICODE.encode()
    assert [token.logprob for token in shown] == [logprob_at(position) for position in range(len(shown))]
    assert any(token.token.startswith("\\x") for token in shown)
    first, second = shown[0].top_logprobs
    assert (first.token, first.logprob) == (shown[0].token, shown[0].logprob)
    assert (second.token, second.logprob) == (byte_level().decode([OTHER_TOKEN]), -9999.0)
    streamed = [token for chunk in chat(sdk, logprobs=True, top_logprobs=2, stream=True) for token in (chunk.choices[0].logprobs or Empty).content]
    assert streamed == shown


class Empty:
    content: tuple[()] = ()


def test_logprobs_of_a_completion_say_where_each_token_begins(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.says = ("It is 36.",)
    choice = complete(sdk, logprobs=2).choices[0]
    assert choice.text == "".join(choice.logprobs.tokens) == "It is 36."
    for token, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[start:].startswith(token)
    assert choice.logprobs.token_logprobs[:2] == [logprob_at(0), logprob_at(1)]
    assert choice.logprobs.top_logprobs[0] == {choice.logprobs.tokens[0]: logprob_at(0), byte_level().decode([OTHER_TOKEN]): -9999.0}
    assert complete(sdk, logprobs=0).choices[0].logprobs.top_logprobs[0] == {choice.logprobs.tokens[0]: logprob_at(0)}
    assert complete(sdk).choices[0].logprobs is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("The quick", ["The quick"]),
        ([65, 66, 67], [[65, 66, 67]]),
        (["The", "quick"], ["The", "quick"]),
        ([[65, 66], [67]], [[65, 66], [67]]),
    ],
    ids=["text", "tokens", "texts", "lists of tokens"],
)
def test_prompts_come_in_four_forms(sdk: OpenAI, server: ScriptedServer, prompt: Any, expected: list[Any]) -> None:
    server.scripted.script.says = ("one", "two")
    answer = complete(sdk, prompt=prompt, n=2, seed=5)
    sent = [request.prompt.numpy().tolist() for request in server.scripted.requests]
    assert sorted(sent) == sorted(tokens_of(item) if isinstance(item, str) else item for item in expected)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert [choice.text for choice in answer.choices] == ["one", "two"] * len(expected)
    assert answer.usage.prompt_tokens == sum(map(len, sent))
    assert sorted(request.params.seed for request in server.scripted.requests) == [5 + index for index in range(len(expected))]


@pytest.mark.parametrize(("seed", "used"), [(-(2**63), [-(2**63), 1 - 2**63]), (-1, [-1, 0]), (2**63 - 1, [0, 2**63 - 1])])
def test_a_seed_is_any_number_of_64_bits(sdk: OpenAI, server: ScriptedServer, seed: int, used: list[int]) -> None:
    answer = complete(sdk, prompt=["The", "quick"], seed=seed)
    assert sorted(request.params.seed for request in server.scripted.requests) == used
    assert server.span(answer.id)["span"]["seed"] == seed
    chat(sdk, seed=seed)
    sdk.responses.create(model="tiny", input="The", extra_body={"seed": seed})
    assert [request.params.seed for request in server.scripted.requests[2:]] == [seed, seed]


def test_prompts_are_streamed_side_by_side(sdk: OpenAI) -> None:
    texts = ["", ""]
    for chunk in complete(sdk, prompt=["The", "quick"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["It is 36."] * 2


def test_an_echo_is_scored(sdk: OpenAI, server: ScriptedServer) -> None:
    prompt = "The quick 🔥"
    scored = complete(sdk, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    choice = scored.choices[0]
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == (prompt, "length", 0)
    ids = tokens_of(prompt)
    assert choice.logprobs.token_logprobs == [None, *(logprob_at(position) for position in range(1, len(ids)))]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {choice.logprobs.tokens[1]: logprob_at(1)}
    longer = complete(sdk, prompt=prompt, echo=True, logprobs=0).choices[0]
    assert longer.text == prompt + "It is 36."
    assert longer.logprobs.text_offset[len(ids)] == len(prompt)
    assert longer.logprobs.token_logprobs[len(ids)] == logprob_at(0)
    assert complete(sdk, prompt=prompt, echo=True).choices[0].text == prompt + "It is 36."


@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("says", ["", "It is 36."])
def test_an_echo_shows_every_token_the_one_that_ends_it_too(sdk: OpenAI, server: ScriptedServer, says: str, max_tokens: int) -> None:
    server.scripted.script.says = (says,)
    answer = complete(sdk, prompt="The quick", echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = answer.choices
    told = choice.logprobs
    assert [len(each) for each in (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)] == [answer.usage.total_tokens] * 4
    ended = choice.finish_reason == "stop"
    assert ended == (not says or max_tokens == 20)
    assert "".join(told.tokens) == choice.text + "<|im_end|>" * ended
    assert not ended or told.text_offset[-1] == len(choice.text)


def test_a_template_without_a_place_for_names_leaves_them_out(sdk: OpenAI, server: ScriptedServer) -> None:
    said = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "assistant", "user")]
    for messages in (said, [{**message, "name": "Ann"} for message in said]):
        chat(sdk, messages=messages)
    plain, named = (request.prompt.numpy().tolist() for request in server.scripted.requests)
    assert named == plain


def test_a_conversation_goes_on_with_the_answer_it_got(sdk: OpenAI, server: ScriptedServer) -> None:
    first = chat(sdk)
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "4?"}]
    chat(sdk, messages=[{"role": "developer", "content": "Be brief."}, *USER, first.choices[0].message, {"role": "user", "content": parts}])
    asked = [
        "<|im_start|>system\nBe brief.",
        f"<|im_start|>user\n{USER[0]['content']}",
        "<|im_start|>assistant\nIt is 36.",
        "<|im_start|>user\nAnd 4?",
    ]
    rendered = byte_level().decode(server.scripted.requests[-1].prompt.numpy().tolist(), skip_special_tokens=False)
    assert rendered == "<|im_end|>\n".join([*asked, "<|im_start|>assistant\n"])


NO_OPS = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None, "n": None, "temperature": None, "logprobs": None}
NO_OPS |= {"return_token_ids": False, "guided_json": None, "top_k": -1}


def test_values_that_ask_for_nothing_are_no_reason_to_refuse(sdk: OpenAI, server: ScriptedServer) -> None:
    no_ops = NO_OPS | {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"], "audio": None}
    assert chat(sdk, seed=7, extra_body=no_ops).choices == chat(sdk, seed=7).choices
    assert complete(sdk, seed=7, extra_body=NO_OPS | {"suffix": None, "best_of": 1}).choices == complete(sdk, seed=7).choices
    talking, plain_talking, completing, plain_completing = (msgspec.structs.replace(asked, request_id="") for asked in server.scripted.requests)
    assert (talking, completing) == (plain_talking, plain_completing)


BAD_CHAT = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "template of this model"),
    ({"functions": [{"name": "f"}]}, "functions", "not offered"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type", "tools of type `custom` are not offered"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type", "a choice of type `allowed_tools` is not offered"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not offered"),
    ({"temprature": 1}, "temprature", "unknown field"),
    ({"model": None}, "model", "expected `str`"),
    ({"model": ""}, "model", "length >= 1"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": "hi"}, "messages", "expected `array`"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "give a text"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "give a text"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "expected"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "which call this answers"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "invalid enum value 'function'"),
    ({"messages": [{"role": "user", "content": "x", "name": 7}]}, "messages.0.name", "expected `str"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood", "unknown field"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]}, "messages.0.reasoning_content", "not offered"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0.tool_call_id", "not offered"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id", "required field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "text alone"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]}]}, "messages.0.content.1.type", "give parts of"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type", "`input_audio` are not offered"),
    ({"messages": [{"role": "user", "content": [{"type": 7}]}]}, "messages.0.content.0.type", "expected"),
    ({"return_token_ids": True}, "return_token_ids", "POST /api/v1/samples takes and gives token ids"),
    ({"guided_json": {}}, "guided_json", 'give `structured_outputs: {"json": ...}`'),
    ({"guided_regex": "a"}, "guided_regex", 'give `structured_outputs: {"regex": ...}`'),
    ({"guided_choice": ["a"]}, "guided_choice", 'give `structured_outputs: {"choice": ...}`'),
    ({"guided_grammar": "a"}, "guided_grammar", 'give `structured_outputs: {"grammar": ...}`'),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages.0.content.0.x", "unknown field"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking", "no variable of that name"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "the rest of the request"),
    ({"chat_template_kwargs": {"message": []}}, "chat_template_kwargs.message", "no variable of that name"),
    ({"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs", "names of variables: 1 to 64 letters"),
    ({"chat_template_kwargs": {f"v{n}": 1 for n in range(33)}}, "chat_template_kwargs", "length <= 32"),
    ({"chat_template_kwargs": {"a": "x" * (1 << 16)}}, "chat_template_kwargs", "more than 64 KiB as JSON"),
    ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs", "expected `object"),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"temperature": "1"}, "temperature", "expected `float"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"top_p": 1.5}, "top_p", "<= 1"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 129}, "n", "<= 128"),
    ({"n": True}, "n", "expected `int"),
    ({"seed": -(2**63) - 1}, "seed", ">= -9223372036854775808"),
    ({"seed": 2**63}, "seed", "<= 9223372036854775807"),
    ({"seed": 0.5}, "seed", "expected `int"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
    ({"max_tokens": CONTEXT}, "max_tokens", "ask for at most"),
    ({"messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}, "messages", "no room in the model's context of 512"),
    ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"stop": ""}, "stop", "length >= 1"),
    ({"stop": ["a", ""]}, "stop.1", "length >= 1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
    ({"stream": True, "stream_options": {"include_cost": True}}, "stream_options.include_cost", "unknown field"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not offered"),
    ({"metadata": {"a": 1}}, "metadata", "expected `str`"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "length <= 16"),
    ({"user": 5}, "user", "expected `str"),
]
BAD_COMPLETION = [
    ({"prompt": None}, "prompt", "expected"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[]]}, "prompt", "not empty"),
    ({"prompt": [1, "x"]}, "prompt", "list of token ids"),
    ({"prompt": [True]}, "prompt", "list of token ids"),
    ({"prompt": [1.5]}, "prompt", "list of token ids"),
    ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
    ({"prompt": [10**12]}, "prompt", "outside the vocabulary"),
    ({"prompt": ["x"] * 257}, "prompt", "at most 256"),
    ({"prompt": ["x"] * 128, "n": 16}, "n", "at most 1024"),
    ({"suffix": "x"}, "suffix", "not offered"),
    ({"return_token_ids": True}, "return_token_ids", "POST /api/v1/samples takes and gives token ids"),
    ({"guided_choice": ["a"]}, "guided_choice", 'give `structured_outputs: {"choice": ...}`'),
    ({"max_tokens": 0, "n": 2}, "n", "leave `n` at 1"),
    ({"logprobs": True}, "logprobs", "expected `int"),
    ({"messages": USER}, "messages", "unknown field"),
]


@pytest.mark.parametrize(
    ("path", "change", "field", "problem"),
    [*(("chat/completions", *case) for case in BAD_CHAT), *(("completions", *case) for case in BAD_COMPLETION)],
)
def test_what_cannot_be_done_is_refused_by_name(server: ScriptedServer, path: str, change: dict[str, Any], field: str, problem: str) -> None:
    body = {"model": "tiny", **({"messages": USER} if path.startswith("chat") else {"prompt": "The"})} | change
    answer = server.http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert problem in error["message"]
    assert field.split(".")[0] in error["message"]
    assert server.scripted.requests == []


LONG = "x" * 100_000
_TYPED = {"type": LONG}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": LONG, "content": "x"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", LONG: 1}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [_TYPED]}]}),
        ("chat/completions", {"messages": USER, "response_format": _TYPED}),
        ("chat/completions", {"messages": USER, "stream_options": {LONG: 1}, "stream": True}),
        ("chat/completions", {"messages": USER, "tool_choice": LONG}),
        ("completions", {"prompt": "The", "logprobs_mode": LONG}),
        ("completions", {"prompt": "The", "structured_outputs": {LONG: 1}}),
        ("responses", {"input": [_TYPED]}),
        ("responses", {"input": "The", "tools": [_TYPED]}),
        ("responses", {"input": "The", "tool_choice": _TYPED}),
        ("responses", {"input": "The", "include": [LONG]}),
        ("responses", {"input": "The", "text": {"format": _TYPED}}),
        ("embeddings", {"input": "The", "encoding_format": LONG}),
    ],
)
def test_no_error_repeats_what_it_was_given_at_any_length(server: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = server.http.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert answer.status_code == 400
    assert len(answer.content) < 1000, answer.text[:200]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b'{"model": NaN}', b"[" * 2_000, b'"' + b"x" * (16 << 20) + b'"'])
def test_a_body_that_is_no_json_object_is_refused(server: ScriptedServer, body: bytes) -> None:
    answer = server.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == (413 if len(body) > MAX_BODY_BYTES else 400)
    assert answer.json()["error"]["param"] == "body"
    assert answer.headers["x-request-id"]


def test_errors_are_those_that_the_sdk_knows(server: ScriptedServer, sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny") as unknown:
        chat(sdk, model="gpt-7")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-7")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools"
    with server.sdk(api_key="tml-wrong") as stranger, pytest.raises(openai.AuthenticationError) as unauthorized:
        chat(stranger)
    assert unauthorized.value.code == "invalid_api_key"


def test_models_are_listed_with_what_serves_them(sdk: OpenAI, server: ScriptedServer) -> None:
    created = server.http.post("/api/v1/deployments", json={"name": "router", "version": "tiny", "evidence": {}})
    assert created.status_code in (200, 201), created.text
    names = {model.id: model for model in sdk.models.list()}
    assert {"tiny", "router"} <= set(names)
    assert names["router"].bloomery == {"kind": "deployment", "version": BASE, "base_hash": BASE, "revision": 1, "context": CONTEXT}
    assert sdk.models.retrieve("tiny").bloomery["kind"] == "base"
    assert sdk.models.retrieve(BASE).id == BASE
    raw = sdk.chat.completions.with_raw_response.create(model="router", messages=USER)
    with pytest.raises(openai.NotFoundError, match="`router`"):
        chat(sdk, model="rooter")
    assert (raw.headers["x-bloomery-deployment"], raw.headers["x-bloomery-revision"]) == ("router", "1")
    span = server.span(raw.parse().id)["span"]
    assert (span["deployment"], span["revision"], span["model"]) == ("router", 1, "router")


def test_what_clients_send_back_with_an_answer_is_taken_where_it_says_nothing() -> None:
    said = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "reasoning_content": None, "thinking_blocks": None}
    asked = parse_chat({"model": "m", "messages": [{"role": "user", "content": "y"}, said]}, 10)
    assert asked.messages[1].plain(1) == {"role": "assistant", "content": "x"}

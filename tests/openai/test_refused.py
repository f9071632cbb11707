"""What else the SDK can call: each refusal names the route and what to use instead, and reaches the caller as the SDK's own error."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from bloomery.api.routes.openai.refused import INSTEAD
from tests.openai.server import ScriptedServer
from tests.openai.test_contract import USER

FILE = ("rows.jsonl", b"{}" * (1 << 20))
CALLS: list[tuple[Callable[[OpenAI], Any], str, str]] = [
    (lambda sdk: sdk.responses.retrieve("resp_1"), "GET /v1/responses/resp_1", "remembers nothing"),
    (lambda sdk: sdk.responses.cancel("resp_1"), "POST /v1/responses/resp_1/cancel", "remembers nothing"),
    (lambda sdk: sdk.conversations.create(), "POST /v1/conversations", "keep the conversation in your program"),
    (lambda sdk: sdk.images.generate(model="tiny", prompt="x"), "POST /v1/images/generations", "text alone"),
    (lambda sdk: sdk.images.edit(model="tiny", image=FILE, prompt="x"), "POST /v1/images/edits", "text alone"),
    (lambda sdk: sdk.audio.speech.create(model="tiny", voice="alloy", input="x"), "POST /v1/audio/speech", "text alone"),
    (lambda sdk: sdk.audio.transcriptions.create(model="tiny", file=FILE), "POST /v1/audio/transcriptions", "text alone"),
    (lambda sdk: sdk.videos.create(prompt="x"), "POST /v1/videos", "text alone"),
    (
        lambda sdk: list(sdk.fine_tuning.checkpoints.permissions.list("ftckpt-1")),
        "GET /v1/fine_tuning/checkpoints/ftckpt-1/permissions",
        "POST /v1/fine_tuning/jobs",
    ),
    (lambda sdk: sdk.moderations.create(input="x"), "POST /v1/moderations", "POST /v1/chat/completions"),
    (lambda sdk: sdk.beta.assistants.create(model="tiny"), "POST /v1/assistants", "keep the conversation in your program"),
    (lambda sdk: sdk.beta.threads.create(), "POST /v1/threads", "keep the conversation in your program"),
    (lambda sdk: sdk.vector_stores.create(), "POST /v1/vector_stores", "search in your own program"),
    (lambda sdk: sdk.containers.create(name="x"), "POST /v1/containers", "in your own program"),
    (lambda sdk: list(sdk.chat.completions.list()), "GET /v1/chat/completions", "GET /api/v1/spans"),
    (lambda sdk: sdk.chat.completions.retrieve("chatcmpl-1"), "GET /v1/chat/completions/chatcmpl-1", "GET /api/v1/spans"),
    (lambda sdk: sdk.models.delete("tiny"), "DELETE /v1/models/tiny", "GET /v1/models/{name}"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("call", "route", "instead"), CALLS, ids=[route for _, route, _ in CALLS])
def test_a_refusal_names_the_route_and_what_to_use_instead(sdk: OpenAI, call: Callable[[OpenAI], Any], route: str, instead: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        call(sdk)
    assert refused.value.message.startswith("Error code: 400 - ")
    assert (refused.value.code, refused.value.type, refused.value.param) == ("not_supported", "invalid_request_error", None)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"].startswith(f"{route} is not offered: ")
    assert instead in refused.value.message


@pytest.mark.parametrize("path", sorted(INSTEAD))
@pytest.mark.parametrize("below", ["", "/x", "/x/y/z"])
def test_everything_that_the_contract_knows_is_refused_alike(server: ScriptedServer, path: str, below: str) -> None:
    answer = server.http.put(f"/v1/{path}{below}", content=b"not json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
    assert answer.json()["error"]["message"] == f"PUT /v1/{path}{below} is not offered: {INSTEAD[path]}"


def test_where_the_contract_lies_elsewhere_a_refusal_names_the_routes_there(server: ScriptedServer) -> None:
    for path, named in (
        ("realtime", "POST /oai/api/v1/chat/completions"),
        ("nowhere", "GET /oai/api/v1/models, and this server's own contract under /api/v1"),
    ):
        message = server.http.post(f"/oai/api/v1/{path}", json={}).json()["error"]["message"]
        assert named in message
        assert " /v1/" not in message


@pytest.mark.parametrize("path", ["", "/", "/nowhere", "/nowhere/else", "/chat2", "//models", "/%F0%9F%94%A5"])
def test_what_nobody_knows_is_told_what_there_is(sdk: OpenAI, server: ScriptedServer, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.get(f"{server.url}/v1{path}", cast_to=object)
    assert (unknown.value.code, unknown.value.type) == ("not_found", "invalid_request_error")
    assert "no route GET /v1" in unknown.value.message
    assert "POST /v1/responses, POST /v1/embeddings and GET /v1/models" in unknown.value.message


def test_a_wrong_key_is_said_before_a_wrong_path(server: ScriptedServer) -> None:
    with server.sdk(api_key="tml-wrong") as stranger, pytest.raises(openai.AuthenticationError) as unauthorized:
        stranger.embeddings.create(model="tiny", input="x")
    assert unauthorized.value.code == "invalid_api_key"


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", "/v1/chat/completions"), ("TRACE", "/v1/nowhere")])
def test_a_method_that_no_route_has_is_refused_in_the_same_form(server: ScriptedServer, method: str, path: str) -> None:
    answer = server.http.request(method, path)
    assert (answer.status_code, set(answer.json()["error"])) == (405, {"message", "type", "param", "code"})


def test_a_slash_at_the_end_is_no_other_route(server: ScriptedServer) -> None:
    body = {"model": "tiny", "messages": USER}
    answer = server.http.post("/v1/chat/completions/", json=body, follow_redirects=True)
    assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")

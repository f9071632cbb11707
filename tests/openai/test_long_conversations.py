"""Bodies of very many small things: what no context could hold is refused before any of it is looked at, and long ones are read off the loop."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from bloomery.api.app import create_app
from bloomery.api.routes.openai.http import read_request
from bloomery.api.routes.openai.requests import MAX_PIECES, check_pieces
from bloomery.config import ApiConfig
from bloomery.services.core import Services
from bloomery.services.threads import SMALL_BYTES
from bloomery.types.errors import InvalidInput
from tests.api.server import KEY, URL
from tests.openai.server import CONTEXT, ScriptedServer

USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# None of them would stand a look: what is told is how many there are.
BAD = {"role": "user", "content": "a", "no such": 1}
TOO_LONG = {
    "300,000 messages": ([BAD] * 300_000, 300_000),
    "one more than the context": ([BAD] * (CONTEXT + 1), CONTEXT + 1),
    "parts of a message": ([{"role": "user", "content": [PART | {"no such": 1}] * (CONTEXT + 1)}], CONTEXT + 1),
    "parts of all messages": ([BAD, {"role": "user", "content": [PART] * CONTEXT}], CONTEXT + 1),
    "calls": ([{"role": "assistant", "content": None, "tool_calls": [CALL | {"no such": 1}] * (CONTEXT + 1)}], CONTEXT + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("messages", "pieces"), TOO_LONG.values(), ids=TOO_LONG)
def test_more_messages_than_a_context_has_tokens_are_refused_unseen(server: ScriptedServer, messages: list[Any], pieces: int) -> None:
    for path, field in (("chat/completions", "messages"), ("responses", "input")):
        answer = server.http.post(f"/v1/{path}", json={"model": "tiny", field: messages})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid", field)
        assert error["message"] == f"`{field}` has {pieces} messages, parts of them and calls, at most {CONTEXT} are taken: send fewer"
    assert server.scripted.requests == []


def test_a_conversation_of_as_many_messages_as_may_be_is_judged_by_its_tokens(server: ScriptedServer) -> None:
    error = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER] * CONTEXT}).json()["error"]
    assert (error["param"], "leaves no room in the model's context" in error["message"]) == ("messages", True)


def test_a_server_without_models_knows_none_of_that_name(tmp_path: Path) -> None:
    async def run() -> tuple[int, dict[str, Any]]:
        async with Services.open(ApiConfig(data_dir=str(tmp_path), host="127.0.0.1", port=0, record="full", models=())) as services:
            transport = httpx.ASGITransport(create_app(services))
            async with httpx.AsyncClient(base_url=URL, headers={"x-api-key": KEY}, transport=transport) as http:
                answer = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]})
                return answer.status_code, answer.json()["error"]

    (tmp_path / "api_key").write_text(f"{KEY}\n")
    status, error = asyncio.run(run())
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_what_is_no_list_of_messages_is_told_by_its_shape() -> None:
    for said in (None, "x", {"a": 1}, 5, [], [1, "x", None, {"content": 5, "tool_calls": {}}]):
        check_pieces(said, 4, "messages")
    with pytest.raises(InvalidInput):
        check_pieces([1, "x", None, {}, {}], 4, "messages")
    assert MAX_PIECES > 2048


@pytest.mark.parametrize("large", [False, True])
def test_a_large_body_is_read_off_the_loop(large: bool) -> None:
    body = {"text": "x" * (SMALL_BYTES if large else 1)}
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        return messages.pop(0)

    async def run() -> None:
        request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)
        read, thread = await read_request(request, lambda content: (content, threading.current_thread()))
        assert read == body
        assert thread[0] == body
        assert (thread[1] is threading.current_thread()) == (not large)

    asyncio.run(run())


def test_a_prompt_that_no_context_holds_is_refused_by_its_length_alone(server: ScriptedServer) -> None:
    # None of these tokens exists.
    for prompt in ([10**6] * (CONTEXT + 1), [[1], [10**6] * (CONTEXT + 1)]):
        error = server.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt}).json()["error"]
        assert error["message"].startswith(f"`prompt` has {CONTEXT + 1} tokens and leaves no room")

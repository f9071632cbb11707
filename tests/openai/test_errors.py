"""Bad input at the door: every answer under `/v1` has its id, every refusal OpenAI's envelope, and no body is read further than it must be."""

import asyncio
import json
import re
import socket
import time
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI

from bloomery.services.serving.sampling import MAX_SUBMISSIONS
from bloomery.store.database import Database
from bloomery.types.errors import WorkerError
from tests.api.server import serving
from tests.openai.server import Script, ScriptedServer
from tests.openai.test_contract import USER, chat
from tests.services.fake_engine import BASE
from tests.services.stage import add_snapshot

POSTS = ["chat/completions", "completions", "responses", "embeddings"]
ENVELOPE = {"message", "type", "param", "code"}
TOO_MUCH = 100 << 20


def connection(server: ScriptedServer) -> socket.socket:
    where = urlsplit(server.url)
    return socket.create_connection((where.hostname, where.port), timeout=20)


def head(server: ScriptedServer, path: str, *lines: str) -> bytes:
    key = f"x-api-key: {server.http.headers['x-api-key']}"
    return "\r\n".join([f"POST /v1/{path} HTTP/1.1", "host: x", key, "content-type: application/json", *lines, "", ""]).encode()


def answered(sock: socket.socket) -> tuple[int, str, Any]:
    """Status, request id and body of the answer, whatever is still to be sent."""
    answer = HTTPResponse(sock)
    answer.begin()
    return answer.status, answer.headers["x-request-id"], json.loads(answer.read())


@pytest.mark.parametrize("path", POSTS)
def test_a_body_of_100_mb_is_refused_before_it_is_sent(server: ScriptedServer, path: str) -> None:
    with connection(server) as sock:
        sock.sendall(head(server, path, f"content-length: {TOO_MUCH}"))
        status, request_id, body = answered(sock)
    assert (status, set(body["error"]), body["error"]["code"], body["error"]["param"]) == (413, ENVELOPE, "too_large", "body")
    assert "100 MiB, at most 16" in body["error"]["message"]
    assert request_id.startswith("request-")


def test_a_body_that_does_not_say_its_length_is_answered_where_it_is_too_large(server: ScriptedServer) -> None:
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connection(server) as sock:
        sock.sendall(head(server, "chat/completions", "transfer-encoding: chunked") + chunk * 17)
        status, _, body = answered(sock)
    assert (status, body["error"]["code"]) == (413, "too_large")


def test_the_sdk_is_told_that_it_asked_too_much_and_the_server_goes_on(sdk: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        chat(sdk, messages=[{"role": "user", "content": "x" * TOO_MUCH}])
    assert (refused.value.status_code, refused.value.code) == (413, "too_large")
    assert chat(sdk).choices


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml"])
def test_another_kind_of_body_is_refused_by_its_name(server: ScriptedServer, path: str, kind: str) -> None:
    answer = server.http.post(f"/v1/{path}", content=json.dumps({"model": "tiny", "messages": USER}), headers={"content-type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "content-type", "invalid_request_error")
    assert kind.partition(";")[0] in error["message"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b"\x00" * 9, b"[" * 5_000, b'{"model": 1e999}'])
def test_malformed_json_is_refused_in_the_envelope(server: ScriptedServer, path: str, body: bytes) -> None:
    answer = server.http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, set(answer.json()["error"])) == (400, ENVELOPE)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/v1/models/gpt-7", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 400, "not_supported"),
        ("OPTIONS", "/v1/embeddings", 405, "invalid"),
        ("TRACE", "/v1/responses", 405, "invalid"),
        ("GET", "/v1/responses/resp-1", 400, "not_supported"),
        ("DELETE", "/v1/responses/resp-1", 400, "not_supported"),
    ],
)
def test_whatever_is_not_there_is_said_in_the_envelope_with_an_id(server: ScriptedServer, method: str, path: str, status: int, code: str) -> None:
    answer = server.http.request(method, path)
    assert (answer.status_code, set(answer.json()["error"]), answer.json()["error"]["code"]) == (status, ENVELOPE, code)
    assert answer.headers["x-request-id"].startswith("request-")


@pytest.mark.parametrize("path", POSTS)
def test_without_a_good_key_the_body_is_not_read(server: ScriptedServer, path: str) -> None:
    with connection(server) as sock:
        sock.sendall(head(server, path, "content-length: 1000000").replace(b"x-api-key: tml", b"x-api-key: xyz"))
        status, _, body = answered(sock)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


def test_the_sdk_finds_the_id_of_every_answer(sdk: OpenAI) -> None:
    assert sdk.models.list()._request_id.startswith("request-")
    assert chat(sdk)._request_id.startswith("request-")
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("gpt-7")
    assert missing.value.request_id.startswith("request-")


def test_models_are_listed_as_the_sdk_reads_lists(sdk: OpenAI) -> None:
    page = sdk.models.list()
    assert page.object == "list"
    assert [model.id for model in page] == [model.id for model in page.data]
    assert {(model.object, model.owned_by) for model in page} == {("model", "bloomery")}
    assert sdk.models.retrieve(page.data[0].id) == page.data[0]


def test_models_are_listed_page_by_page(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for name in ("first", "second"):
            assert server.http.post("/api/v1/deployments", json={"name": name, "version": "tiny"}).status_code == 201

        def page(**asked: object) -> tuple[list[str], str | None, str | None, bool]:
            said = server.http.get("/v1/models", params=asked).json()
            return [model["id"] for model in said["data"]], said["first_id"], said["last_id"], said["has_more"]

        assert page() == (["tiny", "first", "second"], "tiny", "second", False)
        assert page(limit=2) == (["tiny", "first"], "tiny", "first", True)
        assert page(limit=2, after="first") == (["second"], "second", "second", False)
        assert page(order="desc", limit=1, after="second") == (["first"], "first", "first", True)
        assert page(after="second") == ([], None, None, False)
        for asked, param in (({"after": "third"}, "after"), ({"limit": 0}, "limit"), ({"order": "up"}, "order")):
            refused = server.http.get("/v1/models", params=asked)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_what_is_deployed_on_a_base_that_is_not_served_is_not_listed_and_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with Database(tmp_path / "bloomery.db") as database:
            asyncio.run(add_snapshot(database, "v1", "gone", "run-1"))
        assert server.http.post("/api/v1/deployments", json={"name": "old", "version": "v1"}).status_code == 201
        assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["tiny"]
        asked = {"model": "old", "messages": USER}, {"model": "old", "prompt": "x"}, {"model": "old", "input": "x"}, {"model": "old", "input": "x"}
        answers = [server.http.post(f"/v1/{path}", json=body) for path, body in zip(POSTS, asked, strict=True)]
        for answer in (server.http.get("/v1/models/old"), *answers):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert error["message"] == "the base model of `old` (gone) is not served: start the server with `--model DIR` of that base"


def test_a_request_that_may_be_what_kills_is_repeated_by_nobody(server: ScriptedServer) -> None:
    server.scripted.script = Script(dies=True)
    with server.sdk(max_retries=2) as sdk, pytest.raises(openai.InternalServerError, match=f"went away {MAX_SUBMISSIONS} times") as given_up:
        chat(sdk)
    assert (given_up.value.status_code, given_up.value.code) == (500, "worker")
    assert len(server.scripted.requests) == MAX_SUBMISSIONS
    server.call(server.services.links[BASE].wait_ready())
    with server.client() as client, pytest.raises(WorkerError, match=f"went away {MAX_SUBMISSIONS} times"):
        client.chat("tiny", USER)
    assert len(server.scripted.requests) == 2 * MAX_SUBMISSIONS
    server.call(server.services.links[BASE].wait_ready())


def test_a_client_that_vanishes_while_it_sends_leaves_nothing_behind(server: ScriptedServer, sdk: OpenAI) -> None:
    for _ in range(20):
        with connection(server) as sock:
            sock.sendall(head(server, "chat/completions", "content-length: 1000") + b'{"model": ')
    began = time.monotonic()
    assert chat(sdk).choices
    assert time.monotonic() - began < 20
    assert len(server.scripted.requests) == 1


def test_a_redirect_keeps_the_body(server: ScriptedServer) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings/", headers=dict(server.http.headers), content=b"{", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (400, "/v1/embeddings")


def test_the_published_document_says_what_every_route_of_openais_contract_takes(server: ScriptedServer) -> None:
    paths = server.http.get("/api/v1/openapi.json").json()["paths"]
    for path in POSTS:
        schema = paths[f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert (schema["type"], schema["additionalProperties"], "model" in schema["required"]) == ("object", False, True)
        assert not re.search(r"\$ref|\$defs", json.dumps(schema)), "a reference that leads nowhere"

"""Every refusal comes in the caller's envelope, with the right status, and names the field."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bloomery.api import errors
from bloomery.api.page import no_page
from bloomery.types.errors import BloomeryError, Conflict, NotFound, Unauthorized, Unavailable
from bloomery.ui import Asset
from tests.api.server import Server, serving


def every_code(kind: type[BloomeryError] = BloomeryError) -> set[str]:
    return {kind.code}.union(*(every_code(child) for child in kind.__subclasses__()))


def test_every_code_has_a_status() -> None:
    assert every_code() <= set(errors.STATUS)


def test_envelopes_of_both_contracts() -> None:
    missing = NotFound("no model `x`", field="model")
    assert errors.own_envelope(missing) == {"error": {"code": "not_found", "message": "no model `x`", "field": "model"}}
    assert errors.openai_envelope(missing) == {
        "error": {"message": "no model `x`", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    }
    assert errors.openai_envelope(Unauthorized("m"))["error"]["code"] == "invalid_api_key"
    assert errors.openai_envelope(Unavailable("m"))["error"]["type"] == "server_error"
    assert errors.openai_envelope(Conflict("m"))["error"]["code"] == "conflict"


def test_a_busy_server_says_when_to_come_back() -> None:
    answer = errors.respond("/v1/chat/completions", Unavailable("full"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("POST", "/api/v1/runs", b"{", 400, "body"),
        ("POST", "/api/v1/runs", b'{"rank": 4}', 400, "base_model"),
        ("POST", "/api/v1/runs", b'{"base_model": "tiny", "rank": 4, "rnak": 4}', 400, "rnak"),
        ("POST", "/api/v1/runs", b'{"base_model": "tiny", "rank": -1}', 400, "rank"),
        ("POST", "/api/v1/runs", b'{"base_model": "tiny", "rank": 1000000000}', 400, "rank"),
        ("POST", "/api/v1/runs", b'{"base_model": "tiny", "rank": 0, "alpha": 16}', 400, "alpha"),
        ("POST", "/api/v1/runs", b'{"base_model": "other", "rank": 4}', 404, "base_model"),
        ("GET", "/api/v1/runs?limit=0", b"", 400, "limit"),
        ("GET", "/api/v1/runs/run-x", b"", 404, "run_id"),
        ("POST", "/api/v1/deployments", b'{"name": "a b", "version": "v"}', 400, "name"),
        ("POST", "/api/v1/deployments", b'{"name": "x", "version": "\\ud800"}', 400, "version"),
        ("POST", "/api/v1/deployments/x/rollback", b'{"revision": 99999999999999999999}', 400, "revision"),
        ("GET", "/api/v1/runs?offset=99999999999999999999", b"", 400, "offset"),
        ("GET", "/api/v1/spans?since_us=99999999999999999999", b"", 400, "since_us"),
        ("GET", "/api/v1/runs/x/metrics?after=99999999999999999999", b"", 400, "after"),
        ("GET", "/api/v1/nowhere", b"", 404, None),
        ("DELETE", "/api/v1/runs", b"", 405, None),
    ],
)
def test_own_routes_answer_in_their_envelope(server: Server, method: str, path: str, body: bytes, status: int, field: str | None) -> None:
    answer = server.http.request(method, path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["field"] == field
    assert len(error["message"]) > 10
    assert answer.headers["x-request-id"].startswith("request-")


def test_openai_routes_answer_in_theirs(server: Server) -> None:
    answer = server.http.get("/v1/nowhere")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error.pop("message").startswith("no route GET /v1/nowhere: ")
    assert error == {"type": "invalid_request_error", "param": None, "code": "not_found"}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": ""},
        {"x-api-key": "tml-wrong"},
        {"x-api-key": "", "authorization": "Bearer tml-wrong"},
        {"x-api-key": "", "authorization": "Basic x"},
    ],
)
def test_without_a_valid_key_there_is_nothing(server: Server, headers: dict[str, str]) -> None:
    for path in ("/api/v1/runs", "/api/v1/status", "/api/v1/spans", "/api/v1/deployments", "/api/v1/datasets", "/api/v1/models", "/api/v1/feedback"):
        answer = server.http.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(("path", "most"), [("/api/v1/datasets", 256), ("/v1/chat/completions", 16)])
def test_a_body_that_is_too_large_is_refused_unread(server: Server, path: str, most: int) -> None:
    answer = server.http.post(path, content=b"{}", headers={"content-length": str(300 << 20)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert f"300 MiB, at most {most}" in answer.json()["error"]["message"]


def test_both_forms_of_the_key_are_taken(server: Server) -> None:
    assert server.http.get("/api/v1/status", headers={"x-api-key": "", "authorization": "bearer tml-test-key"}).status_code == 200


def test_an_unforeseen_error_is_a_500_without_its_details() -> None:
    with serving_app_that_breaks() as client:
        answer = client.get("/api/v1/broken")
    assert answer.status_code == 500
    assert answer.json()["error"] == {"code": "internal", "message": "internal error (KeyError); the api's log says more", "field": None}


def serving_app_that_breaks() -> TestClient:

    app = FastAPI()
    errors.install(app, no_page({"/": Asset(b"", "text/html")}))

    @app.get("/api/v1/broken")
    async def broken() -> None:
        raise KeyError("secret")

    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all refusals: they change nothing."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running

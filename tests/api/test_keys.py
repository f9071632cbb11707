"""Keys over HTTP: made, shown without their secrets, taken back; and what each contract answers to a key that will not do."""

import gc
import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai
import pytest
import tinker
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from sqlalchemy import update

from bloomery.api.auth import caller
from bloomery.client import Client
from bloomery.store import rows
from bloomery.types.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthorized
from tests.openai.server import KEY, ScriptedServer
from tests.sdk import LEAVES_CONNECTIONS

pytestmark = LEAVES_CONNECTIONS

ALL = ["infer", "read", "train", "deploy", "admin"]
WITHOUT_A_KEY = {"/healthz", "/api/v1/openapi.json", "/external_weights/{token}/{name}", "/login"}
"""An address to download from is signed by the server instead, and who logs in shows a key in the body. And the page, which asks for one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("keys")).listening() as running:
        yield running
        gc.collect()


@pytest.fixture
def admin(server: ScriptedServer) -> Iterator[Client]:
    with server.client() as client:
        yield client


def holder(server: ScriptedServer, key: str) -> Client:
    """A client with another key."""
    return Client(server.url, key)


def test_a_key_is_made_used_shown_without_its_secret_and_taken_back(server: ScriptedServer, admin: Client) -> None:
    made = admin.keys.create("reader", ["read"], ttl_s=3600)
    assert made.key.startswith("tml-")
    assert (made.project, made.scopes, made.last_used_us) == ("default", ["read"], None)
    with holder(server, made.key) as reader:
        assert reader.models()[0].alias == "tiny"
        with pytest.raises(Forbidden, match="lacks the scope `train`"):
            reader.create_run("tiny", rank=4)
        listed = {key.name: key for key in admin.keys.list()}
        assert listed["reader"].last_used_us is not None
        assert listed["reader"].expires_us == made.expires_us == made.created_us + 3600 * 1_000_000
        assert made.key not in httpx.get(f"{server.url}/api/v1/keys", headers={"x-api-key": KEY}).text
        assert admin.keys.revoke("reader").id == made.id
        with pytest.raises(Unauthorized, match="revoked"):
            reader.models()
    assert "reader" not in {key.name for key in admin.keys.list()}


def test_a_project_is_there_with_its_first_key_and_its_admin_stays_in_it(server: ScriptedServer, admin: Client) -> None:
    run = admin.create_run("tiny", rank=4)
    lead = admin.keys.create("lead", ALL, project="blue")
    with holder(server, lead.key) as blue:
        assert blue.runs() == []
        with pytest.raises(NotFound):
            blue.run(run.id)
        blue.keys.create("member", ["train"])
        assert [key.name for key in blue.keys.list()] == [key.name for key in admin.keys.list(project="blue")] == ["lead", "member"]
        for forbidden in (
            lambda: blue.keys.create("spy", ["read"], project="default"),
            lambda: blue.keys.list(project="default"),
            lambda: blue.keys.revoke("development", project="default"),
            lambda: blue.collect_garbage(),
        ):
            with pytest.raises(Forbidden, match="administers project `blue` alone"):
                forbidden()
    assert admin.keys.revoke("member", project="blue").project == "blue"


def test_keys_that_make_no_sense_are_refused_by_field(admin: Client) -> None:
    for options, field in (
        ({"scopes": ["read", "fly"]}, "scopes.0"),
        ({"scopes": []}, "scopes"),
        ({"name": "a/b"}, "name"),
        ({"name": "development"}, "name"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"project": "a b"}, "project"),
    ):
        with pytest.raises(InvalidInput) as refused:
            admin.keys.create(**{"name": "x", "scopes": ["read"]} | options)
        assert refused.value.field == field
    with pytest.raises(NotFound):
        admin.keys.revoke("nobody/at all?")
    with pytest.raises(Conflict):
        admin.keys.revoke("development")


def test_a_key_that_is_wrong_revoked_or_expired_is_told_so_in_the_form_of_each_contract(server: ScriptedServer, admin: Client) -> None:
    revoked, expired = admin.keys.create("revoked", ALL), admin.keys.create("expired", ALL, ttl_s=3600)
    admin.keys.revoke("revoked")
    server.call(server.services.auth._database.write(lambda connection: connection.execute(_expire(expired.id))))
    server.call(server.services.auth.load(KEY))
    for key, says in (("tml-wrong", "unknown API key"), (revoked.key, "revoked"), (expired.key, "`expired`, has expired")):
        with pytest.raises(tinker.AuthenticationError, match=says) as tinkers:
            tinker.RestClient(base_url=server.url, api_key=key).list_training_runs().result()
        assert tinkers.value.body["category"] == "user"
        with server.sdk(api_key=key) as sdk, pytest.raises(openai.AuthenticationError, match=says) as openais:
            sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        assert (openais.value.code, openais.value.type) == ("invalid_api_key", "invalid_request_error")
        with holder(server, key) as ours, pytest.raises(Unauthorized, match=says):
            ours.runs()


def test_a_scope_that_is_missing_is_named_in_the_form_of_each_contract(server: ScriptedServer, admin: Client) -> None:
    key = admin.keys.create("deployer", ["deploy"]).key
    with pytest.raises(tinker.PermissionDeniedError, match="`read` or `train`"):
        tinker.RestClient(base_url=server.url, api_key=key).list_training_runs().result()
    with server.sdk(api_key=key) as sdk, pytest.raises(openai.PermissionDeniedError, match="lacks the scope `infer`") as openais:
        sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert openais.value.code == "forbidden"
    with holder(server, key) as ours, pytest.raises(Forbidden, match="`read` or `train`"):
        ours.runs()


def test_a_key_that_infers_is_all_that_an_openai_client_needs(server: ScriptedServer, admin: Client) -> None:
    admin.deployments.create("router", "tiny")
    with server.sdk(api_key=admin.keys.create("app", ["infer"]).key) as sdk:
        assert {"tiny", "router"} <= {model.id for model in sdk.models.list()}
        answer = sdk.chat.completions.create(model="router", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content


def test_every_route_asks_who_calls(server: ScriptedServer) -> None:
    assert server.app is not None
    found = list(routes(server.app.routes))
    assert len(found) > 50
    silent = {route.path for route in found if caller not in calls(route.dependant)}
    pages = {route.path for route in found if not route.include_in_schema and route.endpoint.__qualname__.startswith("_serve.")}
    assert silent - pages == WITHOUT_A_KEY


def test_nothing_that_a_route_asks_for_waits_for_a_thread(server: ScriptedServer) -> None:
    assert server.app is not None
    asked = set().union(*(calls(route.dependant) for route in routes(server.app.routes)))
    assert caller in asked
    # FastAPI hands what is no coroutine to a thread and waits until it comes back, however little it does.
    assert {call for call in asked if not inspect.iscoroutinefunction(call)} == set()


@pytest.mark.slow
def test_who_has_no_key_is_told_so_before_anything_else(server: ScriptedServer) -> None:
    for method, path in (("POST", "/api/v1/runs"), ("POST", "/api/v1/create_model"), ("POST", "/v1/chat/completions"), ("DELETE", "/api/v1/keys/x")):
        for headers in ({}, {"x-api-key": ""}, {"authorization": "Basic x"}, {"authorization": "Bearer"}, {"x-api-key": "ÿ".encode("latin-1")}):
            for body in (b"", b"{", json.dumps({"unknown": 1}).encode()):
                answer = httpx.request(method, f"{server.url}{path}", headers={"content-type": "application/json", **headers}, content=body)
                assert answer.status_code == 401, (path, headers, body, answer.text)


def test_the_body_of_who_has_no_key_is_not_read(server: ScriptedServer) -> None:
    assert server.app is not None
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"x-api-key", b"tml-wrong")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/api/v1/runs", "query_string": b"", "headers": headers}
    server.call(server.app(scope, receive, send))
    assert sent[0]["status"] == 401


def _expire(key_id: str) -> Any:
    return update(rows.api_key).where(rows.api_key.c.id == key_id).values(expires_us=1)


def routes(mounted: Iterable[Any]) -> Iterator[APIRoute]:
    """All routes of the app, through the routers that it includes."""
    for route in mounted:
        if isinstance(route, APIRoute):
            yield route
        elif hasattr(route, "original_router"):
            yield from routes(route.original_router.routes)


def calls(dependant: Dependant) -> set[Any]:
    """Everything that is called before the route is."""
    return {dependant.call}.union(*(calls(inner) for inner in dependant.dependencies))

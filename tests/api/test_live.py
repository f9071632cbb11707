"""Events of what has changed, over a real socket: they come when something does, and end with the key, the login and the server."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from bloomery.api.routes.bloomery import live as route
from bloomery.services.clients import live
from bloomery.types.resources import Price
from tests.live import wait_until
from tests.openai.server import KEY, ScriptedServer

DEADLINE_S = 30.0
HEARTBEATS = 8
"""Of a stream on which nothing is told, before what is waited for is given up: of one every 15 s."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("live")).listening() as running:
        yield running
        gc.collect()


@contextmanager
def watching(server: ScriptedServer, **headers: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun; one that never comes is a ReadTimeout."""
    with httpx.stream("GET", f"{server.url}/api/v1/live", headers=headers or {"x-api-key": KEY}, timeout=DEADLINE_S) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines).startswith("retry: ")
        yield lines


def topics(lines: Iterator[str], awaited: str) -> list[list[str]]:
    """Those of each event, up to the one with the awaited topic."""
    events: list[list[str]] = []
    heartbeats = 0
    for line in lines:
        heartbeats += line.startswith(":")
        assert heartbeats < HEARTBEATS, f"nothing changed for long, and `{awaited}` was not told: {events}"
        if line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: "))["topics"])
            if awaited in events[-1]:
                return events
    raise AssertionError(f"the stream ended without `{awaited}`: {events}")


def create_key(server: ScriptedServer, name: str, *scopes: str) -> str:
    return str(server.http.post("/api/v1/keys", json={"name": name, "scopes": list(scopes)}).json()["key"])


def test_what_changes_is_told_and_a_training_step_has_points(server: ScriptedServer) -> None:
    with watching(server) as lines, server.client() as client:
        run = client.create_run("tiny", 4)
        assert "runs" in topics(lines, "runs")[-1]
        run.optim_step(1e-3).result()
        topics(lines, "points")
        client.datasets.create("data")
        topics(lines, "datasets")
        client.deployments.create("router", "tiny")
        topics(lines, "deployments")
        client.chat("tiny", [{"role": "user", "content": "hello"}])
        topics(lines, "spans")


def test_a_price_that_changes_is_told(server: ScriptedServer) -> None:
    with server.client() as client:
        client.deployments.create("priced", "tiny")
        with watching(server) as lines:
            for price in (Price(prompt_usd_per_mtok=1.0, completion_usd_per_mtok=2.0), None):
                client.deployments.set_price("priced", price)
                assert topics(lines, "deployments") == [["deployments"]]


def test_an_engine_that_goes_and_comes_is_told(server: ScriptedServer) -> None:
    with watching(server) as lines:
        server.call(_hang_up(server))
        topics(lines, "processes")
    wait_until(lambda: server.http.get("/healthz").status_code == 200)


def test_where_nothing_changes_a_comment_comes_now_and_then(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "HEARTBEAT_S", 0.01)
    with watching(server) as lines:
        assert any(line.startswith(":") for line in lines)


def test_a_stream_ends_with_its_key(server: ScriptedServer) -> None:
    with watching(server, **{"x-api-key": create_key(server, "watcher", "read")}) as lines:
        server.http.delete("/api/v1/keys/watcher")
        assert list(lines)[-1] in ("", "retry: 2000")


def test_a_stream_ends_with_its_login(server: ScriptedServer) -> None:
    login = httpx.post(f"{server.url}/api/v1/login", json={"key": create_key(server, "browser", "train")})
    ((name, token),) = login.cookies.items()
    # Browsers send no header of the page's with these.
    with watching(server, cookie=f"{name}={token}") as lines:
        with server.client() as client:
            client.create_run("tiny", 4)
        topics(lines, "runs")
        server.http.delete("/api/v1/keys/browser")
        for _ in lines:
            pass


def test_who_leaves_makes_room_and_who_may_not_look_is_refused(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST", 1)
    wait_until(lambda: not server.services.live._listeners)
    with watching(server):
        refused = server.http.get("/api/v1/live")
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "unavailable", "1")
    wait_until(lambda: not server.services.live._listeners)
    with watching(server):
        pass
    refused = server.http.get("/api/v1/live", headers={"x-api-key": create_key(server, "asks", "infer")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


def test_a_server_that_stops_ends_its_streams_whole(server: ScriptedServer) -> None:
    with watching(server) as lines:
        server.call(_stop_watching(server))
        # Cut off, it would be an error of the transport.
        assert list(lines)[-1] == ""


async def _hang_up(server: ScriptedServer) -> None:
    server.scripted.hang_up()


async def _stop_watching(server: ScriptedServer) -> None:
    server.services.live.close()

"""Every route, by the shortcut and by trying one after the other; and whole requests to the app with the shortcut and without."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.routing import BaseRoute, Match

from bloomery.api.app import create_app
from bloomery.api.shortcut import Shortcut
from tests.api.server import KEY, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def scope_of(method: str, path: str) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "query_string": b""}


def one_by_one(routes: list[RouteContext], scope: dict[str, Any]) -> dict[str, Any] | None:
    found = ({**child, "route": route.original_route} for route in routes for match, child in [route.matches(scope)] if match is Match.FULL)
    return next(found, None)


def without_shortcut(server: Server) -> Any:
    """The same app, but that its routes are tried one by one."""
    assert server.app is not None
    app = create_app(server.services)
    app.router.routes[:] = behind(app.router.routes)
    return app


def behind(routes: list[BaseRoute]) -> list[BaseRoute]:
    kept = [route for route in routes if not isinstance(route, Shortcut)]
    assert len(kept) == len(routes) - 1
    return kept


def test_the_shortcut_finds_what_is_found_one_by_one(server: Server) -> None:
    assert server.app is not None
    (shortcut,) = [route for route in server.app.routes if isinstance(route, Shortcut)]
    tried = behind(server.app.routes)
    routes = list(iter_route_contexts(tried))
    assert len(routes) > 200
    asked, taken = set(), 0
    for route in routes:
        for value in ("x", "runs"):
            path = re.sub(r"\{\w+\}", value, route.path_format or "")
            for end in ("", "/", "\n"):
                asked |= {(method, path + end) for method in {*(route.methods or ()), "HEAD"}}
    for method, path in asked:
        scope = scope_of(method, path)
        match, found = shortcut.matches(scope)
        expected = one_by_one(routes, scope)
        got = {name: found[name] for name in ("endpoint", "path_params", "route")} if match is Match.FULL else None
        assert got == expected, (method, path)
        taken += match is Match.FULL
    assert taken > 2 * len(routes)
    plain = {"path_params": {}, **scope_of("GET", "/healthz")}
    assert shortcut.matches(plain)[0] is Match.FULL
    assert shortcut.matches({**plain, "type": "websocket"})[0] is shortcut.matches({**plain, "root_path": "/behind"})[0] is Match.NONE


def test_what_no_route_takes_is_answered_as_without_the_shortcut(server: Server) -> None:
    other = without_shortcut(server)
    known = {"x-api-key": KEY}
    requests = [
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/no/such"),
        ("POST", "/api/v1/runs"),
        ("GET", "/api/v1/runs/"),
        ("GET", "/api/v1/runs/none"),
        ("PUT", "/api/v1/runs/none"),
        ("DELETE", "/api/v1/asample"),
        ("GET", "/api/v1/no/such"),
        ("GET", "/api/v1"),
        ("POST", "/metrics"),
        ("HEAD", "/healthz"),
        ("OPTIONS", "/healthz"),
        ("GET", "/"),
        ("HEAD", "/"),
        ("POST", "/"),
        ("GET", "//v1/models"),
    ]
    statuses = set()
    for method, path in requests:
        for headers in (known, {}):
            one, two = (server.call(ask(app, method, path, headers)) for app in (server.app, other))
            assert one == two, (method, path)
            statuses.add(one[0])
    assert {200, 307, 400, 401, 404, 405} <= statuses, statuses


async def ask(app: Any, method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers) as client:
        answer = await client.request(method, path)
    # The number of the request, and when it came.
    told = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "openai-processing-ms", "date")}
    return answer.status_code, told, answer.content

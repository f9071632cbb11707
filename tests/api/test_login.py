"""A browser shows its key once; the cookie that it gets for it stands for the key, and for no page but the server's own."""

import json
import logging
import time
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.services.access.identity import BROWSER, LOGIN_S
from bloomery.types.ids import now_us
from tests.api.server import KEY, Server, serving

HOME = "http://127.0.0.1:8700"
ALL = ["infer", "read", "train", "deploy", "admin"]
NEW = {"base_model": "tiny", "rank": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("login")) as running:
        yield running


@pytest.fixture
def browser(server: Server) -> Iterator[httpx.Client]:
    """It keeps cookies, and has no key in its headers."""
    with httpx.Client(base_url=HOME, transport=server.transport) as client:
        yield client


def log_in(browser: httpx.Client, key: str = KEY, **headers: str) -> dict[str, Any]:
    answer = browser.post("/api/v1/login", json={"key": key}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def create_key(server: Server, name: str, **options: Any) -> str:
    answer = server.http.post("/api/v1/keys", json={"name": name, "scopes": ALL, **options})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


def test_a_key_is_shown_once_and_then_a_cookie_that_no_script_reads_stands_for_it(server: Server, browser: httpx.Client) -> None:
    before_us = now_us()
    answer = browser.post("/api/v1/login", json={"key": KEY})
    said = answer.json()
    assert {**said, "csrf": "", "ends_us": 0} == {"key": "development", "project": "default", "scopes": sorted(ALL), "csrf": "", "ends_us": 0}
    assert 0 <= said["ends_us"] - before_us - (LOGIN_S - 1) * 1_000_000 < 60_000_000
    (name, cookie), *others = SimpleCookie(answer.headers["set-cookie"]).items()
    assert (name, others) == ("bloomery-8700", [])
    assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["domain"], cookie["secure"]) == (True, "strict", "/", "", "")
    assert 0 < int(cookie["max-age"]) <= LOGIN_S
    assert answer.headers["cache-control"] == "no-store"
    assert KEY not in answer.text + cookie.value
    for path in ("/api/v1/runs", "/v1/models", "/api/v1/auth/apikey/me", "/metrics"):
        assert browser.get(path).status_code == 200, path


def test_over_tls_the_cookie_never_leaves_it_and_two_servers_of_a_host_have_one_each(server: Server) -> None:
    with httpx.Client(transport=server.transport) as browser:
        answer = browser.post("https://localhost:8700/api/v1/login", json={"key": KEY}, headers={"origin": "https://localhost:8700"})
        (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
        assert cookie["secure"] is True
        browser.post("http://localhost:8701/api/v1/login", json={"key": KEY})
        assert sorted(browser.cookies) == ["bloomery-8700", "bloomery-8701"]


def test_whoever_shows_no_good_key_is_not_let_in(server: Server, browser: httpx.Client) -> None:
    token = server.http.post("/api/v1/auth/token").json()["jwt"]
    for key in ("tml-wrong", f"{KEY} ", token):
        answer = browser.post("/api/v1/login", json={"key": key})
        assert (answer.status_code, answer.json()["error"]["code"], "set-cookie" in answer.headers) == (401, "unauthorized", False), key
    for body in ({}, {"key": 7}, {"key": ""}, {"key": KEY, "more": 1}, {"key": "x" * 513}, [KEY]):
        answer = browser.post("/api/v1/login", json=body)
        assert answer.status_code == 400, body
        assert "xxxxx" not in answer.text
        assert KEY not in answer.text
    long = json.dumps({"key": "x" * 5000}).encode()
    for content in (long, iter([long])):
        answer = browser.post("/api/v1/login", content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert browser.get("/api/v1/login").status_code == 401


def test_a_login_is_renewed_with_the_word_that_it_had_and_ends_when_the_browser_says_so(browser: httpx.Client) -> None:
    first = log_in(browser)
    token = browser.cookies["bloomery-8700"]
    renewed = browser.get("/api/v1/login")
    assert renewed.status_code == 200
    assert renewed.json()["ends_us"] >= first["ends_us"]
    assert {**renewed.json(), "ends_us": 0} == {**first, "ends_us": 0}
    assert browser.cookies["bloomery-8700"].count(".") == token.count(".") == 2
    assert browser.delete("/api/v1/login").status_code == 403
    gone = browser.delete("/api/v1/login", headers={"x-csrf-token": first["csrf"]})
    assert (gone.status_code, gone.content) == (204, b"")
    assert dict(browser.cookies) == {}
    assert browser.get("/api/v1/login").status_code == 401


def test_what_changes_something_repeats_the_word_and_comes_from_the_page_of_this_server(server: Server, browser: httpx.Client) -> None:
    csrf = log_in(browser)["csrf"]
    wrong: list[dict[str, str]] = [
        {},
        {"x-csrf-token": ""},
        {"x-csrf-token": csrf[:-1]},
        {"x-csrf-token": csrf, "origin": "http://evil.example"},
        {"x-csrf-token": csrf, "origin": "http://127.0.0.1:8701"},
        {"x-csrf-token": csrf, "origin": "null"},
    ]
    for headers in wrong:
        answer = browser.post("/api/v1/runs", json=NEW, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), headers
        assert browser.get("/api/v1/runs", headers=headers).status_code == 200
    for headers in ({}, {"origin": HOME}):
        assert browser.post("/api/v1/runs", json=NEW, headers={"x-csrf-token": csrf, **headers}).status_code == 201
    other = browser.post("/v1/chat/completions", json={"model": "tiny"})
    assert (other.status_code, set(other.json()["error"])) == (403, {"message", "type", "param", "code"})
    assert browser.post("/v1/chat/completions", json={"model": "tiny"}, headers={"x-csrf-token": csrf}).status_code == 400
    tinkers = browser.post("/api/v1/create_session", json={})
    assert (tinkers.status_code, tinkers.json()["category"]) == (403, "user")


def test_a_name_that_somebody_pointed_here_gets_nothing(server: Server, browser: httpx.Client) -> None:
    csrf = log_in(browser)["csrf"]
    strange = [
        "evil.example",
        "evil.example:8700",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "127.1",
        "",
        "a b",
        "[::1",
        "x@127.0.0.1",
        "127.0.0.1:8700:x",
    ]
    for host in strange:
        for answer in (
            browser.get("/api/v1/runs", headers={"host": host}),
            browser.post("/api/v1/runs", json=NEW, headers={"host": host, "x-csrf-token": csrf}),
            browser.post("/api/v1/login", json={"key": KEY}, headers={"host": host}),
        ):
            assert (answer.status_code, answer.json()["error"]["field"]) == (403, "host"), host
            assert "--public-host" in answer.text
    for host in ("localhost", "LOCALHOST.:8700", "127.0.0.1", "10.1.2.3:80", "[::1]", "[::1]:8700"):
        assert browser.get("/api/v1/runs", headers={"host": host}).status_code == 200, host
    # A key proves enough, under whatever name.
    assert server.http.get("/api/v1/runs", headers={"host": "evil.example"}).status_code == 200


def test_a_name_that_the_server_was_started_with_is_its_own(tmp_path: Path) -> None:
    server_of_that_name = serving(tmp_path, public_hosts=("bloomery.example",))
    with server_of_that_name as server, httpx.Client(base_url="http://Bloomery.example", transport=server.transport) as browser:
        csrf = log_in(browser, origin="https://bloomery.example")["csrf"]
        headers = {"x-csrf-token": csrf, "origin": "https://bloomery.example"}
        assert browser.post("/api/v1/runs", json=NEW, headers=headers).status_code == 201


def test_who_shows_a_key_is_whom_the_key_says_whatever_the_cookie_says(server: Server, browser: httpx.Client) -> None:
    log_in(browser)
    reader = {"x-api-key": create_key(server, "cookie-reader", scopes=["read"])}
    assert browser.post("/api/v1/runs", json=NEW, headers=reader).json()["error"]["message"].startswith("this key lacks the scope")
    for headers in ({"x-api-key": "tml-wrong"}, {"authorization": "Bearer tml-wrong"}):
        assert browser.get("/api/v1/runs", headers=headers).status_code == 401
    assert browser.get("/api/v1/login", headers=reader).status_code == 401


def test_a_login_is_as_good_as_its_key_and_never_longer(server: Server, browser: httpx.Client) -> None:
    key = create_key(server, "cookie-revoked", project="red", scopes=["read"], ttl_s=3600)
    said = log_in(browser, key)
    assert (said["key"], said["project"], said["scopes"]) == ("cookie-revoked", "red", ["read"])
    assert said["ends_us"] <= now_us() + 3600 * 1_000_000
    assert browser.post("/api/v1/runs", json=NEW, headers={"x-csrf-token": said["csrf"]}).status_code == 403
    assert browser.get("/api/v1/runs").status_code == 200
    assert server.http.delete("/api/v1/keys/cookie-revoked?project=red").status_code == 200
    assert browser.get("/api/v1/runs").status_code == 401
    assert browser.get("/api/v1/login").status_code == 401


def test_a_token_of_one_kind_is_none_of_the_other(server: Server, browser: httpx.Client) -> None:
    log_in(browser)
    login, token = browser.cookies["bloomery-8700"], server.http.post("/api/v1/auth/token").json()["jwt"]
    over = server.services._tokens.sign(BROWSER, {"key": "x", "csrf": "x"}, expires_s=int(time.time()))
    browser.cookies.clear()
    assert browser.get("/api/v1/runs", headers={"x-api-key": login}).status_code == 401
    for cookie in (token, over, login[:-1], KEY, "", "ÿ"):
        answer = browser.get("/api/v1/runs", headers={"cookie": f"bloomery-8700={cookie}".encode("latin-1")})
        assert answer.status_code == 401, cookie
    assert browser.get("/api/v1/runs", headers={"cookie": f"bloomery-8701={login}"}).status_code == 401


def test_no_key_is_written_to_a_log(server: Server, browser: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        log_in(browser)
        browser.post("/api/v1/login", json={"key": KEY, "more": 1})
        browser.post("/api/v1/login", json={"key": f"{KEY}-wrong"})
    assert KEY not in caplog.text

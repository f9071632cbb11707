"""A browser shows its key once; the cookie that it gets for it stands for the key, with a word that no page but the server's own was told."""

import json
import logging
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.api.browser import CSRF
from bloomery.services.access.identity import BROWSER, LOGIN_S, LOGINS_S, fingerprint
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
    """Logged in as the page does it: from now on every request of this browser repeats the word, where the test has it do nothing else."""
    answer = browser.post("/api/v1/login", json={"key": key}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    browser.headers[CSRF] = found["csrf"]
    return found


def bare(server: Server) -> httpx.Client:
    """A client that shows what a test says, and nothing else."""
    return httpx.Client(base_url=HOME, transport=server.transport)


def claims(token: str) -> dict[str, Any]:
    """What a token says to whoever reads it."""
    text = token.split(".")[1]
    found: dict[str, Any] = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
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
    browser.headers[CSRF] = said["csrf"]
    for path in ("/api/v1/runs", "/v1/models", "/api/v1/auth/apikey/me", "/metrics"):
        assert browser.get(path).status_code == 200, path


def test_over_tls_the_cookie_never_leaves_it_and_nobody_without_tls_or_of_another_name_writes_it(server: Server) -> None:
    with httpx.Client(base_url="https://localhost:8700", transport=server.transport) as browser:
        answer = browser.post("/api/v1/login", json={"key": KEY}, headers={"origin": "https://localhost:8700"})
        ((name, cookie),) = SimpleCookie(answer.headers["set-cookie"]).items()
        # What browsers ask of a name that begins so.
        assert name == "__Host-bloomery-8700"
        assert (cookie["secure"], cookie["path"], cookie["domain"]) == (True, "/", "")
        browser.headers[CSRF] = answer.json()["csrf"]
        browser.cookies.set("bloomery-8700", "another's")
        assert browser.get("/api/v1/login").status_code == 200
        gone = browser.delete("/api/v1/login", headers={"origin": "https://localhost:8700"})
        ((name, cookie),) = SimpleCookie(gone.headers["set-cookie"]).items()
        assert (name, cookie["secure"], cookie["max-age"]) == ("__Host-bloomery-8700", True, "0")


def test_over_tls_a_cookie_that_was_written_without_it_is_none(server: Server, browser: httpx.Client) -> None:
    log_in(browser)
    shown = {CSRF: browser.headers[CSRF], "cookie": f"bloomery-8700={browser.cookies['bloomery-8700']}"}
    with bare(server) as other:
        assert other.get("/api/v1/login", headers=shown).status_code == 200
        assert other.get("https://127.0.0.1:8700/api/v1/login", headers=shown).status_code == 401
        # A proxy speaks TLS, and the page says so.
        behind = shown | {"origin": "https://127.0.0.1:8700"}
        assert other.post("/api/v1/runs", json=NEW, headers=behind).status_code == 401


def test_two_servers_of_a_host_have_a_cookie_each_and_neither_ends_the_login_of_the_other(server: Server) -> None:
    with httpx.Client(transport=server.transport) as browser:
        ports = {port: f"http://localhost:{port}/api/v1/login" for port in (8700, 8701)}
        words = {port: {CSRF: browser.post(login, json={"key": KEY}).json()["csrf"]} for port, login in ports.items()}
        assert sorted(browser.cookies) == ["bloomery-8700", "bloomery-8701"]
        assert [browser.get(login, headers=words[port]).status_code for port, login in ports.items()] == [200, 200]
        assert browser.delete(ports[8701], headers=words[8701]).status_code == 204
        assert [browser.get(login, headers=words[port]).status_code for port, login in ports.items()] == [200, 401]


def test_behind_a_proxy_that_speaks_tls_the_page_says_so_and_the_cookie_has_the_port_that_the_browser_knows(server: Server) -> None:
    over_tls = {"host": "localhost:8443", "origin": "https://localhost:8443"}
    with bare(server) as browser:
        made = browser.post("/api/v1/login", json={"key": KEY}, headers=over_tls)
        ((name, cookie),) = SimpleCookie(made.headers["set-cookie"]).items()
        assert (name, cookie["secure"]) == ("__Host-bloomery-8443", True)
        # Browsers send no origin with this one.
        shown = {"host": "localhost:8443", CSRF: made.json()["csrf"], "cookie": f"{name}={cookie.value}"}
        renewed = browser.get("/api/v1/login", headers=shown)
        ((name, cookie),) = SimpleCookie(renewed.headers["set-cookie"]).items()
        assert (name, cookie["secure"]) == ("__Host-bloomery-8443", True)
        usual = browser.post("/api/v1/login", json={"key": KEY}, headers={"host": "localhost", "origin": "https://localhost"})
        assert [*SimpleCookie(usual.headers["set-cookie"])] == ["__Host-bloomery"]


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


def test_no_page_of_others_logs_a_browser_in(browser: httpx.Client) -> None:
    for origin in ("http://evil.example", "http://127.0.0.1:8701", "https://127.0.0.1", "null"):
        # As a form of theirs can send it, which browsers ask nobody about.
        for kind in ("text/plain", "application/json"):
            body = json.dumps({"key": KEY}).encode()
            answer = browser.post("/api/v1/login", content=body, headers={"origin": origin, "content-type": kind})
            assert (answer.status_code, answer.json()["error"]["field"], "set-cookie" in answer.headers) == (403, "origin", False), origin


def test_a_login_is_renewed_with_the_word_that_it_had_and_ends_when_the_browser_says_so(browser: httpx.Client) -> None:
    first = log_in(browser)
    csrf = first.pop("csrf")
    token = browser.cookies["bloomery-8700"]
    renewed = browser.get("/api/v1/login")
    assert renewed.status_code == 200
    assert renewed.json()["ends_us"] >= first["ends_us"]
    assert {**renewed.json(), "ends_us": 0} == {**first, "ends_us": 0}
    assert {**claims(token), "iat": 0, "exp": 0} == {**claims(browser.cookies["bloomery-8700"]), "iat": 0, "exp": 0}
    assert browser.get("/api/v1/login", headers={CSRF: ""}).status_code == 403
    # Who has lost the word logs out all the same.
    assert browser.delete("/api/v1/login", headers={CSRF: "", "origin": "http://127.0.0.1:8701"}).status_code == 403
    gone = browser.delete("/api/v1/login", headers={CSRF: ""})
    assert (gone.status_code, gone.content) == (204, b"")
    assert dict(browser.cookies) == {}
    assert browser.get("/api/v1/login", headers={CSRF: csrf}).status_code == 401


def test_a_login_ends_a_week_after_the_key_was_shown_however_often_it_is_renewed(server: Server, browser: httpx.Client) -> None:
    csrf = log_in(browser)["csrf"]
    said, now_s = claims(browser.cookies["bloomery-8700"]), int(time.time())
    assert 0 <= now_s - said["began"] < 60
    old = server.services._tokens.sign(BROWSER, {**said, "began": now_s + 1800 - LOGINS_S}, expires_s=now_s + 60)
    renewed = bare(server).get("/api/v1/login", headers={CSRF: csrf, "cookie": f"bloomery-8700={old}"})
    assert renewed.json()["ends_us"] == (now_s + 1800) * 1_000_000
    (cookie,) = SimpleCookie(renewed.headers["set-cookie"]).values()
    assert (claims(cookie.value)["exp"], claims(cookie.value)["began"]) == (now_s + 1800, now_s + 1800 - LOGINS_S)


def test_what_a_cookie_alone_shows_is_nobodys_login(server: Server, browser: httpx.Client) -> None:
    """Browsers send the cookies of a host to every port of it: another server there reads the cookie, and may send it itself."""
    csrf = log_in(browser)["csrf"]
    token = browser.cookies["bloomery-8700"]
    assert csrf not in json.dumps(claims(token))
    assert claims(token)["csrf_hash"] == fingerprint(csrf)
    with bare(server) as thief:
        thief.cookies.set("bloomery-8700", token)
        for word in ("", csrf[:-1], claims(token)["csrf_hash"], "ÿ"):
            headers = {CSRF: word.encode("latin-1")}
            answers = [
                *(thief.get(path, headers=headers) for path in ("/api/v1/login", "/api/v1/runs", "/v1/models", "/api/v1/auth/apikey/me", "/metrics")),
                *(thief.request(method, "/api/v1/runs", headers=headers) for method in ("POST", "DELETE", "PUT", "HEAD", "OPTIONS")),
                thief.post("/api/v1/auth/token", headers=headers),
                thief.delete("/api/v1/keys/development", headers=headers),
            ]
            for answer in answers:
                assert answer.status_code in (403, 405), (word, answer.request)
                assert "set-cookie" not in answer.headers
                assert csrf not in answer.text


def test_every_request_repeats_the_word_and_comes_from_the_page_of_this_server(server: Server, browser: httpx.Client) -> None:
    csrf = log_in(browser)["csrf"]
    del browser.headers[CSRF]
    wrong: list[dict[str, str]] = [
        {},
        {"x-csrf-token": ""},
        {"x-csrf-token": csrf[:-1]},
        {"x-csrf-token": csrf, "origin": "http://evil.example"},
        {"x-csrf-token": csrf, "origin": "http://127.0.0.1:8701"},
        {"x-csrf-token": csrf, "origin": "null"},
    ]
    for headers in wrong:
        for answer in (browser.post("/api/v1/runs", json=NEW, headers=headers), browser.get("/api/v1/runs", headers=headers)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), headers
    for headers in ({}, {"origin": HOME}):
        assert browser.get("/api/v1/runs", headers={"x-csrf-token": csrf, **headers}).status_code == 200
        assert browser.post("/api/v1/runs", json=NEW, headers={"x-csrf-token": csrf, **headers}).status_code == 201
    other = browser.post("/v1/chat/completions", json={"model": "tiny"})
    assert (other.status_code, set(other.json()["error"])) == (403, {"message", "type", "param", "code"})
    assert browser.post("/v1/chat/completions", json={"model": "tiny"}, headers={"x-csrf-token": csrf}).status_code == 400
    tinkers = browser.post("/api/v1/create_session", json={})
    assert (tinkers.status_code, tinkers.json()["category"]) == (403, "user")


def test_a_name_that_somebody_pointed_here_gets_nothing(server: Server, browser: httpx.Client) -> None:
    csrf = log_in(browser)["csrf"]
    token = browser.cookies["bloomery-8700"]
    # Whatever port a name has, its cookie is there.
    login = {CSRF: csrf, "cookie": "; ".join(f"{name}={token}" for name in ("bloomery", "bloomery-80", "bloomery-8700"))}
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
            bare(server).get("/api/v1/runs", headers={"host": host, **login}),
            bare(server).post("/api/v1/runs", json=NEW, headers={"host": host, **login}),
            bare(server).post("/api/v1/login", json={"key": KEY}, headers={"host": host}),
        ):
            assert (answer.status_code, answer.json()["error"]["field"]) == (403, "host"), host
            assert "--public-host" in answer.text
    for host in ("localhost", "LOCALHOST.:8700", "127.0.0.1", "10.1.2.3:80", "[::1]", "[::1]:8700"):
        assert bare(server).get("/api/v1/runs", headers={"host": host, **login}).status_code == 200, host
    # A key proves enough, under whatever name.
    assert server.http.get("/api/v1/runs", headers={"host": "evil.example"}).status_code == 200


def test_a_name_that_the_server_was_started_with_is_its_own(tmp_path: Path) -> None:
    server_of_that_name = serving(tmp_path, public_hosts=("bloomery.example",))
    with server_of_that_name as server, httpx.Client(base_url="http://Bloomery.example", transport=server.transport) as browser:
        made = browser.post("/api/v1/login", json={"key": KEY}, headers={"origin": "https://bloomery.example"})
        (cookie,) = SimpleCookie(made.headers["set-cookie"]).values()
        # It is for TLS alone, which ends before this server.
        headers = {CSRF: made.json()["csrf"], "origin": "https://bloomery.example", "cookie": f"{cookie.key}={cookie.value}"}
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
    over = server.services._tokens.sign(BROWSER, {"key": "x", "csrf_hash": "x"}, expires_s=int(time.time()))
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

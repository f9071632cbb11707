"""Keys, the tokens that stand for them, and the login of the `tinker` command, with the unmodified SDK against `bloomery up`."""

import json
from base64 import urlsafe_b64decode
from pathlib import Path

import httpx
import pytest
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli

from tests.live import LiveServer, free_port, running_server
from tests.tinker.over_fake_engine import KEY, Served, served
from tests.tinker.tenants import MODEL, new_key, post, rest_of


def token_of(server: LiveServer, credential: str) -> str:
    answer = post(server, "/auth/token", {}, key=credential)
    assert answer.status_code == 200, answer.text
    token: str = answer.json()["jwt"]
    return token


def said(token: str) -> dict[str, object]:
    payload = token.split(".")[1]
    found: dict[str, object] = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return found


def test_a_caller_is_told_who_it_is(live_server: LiveServer) -> None:
    me = rest_of(live_server, live_server.key).whoami().result()
    assert (me.user_urn, me.org_urn, me.email) == ("tml:organization_user:default", "tml:organization:default", "development@default.localhost")
    other = rest_of(live_server, new_key(live_server, "team-b", "night-shift")).whoami().result()
    assert (other.user_urn, other.email) == ("tml:organization_user:team-b", "night-shift@team-b.localhost")


@pytest.mark.contract("POST /api/v1/auth/token")
def test_a_token_is_as_good_as_its_key_and_dies_with_it(live_server: LiveServer) -> None:
    key = new_key(live_server, "default", "short-lived", ["read"])
    token = token_of(live_server, key)
    assert rest_of(live_server, token).whoami().result().email == "short-lived@default.localhost"
    capabilities = rest_of(live_server, token).get_server_capabilities().result()
    assert [model.model_name for model in capabilities.supported_models] == [MODEL]
    # A scope that the key lacks, the token lacks.
    assert httpx.get(f"{live_server.url}/api/v1/audit", headers={"authorization": f"Bearer {token}"}).status_code == 403
    again = token_of(live_server, token)
    assert said(again)["exp"] == said(token)["exp"]
    revoked = httpx.delete(f"{live_server.url}/api/v1/keys/short-lived", headers={"x-api-key": live_server.key})
    assert revoked.status_code == 200
    for dead in (key, token, again):
        assert post(live_server, "/auth/token", {}, key=dead).status_code == 401


def test_a_token_ends_with_its_key(live_server: LiveServer) -> None:
    body = {"name": "minute", "scopes": ["read"], "ttl_s": 60}
    key = httpx.post(f"{live_server.url}/api/v1/keys", json=body, headers={"x-api-key": live_server.key}).json()
    claims = said(token_of(live_server, key["key"]))
    assert claims["exp"] == key["expires_us"] // 1_000_000
    assert claims["exp"] - claims["iat"] <= 60


def test_tokens_that_are_none_are_refused_so_that_the_sdk_asks_for_another(live_server: LiveServer) -> None:
    header, claims, signature = token_of(live_server, live_server.key).split(".")
    unsigned = "eyJhbGciOiJub25lIn0"
    for forged in (f"{header}.{claims}.{signature[::-1]}", f"{header}.{claims}.", f"{unsigned}.{claims}.", "eyJ", f"{header}..{signature}"):
        answer = post(live_server, "/client/config", {"sdk_version": "0.38.0"}, key=forged)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    plain = post(live_server, "/client/config", {"sdk_version": "0.38.0"}, key="tml-wrong")
    assert (plain.status_code, plain.headers.get("www-authenticate")) == (401, None)
    with pytest.raises(tinker.AuthenticationError):
        rest_of(live_server, "tml-" + "0" * 40).whoami().result()


def test_tokens_outlive_the_api_but_not_the_key_that_signed_them(tmp_path: Path) -> None:
    def asks(server: Served, credential: str, path: str = "/client/config") -> httpx.Response:
        return httpx.post(f"{server.url}/api/v1{path}", json={"sdk_version": "0.38.0"}, headers={"x-api-key": credential})

    with served(tmp_path) as first:
        token = asks(first, KEY, "/auth/token").json()["jwt"]
        assert (tmp_path / "signing_key").stat().st_mode & 0o777 == 0o600
    with served(tmp_path) as second:
        assert asks(second, token).status_code == 200
    (tmp_path / "signing_key").unlink()
    with served(tmp_path) as third:
        assert [asks(third, credential).status_code for credential in (token, KEY)] == [401, 200]


@pytest.mark.slow
def test_the_sdk_goes_on_when_its_token_is_refused(tmp_path: Path) -> None:
    port = str(free_port())
    with running_server(tmp_path / "data", "--port", port) as first:
        rest = rest_of(first, first.key)
        assert rest.get_server_capabilities().result().supported_models
    (tmp_path / "data" / "signing_key").unlink()
    with running_server(tmp_path / "data", "--port", port):
        # The SDK holds a token of the old signature, exchanges its key, and asks again.
        assert rest.get_server_capabilities().result().supported_models


def test_the_tinker_command_logs_in_and_says_who_it_is(live_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", live_server.url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    key = new_key(live_server, "default", "laptop", ["read", "train"])

    def command(*arguments: str, given: str | None = None) -> str:
        done = CliRunner().invoke(main_cli, arguments, input=given)
        assert done.exit_code == 0, done.output
        return done.output

    assert "Logged in as laptop@default.localhost (default)" in command("auth", "login", given=f"{key}\n")
    assert json.loads((tmp_path / ".tinker" / "credentials.json").read_text())["keys"]
    assert "tml:organization_user:default" in command("auth", "whoami")
    assert "Tinker accessible: yes" in command("auth", "status")
    assert "Removed credential 'laptop'" in command("auth", "logout")
    refused = CliRunner().invoke(main_cli, ["auth", "login"], input="tml-wrong\n")
    assert refused.exit_code != 0


@pytest.mark.contract("GET /api/v1/auth/apikey/me")
@pytest.mark.contract("DELETE /api/v1/auth/apikey/me")
def test_a_key_deletes_itself_and_nothing_else(live_server: LiveServer) -> None:
    def me(key: str, method: str = "GET") -> httpx.Response:
        return httpx.request(method, f"{live_server.url}/api/v1/auth/apikey/me", headers={"x-api-key": key})

    one, two = (new_key(live_server, "default", name, ["read"]) for name in ("one", "two"))
    assert me(one).json()["key_id"] != me(two).json()["key_id"]
    assert me(one, "DELETE").status_code == 200
    assert [me(key).status_code for key in (one, two)] == [401, 200]
    development = me(live_server.key, "DELETE")
    assert (development.status_code, "data directory" in development.json()["error"]) == (400, True)
    assert me(live_server.key).status_code == 200

"""`bloomery key` against a running server."""

import json
from pathlib import Path

import httpx
from typer.testing import CliRunner, Result

from bloomery.cli.main import app
from tests.live import LiveServer
from tests.up.builders import data_dir


def run(*arguments: str, data: Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["key", *arguments, "--data-dir", str(data)])


def status(server: LiveServer, key: str, path: str) -> int:
    return httpx.get(f"{server.url}{path}", headers={"x-api-key": key}).status_code


def refusal(result: Result) -> str:
    """The one line of a user error."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_a_key_is_printed_once_works_at_once_and_is_taken_back(live_server: LiveServer) -> None:
    data = live_server.data_dir
    made = run("create", "cli-reader", "--scopes", "read, infer", "--days", "30", "--rpm", "60", "--tpm", "5000", data=data)
    (key,) = made.stdout.splitlines()
    assert key.startswith("tml-")
    assert "key `cli-reader` of project `default` may infer, read" in made.stderr
    assert (status(live_server, key, "/api/v1/spans"), status(live_server, key, "/api/v1/keys")) == (200, 403)
    shown = run("list", data=data).stdout
    assert key not in shown
    (row,) = [line.split() for line in shown.splitlines() if " cli-reader " in line]
    assert row[:3] == ["default", "cli-reader", "infer,read"]
    assert "never" not in row
    assert row[-2:] == ["60", "5000"]
    assert "already" in refusal(run("create", "cli-reader", "--scopes", "read", data=data))
    told = json.loads(run("list", "--json", data=data).stdout)
    assert [(each["scopes"], "key" in each) for each in told if each["name"] == "cli-reader"] == [(["infer", "read"], False)]
    said = run("revoke", "cli-reader", data=data).stdout
    assert said == "key `cli-reader` of project `default` is refused from now on\n"
    assert status(live_server, key, "/api/v1/spans") == 401
    assert " cli-reader " not in run("list", data=data).stdout
    assert "has no key `cli-reader`" in refusal(run("revoke", "cli-reader", data=data))


def test_a_key_of_a_new_project_makes_the_project(live_server: LiveServer) -> None:
    data = live_server.data_dir
    (key,) = run("create", "cli-lead", "--scopes", "admin,train,read", "--project", "cli-blue", data=data).stdout.splitlines()
    assert httpx.get(f"{live_server.url}/api/v1/keys", headers={"x-api-key": key}).json()["data"][0]["project"] == "cli-blue"
    listed = run("list", "--project", "cli-blue", data=data).stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [["PROJECT", "NAME"], ["cli-blue", "cli-lead"]]
    said = refusal(run("revoke", "cli-lead", data=data))
    assert "project `default` has no key `cli-lead`: `bloomery key list` shows those of all projects, and `--project` " in said
    assert run("revoke", "cli-lead", "--project", "cli-blue", data=data).exit_code == 0


def test_what_makes_no_sense_is_one_line_that_says_what_to_do(live_server: LiveServer, tmp_path: Path) -> None:
    data = live_server.data_dir
    assert "`scopes.0`: Input should be 'infer', 'read', 'train', 'deploy' or 'admin'" in refusal(run("create", "x", "--scopes", "fly", data=data))
    assert "scopes" in refusal(run("create", "x", "--scopes", ",", data=data))
    assert "name" in refusal(run("create", "a/b", "--scopes", "read", data=data))
    assert "replace that and start the server again" in refusal(run("revoke", "development", data=data))
    stopped = data_dir(tmp_path / "stopped")
    assert "no server is running" in refusal(run("list", data=stopped.root))

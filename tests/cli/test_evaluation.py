"""`bloomery eval` as its users type it, on a real server."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bloomery.cli.main import app
from bloomery.client import Client
from tests.live import LiveServer

CHECK = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}", "operation": "ne"}


@pytest.fixture(scope="module")
def server(live_server: LiveServer) -> LiveServer:
    with Client(live_server.url, live_server.key) as client:
        rows = [{"messages": [{"role": "user", "content": f"Say {place}."}], "answer": "never"} for place in range(4)]
        client.datasets.create("cli-asked")
        client.datasets.add_version("cli-asked", {"eval": "\n".join(map(json.dumps, rows))})
        client.graders.create("cli-other", CHECK)
        client.deployments.create("cli-front", "bloomery-tiny")
    return live_server


def run(server: LiveServer, *arguments: str, expect: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", *arguments, "--data-dir", str(server.data_dir)])
    assert done.exit_code == expect, done.output
    return done.output


def as_json(server: LiveServer, *arguments: str) -> Any:
    return json.loads(run(server, *arguments, "--json"))


def test_an_evaluation_is_made_of_a_file_and_flags_followed_and_shown(server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text("data: {dataset: cli-asked}\nmodels: [bloomery-tiny]\ngraders: [cli-other@1]\nparams: {max_tokens: 4}\n")
    said = run(
        server, "create", "typed", "--file", str(file), "--model", "bloomery-tiny", "--model", "cli-front", "--set", "params.top_p=0.9", "--watch"
    )
    assert "typed has succeeded" in said
    assert "4 rows of cli-asked, eval: 8 of 8 answers, 8 of 8 scores" in said
    assert "1 [0.5101, 1]" in said
    assert "bloomery-tiny - cli-front" in said
    shown = as_json(server, "show", "typed", "--watch")
    assert (shown["spec"]["params"]["top_p"], shown["spec"]["params"]["max_tokens"]) == (0.9, 4)
    assert "typed" in run(server, "list")
    succeeded, failed = (as_json(server, "list", "--state", state) for state in ("succeeded", "failed"))
    assert {each["state"] for each in succeeded} == {"succeeded"}
    assert "typed" in {each["spec"]["name"] for each in succeeded} - {each["spec"]["name"] for each in failed}
    assert "cli-other@1 1" in run(server, "items", "typed", "--model", "cli-front", "--status", "passed")
    assert len(run(server, "items", "typed", "--limit", "3", "--json").splitlines()) == 3
    (line,) = as_json(server, "leaderboard", "cli-asked", "cli-other@1")["data"]
    assert (line["place"], line["evaluation"]) == (1, "typed")
    assert "typed" in run(server, "leaderboard", "cli-asked", "cli-other")
    assert "cannot be cancelled" in run(server, "cancel", "typed", expect=2)
    assert "typed is deleted" in run(server, "delete", "typed")


def test_what_is_wrong_with_a_spec_is_told_in_a_line(server: LiveServer, tmp_path: Path) -> None:
    assert "`models`: this is missing; give --model NAME" in run(server, "create", "x", "--dataset", "cli-asked", "--grader", "cli-other", expect=2)
    assert "no data set `gone`" in run(server, "create", "x", "--dataset", "gone", "--model", "bloomery-tiny", "--grader", "cli-other", expect=2)
    assert "`graders.0`: the version of a grader is a number" in run(
        server, "create", "x", "--dataset", "cli-asked", "--model", "bloomery-tiny", "--grader", "cli-other@new", expect=2
    )

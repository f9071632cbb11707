"""The worked example of agents: what its tool says, what is right, and the programs of the page."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bloomery.recipes.lookups import Ask, Message, Told, converse, problems, worked
from tests.live import LiveServer
from tests.test_docs import ROOT, blocks

CHAIN = ("red", "ship", "milk")


def says(*contents: str) -> Ask:
    """A model that says these, in their order."""
    left = iter(contents)
    return lambda _: next(left)


def call(key: Any) -> str:
    return json.dumps({"tool": "get", "args": {"key": key}})


def end(word: str) -> str:
    return json.dumps({"answer": word})


def test_a_worked_example_is_right() -> None:
    heard: list[Sequence[Message]] = []
    contents = iter([message["content"] for message in worked(CHAIN) if message["role"] == "assistant"])

    def ask(messages: Sequence[Message]) -> str:
        heard.append(list(messages))
        return str(next(contents))

    assert converse(ask, CHAIN) == Told(right=True, looked_up=2)
    assert [*heard[-1], {"role": "assistant", "content": end("milk")}] == worked(CHAIN)


@pytest.mark.parametrize(
    ("contents", "looked_up"),
    [
        ([end("milk")], 0),
        ([call("red"), end("milk")], 1),
        ([call("red"), call("ship"), end("ship")], 2),
        ([call("red"), call("ship"), end("milk") + " "], 2),
        ([call("blue"), call("ship"), end("nothing")], 2),
        ([call("red")] * 4, 3),
        (["no JSON"], 0),
        (["[]"], 0),
        ([call(["red"])], 0),
        ([json.dumps({"tool": "get", "args": "red"})], 0),
    ],
)
def test_what_was_not_looked_up_or_is_not_the_end_is_wrong(contents: list[str], looked_up: int) -> None:
    told = converse(says(*contents), CHAIN)
    assert (told.right, told.looked_up) == (contents[-1] == end("milk") + " ", looked_up)


def test_problems_of_a_seed_are_the_same_and_of_another_seed_are_others() -> None:
    assert problems(8, 1) == problems(8, 1)
    assert {problem.data for problem in problems(8, 1)}.isdisjoint(problem.data for problem in problems(8, 2))
    assert all(len(set(problem.data)) == 3 for problem in problems(64, 0))


@pytest.mark.slow
def test_the_python_of_the_page_runs_with_the_real_sdk(live_server: LiveServer, tmp_path: Path) -> None:
    (_, code), *_ = blocks(ROOT / "docs" / "rl-agents.md")
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key}
    code = code.replace("http://127.0.0.1:8700", live_server.url).replace("steps=5", "steps=1")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert (metrics["groups/made"], metrics["agents/answers"], metrics["failures/lost"]) == (4, 2, 0)


@pytest.mark.slow
def test_the_program_goes_on_where_it_was_stopped(live_server: LiveServer, tmp_path: Path) -> None:
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key}
    argv = [
        sys.executable,
        "-m",
        "bloomery.recipes.learn_lookups",
        "--url",
        live_server.url,
        "--cursor",
        str(tmp_path / "cursor"),
        "--examples",
        "16",
    ]
    for steps, kinds in (("1", ["before", "warm", "step", "after"]), ("2", ["step", "after"])):
        done = subprocess.run([*argv, "--examples", "16", "--steps", steps], env=environment, capture_output=True, text=True, timeout=300, check=True)
        assert [json.loads(line)["kind"] for line in done.stdout.splitlines()] == kinds


@pytest.mark.slow
def test_the_model_that_ships_learns_to_use_the_tool_in_several_turns(live_server: LiveServer, tmp_path: Path) -> None:
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key}
    argv = [sys.executable, "-m", "bloomery.recipes.learn_lookups", "--url", live_server.url, "--cursor", str(tmp_path / "cursor")]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=500, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    before, warm, after = (next(row for row in rows if row["kind"] == kind) for kind in ("before", "warm", "after"))
    assert before["high"] < 0.1
    assert after["low"] > warm["high"]
    assert {row["ratio/k3"] for row in rows if row["kind"] == "step"} == {0.0}

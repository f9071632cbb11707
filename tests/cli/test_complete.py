"""What a shell is told to complete a line with, by click's protocol: names that the running server has, and nothing where none answers."""

import os
import subprocess
from pathlib import Path

import pytest

from bloomery.client import Client
from tests.live import BLOOMERY, LiveServer

CHECK = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "yes", "operation": "eq"}


def completed(line: str) -> list[str]:
    """Of the last word of the line."""
    words = line.split(" ")
    # Nothing of the environment but what the shell's own function says.
    protocol = {"_BLOOMERY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([BLOOMERY], env={**os.environ, **protocol}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [name for name in done.stdout.splitlines() if name]


@pytest.fixture(scope="module")
def named(live_server: LiveServer) -> LiveServer:
    with Client(live_server.url, live_server.key) as client:
        client.datasets.create("completed-data")
        client.graders.create("completed-grader", CHECK)
        client.deployments.create("completed-deployment", "bloomery-tiny")
    return live_server


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("dataset show --data-dir DIR comp", ["completed-data"]),
        ("job create x --data-dir DIR --dataset completed", ["completed-data"]),
        ("job create x --data-dir DIR --model bloom", ["bloomery-tiny"]),
        ("grader show --data-dir DIR completed", ["completed-grader"]),
        ("deployment rollback --data-dir DIR completed", ["completed-deployment"]),
        ("deployment promote --data-dir DIR completed-deployment bloomery", ["bloomery-tiny"]),
        ("export --data-dir DIR completed", ["completed-deployment"]),
        ("eval create x --data-dir DIR --model completed", ["completed-deployment"]),
        ("eval leaderboard --data-dir DIR completed-data completed", ["completed-grader"]),
        ("eval show --data-dir DIR no-evaluation", []),
        ("deployment create --data-dir DIR completed", []),
        ("job show --data-dir DIR no-job", []),
    ],
)
def test_names_of_what_is_there_complete_a_line(named: LiveServer, line: str, names: list[str]) -> None:
    assert completed(f"bloomery {line}".replace("DIR", str(named.data_dir))) == names


def test_commands_are_completed_without_a_server() -> None:
    assert completed("bloomery depl") == ["deployment"]


def test_where_no_server_answers_there_are_no_names_and_no_words(tmp_path: Path) -> None:
    assert completed(f"bloomery job show --data-dir {tmp_path} ") == []
    assert completed("bloomery dataset show --url http://127.0.0.1:9 ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_function_of_a_shell_is_shown(shell: str) -> None:
    shown = subprocess.run([BLOOMERY], env={**os.environ, "_BLOOMERY_COMPLETE": f"source_{shell}"}, capture_output=True, text=True, check=True).stdout
    assert f"complete_{shell}" in shown

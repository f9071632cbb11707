"""An environment of the published package as the agent of a managed job, as `docs/rl-agents.md` has it: its rows, its server, its own evaluation."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bloomery.client import Client
from bloomery.recipes.agents import Agents
from bloomery.recipes.remote_rollouts import RemoteRollouts, problem
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.render import ChatTokenizer
from bloomery.types.jobs import Data, Evaluation, JobSpec, JobState
from bloomery.types.methods import Reinforcement
from tests.cookbook.setup import ROOT, environment
from tests.jobs.test_agents_live import listens
from tests.live import LiveServer, free_port, running_server, wait_until
from tests.test_docs import blocks
from tests.verifiers.setup import ENVIRONMENT, REQUIREMENTS

pytestmark = pytest.mark.slow

BASE = "bloomery-tiny"
AWAY = """
import verifiers as vf
from datasets import Dataset


def judge(completion):
    raise ValueError("the judge is away")


def load_environment(same=False):
    rows = [{"question": "How much bread?", "answer": "12"}] + [{"question": "How much bread?", "answer": "3"}] * same
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[judge]))
"""


class Served(NamedTuple):
    """A server that was started with the environment `stock` as its agent, and that agent's ports: its own, and where it is told how it ended."""

    server: LiveServer
    folder: Path
    own: int
    told: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, own, told = tmp_path_factory.mktemp("served"), free_port(), free_port()
    (code,) = [code for _, code in blocks(ROOT / "docs" / "rl-agents.md") if "load_environment" in code]
    (folder / "stock.py").write_text(code)
    (folder / "away.py").write_text(AWAY)
    (folder / "agents.yaml").write_text(f"stock: {{url: 'http://127.0.0.1:{own}', port: {told}, timeout_s: 60}}\n")
    with running_server(folder / "data", "--agents", str(folder / "agents.yaml"), jobs=1) as server:
        yield Served(server, folder, own, told)


def around(folder: Path, **more: str) -> dict[str, str]:
    """What programs of the package are surrounded by."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), **more}


def serve(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [str(environment(ENVIRONMENT, REQUIREMENTS)), "-m", "bloomery.recipes.serve_verifiers", *arguments]
    return subprocess.run(argv, cwd=folder, env=around(folder), capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def playing(served: Served, name: str, own: int, told: int) -> Iterator[None]:
    argv = [str(environment(ENVIRONMENT, REQUIREMENTS)), "-m", "bloomery.recipes.serve_verifiers", name]
    argv += ["--port", str(own), "--told", f"http://127.0.0.1:{told}"]
    with subprocess.Popen(argv, cwd=served.folder, env=around(served.folder), stdout=sys.stderr) as process:
        try:
            wait_until(lambda: listens(own) or process.poll() is not None)
            yield
        finally:
            process.terminate()


def test_an_environment_is_trained_on_in_a_managed_job_and_evaluated_by_the_packages_own_command(served: Served) -> None:
    wrote = serve(served.folder, "stock", "--rows", "rows.jsonl")
    assert wrote.returncode == 0, wrote.stderr
    assert "4 rows in rows.jsonl: `bloomery dataset upload NAME rows.jsonl --kind prompt`" in wrote.stdout
    rows = (served.folder / "rows.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["messages"] == [{"role": "user", "content": "How much apple is there?"}]
    with Client(served.server.url, served.server.key) as client, playing(served, "stock", served.own, served.told):
        client.datasets.create("stock")
        client.datasets.add_version("stock", {"train": "\n".join(rows), "eval": "\n".join(rows[:2])}, kind="prompt")
        method = Reinforcement(agent="stock", steps=2, groups_per_step=2, group_size=4, max_tokens=12)
        spec = JobSpec(name="keeper", base_model=BASE, data=Data(dataset="stock"), method=method, rank=4, seed=1, evaluation=Evaluation(every=1))
        done = client.jobs.wait(client.jobs.create(spec).id, 300)
        assert done.state is JobState.SUCCEEDED, done.reason
        assert done.result is not None
        assert [(each.name, each.rows) for each in done.result.compared] == [("reward", 2)]
        steps = [point.values for point in client.jobs.points("keeper") if "agents/answers" in point.values]
        assert [(values["agents/answers"], values["failures/lost"]) for values in steps] == [(2, 0), (2, 0)]
        for values in steps:
            parts = {name: values[f"reward/part/{name}"] or 0.0 for name in ("has_the_answer", "short", "num_turns")}
            assert parts["num_turns"] == 2
            assert values["reward/raw"] == pytest.approx(parts["has_the_answer"] + 0.5 * parts["short"])
        client.deployments.create("keeper-1", done.result.version)
    evaluated(served, "keeper-1")


def evaluated(served: Served, model: str) -> None:
    """By the command of the page."""
    python = environment(ENVIRONMENT, REQUIREMENTS)
    argv = [str(python.with_name("vf-eval")), "stock", "--api-base-url", f"{served.server.url}/v1"]
    argv += ["--api-key-var", "BLOOMERY_API_KEY", "--model", model, "-n", "4", "-r", "1", "-t", "8", "--disable-tui", "--save-results", "-o", "out"]
    env = around(served.folder, BLOOMERY_API_KEY=served.server.key)
    done = subprocess.run(argv, cwd=served.folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = (served.folder / "out").rglob("results.jsonl")
    told: list[dict[str, Any]] = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(told) == 4
    assert [[message["role"] for message in row["completion"]] for row in told] == [["assistant", "user", "assistant"]] * 4
    assert all(row.get("error") is None and row["reward"] == pytest.approx(row["has_the_answer"] + 0.5 * row["short"]) for row in told), told[0]


def test_what_goes_wrong_is_told_with_its_reason_and_is_no_reward(served: Served) -> None:
    own, told = free_port(), free_port()
    with Client(served.server.url, served.server.key) as client, playing(served, "away", own, told):
        tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
        with RemoteRollouts(f"http://127.0.0.1:{own}", port=told) as remote, Agents(remote, tokenizer, timeout_s=30) as agents:
            makes = agents.rollouts(lambda: client.sampler(BASE), RolloutConfig(group_size=2, max_tokens=8, attempts=1, seed=5))
            for asked, why in (
                ("How much bread?", "ValueError: the judge is away"),
                ("How much cheese?", "no row of the environment has this prompt"),
            ):
                group = makes.group(0, problem(asked, [{"role": "user", "content": asked}]))
                assert group.members == ()
                assert [failure.kind for failure in group.failures] == ["raised"] * 2
                assert all(why in failure.message for failure in group.failures), group.failures
        for path, body, why in (
            ("/init", {"messages": []}, "no row"),
            ("/init", {}, "no request of remote rollouts"),
            ("/", {}, "rollouts begin at /init"),
        ):
            request = urllib.request.Request(f"http://127.0.0.1:{own}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            with refused.value as answer:
                assert why in answer.read().decode()


def test_rows_that_a_prompt_does_not_tell_apart_and_environments_that_are_not_there_are_refused(served: Served) -> None:
    for arguments, why in ((("away", "--args", '{"same": true}'), "rows 0 and 1 have the same prompt"), (("nowhere",), "Could not import 'nowhere'")):
        refused = serve(served.folder, *arguments, "--rows", "none.jsonl")
        assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr
    assert not (served.folder / "none.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--eval"], "give --rows FILE too"),
        (
            ["--rows", "rows.jsonl", "--timeout-s", "9", "--port", "0"],
            "--rows writes rows and serves nothing: leave out --port, --timeout-s, or --rows",
        ),
        (["--args", "same"], "argument --args: same is no JSON object"),
        (["--args", "[1]"], "argument --args: [1] is no JSON object"),
        (["--rows", "nowhere/rows.jsonl"], "error: [Errno 2] No such file or directory: 'nowhere/rows.jsonl'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_a_line(served: Served, arguments: list[str], why: str) -> None:
    refused = serve(served.folder, "stock", *arguments)
    assert (refused.returncode, why in refused.stderr, "Traceback" in refused.stderr) == (2, True, False), refused.stderr

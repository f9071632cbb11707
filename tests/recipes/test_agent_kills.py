"""kill -9 in the middle of an agent's conversation, between its turns: of the loop, of the engine that samples and trains, of the replica that
samples for it, and of the server before both.

The door, its port and its keys are others when a loop is started again, and seeds follow from rollout and prompt: the same conversations come again,
and the same weights of them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.recipes.agents import Agents, Episode
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.async_grpo import train as train_ahead
from bloomery.recipes.grpo import GrpoConfig, StepReport, train
from bloomery.recipes.rollouts import Problem, RolloutConfig
from bloomery.render import ChatTokenizer
from tests.live import LiveServer, running_server
from tests.recipes.loops import BASE, POLICY
from tests.recipes.test_agents import asks
from tests.test_docs import ROOT

SUMS = [Problem(f"{number}+4", (), data=(number, 4)) for number in range(5)]
ROLLOUTS = RolloutConfig(group_size=3, max_tokens=8, seed=3)
STEPS = 3
PATIENCE_S = 300.0
MIDDLE = "3.1"
"""A rollout of the second step."""


class Conversing:
    """An agent of two turns, in the middle of one of which somebody is killed, once; it remembers what it was answered."""

    def __init__(self, kill: Callable[[], None] | None = None) -> None:
        self.heard: dict[str, set[tuple[str, ...]]] = {}
        self._kill, self._lock = kill, threading.Lock()

    def __call__(self, episode: Episode) -> float:
        messages = [{"role": "user", "content": f"What is {episode.problem.id}?"}]
        answers: list[str] = []
        with asks(episode) as model:
            for turn in range(2):
                if turn and episode.rollout_id == MIDDLE:
                    self._kill_once()
                answer = model.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content or ""  # type: ignore[arg-type]
                answers.append(answer)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"It is {sum(episode.problem.data)}. Again?"}]
        self.heard.setdefault(episode.rollout_id, set()).add(tuple(answers))
        return float(sum(map(ord, "".join(answers))) % 101)

    def _kill_once(self) -> None:
        with self._lock:
            kill, self._kill = self._kill, None
        if kill is not None:
            kill()


def run_loop(client: Client, path: Path, agent: Conversing, *, asynchronous: bool = False) -> tuple[str, list[StepReport]]:
    """The digest of the weights behind the last step, and what the steps showed."""
    reports: list[StepReport] = []
    tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
    with Agents(agent, tokenizer) as agents:
        if asynchronous:
            on_policy = AsyncGrpoConfig(policy=POLICY, rollouts=ROLLOUTS, groups_per_step=2, max_head_offpolicy_versions=0)
            policy = train_ahead(client, SUMS, agents, on_policy, path, steps=STEPS, on_step=reports.append)
        else:
            config = GrpoConfig(policy=POLICY, rollouts=ROLLOUTS, groups_per_step=2)
            policy = train(client, SUMS, agents, config, path, steps=STEPS, on_step=reports.append)
    return policy.run.save_checkpoint("end").result().digest, reports


def run_killed(url: str, key: str, path: Path, asynchronous: bool) -> None:
    """What the process of a loop does that is killed."""
    with Client(url, key) as client:
        run_loop(client, path, Conversing(lambda: os.kill(os.getpid(), signal.SIGKILL)), asynchronous=asynchronous)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_loop_of_agents_killed_within_a_conversation_goes_on_to_the_weights_of_an_undisturbed_one(
    live_server: LiveServer, client: Client, tmp_path: Path, asynchronous: bool
) -> None:
    path, again, expected = tmp_path / "cursor", Conversing(), Conversing()
    arguments = f"{live_server.url!r}, {live_server.key!r}, Path({str(path)!r}), {asynchronous}"
    code = f"from pathlib import Path; from {__name__} import run_killed; run_killed({arguments})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300, check=False).returncode == -signal.SIGKILL
    assert json.loads(path.read_text())["round"] == 1
    digest, _ = run_loop(client, path, again, asynchronous=asynchronous)
    undisturbed, _ = run_loop(client, tmp_path / "other", expected)
    assert digest == undisturbed
    made = {rollout: heard for rollout, heard in again.heard.items() if rollout in expected.heard}
    assert MIDDLE in made
    assert made == {rollout: expected.heard[rollout] for rollout in made}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["api", f"engine-{BASE}"])
def test_a_server_killed_within_a_conversation_costs_neither_turns_nor_bits(client: Client, tmp_path: Path, victim: str) -> None:
    expected = Conversing()
    with running_server(tmp_path / "data") as server, Client(server.url, server.key, patience_s=PATIENCE_S) as mortal:
        agent = Conversing(lambda: os.kill(server.pid(victim), signal.SIGKILL))
        digest, reports = run_loop(mortal, tmp_path / "cursor", agent)
    undisturbed, _ = run_loop(client, tmp_path / "other", expected)
    assert digest == undisturbed
    assert agent.heard == expected.heard
    assert [report.metrics["failures/lost"] for report in reports] == [0] * STEPS


@pytest.mark.slow
def test_a_replica_killed_within_a_conversation_costs_neither_turns_nor_bits(client: Client, tmp_path: Path) -> None:
    expected = Conversing()
    with (
        running_server(tmp_path / "data", "--rollout-replicas", "1") as server,
        Client(server.url, server.key, patience_s=PATIENCE_S) as mortal,
    ):
        agent = Conversing(lambda: os.kill(server.pid(f"rollouts-{BASE}-0"), signal.SIGKILL))
        digest, reports = run_loop(mortal, tmp_path / "cursor", agent)
    undisturbed, _ = run_loop(client, tmp_path / "other", expected)
    assert digest == undisturbed
    assert agent.heard == expected.heard
    assert [report.metrics["failures/lost"] for report in reports] == [0] * STEPS

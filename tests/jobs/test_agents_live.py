"""An agent of many turns as a job of reinforcement, on a real server: its own server is elsewhere, and speaks Eval Protocol's remote rollouts."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai import OpenAI

from bloomery.cli.eject import script
from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, Job, JobSample, JobSpec, JobState
from bloomery.types.methods import Reinforcement
from tests.jobs.test_jobs_live import WORKER, kill, wait_until_seen
from tests.jobs.test_kills_live import measured
from tests.jobs.test_methods_live import BASE, lines
from tests.live import LiveServer, free_port, running_server, wait_until
from tests.test_docs import ROOT, blocks

STOCK = {"apple": 3, "bread": 12, "milk": 7, "salt": 1}
SPREAD = "def score(output):\n    return min(1.0, len(set(output)) / 24)\n"
"""How many different characters an answer has: rewards differ, whatever the model says."""


class Elsewhere:
    """A server with the agent, and the rollouts that it was `asked` for. Beyond `patience` of them, if that is a number, it takes a rollout and never
    says anything of it; those are `left`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[dict[str, Any]] = []
        self.patience: int | None = None
        self.left = 0
        self._lock = threading.Lock()

    def takes_part_in(self, body: dict[str, Any]) -> bool:
        with self._lock:
            self.asked.append(body)
            if self.patience is None:
                return True
            if self.patience == 0:
                self.left += 1
                return False
            self.patience -= 1
            return True

    def be(self, patience: int | None) -> None:
        with self._lock:
            self.patience, self.left = patience, 0


class Running(NamedTuple):
    """A server of ours that was started with the agent."""

    server: LiveServer
    client: Client
    elsewhere: Elsewhere
    port: int
    doubter: tuple[int, int]
    """The ports of another agent, whose server nobody started: its own, and where it is to say how rollouts ended."""


def take_turns(body: dict[str, Any], gateway: str) -> None:
    """Two turns with what a tool says between, then how it went; of the row `milk` the agent rates itself."""
    said = list(body["messages"])
    with OpenAI(base_url=body["model_base_url"], api_key=body["api_key"]) as model:
        call = model.chat.completions.create(model=body["completion_params"]["model"], messages=said).choices[0].message
        thing = said[-1]["content"].split()[-1]
        said += [call, {"role": "user", "content": f"There are {STOCK[thing]}. So?"}]
        answer = model.chat.completions.create(model=body["completion_params"]["model"], messages=said).choices[0].message
    reward = min(1.0, len(set(answer.content or "")) / 24)
    httpx.post(f"{body['model_base_url']}/reward", json={"reward": reward}).raise_for_status()
    ended = {"program": "test", "status": {"code": 100, "message": "done"}, "tags": [f"rollout_id:{body['metadata']['rollout_id']}"]}
    httpx.post(f"{gateway}/logs", json=ended)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, port = tmp_path_factory.mktemp("agents"), free_port()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if elsewhere.takes_part_in(body):
                threading.Thread(target=attempt, args=(body,), daemon=True).start()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def attempt(body: dict[str, Any]) -> None:
        try:
            take_turns(body, f"http://127.0.0.1:{port}")
        except Exception:
            # The job was struck meanwhile: nobody waits for this rollout any more.
            return

    with ExitStack() as stack:
        agent = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        stack.callback(agent.server_close)
        threading.Thread(target=agent.serve_forever, daemon=True).start()
        stack.callback(agent.shutdown)
        elsewhere = Elsewhere(f"http://127.0.0.1:{agent.server_address[1]}")
        file = folder / "agents.yaml"
        other, its = free_port(), free_port()
        file.write_text(
            f"counter: {{url: '{elsewhere.url}', port: {port}, timeout_s: 600}}\ndoubter: {{url: 'http://127.0.0.1:{other}', port: {its}}}\n"
        )
        server = stack.enter_context(running_server(folder / "data", "--agents", str(file), jobs=2))
        client = stack.enter_context(Client(server.url, server.key))
        client.datasets.create("counts")
        rows = [{"messages": [{"role": "user", "content": f"How much {thing}"}], "right": count} for thing, count in STOCK.items()]
        client.datasets.add_version("counts", {"train": lines(rows), "eval": lines(rows[:2])})
        client.graders.create("spread", {"type": "function", "source": SPREAD, "entry": "score"})
        client.graders.waive("spread", "what it counts is nothing to be good at")
        yield Running(server, client, elsewhere, port, (other, its))


def spec(name: str, grader: str | None, steps: int = 3) -> JobSpec:
    method = Reinforcement(agent="counter", grader=grader, steps=steps, groups_per_step=2, group_size=4, max_tokens=12)
    return JobSpec(name=name, base_model=BASE, data=Data(dataset="counts"), method=method, evaluation=Evaluation(every=2), rank=4, seed=1)


def done(client: Client, job: str) -> Job:
    ended = client.jobs.wait(job, 300)
    assert ended.state is JobState.SUCCEEDED, ended.reason
    assert ended.result is not None
    return ended


@pytest.mark.slow
def test_a_job_of_an_agent_is_struck_and_ejected_and_ends_with_the_same_weights(running: Running, tmp_path: Path) -> None:
    client = running.client
    reference = done(client, client.jobs.create(spec("undisturbed", "spread")).id)
    assert reference.result is not None
    assert [each.name for each in reference.result.compared] == ["reward"]
    assert reference.result.compared[0].rows == 2
    assert reference.result.samples
    assert {each.asked for each in reference.result.samples} == {f"How much {thing}" for thing in [*STOCK][:2]}
    assert all(each.before_reward is not None and each.after_reward is not None for each in reference.result.samples)
    points = [point.values for point in client.jobs.points("undisturbed")]
    assert len(points) == 3
    assert all((point["agents/answers"] or 0) == 2 and (point["failures/lost"] or 0) == 0 for point in points)
    body = running.elsewhere.asked[0]
    assert body["messages"][-1]["content"].startswith("How much ")
    # What graders read is told to nobody else.
    assert "right" not in json.dumps(body)
    card = client.jobs.card("undisturbed")
    assert card.spec is not None
    assert card.rewarded_by is not None
    assert card.rewarded_by.grader == "spread"

    disturbed = client.jobs.create(spec("disturbed", "spread")).id
    for step, name in ((1, WORKER), (2, "api")):
        wait_until_seen(running.server, lambda asking, step=step: asking.jobs.get(disturbed).progress.step >= step)  # type: ignore[misc]
        kill(running.server, name)
    struck = done(client, disturbed)
    assert struck.result is not None
    assert struck.epoch >= 2
    assert came_of(struck) == came_of(reference)

    around = {**os.environ, "BLOOMERY_URL": running.server.url, "BLOOMERY_API_KEY": running.server.key}
    around |= {"AGENT_URL": running.elsewhere.url, "AGENT_PORT": str(running.port)}
    code = script(reference.spec)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=around, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, code + ran.stderr
    assert ran.stdout.splitlines()[-1].split()[2:] == ["digest", reference.result.digest]


@pytest.mark.slow
def test_a_job_whose_agent_never_answers_is_paused_and_cancelled_at_once_and_goes_on_with_nothing_lost(running: Running) -> None:
    client, agent = running.client, running.elsewhere
    reference = done(client, client.jobs.create(spec("heard", "spread", steps=2)).id)
    # A step has 8 rollouts, so have the held-out rows behind the second one, and at the end each version: those that are waited for in vain are the
    # first, and one each of the second step, of those rows, and of the comparison.
    agent.be(0)
    unheard = client.jobs.create(spec("unheard", "spread", steps=2)).id
    for answered in (8 + 3, 8 + 2, 8 + 8 + 2, None):
        stopped(client, agent, unheard, "pause")
        agent.be(answered)
        client.jobs.resume(unheard)
    resumed = done(client, unheard)
    assert came_of(resumed) == came_of(reference)
    assert measured(client, "unheard") == measured(client, "heard")

    agent.be(0)
    stopped(client, agent, client.jobs.create(spec("given-up", "spread", steps=2)).id, "cancel")
    agent.be(None)


def stopped(client: Client, agent: Elsewhere, job: str, how: str) -> None:
    wait_until(lambda: agent.left > 0)
    getattr(client.jobs, how)(job)
    # Long before the agent is late, which has ten minutes for a rollout.
    wait_until(lambda: client.jobs.get(job).state in (JobState.PAUSED, JobState.CANCELLED))
    assert client.jobs.get(job).state is {"pause": JobState.PAUSED, "cancel": JobState.CANCELLED}[how]


def came_of(job: Job) -> tuple[str, int, list[Any], list[JobSample]]:
    assert job.result is not None
    assert job.result.samples
    return job.result.digest, job.result.step, job.result.compared, job.result.samples


@pytest.mark.slow
def test_two_jobs_of_an_agent_that_rates_itself_have_it_one_after_the_other(running: Running) -> None:
    client = running.client
    first, second = (client.jobs.create(spec(name, None, steps=2)).id for name in ("rates-itself", "waits"))
    for job in (first, second):
        ended = done(client, job)
        assert ended.result is not None
        assert [each.name for each in ended.result.compared] == ["reward"]
    assert any("waits for its agent" in event.message for job in (first, second) for event in client.jobs.events(job))
    assert client.jobs.card("waits").rewarded_by is None


@pytest.mark.slow
def test_the_server_of_the_page_is_all_that_a_job_of_an_agent_needs(running: Running) -> None:
    own, told = running.doubter
    (code,) = [content for _, content in blocks(ROOT / "docs" / "rl-agents.md") if "serve_forever" in content]
    code = code.replace("3000", str(own)).replace("8701", str(told))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as agent:
        try:
            wait_until(lambda: listens(own))
            method = Reinforcement(agent="doubter", grader="spread", steps=1, groups_per_step=2, group_size=4, max_tokens=12)
            running.client.jobs.create(JobSpec(name="doubts", base_model=BASE, data=Data(dataset="counts"), method=method, rank=4, seed=1))
            done(running.client, "doubts")
        finally:
            agent.terminate()
    (values,) = [point.values for point in running.client.jobs.points("doubts") if "agents/answers" in point.values]
    assert (values["agents/answers"], values["failures/lost"]) == (2.0, 0.0)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

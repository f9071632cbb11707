"""Agents elsewhere over HTTP to the real services: whose they are, and what a job of reinforcement is told of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.config import AgentConfig
from bloomery.types.errors import InvalidInput, NotFound
from bloomery.types.jobs import Begin, Data, Gate, JobSpec
from bloomery.types.methods import Reinforcement
from bloomery.types.resources import AgentShown
from tests.api.server import Server, serving

AGENTS = (
    AgentConfig(name="counter", url="http://127.0.0.1:3000", port=8701),
    AgentConfig(name="theirs", url="http://127.0.0.1:3001", port=8702, projects=("shop",)),
)
PROMPT = '{"messages": [{"role": "user", "content": "a"}], "right": "b"}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, agents=AGENTS) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    client = server.client()
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": PROMPT})
    return client


def spec(name: str, method: Reinforcement, **more: object) -> JobSpec:
    return JobSpec.model_validate({"name": name, "base_model": "tiny", "data": Data(dataset="rows"), "method": method, **more})


def test_a_project_sees_its_own_agents_and_nothing_of_where_they_report(client: Client, server: Server) -> None:
    assert client.agents() == [AgentShown(name="counter", url="http://127.0.0.1:3000", timeout_s=120.0)]
    assert "8701" not in server.http.get("/api/v1/agents").text


@pytest.mark.parametrize("agent", ["theirs", "nobody"])
def test_a_job_of_an_agent_that_its_project_does_not_have_is_refused(client: Client, agent: str) -> None:
    with pytest.raises(NotFound, match=f"no agent `{agent}` for project `default`") as refused:
        client.jobs.create(spec("a", Reinforcement(agent=agent, max_tokens=4)))
    assert refused.value.field == "method.agent"


def test_the_process_of_a_job_is_lent_its_agent_as_long_as_the_server_has_it(client: Client, server: Server) -> None:
    client.jobs.create(spec("a", Reinforcement(agent="counter", max_tokens=4)))
    lease = client.runner("r").claim(0)
    assert lease is not None
    assert lease.agent is not None
    assert lease.agent.model_dump() == {"name": "counter", "url": "http://127.0.0.1:3000", "host": "127.0.0.1", "port": 8701, "timeout_s": 120.0}
    client.graders.create("g", {"type": "function", "source": "def score(output): return 1.0", "entry": "score"})
    client.jobs.create(spec("b", Reinforcement(grader="g", max_tokens=4)))
    plain = client.runner("r").claim(0)
    assert plain is not None
    assert plain.agent is None


def test_an_agent_that_rates_itself_has_no_measure_that_a_gate_may_ask_for(client: Client) -> None:
    client.datasets.add_version("rows", {"train": PROMPT, "eval": PROMPT.replace('"a"', '"c"')})
    client.jobs.create(spec("a", Reinforcement(agent="counter", max_tokens=4)))
    begin = Begin(job="a", gate=Gate(measure="reward", bound=0.5))
    with pytest.raises(InvalidInput, match="its agent's own rewards are no measure of a gate"):
        client.jobs.create(spec("b", Reinforcement(agent="counter", max_tokens=4), begin=begin))

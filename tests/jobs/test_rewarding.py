"""What graders are shown of an agent's rollouts, who else looks at them, and a port that somebody has."""

import socket
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.client import Sampler
from bloomery.jobs import rewarding
from bloomery.jobs.reinforced import require_trust
from bloomery.jobs.reporting import StandsStill
from bloomery.jobs.rewarding import HELD_OUT, Said, beside, conversation, last_answer
from bloomery.jobs.work import Work
from bloomery.recipes.remote_rollouts import Finished
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Environment, Failure, Group, MakesGroups, Problem, RolloutConfig
from bloomery.types.datasets import PromptRow
from bloomery.types.errors import Unavailable
from bloomery.types.graders import OutputRow
from bloomery.types.jobs import Data, Job, JobProgress, JobSpec, JobState
from bloomery.types.leases import LentAgent
from bloomery.types.methods import Reinforcement
from tests.live import free_port

TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
ROW = PromptRow(
    messages=[{"role": "user", "content": "How much bread?"}], tools=[TOOL], item={"right": "12"}, label_source="import", source_span=None
)
ASKED = {"role": "user", "content": "How much bread?"}


def finished(*said: dict[str, Any]) -> Finished:
    return Finished("1.0", conversation(Problem("train-1", (5, 6), ROW)), [ASKED, *said] if said else [], {})


def test_a_row_is_told_to_the_agents_server_without_what_only_graders_read() -> None:
    told = conversation(Problem("train-1", (5, 6), ROW))
    assert (told.id, told.prompt) == ("train-1", ())
    assert (told.data["messages"], told.data["tools"]) == ([ASKED], [TOOL])
    assert "right" not in str({name: told.data[name] for name in ("messages", "tools")})


def test_a_grader_reads_the_last_answer_behind_all_that_was_said() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "count", "arguments": "{}"}}]}
    found, last = {"role": "tool", "tool_call_id": "1", "content": "12"}, {"role": "assistant", "content": "12 loaves"}
    assert last_answer(finished(call, found, last)) == OutputRow(item={"right": "12"}, output="12 loaves", messages=[ASKED, call, found])
    assert last_answer(finished(call)) == OutputRow(item={"right": "12"}, output="", tools=call["tool_calls"], messages=[ASKED])
    assert last_answer(finished()) == OutputRow(item={"right": "12"}, output="")


def said(number: int) -> Said:
    return Said(f"{number}.0", f"train-{number}", OutputRow(output=f"answer {number}"))


def test_a_share_of_what_was_said_is_scored_by_another_grader_always_the_same() -> None:
    notes: list[str] = []
    both = beside(lambda said: Reward(said.rollout_id, 0.5, {"own": 1.0}), lambda said: Reward(said.rollout_id, 0.25), 0.3, notes.append)
    first, second = ([both(said(number)) for number in range(400)] for _ in range(2))
    assert first == second
    looked_at = [reward for reward in first if HELD_OUT in reward.parts]
    assert 80 < len(looked_at) < 160
    assert all(reward.parts == {"own": 1.0, HELD_OUT: 0.25} and reward.value == 0.5 for reward in looked_at)
    assert not notes


def test_another_grader_that_fails_takes_no_reward_away() -> None:
    notes: list[str] = []

    def fails(_: Said) -> Reward:
        raise Unavailable("it is away")

    assert beside(lambda said: Reward(said.rollout_id, 0.5), fails, 1.0, notes.append)(said(1)) == Reward("1.0", 0.5)
    assert notes == ["it is away"]


class Reporter:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str, **_: Any) -> None:
        self.notes.append(message)

    def check(self) -> None:
        pass


def working(agent: LentAgent | None, reporter: Any) -> tuple[Work, Reinforcement]:
    method = Reinforcement(agent="counter", max_tokens=4)
    spec = JobSpec(name="a", base_model="tiny", data=Data(dataset="rows"), method=method)
    times = {"created_us": 0, "updated_us": 0, "started_us": 0, "finished_us": None}
    job = Job(id="job-1", spec=spec, state=JobState.RUNNING, reason=None, run=None, progress=JobProgress(), result=None, epoch=1, **times)
    other: Any = None
    return Work(client=other, job=job, cursor=None, tokenizer=other, reporter=reporter, guard=other, agent=agent), method


def counter(port: int, host: str = "127.0.0.1") -> LentAgent:
    return LentAgent(name="counter", url="http://127.0.0.1:9", host=host, port=port, timeout_s=1.0)


def test_a_job_waits_for_the_port_of_its_agent_and_stands_still_when_that_does_not_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewarding, "TAKEN_S", 0.0)
    monkeypatch.setattr(rewarding, "_LOOK_EVERY_S", 0.0)
    reporter = Reporter()
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        doing, method = working(counter(taken.getsockname()[1]), reporter)
        with pytest.raises(StandsStill, match="another job may have the agent: resume this one once it is free"), rewarding.rewarding(doing, method):
            pass


def test_a_job_whose_agent_the_server_has_no_more_stands_still() -> None:
    doing, method = working(None, Reporter())
    with pytest.raises(StandsStill, match="start the server with it"), rewarding.rewarding(doing, method):
        pass


def test_a_job_has_its_agent_between_two_of_its_loops_too() -> None:
    port = free_port()
    doing, method = working(counter(port), Reporter())
    with rewarding.rewarding(doing, method) as rewards:
        for _ in range(2):
            with rewards(None):
                pass
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
    with closing(socket.create_server(("127.0.0.1", port))):
        pass


def test_an_address_that_this_machine_does_not_have_is_not_waited_for() -> None:
    doing, method = working(counter(8701, "192.0.2.1"), Reporter())
    with pytest.raises(StandsStill, match="mend its `host` or `port`"), rewarding.rewarding(doing, method):
        pass


class Away(Environment, MakesGroups):
    """Of an agent whose server is down."""

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> MakesGroups:
        self._members = range(config.group_size)
        return self

    def group(self, number: int, problem: Problem) -> Group:
        return Group(number, problem, (), tuple(Failure(f"{number}.{each}", "raised", "it cannot be reached", final=True) for each in self._members))


def test_an_agent_of_which_nothing_comes_back_is_trained_by_no_step() -> None:
    doing, method = working(counter(8701), Reporter())
    client: Any = SimpleNamespace(sampler=lambda model: None)
    doing = replace(doing, client=client)
    given = [Problem(f"train-{number}", (number,), ROW) for number in (1, 2)]
    with pytest.raises(StandsStill, match=r"of 8 attempts at a rollout of `counter` none came to a reward: raised \(it cannot be reached\)"):
        require_trust(doing, method, given, lambda: nullcontext(Away()))

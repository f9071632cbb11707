"""What loops tell the server of what they trained on: token by token as it was, once, and without ever ending a loop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bloomery.client import Client
from bloomery.recipes import async_grpo, distill
from bloomery.recipes.advantages import sort_groups, weigh
from bloomery.recipes.agents import rollout_of
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.distill import DistillConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport, train
from bloomery.recipes.recording import Recorder, Recording, Taught, recorded_step
from bloomery.recipes.rewards import Reward, fault_of
from bloomery.recipes.rollouts import Failure, Graded, Group, Problem, Rollout, judge
from bloomery.recipes.segments import Turn
from bloomery.types.rollouts import MAX_LEVELS, MAX_MESSAGES_BYTES, RecordedSegment, RolloutGroup, messages_of
from tests.live import LiveServer
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL, Killed, Record, mortal_client

CONFIG = GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2)
PROMPT = Problem("p", (1, 2, 3))


def rollout(name: str, tokens: tuple[int, ...], versions: tuple[str, ...]) -> Rollout:
    return Rollout(name, PROMPT, tokens, tuple(-0.5 * token for token in tokens), versions, stopped=True)


def graded(name: str, reward: float, **changes: Any) -> Graded:
    return Graded(rollout(name, (4, 5, 6), ("a", "a", "b")), reward, {"json": reward}, **changes)


def taught(groups: list[Group], **changes: Any) -> Taught:
    kept = sort_groups(groups, 2)
    return Taught(1, groups, kept, weigh(kept.trained, by_deviation=True), **changes)


def test_a_step_is_recorded_as_it_was_trained_and_what_was_dropped_says_why() -> None:
    varied = Group(0, PROMPT, (graded("0.0", 1.0, reason="right \ud83d"), graded("0.1", 0.0)), ())
    alike = Group(1, PROMPT, (graded("1.0", 1.0), graded("1.1", 1.0)), ())
    lost = Group(2, PROMPT, (), (Failure("2.0", "raised", "x" * 5000, True),))
    first, second, third = recorded_step(taught([varied, alike, lost], stale=frozenset("b"))).groups
    right, wrong = first.rollouts
    assert (first.dropped, second.dropped, third.dropped) == (None, "zero_variance", "too_small")
    assert first.prompt.numpy().tolist() == [1, 2, 3]
    assert (right.reward, right.parts, right.reason, wrong.reason) == (1.0, {"json": 1.0}, "right ?", None)
    (segment,) = right.segments
    assert (segment.tokens.numpy().tolist(), segment.sampled, segment.after_prompt, segment.answers) == ([4, 5, 6], ((0, 3),), True, ())
    assert segment.logprobs.numpy().tolist() == [-2.0, -2.5, -3.0]
    assert segment.versions == ((0, 2, "a"), (2, 3, "b"))
    assert segment.trained == ((0, 2),)
    assert advantages(segment) == [1.0] * 3
    assert advantages(wrong.segments[0]) == [-1.0] * 3
    assert (second.rollouts[0].segments[0].advantages, second.rollouts[0].segments[0].trained) == (None, ())
    assert (len(third.failures[0].message), third.failures[0].kind) == (4096, "raised")


def test_of_an_agent_what_lies_between_its_answers_is_told_and_not_trained() -> None:
    turns = [
        Turn("one", (1, 2), (3, 4), (-0.1, -0.2), "v", stopped=True),
        Turn("two", (1, 2, 3, 4, 9, 9), (5,), (-0.3,), "v", stopped=True, continues="one"),
    ]
    members = tuple(Graded(rollout_of(f"0.{n}", Problem("p", ()), turns), float(n), {}, (("two", float(n)),)) for n in range(2))
    ((first, second),) = [group.rollouts for group in recorded_step(taught([Group(0, Problem("p", ()), members, ())])).groups]
    (segment,) = second.segments
    assert segment.tokens.numpy().tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert segment.sampled == segment.trained == ((2, 4), (6, 7))
    assert segment.answers == ((2, 4, "one"), (6, 7, "two"))
    assert (segment.after_prompt, second.turns, first.turns) == (False, {"two": 1.0}, {"two": 0.0})
    assert advantages(segment) == [2.0, 2.0, 2.0]


def test_the_conversation_of_a_prompt_goes_with_it() -> None:
    step = recorded_step(
        taught([Group(0, PROMPT, (graded("0.0", 1.0), graded("0.1", 0.0)), ())]), lambda problem: [{"role": "user", "content": problem.id}]
    )
    assert messages_of(step.groups[0].messages) == [{"role": "user", "content": "p"}]


def test_a_conversation_that_a_group_may_not_have_is_left_out_and_the_step_is_not() -> None:
    groups = [Group(0, PROMPT, (graded("0.0", 1.0), graded("0.1", 0.0)), ())]
    deep: Any = "x"
    for _ in range(MAX_LEVELS):
        deep = [deep]
    for said in ({"content": "x" * MAX_MESSAGES_BYTES}, {"content": deep}, {"content": b"x"}, {"content": float("nan")}, {"content": object()}):
        (group,) = recorded_step(taught(groups), lambda _, said=said: [said]).groups  # type: ignore[misc]
        assert (len(group.rollouts), messages_of(group.messages)) == (2, None)


def test_the_reason_of_a_grader_goes_with_its_reward_and_is_text() -> None:
    one = rollout("0.0", (4,), ("a",))
    told = judge(one, Reward("0.0", 1.0, reason="because"))
    assert isinstance(told, Graded)
    assert told.reason == "because"
    fault = fault_of(Reward("0.0", 1.0, reason=7))  # type: ignore[arg-type]
    assert fault is not None
    assert (fault.kind, fault.field) == ("wrong_type", "reason")


def advantages(segment: RecordedSegment) -> list[float]:
    assert segment.advantages is not None
    found: list[float] = segment.advantages.numpy().tolist()
    return found


# Against a real server


def read(client: Client, run: str, step: int) -> list[RolloutGroup]:
    return list(client.run(run).rollouts.groups(step))


def reasoned(record: Record) -> Callable[[Rollout], Reward]:
    return lambda rollout: Reward(rollout.id, record.grade(rollout), {"tokens": float(len(rollout.tokens))}, reason=f"sum of {rollout.id}")


def test_what_a_loop_trained_on_is_read_back_and_agrees_with_what_it_told(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    lost: list[str] = []
    record = Record()
    recorder = Recorder(note=lost.append)
    policy = train(client, PROBLEMS, reasoned(record), CONFIG, tmp_path / "cursor", steps=2, on_step=reports.append, recorder=recorder)
    assert lost == []
    kept = policy.run.rollouts.steps(order="oldest")
    assert [step.step for step in kept] == [1, 2]
    served = [policy.cursor.first, reports[0].version]
    for step, report, version in zip(kept, reports, served, strict=True):
        assert step.reward_mean == pytest.approx(report.metrics["reward/raw"])
        assert (step.groups, step.rollouts, step.tokens) == (2, 6, report.metrics["tokens/sampled"])
        for group in read(client, policy.run.id, step.step):
            assert (group.trained, group.prompt_tokens) == (True, list(problem_named(group.problem).prompt))
            for each in group.rollouts:
                (segment,) = each.segments
                (seen,) = record.seen[each.id]
                assert (group.problem, tuple(segment.tokens), tuple(segment.logprobs)) == seen
                assert (each.reward, each.reason) == (float(sum(segment.tokens)), f"sum of {each.id}")
                assert segment.versions == [(0, len(segment.tokens), version)]
                assert all(segment.trained)
                assert "".join(segment.texts or []) == segment.text
            rewards = np.asarray([each.reward for each in group.rollouts])
            expected = (rewards - rewards.mean()) / rewards.std()
            assert [each.advantage for each in group.rollouts] == pytest.approx(expected.tolist(), abs=1e-5)


def problem_named(name: str) -> Problem:
    return next(problem for problem in PROBLEMS if problem.id == name)


def test_the_asynchronous_loop_and_distillation_record_too(client: Client, tmp_path: Path) -> None:
    lost: list[str] = []
    recorder = Recorder(note=lost.append)
    config = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2, max_head_offpolicy_versions=1)
    reports: list[StepReport] = []
    policy = async_grpo.train(client, PROBLEMS, Record().grade, config, tmp_path / "a", steps=3, on_step=reports.append, recorder=recorder)
    steps = policy.run.rollouts.steps(order="oldest")
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.reward_mean for step in steps] == pytest.approx([report.metrics["reward/raw"] for report in reports])
    taught_by = DistillConfig(policy=POLICY, teacher=BASE, rollouts=replace(SMALL, group_size=2), prompts_per_step=2)
    student = distill.train(client, PROBLEMS, taught_by, tmp_path / "d", steps=1, recorder=recorder)
    (step,) = student.run.rollouts.steps()
    assert (step.reward_mean, step.rollouts) == (None, 4)
    for group in read(client, student.run.id, 1):
        # The teacher is who the student still is.
        assert [each.advantage for each in group.rollouts] == pytest.approx([0.0, 0.0], abs=1e-6)
        assert all(all(segment.trained) for each in group.rollouts for segment in each.segments)
    assert lost == []


def test_a_step_whose_process_died_before_it_was_told_is_named_and_one_that_is_made_again_is_told(live_server: LiveServer, tmp_path: Path) -> None:
    gradients_of_the_second = 5
    for heard, expected in ((True, [1, 3]), (False, [1, 2, 3])):
        lost: list[str] = []
        path, recorder = tmp_path / f"cursor-{heard}", Recorder(note=lost.append)
        with mortal_client(live_server, gradients_of_the_second, heard=heard) as dying, pytest.raises(Killed):
            train(dying, PROBLEMS, Record().grade, CONFIG, path, steps=3, recorder=recorder)
        assert lost == []
        with Client(live_server.url, live_server.key) as client:
            policy = train(client, PROBLEMS, Record().grade, CONFIG, path, steps=3, recorder=recorder)
            assert [step.step for step in policy.run.rollouts.steps(order="oldest")] == expected
        assert lost == (["the rollouts of step 2 were lost with the process that trained on them"] if heard else [])


class Refusing(httpx.BaseTransport):
    """Answers what is recorded itself, with what `answer` gives, and with `reads` what is asked of it too."""

    def __init__(self, answer: Callable[[], httpx.Response], *, reads: bool = False) -> None:
        self._answer, self._reads, self._wire, self.asked = answer, reads, httpx.HTTPTransport(), 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if "/rollouts" in request.url.path and (self._reads or request.method == "POST"):
            self.asked += 1
            return self._answer()
        return self._wire.handle_request(request)

    def close(self) -> None:
        self._wire.close()


@contextmanager
def refused(server: LiveServer, answer: Callable[[], httpx.Response], *, reads: bool = False) -> Iterator[tuple[Client, Refusing]]:
    transport = Refusing(answer, reads=reads)
    with Client(server.url, server.key, transport=transport) as client:
        yield client, transport


def test_a_server_that_keeps_none_is_asked_once_and_trains(live_server: LiveServer, tmp_path: Path) -> None:
    lost: list[str] = []
    error = {"error": {"message": "no rollouts are kept", "code": "not_supported", "field": None}}
    with refused(live_server, lambda: httpx.Response(400, json=error)) as (client, transport):
        policy = train(client, PROBLEMS, Record().grade, CONFIG, tmp_path / "cursor", steps=3, recorder=Recorder(note=lost.append))
        assert policy.run.state().step == 3
        assert transport.asked == 1
    assert lost == [
        "the rollouts of step 1 are not recorded, and none from here on; training goes on: no rollouts are kept",
        "the rollouts of 3 steps were not recorded in all, from step 1 to step 3",
    ]


def test_a_step_that_is_refused_for_what_it_is_ends_no_recording(live_server: LiveServer) -> None:
    for status, code in ((400, "invalid"), (413, "too_large"), (409, "conflict"), (429, "rate_limit_exceeded"), (410, "gone")):
        lost: list[str] = []
        error = {"error": {"message": "not this one", "code": code, "field": None}}
        with refused(live_server, lambda: httpx.Response(status, json=error)) as (client, transport):  # noqa: B023
            told(client, Recorder(note=lost.append), 3)
            assert transport.asked >= 3, code
        assert lost == [
            "the rollouts of step 1 are not recorded, and training goes on: not this one",
            "the rollouts of 3 steps were not recorded in all, from step 1 to step 3",
        ]


def test_what_is_no_answer_and_who_cannot_be_told_end_nothing(live_server: LiveServer) -> None:
    asked: list[str] = []

    def note(said: str) -> None:
        asked.append(said)
        raise KeyError("nobody listens")

    with refused(live_server, lambda: httpx.Response(201, json={"step": "none"}), reads=True) as (client, transport):
        told(client, Recorder(note=note), 3, done=5)
        assert transport.asked == 4
    assert [said.partition(" are ")[0] for said in asked] == [
        "the rollouts of step 6",
        "the rollouts of 3 steps were not recorded in all, from step 6 to step 8",
    ]


def test_a_thread_that_died_is_not_waited_for_and_what_it_left_is_named(live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def dies(_: Problem) -> None:
        raise Killed

    with Client(live_server.url, live_server.key) as client:
        run = client.create_run(BASE, 4)
        with Recording(Recorder(note=lost.append, messages=dies), run, 0, last_s=30) as recording:
            for step in (1, 2):
                recording.of(taught(ONE)._replace(step=step))()
            recording._thread.join(30)
            for step in range(3, 12):
                recording.of(taught(ONE)._replace(step=step))()
    assert died
    assert lost[-1] == "the rollouts of 11 steps were not recorded in all, from step 1 to step 11"


ONE = [Group(0, PROMPT, (graded("0.0", 1.0), graded("0.1", 0.0)), ())]


def told(client: Client, recorder: Recorder, steps: int, done: int = 0) -> None:
    with Recording(recorder, client.create_run(BASE, 4), done) as recording:
        for step in range(done + 1, done + 1 + steps):
            recording.of(taught(ONE)._replace(step=step))()


def test_a_server_that_fails_at_it_loses_every_step_and_says_so_twice(live_server: LiveServer, tmp_path: Path) -> None:
    lost: list[str] = []
    with refused(live_server, lambda: httpx.Response(500, text="broken")) as (client, transport):
        train(client, PROBLEMS, Record().grade, CONFIG, tmp_path / "cursor", steps=3, recorder=Recorder(note=lost.append))
        assert transport.asked == 3
    assert lost[0].startswith("the rollouts of step 1 are not recorded, and training goes on: ")
    assert lost[1:] == ["the rollouts of 3 steps were not recorded in all, from step 1 to step 3"]


def test_a_server_that_never_answers_holds_up_neither_a_step_nor_the_end(live_server: LiveServer) -> None:
    answering, lost = threading.Event(), list[str]()

    def never() -> httpx.Response:
        answering.wait(30)
        return httpx.Response(500, text="late")

    with refused(live_server, never) as (client, _):
        run = client.create_run(BASE, 4)
        groups = [Group(0, PROMPT, (graded("0.0", 1.0), graded("0.1", 0.0)), ())]
        with Recording(Recorder(note=lost.append), run, 0, last_s=0.05) as recording:
            for step in range(1, 12):
                recording.of(taught(groups)._replace(step=step))()
        answering.set()
    assert lost[0].startswith("the rollouts of step ")
    assert "still wait to be taken" in lost[0]
    assert lost[-1] == "the rollouts of 11 steps were not recorded in all, from step 1 to step 11"

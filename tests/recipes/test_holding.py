"""Loops hold rollouts to the version that drew them, also where the trainer is ahead: faults are injected between the server and the loop, for single
continuations and for agents, and the same loops without them go on."""

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.client import Client, Sampler
from bloomery.client.sampling import PendingSample, Sampled
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.agents import Agents
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.holding import Bar, Holding, Scores
from bloomery.recipes.rollouts import Environment, Failure, Graded, Group, Problem, Rollout, RolloutConfig
from bloomery.render import ChatTokenizer
from bloomery.types.errors import Corrupt, Unavailable
from tests.live import LiveServer
from tests.recipes.loops import BASE, POLICY, PROBLEMS, Record
from tests.recipes.test_agents import with_a_tool
from tests.recipes.test_kill_list_numbers import FAULTS, Fault, asked_with, under_the_name_of

Patch = pytest.MonkeyPatch
ROLLOUTS = RolloutConfig(group_size=4, max_tokens=16, seed=5)
SUMS = [Problem(f"{number}+4", (), data=(number, 4)) for number in range(4)]
REFUSED = r"the rollouts of group [0-9]+ are held and nothing of it is learnt.* gives other log-probabilities than were served"


Loop = Callable[..., list[StepReport]]


def ahead(client: Client, path: Path, grade: Any, problems: list[Problem], steps: int = 1, **other: Any) -> list[StepReport]:
    """The asynchronous loop, whose trainer may be a version ahead."""
    reports: list[StepReport] = []
    config = AsyncGrpoConfig(policy=POLICY, rollouts=ROLLOUTS, groups_per_step=2, concurrency=2)
    async_grpo.train(client, problems, grade, replace(config, **other), path, steps=steps, on_step=reports.append)
    return reports


def in_step(client: Client, path: Path, grade: Any, problems: list[Problem], steps: int = 1, **other: Any) -> list[StepReport]:
    """The synchronous one."""
    reports: list[StepReport] = []
    config = GrpoConfig(policy=POLICY, rollouts=ROLLOUTS, groups_per_step=2)
    grpo.train(client, problems, grade, replace(config, **other), path, steps=steps, on_step=reports.append)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_what_others_met_ends_either_loop_before_anything_is_learnt(
    client: Client, tmp_path: Path, monkeypatch: Patch, loop: Loop, fault: Fault
) -> None:
    path = tmp_path / "cursor"
    with monkeypatch.context() as patch:
        fault.inject(patch)
        with pytest.raises(Corrupt, match=REFUSED):
            loop(client, path, Record().grade, PROBLEMS)
    (report,) = loop(client, path, Record().grade, PROBLEMS)
    assert report.step == 1
    assert abs(report.metrics["agreement/drawn_deviation"]) < 6


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
@pytest.mark.parametrize("fault", [FAULTS[0], FAULTS[2]], ids=lambda fault: fault.name.replace(" ", "-"))
def test_agents_are_held_alike(client: Client, tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: Patch, loop: Loop, fault: Fault) -> None:
    path = tmp_path / "cursor"
    with Agents(with_a_tool, tokenizer) as agents:
        with monkeypatch.context() as patch:
            fault.inject(patch)
            with pytest.raises(Corrupt, match=REFUSED):
                loop(client, path, agents, SUMS)
        (report,) = loop(client, path, agents, SUMS)
    assert report.metrics["agents/answers"] == 2
    assert report.metrics["agreement/scored_tokens"] > 0


@pytest.mark.slow
def test_where_the_trainer_is_ahead_every_token_is_scored_by_the_version_that_drew_it(client: Client, tmp_path: Path) -> None:
    late, asked, lock = threading.Event(), [0], threading.Lock()
    record = Record()

    def grade(rollout: Rollout) -> float:
        with lock:
            asked[0] += 1
        if rollout.id.startswith("1."):
            # Made by the first version, and trained where another is the newest.
            assert late.wait(30)
        return record.grade(rollout)

    def note(report: StepReport) -> None:
        reports.append(report)
        late.set()

    reports: list[StepReport] = []
    config = AsyncGrpoConfig(policy=POLICY, rollouts=ROLLOUTS, groups_per_step=1, max_head_offpolicy_versions=3, concurrency=2)
    async_grpo.train(client, PROBLEMS, grade, config, tmp_path / "cursor", steps=4, on_step=note)
    assert max(report.metrics["lag/max"] for report in reports) >= 1
    assert max(report.metrics["ratio/largest_difference"] for report in reports) > 0
    sampled = sum(report.metrics["tokens/sampled"] for report in reports)
    # Those that were in the making at the end were scored too.
    assert sum(report.metrics["agreement/scored_tokens"] for report in reports) >= sampled


@pytest.mark.slow
def test_tokens_of_an_older_version_under_the_name_of_the_newest_end_the_loop_that_is_ahead(
    client: Client, tmp_path: Path, monkeypatch: Patch
) -> None:
    path = tmp_path / "cursor"
    ahead(client, path, Record().grade, PROBLEMS, steps=2)
    sampler = client.sampler
    with monkeypatch.context() as patch:
        patch.setattr(client, "sampler", lambda version: sampler(BASE))
        newest = {"version": ""}
        opened = async_grpo.Policy.open

        def told(*given: Any) -> Any:
            policy = opened(*given)
            newest["version"] = policy.cursor.version
            under_the_name_of(patch, newest["version"])
            return policy

        patch.setattr(async_grpo.Policy, "open", told)
        # Scoring asks the same wrong weights, which agree with themselves: the trainer's forward is what sees it.
        with pytest.raises(Corrupt, match=r"the update of step 2 is held and nothing of it is learnt.*gives other log-probabilities"):
            ahead(client, path, Record().grade, PROBLEMS, steps=3)


def never_delivered(patch: Patch, client: Client, *, but: str = "") -> None:
    """Whoever samples goes on with the first version of a run, and says so, as if it were staleness; `but`: one that comes as it should."""
    sampler = client.sampler
    held: dict[str, Sampler] = {}
    patch.setattr(client, "sampler", lambda version: sampler(version) if version == but else held.setdefault("first", sampler(version)))


class Remembering(Environment):
    """One that goes on with the sampler that it was given first."""

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> Any:
        first = newest()
        return grpo.groups_by(lambda: first, Record().grade, config)


@pytest.mark.slow
@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize(("loop", "learnt"), [(in_step, 1), (ahead, 2)])
def test_weights_that_never_reach_whoever_samples_end_either_loop_before_it_learns_of_what_is_too_old(
    client: Client, tmp_path: Path, monkeypatch: Patch, loop: Loop, learnt: int, remembers: bool
) -> None:
    path, short = tmp_path / "cursor", {"max_idle_groups": 4} if loop is ahead else {}
    with monkeypatch.context() as patch:
        if not remembers:
            never_delivered(patch, client)
        with pytest.raises(
            Unavailable, match=r"3 rounds in a row .* `foreign_version` \(tokens of weights that were out of date when the group began"
        ):
            loop(client, path, Remembering() if remembers else Record().grade, PROBLEMS, steps=20, **short)
    cursor = json.loads(path.read_text())
    assert client.run(cursor["run_id"]).state().step == cursor["step"] == learnt
    reports = loop(client, path, Record().grade, PROBLEMS, steps=cursor["round"] + 3, **short)
    assert client.run(cursor["run_id"]).state().step == learnt + 3
    assert reports[-1].metrics["failures/lost"] == 0


@pytest.mark.slow
def test_held_out_problems_that_other_weights_have_answered_are_no_measurement_of_the_newest(client: Client, tmp_path: Path) -> None:
    def measured(name: str, grade: Any) -> dict[str, float]:
        config = GrpoConfig(policy=POLICY, rollouts=ROLLOUTS, groups_per_step=2, evaluate_every=1, evaluation=ROLLOUTS)
        reports: list[StepReport] = []
        grpo.train(client, PROBLEMS[:3], grade, config, tmp_path / name, steps=1, held_out=PROBLEMS[3:], on_step=reports.append)
        return reports[0].metrics

    sound, outdated = measured("sound", Record().grade), measured("outdated", Remembering())
    assert (sound["evaluation/lost"], outdated["evaluation/lost"]) == (0, 2 * ROLLOUTS.group_size)
    assert "evaluation/reward" in sound
    assert "evaluation/reward" not in outdated


def raw_beside(patch: Patch, client: Client) -> None:
    """From now on tokens come with the model's own log-probabilities, whatever they were drawn from: as of servers that tell those."""
    result = PendingSample.result

    def raw(self: PendingSample, timeout_s: float = 600.0) -> Sampled:
        sampled = result(self, timeout_s)
        (chunk,) = self._asked["prompt"]["chunks"]
        sampler, prompt = client.sampler(sampled.version), tuple(chunk["tokens"])
        scored = [sampler.score(prompt + each.tokens).prompt_logprobs()[len(prompt) :] for each in sampled.sequences]
        told = [each._replace(logprobs=logprobs) for each, logprobs in zip(sampled.sequences, scored, strict=True)]
        return sampled._replace(sequences=tuple(told))

    patch.setattr(PendingSample, "result", raw)


@pytest.mark.slow
def test_tokens_that_were_drawn_otherwise_beside_the_models_own_numbers_end_the_loop_by_counting(
    live_server: LiveServer, client: Client, tmp_path: Path, monkeypatch: Patch
) -> None:
    rollouts = RolloutConfig(group_size=16, max_tokens=64, seed=5)
    with Client(live_server.url, live_server.key) as other, monkeypatch.context() as patch:
        asked_with(temperature=0.7)(patch)
        raw_beside(patch, other)
        with pytest.raises(
            Corrupt, match=r"the rollouts up to group [0-9]+ are held .* were not drawn from its distribution: the likeliest one came"
        ):
            ahead(client, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=rollouts)
    (report,) = ahead(client, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=rollouts)
    assert 0 < abs(report.metrics["agreement/drawn_deviation"]) < 6


class Away(httpx.BaseTransport):
    """Of a server whose status says that its engine was not reached yet, until it is `back`."""

    def __init__(self) -> None:
        self._wire, self.back = httpx.HTTPTransport(), False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._wire.handle_request(request)
        if request.url.path != "/api/v1/status" or self.back:
            return response
        response.read()
        told = response.json()
        for engine in told["engines"]:
            engine["detail"] = {"problem": "it was not reached yet"}
        return httpx.Response(200, json=told)

    def close(self) -> None:
        self._wire.close()


@pytest.mark.slow
def test_an_engine_that_was_away_at_the_first_group_is_held_to_its_promise_once_it_is_back(live_server: LiveServer) -> None:
    away = Away()
    with Client(live_server.url, live_server.key, transport=away) as client:
        sampler = client.sampler(BASE)
        sound = grpo.groups_by(lambda: sampler, Record().grade, ROLLOUTS).group(0, PROBLEMS[0])
        (version,) = {version for member in sound.members for version in member.rollout.versions}
        held = Holding(Bar(client, BASE, "promised"), {version: sampler}.get, every=True, attempts=1, timeout_s=30)
        lower = [member.rollout._replace(logprobs=tuple(each - 0.5 for each in member.rollout.logprobs)) for member in sound.members]
        wrong = sound._replace(members=tuple(member._replace(rollout=one) for member, one in zip(sound.members, lower, strict=True)))
        assert held.held(wrong) == wrong
        assert held.take_scores() == Scores(0, 0.0, 0.0)
        away.back = True
        with pytest.raises(Corrupt, match=REFUSED):
            held.held(wrong)
        assert held.held(sound) == sound
        tokens = sum(len(member.rollout.tokens) for member in sound.members)
        assert held.take_scores()[::2] == (tokens, 1.0)
        # What was promised once is looked for from then on, and holds while nobody says otherwise.
        away.back = False
        assert held.held(sound) == sound
        assert held.take_scores()[::2] == (tokens, 1.0)
        assert held.take_scores().held_share is None
        with pytest.raises(Corrupt, match=REFUSED):
            held.held(wrong)


def holding(client: Client, sampler: Sampler) -> Holding:
    return Holding(Bar(client, BASE, "promised"), {BASE: sampler}.get, every=True, attempts=1, timeout_s=30)


def chosen(sampler: Sampler, wanted: bool) -> Group:
    """Those of many rollouts whose first token is, or is not, the likeliest there: as of a grader that fails at the others."""
    sampled = sampler.sample(PROBLEMS[0].prompt, max_tokens=1, seed=1, num_samples=128).result()
    (likeliest,) = {sampler.score((*PROBLEMS[0].prompt, 0), likeliest=True).scored().likeliest[-1].token}
    rollouts = [Rollout(f"0.{place}", PROBLEMS[0], each.tokens, each.logprobs, (BASE,), each.stopped) for place, each in enumerate(sampled.sequences)]
    return Group(0, PROBLEMS[0], tuple(Graded(each, 1.0, {}) for each in rollouts if (each.tokens[0] == likeliest) is wanted), ())


@pytest.mark.slow
def test_whom_a_grader_chose_by_failing_at_others_shows_nothing_of_how_tokens_are_drawn(client: Client) -> None:
    sampler = client.sampler(BASE)
    group = chosen(sampler, True)
    assert len(group.members) > 8
    failed = group._replace(failures=(Failure("0.1", "raised", "cannot read this", final=True),))
    held = holding(client, sampler)
    assert held.held(failed) == failed
    assert held.take_scores().deviation == 0
    with pytest.raises(Corrupt, match="were not drawn from its distribution"):
        deque(map(held.held, [group] * 20))


class Foreign(Environment):
    """An environment of somebody else's, which knows nothing of any of this."""

    def __init__(self, change: Callable[[Group], Group]) -> None:
        self._change = change

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> Any:
        made = grpo.groups_by(newest, Record().grade, config)
        group = made.group
        made.group = lambda number, problem: self._change(group(number, problem))  # type: ignore[method-assign]
        return made


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
def test_whatever_makes_the_groups_they_are_held(client: Client, tmp_path: Path, loop: Loop) -> None:
    def swapped(group: Group) -> Group:
        # One token is another one's.
        members = [
            member._replace(rollout=member.rollout._replace(tokens=(*member.rollout.tokens[:-1], member.rollout.tokens[-1] ^ 1)))
            for member in group.members
        ]
        return group._replace(members=tuple(members))

    loop(client, tmp_path / "sound", Foreign(lambda group: group), PROBLEMS)
    with pytest.raises(Corrupt, match=REFUSED):
        loop(client, tmp_path / "swapped", Foreign(swapped), PROBLEMS)

"""Loops at another temperature than 1: what is drawn, scored, held, anchored and trained is one distribution; what is of another is refused."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from bloomery.client import Client, Sampler
from bloomery.recipes import async_grpo, distill, grpo
from bloomery.recipes.advantages import mean_over_tokens, sort_groups, weigh
from bloomery.recipes.agents import Agents, Episode
from bloomery.recipes.agreement import check_served, k3
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.cursors import _deciding, fingerprint
from bloomery.recipes.distill import DISTANCE, DistillConfig
from bloomery.recipes.environments import groups_by
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.policy import Policy, at_temperature
from bloomery.recipes.rollouts import Environment, Group, MakesGroups, Problem, RolloutConfig, Rollouts
from bloomery.recipes.segments import Turn, assemble
from bloomery.render import ChatTokenizer
from bloomery.types.errors import Corrupt, InvalidInput
from tests.recipes.loops import BASE, POLICY, PROBLEMS, Record
from tests.recipes.test_holding import REFUSED, Loop, Patch, ahead, in_step
from tests.recipes.test_kill_list_numbers import asked_with

T = 0.7
COLD = RolloutConfig(group_size=4, max_tokens=16, seed=5, temperature=T)
HOT = replace(COLD, temperature=1.4)


def test_a_policy_at_a_temperature_has_it_in_its_loss_and_at_one_it_is_as_it_was() -> None:
    assert at_temperature(POLICY, 1.0) == POLICY
    assert at_temperature(replace(POLICY, loss_config=(("temperature", 1.0),)), 1.0) == POLICY
    clipped = replace(POLICY, loss="ppo", loss_config=(("clip_high_threshold", 1.3),))
    assert dict(at_temperature(clipped, T).loss_config) == {"clip_high_threshold": 1.3, "temperature": T}
    assert at_temperature(at_temperature(clipped, T), T) == at_temperature(clipped, T)
    with pytest.raises(InvalidInput, match=r"`loss_config` has the temperature 0\.5: rollouts are drawn at `temperature` 0\.7") as refused:
        at_temperature(replace(POLICY, loss_config=(("temperature", 0.5),)), T)
    assert refused.value.field == "loss_config"


def test_another_temperature_is_another_loop_and_a_cursor_of_before_there_was_one_is_of_the_loop_at_one() -> None:
    plain = GrpoConfig(policy=POLICY, rollouts=replace(COLD, temperature=1.0))
    described = [_deciding(asdict(plain)), [(problem.id, problem.prompt) for problem in PROBLEMS]]
    assert "temperature" not in json.dumps(described)
    before = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    found = [fingerprint(PROBLEMS, replace(plain, rollouts=rollouts)) for rollouts in (plain.rollouts, COLD, HOT)]
    assert found[0] == before
    assert len(set(found)) == 3
    # What only looks decides nothing.
    assert fingerprint(PROBLEMS, replace(plain, evaluation=replace(COLD, temperature=0.0))) == before


def distilled(client: Client, path: Path, _: object, problems: list[Problem], **other: Any) -> None:
    distill.train(client, problems, DistillConfig(policy=POLICY, teacher=BASE, **other), path, steps=1)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.001, 1000.0, math.nan, math.inf, True])
@pytest.mark.parametrize("loop", [in_step, ahead, distilled])
def test_a_temperature_that_no_loss_computes_is_refused_at_once(client: Client, tmp_path: Path, loop: Loop, temperature: float) -> None:
    rollouts = replace(COLD, temperature=temperature)
    with pytest.raises(InvalidInput, match=r"`temperature` is .*: it must be from 0\.01 to 100") as refused:
        loop(client, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=rollouts)
    assert refused.value.field == "temperature"
    assert not (tmp_path / "cursor").exists()


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_an_evaluation_at_no_temperature_is_refused(client: Client, tmp_path: Path, temperature: float) -> None:
    with pytest.raises(InvalidInput, match="it must be from 0 to 100"):
        in_step(client, tmp_path / "cursor", Record().grade, PROBLEMS, evaluation=replace(COLD, temperature=temperature))


def test_options_of_a_truncated_loss_are_still_refused_beside_a_temperature(client: Client, tmp_path: Path) -> None:
    policy = replace(POLICY, loss_config=(("temperature", T), ("clip_high_threshold", 2.0)))
    with pytest.raises(InvalidInput, match="`loss_config` has `clip_high_threshold`: `importance_sampling` has no such options"):
        ahead(client, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=COLD, policy=policy)


def scores(sampler: Sampler, tokens: tuple[int, ...], temperature: float) -> np.ndarray:
    return np.array(sampler.score(tokens, temperature=temperature).prompt_logprobs())


@pytest.mark.parametrize("rollouts", [COLD, HOT])
def test_rollouts_are_drawn_and_scored_at_their_temperature_to_the_bit(client: Client, rollouts: RolloutConfig) -> None:
    sampler = client.sampler(BASE)
    made = Rollouts(lambda: sampler, Record().grade, rollouts).group(0, PROBLEMS[0])
    for member in made.members:
        (segment,) = member.rollout.segments
        assert member.rollout.temperature == segment.temperature == rollouts.temperature
        again, own = (scores(sampler, segment.tokens, temperature) for temperature in (rollouts.temperature, 1.0))
        assert [again[place] for place in segment.places] == list(segment.logprobs)
        assert [own[place] for place in segment.places] != list(segment.logprobs)
    segments = [member.rollout.segments[0] for member in made.members]
    assert all(found.largest == 0 for found in check_served(segments, client.sampler, "exact").values())
    with pytest.raises(Corrupt, match="gives other log-probabilities than were served"):
        check_served([segment._replace(temperature=1.0) for segment in segments], client.sampler, "plain")


def test_the_likeliest_are_taken_at_zero(client: Client) -> None:
    sampler = client.sampler(BASE)
    made = Rollouts(lambda: sampler, Record().grade, replace(COLD, temperature=0.0)).group(0, PROBLEMS[0])
    assert len({member.rollout.tokens for member in made.members}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
@pytest.mark.parametrize("rollouts", [COLD, HOT, replace(COLD, piece_tokens=5)], ids=["cold", "hot", "in pieces"])
def test_a_loop_at_a_temperature_is_held_to_the_bit_and_learns(client: Client, tmp_path: Path, loop: Loop, rollouts: RolloutConfig) -> None:
    reports = loop(client, tmp_path / "cursor", Record().grade, PROBLEMS, steps=3, rollouts=rollouts, kl_rollouts=100)
    # A step may be taken while no group is finished: whoever is ahead has made its groups before.
    assert {report.metrics["agreement/held_share"] for report in reports if "agreement/held_share" in report.metrics} == {1}
    assert sum(report.metrics["agreement/scored_tokens"] for report in reports) > 0
    for report in reports:
        assert abs(report.metrics["agreement/drawn_deviation"]) < 6
        assert report.metrics["gradient_norm"] > 0
        if not report.metrics["lag/max"]:
            assert report.metrics["ratio/k3"] == report.metrics["ratio/largest_difference"] == 0
    # Nothing was learnt before the first step, so that policy and reference are one: at one temperature.
    assert reports[0].metrics["kl/reference"] == 0
    assert reports[-1].metrics["kl/reference"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
def test_the_distance_to_the_reference_pulls_nothing_before_anything_is_learnt(client: Client, tmp_path: Path, loop: Loop) -> None:
    (plain,), (pulled,) = (
        loop(client, tmp_path / f"{coefficient}", Record().grade, PROBLEMS, rollouts=COLD, kl_coefficient=coefficient, max_lost_rounds=1)
        for coefficient in (0.0, 0.5)
    )
    assert pulled.metrics["kl/reference"] == 0
    if loop is in_step:
        assert pulled.metrics["gradient_norm"] == plain.metrics["gradient_norm"]


@pytest.mark.slow
def test_the_distance_that_is_shown_is_of_both_policies_at_the_temperature(client: Client, tmp_path: Path) -> None:
    seen: list[Any] = []

    def grade(rollout: Any) -> float:
        seen.append(rollout)
        return float(sum(rollout.tokens))

    config = GrpoConfig(policy=POLICY, rollouts=HOT, groups_per_step=2, kl_rollouts=100)
    reports: list[StepReport] = []
    policy = grpo.train(client, PROBLEMS, grade, config, tmp_path / "cursor", steps=2, on_step=reports.append)
    second = [rollout.segments[0] for rollout in seen if int(rollout.id.partition(".")[0]) in (2, 3)]
    then = [scores(policy.first, segment.tokens, HOT.temperature)[list(segment.places)] for segment in second]
    d = np.concatenate([given - np.array(segment.logprobs) for given, segment in zip(then, second, strict=True)])
    assert reports[1].metrics["kl/reference"] == pytest.approx(k3(d), rel=1e-9)


@pytest.mark.slow
def test_an_anchor_is_scored_at_the_temperature(client: Client, tmp_path: Path) -> None:
    config = {"anchor": "snapshot", "rollouts": COLD, "max_head_offpolicy_versions": 2, "concurrency": 4}
    reports = ahead(client, tmp_path / "cursor", Record().grade, PROBLEMS, steps=5, **config)
    assert max(report.metrics["lag/max"] for report in reports) >= 1
    for report in reports:
        # The trainer's forward and the snapshot of its own weights are one, to the bit, of every token.
        assert report.metrics["ratio/largest_difference"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
def test_a_sampler_that_draws_at_another_temperature_than_the_loops_ends_it(client: Client, tmp_path: Path, monkeypatch: Patch, loop: Loop) -> None:
    with monkeypatch.context() as patch:
        asked_with(temperature=1.0)(patch)
        with pytest.raises(Corrupt, match=REFUSED):
            loop(client, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=COLD)
    (report,) = loop(client, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=COLD)
    assert report.step == 1


class Foreign(Environment):
    """Draws at its own temperature, and says which that was."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> MakesGroups:
        inner = Rollouts(newest, Record().grade, replace(config, temperature=self._temperature))

        class Made(MakesGroups):
            def group(self, number: int, problem: Problem) -> Group:
                return inner.group(number, problem)

        return Made()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
@pytest.mark.parametrize(("drawn", "asked"), [(T, 1.0), (1.0, T), (1.4, T)])
def test_rollouts_that_say_another_temperature_than_the_loops_are_refused_before_anything_is_submitted(
    client: Client, tmp_path: Path, loop: Loop, drawn: float, asked: float
) -> None:
    rollouts = replace(COLD, temperature=asked)
    with pytest.raises(Corrupt, match=rf"drawn at temperature {drawn:g}, and the loss computes the distribution at {asked:g}: draw at that"):
        loop(client, tmp_path / "cursor", Foreign(drawn), PROBLEMS, rollouts=rollouts)
    cursor = json.loads((tmp_path / "cursor").read_text())
    assert client.run(cursor["run_id"]).next_seq == cursor["seq"]
    (report,) = loop(client, tmp_path / "cursor", Foreign(asked), PROBLEMS, rollouts=rollouts)
    assert report.metrics["gradient_norm"] > 0


@pytest.mark.slow
def test_a_loop_of_policy_of_ones_own_is_held_to_its_temperature(client: Client, tmp_path: Path) -> None:
    policy = Policy.open(client, at_temperature(POLICY, T), tmp_path / "cursor", "mine")
    made = [Rollouts(lambda: policy.sampler, Record().grade, rollouts).group(0, PROBLEMS[0]) for rollouts in (COLD, HOT)]
    cold, hot = (mean_over_tokens(weigh(sort_groups([each], 2).trained, by_deviation=True)) for each in made)
    with pytest.raises(Corrupt, match=r"drawn at temperature 1\.4, and the loss computes the distribution at 0\.7"):
        policy.train([row.datum for row in hot], [0], served=[row.segment for row in hot])
    metrics = policy.train([row.datum for row in cold], [0], served=[row.segment for row in cold])
    assert (metrics["k3:sum"], metrics["logprob_diff:max"]) == (0, 0)


def asks_at(temperature: float | None, told: list[str]) -> Callable[[Episode], float]:
    def agent(episode: Episode) -> float:
        said = {} if temperature is None else {"temperature": temperature}
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as model:
            asked = [{"role": "user", "content": f"Say a word of {episode.problem.id}."}]
            for _ in range(2):
                answer = model.chat.completions.create(model=episode.model, messages=asked, **said)
                asked += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Another."}]
                told.append(answer.choices[0].message.content or "")
        return float(len("".join(told[-2:])))

    return agent


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [None, T])
def test_an_agent_is_answered_at_the_loops_temperature_whether_it_names_it_or_not(
    client: Client, tokenizer: ChatTokenizer, tmp_path: Path, temperature: float | None
) -> None:
    with Agents(asks_at(temperature, []), tokenizer) as agents:
        (report,) = in_step(client, tmp_path / "cursor", agents, [Problem(f"p{n}", ()) for n in range(4)], rollouts=COLD)
    assert report.metrics["agents/answers"] == 2
    assert report.metrics["ratio/k3"] == report.metrics["ratio/largest_difference"] == 0


def test_an_agent_that_asks_for_another_temperature_than_the_loops_is_told_so(client: Client, tokenizer: ChatTokenizer) -> None:
    sampler = client.sampler(BASE)
    with Agents(asks_at(1.0, []), tokenizer) as agents:
        group = groups_by(lambda: sampler, agents, replace(COLD, attempts=1)).group(0, Problem("p", ()))
    assert group.members == ()
    assert {failure.kind for failure in group.failures} == {"raised"}
    assert all("`temperature` can only be 0.7 where answers are trained on: leave it out" in failure.message for failure in group.failures)


def test_turns_of_two_temperatures_are_no_one_sequence() -> None:
    first = Turn("a", (1, 2), (3,), (-1.0,), "v", stopped=True, temperature=T)
    second = Turn("b", (1, 2, 3, 4), (5,), (-1.0,), "v", stopped=True)
    assert [(segment.tokens, segment.temperature) for segment in assemble([first, second])] == [((1, 2, 3), T), ((1, 2, 3, 4, 5), 1.0)]
    assert [segment.temperature for segment in assemble([first, second._replace(temperature=T)])] == [T]


def by_hand(student: Sampler, teacher: Sampler, rollouts: RolloutConfig) -> float:
    """The mean over two problems of how far the student is from its teacher, both at the temperature of the student's answers."""
    made, found = Rollouts(lambda: student, Record().grade, rollouts), []
    for number in range(2):
        segments = [member.rollout.segments[0] for member in made.group(number, PROBLEMS[number]).members]
        theirs = [scores(teacher, segment.tokens, rollouts.temperature)[list(segment.places)] for segment in segments]
        found.append(k3(np.concatenate([given - np.array(segment.logprobs) for given, segment in zip(theirs, segments, strict=True)])))
    return float(np.mean(found))


@pytest.mark.slow
def test_a_student_is_compared_with_its_teacher_at_the_temperature_of_its_answers(client: Client, tmp_path: Path) -> None:
    taught = in_step(client, tmp_path / "teacher", Record().grade, PROBLEMS, steps=2, policy=replace(POLICY, learning_rate=1e-2))
    teacher, found = taught[-1].version, []
    for name, rollouts in {"hot": HOT, "plain": replace(HOT, temperature=1.0)}.items():
        config = DistillConfig(policy=POLICY, teacher=teacher, rollouts=rollouts, evaluation=rollouts, prompts_per_step=2, evaluate_every=1)
        reports: list[StepReport] = []
        policy = distill.train(client, PROBLEMS, config, tmp_path / name, steps=1, held_out=PROBLEMS[:2], on_step=reports.append)
        assert reports[0].metrics["ratio/k3"] == reports[0].metrics["ratio/largest_difference"] == 0
        found.append(reports[0].metrics[f"evaluation/{DISTANCE}"])
        assert found[-1] == pytest.approx(by_hand(policy.sampler, client.sampler(teacher), rollouts), rel=1e-9)
    assert found[0] != found[1]


@pytest.mark.slow
def test_answers_of_a_teacher_are_drawn_at_a_temperature_and_learnt_at_one(client: Client, tmp_path: Path) -> None:
    config = DistillConfig(policy=POLICY, teacher=BASE, mode="teacher_answers", rollouts=COLD, prompts_per_step=2)
    assert distill.losing(config).loss_config == ()
    reports: list[StepReport] = []
    distill.train(client, PROBLEMS, config, tmp_path / "cursor", steps=1, on_step=reports.append)
    assert reports[0].metrics["loss"] > 0


def test_the_asynchronous_loop_computes_its_truncated_loss_at_the_temperature() -> None:
    config = AsyncGrpoConfig(policy=POLICY, rollouts=COLD)
    losing = at_temperature(async_grpo.truncated(config), COLD.temperature)
    assert losing.loss == "cispo"
    assert dict(losing.loss_config) == {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0, "temperature": T}

"""Rollouts that reuse those of an earlier epoch: the same tokens, numbers and weights as without, to the bit, in both loops and for agents."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client, Sampler
from bloomery.recipes import async_grpo, grpo, reuse
from bloomery.recipes.agents import Agents, Episode
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.policy import Policy
from bloomery.recipes.reuse import Earlier
from bloomery.recipes.rollouts import Problem, RolloutConfig, Rollouts
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from tests.live import LiveServer
from tests.recipes.loops import BASE, POLICY, PROBLEMS, Killed, Record, mortal_client
from tests.recipes.test_agents import asks, with_a_tool

REUSING = RolloutConfig(group_size=3, max_tokens=12, seed=11, reuse=True)
SLOWLY = replace(POLICY, learning_rate=1e-5)
EPOCHS = 3
SUMS = [Problem(f"{number}+4", (), data=(number, 4)) for number in range(2)]


@pytest.fixture
def without_drafts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on everything is sampled plainly: the oracle."""

    def forget() -> None:
        monkeypatch.setattr(Earlier, "of", lambda self, place, members: [()] * members)

    return forget


Loop = Callable[..., tuple[Policy, list[StepReport]]]


def synchronous(client: Client, path: Path, grade: Any, problems: list[Problem], rollouts: RolloutConfig) -> tuple[Policy, list[StepReport]]:
    reports: list[StepReport] = []
    config = GrpoConfig(policy=SLOWLY, rollouts=rollouts, groups_per_step=len(problems))
    return grpo.train(client, problems, grade, config, path, steps=EPOCHS, on_step=reports.append), reports


def asynchronous(client: Client, path: Path, grade: Any, problems: list[Problem], rollouts: RolloutConfig) -> tuple[Policy, list[StepReport]]:
    reports: list[StepReport] = []
    config = AsyncGrpoConfig(policy=SLOWLY, rollouts=rollouts, groups_per_step=len(problems), max_head_offpolicy_versions=0)
    return async_grpo.train(client, problems, grade, config, path, steps=EPOCHS, on_step=reports.append), reports


@pytest.mark.parametrize("loop", [synchronous, asynchronous])
@pytest.mark.parametrize("piece_tokens", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_a_loop_that_reuses_rollouts_makes_those_that_it_would_make_without_and_the_same_weights(
    client: Client, tmp_path: Path, without_drafts: Callable[[], None], loop: Loop, piece_tokens: int | None
) -> None:
    rollouts = replace(REUSING, piece_tokens=piece_tokens)
    reusing, plain = Record(), Record()
    policy, reports = loop(client, tmp_path / "reusing", reusing.grade, PROBLEMS, rollouts)
    without_drafts()
    oracle, others = loop(client, tmp_path / "plain", plain.grade, PROBLEMS, rollouts)
    assert reusing.seen == plain.seen
    assert policy.run.save_checkpoint("end").result().digest == oracle.run.save_checkpoint("end").result().digest
    kept = [report.metrics["rollouts/kept_share"] for report in reports]
    # The first epoch has nothing to go by; a small step changes few answers.
    assert kept[0] == 0
    assert min(kept[1:]) > 0.5
    assert [report.metrics["rollouts/kept_share"] for report in others] == [0] * EPOCHS
    assert [report.metrics["ratio/largest_difference"] for report in reports] == [0] * EPOCHS


@pytest.mark.slow
def test_agents_reuse_theirs_alike(client: Client, tokenizer: ChatTokenizer, tmp_path: Path, without_drafts: Callable[[], None]) -> None:
    digests, kept = [], []
    for name in ("reusing", "plain"):
        with Agents(with_a_tool, tokenizer) as agents:
            policy, reports = synchronous(client, tmp_path / name, agents, SUMS, replace(REUSING, max_tokens=6))
        digests.append(policy.run.save_checkpoint("end").result().digest)
        kept.append([report.metrics["rollouts/kept_share"] for report in reports])
        without_drafts()
    assert digests[0] == digests[1]
    assert kept[0][0] == 0
    assert min(kept[0][1:]) > 0.5
    assert kept[1] == [0] * EPOCHS


@pytest.mark.slow
def test_a_loop_that_was_killed_has_nothing_to_reuse_and_makes_the_same_rollouts(live_server: LiveServer, client: Client, tmp_path: Path) -> None:
    record, undisturbed = Record(), Record()
    with mortal_client(live_server, 5, heard=True) as dying, pytest.raises(Killed):
        synchronous(dying, tmp_path / "cursor", record.grade, PROBLEMS, REUSING)
    policy, _ = synchronous(client, tmp_path / "cursor", record.grade, PROBLEMS, REUSING)
    expected, _ = synchronous(client, tmp_path / "other", undisturbed.grade, PROBLEMS, REUSING)
    assert record.seen == undisturbed.seen
    assert policy.run.save_checkpoint("end").result().digest == expected.run.save_checkpoint("end").result().digest


def test_what_was_remembered_of_another_prompt_or_is_too_long_changes_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler: Sampler = client.sampler(BASE)
    plain = Rollouts(lambda: sampler, Record().grade, REUSING).group(0, PROBLEMS[0])
    monkeypatch.setattr(Earlier, "of", lambda self, place, members: [tuple(range(40, 90))] * members)
    misled = Rollouts(lambda: sampler, Record().grade, REUSING).group(0, PROBLEMS[0])
    assert [member.rollout.tokens for member in misled.members] == [member.rollout.tokens for member in plain.members]
    assert [member.rollout.logprobs for member in misled.members] == [member.rollout.logprobs for member in plain.members]


def test_what_an_agents_member_was_answered_is_forgotten_in_its_turn(
    client: Client, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[tuple[int, ...], Earlier] = {}
    keep = Earlier.keep

    def noted(self: Earlier, place: tuple[int, ...], said: Any) -> None:
        kept[place] = self
        keep(self, place, said)

    monkeypatch.setattr(Earlier, "keep", noted)
    monkeypatch.setattr(reuse, "ANSWERS", 3)
    rounds = iter(range(100))

    def agent(episode: Episode) -> float:
        with asks(episode) as model:
            for word in ("red", f"the number {next(rounds)}"):
                model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": f"Say {word}."}])
        return 1.0

    sampler = client.sampler(BASE)
    with Agents(agent, tokenizer) as agents:
        made = agents.rollouts(lambda: sampler, replace(REUSING, group_size=2, max_tokens=4))
        groups = [made.group(number, SUMS[number % 2]) for number in range(12)]
    # Two problems of two members: each asked one thing that is the same and six that are not.
    assert len(kept) == 2 * 2 * (1 + 6)
    assert sum(any(earlier.of(place, 1)) for place, earlier in kept.items()) == 2 * 2 * 3
    # What is asked again is remembered.
    assert all(member.rollout.kept for group in groups[2:] for member in group.members)


def test_one_seed_for_a_prompt_is_refused_where_it_would_give_the_same_group_twice(client: Client, tmp_path: Path) -> None:
    few = GrpoConfig(policy=POLICY, rollouts=REUSING, groups_per_step=6)
    with pytest.raises(InvalidInput, match="6 groups a step of 5 problems would be the same ones") as refused:
        grpo.train(client, PROBLEMS, Record().grade, few, tmp_path / "cursor", steps=1)
    assert refused.value.field == "groups_per_step"
    twice = [PROBLEMS[0], PROBLEMS[0]._replace(id="again")]
    with pytest.raises(InvalidInput, match="two problems have one prompt, and with `reuse` one seed"):
        grpo.train(client, twice, Record().grade, replace(few, groups_per_step=2), tmp_path / "cursor", steps=1)

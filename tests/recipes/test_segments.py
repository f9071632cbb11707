"""Served answers as what is trained on: which tokens have a loss, what goes on from what, where a conversation drifted; rewards of single answers."""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from bloomery.recipes.advantages import mask_stale, sort_groups, turn_advantages, weigh
from bloomery.recipes.agents import rollout_of
from bloomery.recipes.rewards import FailureKind, Reward
from bloomery.recipes.rl_metrics import round_metrics
from bloomery.recipes.rollouts import Failure, Graded, Group, Problem, judge
from bloomery.recipes.segments import Segment, Turn, assemble

PROBLEM = Problem("p", ())


def turn(name: str, prompt: tuple[int, ...], tokens: tuple[int, ...], *, version: str = "v", continues: str | None = None) -> Turn:
    """Log-probabilities are minus a tenth of the token, so that each can be told."""
    return Turn(name, prompt, tokens, tuple(-token / 10 for token in tokens), version, stopped=True, continues=continues)


FIRST = turn("a", (1, 2, 3), (4, 5))
SECOND = turn("b", (1, 2, 3, 4, 5, 6, 7), (8,), version="w", continues="a")


def test_an_answer_whose_prompt_begins_with_all_that_was_served_goes_on_with_it_and_only_sampled_tokens_are_its() -> None:
    (segment,) = assemble([FIRST, SECOND])
    assert segment == Segment((1, 2, 3, 4, 5, 6, 7, 8), (3, 4, 7), (-0.4, -0.5, -0.8), ("v", "v", "w"), ("a", "a", "b"))
    assert segment.sampled == (4, 5, 8)


def test_only_sampled_tokens_have_a_loss_and_each_keeps_its_place() -> None:
    groups = [Group(0, PROBLEM, tuple(Graded(rollout_of(f"0.{place}", PROBLEM, [FIRST, SECOND]), float(place), {}) for place in range(2)), ())]
    rows = weigh(groups, by_deviation=True)
    datum = rows[1].datum
    assert datum.tokens.numpy().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert datum.inputs["target_tokens"].numpy().tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert datum.inputs["advantages"].numpy().tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert datum.inputs["logprobs"].numpy().tolist() == np.float32([0, 0, -0.4, -0.5, 0, 0, -0.8]).tolist()
    stale = mask_stale(rows, {"v": 2, "w": 0}.__getitem__, max_lag=1)
    assert stale[1].datum.inputs["advantages"].numpy().tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_a_branch_is_a_segment_of_its_own_and_what_it_shares_is_trained_once() -> None:
    other = turn("c", (1, 2, 3, 4, 5, 9, 9, 9), (10,), continues="a")
    first, second = assemble([FIRST, SECOND, other])
    assert (first.turns, first.sampled) == (("a", "a", "b"), (4, 5, 8))
    assert (second.turns, second.sampled, second.tokens) == (("c",), (10,), (1, 2, 3, 4, 5, 9, 9, 9, 10))
    assert (first.drift, second.drift) == (None, None)


def test_a_sub_agent_of_another_prompt_is_a_segment_of_its_own_and_no_drift() -> None:
    segments = assemble([FIRST, turn("s", (20, 21), (22,)), SECOND])
    assert sorted(segment.turns for segment in segments) == [("a", "a", "b"), ("s",)]
    assert [segment.drift for segment in segments] == [None, None]


@pytest.mark.parametrize(("prompt", "place"), [((1, 2, 3, 4, 50, 6), 4), ((1, 90), 1), ((1, 2, 3, 4), 4)])
def test_a_history_that_was_written_in_other_tokens_is_a_drift_at_its_place_and_both_answers_keep_what_they_were_served_with(
    prompt: tuple[int, ...], place: int
) -> None:
    segments = {segment.turns[-1]: segment for segment in assemble([FIRST, turn("b", prompt, (8,), continues="a")])}
    assert segments["a"].tokens == (1, 2, 3, 4, 5)
    assert segments["b"].tokens == (*prompt, 8)
    assert segments["b"].sampled == (8,)
    assert (segments["a"].drift, segments["b"].drift) == (None, place)


def test_the_order_in_which_sub_agents_were_answered_changes_nothing() -> None:
    turns = [FIRST, SECOND, turn("c", (1, 2, 3), (6,)), turn("d", (1, 2, 3, 6, 7), (8,)), turn("e", (30,), (31,))]
    assert len({assemble(order) for order in permutations(turns)}) == 1
    assert sum(len(segment.sampled) for segment in assemble(turns)) == sum(len(each.tokens) for each in turns)


def test_two_answers_to_one_prompt_are_two_segments_though_one_begins_with_the_other() -> None:
    assert [segment.sampled for segment in assemble([turn("a", (1, 2), (3,)), turn("b", (1, 2), (3, 4))])] == [(3,), (3, 4)]


def graded(name: str, reward: float, *turns: float) -> Graded:
    answers = [turn(f"{place}", (*range(place + 1),), (place + 1,)) for place in range(len(turns))]
    outcome = judge(rollout_of(name, PROBLEM, answers), Reward(name, reward, turns={str(place): value for place, value in enumerate(turns)}))
    assert isinstance(outcome, Graded)
    return outcome


def test_rewards_of_answers_count_for_them_and_for_all_before_them() -> None:
    added = turn_advantages([graded("0.0", 0, 1, 0), graded("0.1", 0, 0, 1)], by_deviation=True)
    assert added == [{"0": 0.0, "1": -1.0}, {"0": 0.0, "1": 1.0}]
    assert turn_advantages([graded("0.0", 0, 3), graded("0.1", 0, 1)], by_deviation=False) == [{"0": 1.0}, {"0": -1.0}]


def test_a_group_whose_answers_alone_were_rewarded_otherwise_teaches_something() -> None:
    group = Group(0, PROBLEM, (graded("0.0", 1, 1, 0), graded("0.1", 1, 0, 1)), ())
    kept = sort_groups([group], 2)
    assert kept.trained == (group,)
    assert [row.advantages.tolist() for row in weigh(kept.trained, by_deviation=True)] == [[0, -1], [0, 1]]
    same = Group(0, PROBLEM, (graded("0.0", 1, 1), graded("0.1", 1, 1)), ())
    assert sort_groups([same], 2).zero_variance == (same,)


@pytest.mark.parametrize(
    ("turns", "kind"), [({"z": 1.0}, "foreign_reward"), ({"a": math.nan}, "not_finite"), ({"a": None}, "no_reward"), ({"a": "1"}, "wrong_type")]
)
def test_a_reward_of_an_answer_is_judged_like_any_other(turns: dict[str, Any], kind: FailureKind) -> None:
    failure = judge(rollout_of("0.0", PROBLEM, [FIRST]), Reward("0.0", 1.0, turns=turns))
    assert isinstance(failure, Failure)
    assert failure.kind == kind


def test_metrics_count_answers_segments_and_drifts() -> None:
    drifted = rollout_of("0.0", PROBLEM, [FIRST, turn("b", (1, 9), (8,), continues="a")])
    whole = rollout_of("0.1", PROBLEM, [FIRST, SECOND])
    group = Group(0, PROBLEM, (Graded(drifted, 1.0, {}), Graded(whole, 0.0, {}, (("a", 0.5), ("b", 1.0)))), ())
    kept = sort_groups([group], 2)
    found = round_metrics([group], kept, weigh(kept.trained, by_deviation=True), lambda _: 0)
    expected = {
        "agents/answers": 2,
        "agents/segments": 1.5,
        "agents/drifted_share": 0.5,
        "reward/turns": 1.5,
        "tokens/sampled": 6,
        "tokens/trained": 16,
    }
    assert {name: found[name] for name in expected} == expected

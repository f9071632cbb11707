"""From rewards to data, by closed form."""

from collections.abc import Sequence

import numpy as np
import pytest

from bloomery.recipes.advantages import group_advantages, mask_stale, mean_over_tokens, pull_to_reference, sort_groups, varies, weigh
from bloomery.recipes.rl_metrics import Seconds, round_metrics, stale_share, times, update_metrics
from bloomery.recipes.rollouts import Failure, Graded, Group, Problem, Rollout

PROBLEM = Problem("p", (7, 8, 9))


def group(*rewards: float, versions: Sequence[str] = ("v", "v"), failures: int = 0) -> Group:
    members = [
        Graded(Rollout(f"0.{place}", PROBLEM, (5, 6), (-0.5, -0.25), tuple(versions), stopped=True), reward, {"right": reward})
        for place, reward in enumerate(rewards)
    ]
    lost = [Failure(f"0.{len(rewards) + place}", "timeout", "late", final=True) for place in range(failures)]
    return Group(0, PROBLEM, tuple(members), tuple(lost))


def test_advantages_are_rewards_less_their_mean_over_their_deviation() -> None:
    assert group_advantages([1, 0, 0, 1], by_deviation=True) == [1, -1, -1, 1]
    assert group_advantages([1, 0, 0, 1], by_deviation=False) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([2, 2], by_deviation=True) == [0, 0]
    assert group_advantages([0.1] * 6, by_deviation=False) == [0] * 6, "the mean of these is another number in the last bit"


def test_groups_that_teach_nothing_and_groups_that_lost_too_many_are_told_apart() -> None:
    good, equal, small, alone = group(1, 0, 0), group(1, 1, 1), group(1, 0, failures=2), group(1, failures=3)
    kept = sort_groups([good, equal, small, alone], min_group_size=3)
    assert kept == ((good,), (equal,), (small, alone))
    assert sort_groups([small, alone], min_group_size=2) == ((small,), (), (alone,))
    assert varies(good)
    assert not varies(equal)


def test_groups_that_were_rewarded_alike_count_in_the_mean_where_they_are_kept() -> None:
    groups = [group(1, 0), group(1, 1), group(1, failures=3)]
    dropped, kept = (sort_groups(groups, 2, zero_variance) for zero_variance in ("drop", "keep"))  # type: ignore[arg-type]
    assert kept == (tuple(groups[:2]), (groups[1],), (groups[2],))
    assert (dropped.compared, kept.compared) == (2, 2)
    rows = [mean_over_tokens(weigh(each.trained, by_deviation=True)) for each in (dropped, kept)]
    assert [[row.advantages.tolist() for row in each] for each in rows] == [[[0.25] * 2, [-0.25] * 2], [[0.125] * 2, [-0.125] * 2]]
    pulled = pull_to_reference(weigh(kept.trained, by_deviation=True), [[-0.5, -0.25]] * 3 + [[-1.5, -0.25]], coefficient=0.8)
    assert pulled[2].advantages.tolist() == pytest.approx([0.1, 0.1])
    assert pulled[3].advantages.tolist() == pytest.approx([-0.7, 0.1])
    found = round_metrics(groups, kept, [], {}.__getitem__)
    assert [found[f"groups/{name}"] for name in ("made", "trained", "zero_variance_share", "too_small")] == [3, 2, 0.5, 1]
    assert found["reward/filtered"] == 0.75


def test_a_datum_predicts_each_sampled_token_from_all_before_it_and_masks_the_prompt() -> None:
    first = weigh([group(1, 0)], by_deviation=True)[0].datum
    assert first.tokens.numpy().tolist() == [7, 8, 9, 5]
    assert first.inputs["target_tokens"].numpy().tolist() == [8, 9, 5, 6]
    assert first.inputs["advantages"].numpy().tolist() == [0, 0, 1, 1]
    assert first.inputs["logprobs"].numpy().tolist() == [0, 0, -0.5, -0.25]


def test_tokens_that_are_too_old_have_no_loss() -> None:
    rows = mask_stale(weigh([group(1, 0, versions=("old", "new"))], by_deviation=True), {"old": 3, "new": 1}.__getitem__, max_lag=2)
    assert [row.advantages.tolist() for row in rows] == [[0, 1], [0, -1]]
    assert stale_share(rows, {"old": 3, "new": 1}.__getitem__, max_lag=2) == {"lag/masked_share": 0.5}


def test_the_pull_to_a_reference_moves_advantages_by_the_log_ratio_and_adds_up_to_nothing() -> None:
    rows = pull_to_reference(weigh([group(1, 0)], by_deviation=True), [[-0.5, -0.25], [-1.5, -0.25]], coefficient=0.4)
    assert rows[0].advantages.tolist() == pytest.approx([1.1, 1.1])
    assert rows[1].advantages.tolist() == pytest.approx([-1.3, -0.9])


def test_a_rollout_rewarded_as_its_groups_mean_counts_among_the_tokens_of_the_batch() -> None:
    exactly, nearly = (mean_over_tokens(weigh([group(0, middle, 1)], by_deviation=False)) for middle in (0.5, 0.5 + 1e-9))
    np.testing.assert_allclose([row.advantages for row in exactly], [[-0.5 / 6] * 2, [0.5 / 6] * 2], rtol=1e-6)
    np.testing.assert_allclose([row.advantages for row in nearly[::2]], [row.advantages for row in exactly], rtol=1e-6)


def test_a_batch_is_a_mean_over_its_tokens_that_are_not_too_old() -> None:
    rows = mean_over_tokens(mask_stale(weigh([group(1, 0, versions=("old", "new"))], by_deviation=True), {"old": 9, "new": 0}.__getitem__, 1))
    assert [row.advantages.tolist() for row in rows] == [[0, 0.5], [0, -0.5]]
    assert rows[0].advantages.dtype == np.float32


def test_metrics_tell_raw_from_filtered_rewards_and_count_what_was_lost() -> None:
    groups = [group(1, 0, 0, failures=1), group(1, 1), group(0, failures=3)]
    kept = sort_groups(groups, min_group_size=2)
    data = weigh(kept.trained, by_deviation=True)
    sums = {"loss:sum": -0.5, "tokens:sum": 6.0, "ratio:sum": 6.6, "k3:sum": 0.06, "clipped:sum": 3.0, "grad_norm": 2.0}
    before = round_metrics(groups, kept, data, {"v": 1}.__getitem__)
    found = before | update_metrics(sums) | times(before, Seconds(2.0, 0.5, 1.5, 0.5, 1.5))
    expected = {
        "reward/raw": 0.5,
        "reward/filtered": 1 / 3,
        "reward/part/right": 0.5,
        "groups/zero_variance_share": 0.5,
        "groups/too_small": 1,
        "failures/lost": 4,
        "failures/timeout": 4,
        "failures/retried": 0,
        "lag/mean": 1,
        "lag/tokens/1": 6,
        "ratio/mean": 1.1,
        "ratio/k3": 0.01,
        "ratio/clipped_share": 0.5,
        "idle/trainer_share": 0.25,
        "idle/rollouts_share": 0.75,
        "tokens/sampled_per_s": 24,
        "tokens/trained_per_s": 10,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    stale = mask_stale(data, {"v": 2}.__getitem__, 1)
    masked = round_metrics(groups, kept, stale, {"v": 2}.__getitem__)
    assert (masked["tokens/trained"], masked["lag/tokens/2"]) == (0, 6), "nothing is trained of what is masked"


def test_a_step_without_anything_to_train_has_metrics_all_the_same() -> None:
    found = round_metrics([group(1, 1)], sort_groups([group(1, 1)], 2), [], {}.__getitem__)
    assert (found["reward/raw"], found["groups/trained"], found["groups/zero_variance_share"]) == (1, 0, 1)
    assert "reward/filtered" not in found

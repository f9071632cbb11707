"""From groups to what is trained: which groups teach something, how much each rollout counts, and the data that says so to the server.

Shapes: a segment has N tokens, S of them sampled; a datum has N - 1 predictions, of which those of the sampled tokens are trained.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from bloomery.recipes.rollouts import Graded, Group
from bloomery.recipes.segments import Segment
from bloomery.types.arrays import Array
from bloomery.types.operations import Datum

ZeroVariance = Literal["drop", "keep"]
"""What becomes of groups whose members were all rewarded alike: left out of the batch, or among those that it is a mean over."""


class Sorted(NamedTuple):
    """Groups by what becomes of them."""

    trained: tuple[Group, ...]
    """What the batch is made of: groups in which rewards differ, and where they are kept those in which they do not."""
    zero_variance: tuple[Group, ...]
    """All members were rewarded alike: there is nothing to prefer."""
    too_small: tuple[Group, ...]
    """Too many members failed."""

    @property
    def compared(self) -> int:
        """Groups whose members could be told apart by their rewards, whether they were or not."""
        return len(self.zero_variance) + sum(map(varies, self.trained))


def sort_groups(groups: Sequence[Group], min_group_size: int, zero_variance: ZeroVariance = "drop") -> Sorted:
    """By members that are left, and by what they were rewarded."""
    too_small = tuple(group for group in groups if len(group.members) < min_group_size)
    whole = [group for group in groups if len(group.members) >= min_group_size]
    trained = tuple(group for group in whole if zero_variance == "keep" or varies(group))
    return Sorted(trained, tuple(group for group in whole if not varies(group)), too_small)


def varies(group: Group) -> bool:
    """Whether some member was rewarded otherwise than another."""
    by_turn = {reward for member in group.members for _, reward in member.turns}
    return len({member.reward for member in group.members}) > 1 or len(by_turn) > 1


def group_advantages(rewards: Sequence[float], *, by_deviation: bool) -> list[float]:
    """Rewards less their mean and, with `by_deviation`, over their standard deviation (Shao et al. 2024, arXiv 2402.03300)."""
    if len(set(rewards)) == 1:
        # Of rewards that are alike the mean may be rounded to another number, and a group of them prefers nothing.
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.pstdev(rewards) if by_deviation else 1.0
    return [(reward - mean) / scale if scale else 0.0 for reward in rewards]


def turn_advantages(members: Sequence[Graded], *, by_deviation: bool) -> list[dict[str, float]]:
    """What rewards of single answers add to each answer of each member: those from it on, each relative to all such rewards of the group.

    That is process supervision as Shao et al. have it (section 4.1.3); an answer without such a reward adds nothing of its own.
    """
    rewards = [reward for member in members for _, reward in member.turns]
    relative = iter(group_advantages(rewards, by_deviation=by_deviation) if rewards else ())
    added: list[dict[str, float]] = []
    for member in members:
        own = {answer: next(relative) for answer, _ in member.turns}
        onwards = accumulate(own.get(answer, 0.0) for answer in reversed(member.rollout.answers))
        added.append(dict(zip(reversed(member.rollout.answers), onwards, strict=True)))
    return added


class Weighed(NamedTuple):
    """A segment and the advantage of each of its sampled tokens, float32 [S]."""

    segment: Segment
    advantages: np.ndarray
    anchor: tuple[float, ...] | None = None
    """Log-probabilities that the loss compares with; None: those that were served."""
    masked: int = 0
    """Sampled tokens that are kept out of the batch, because they are too old."""

    @property
    def teaches(self) -> bool:
        """Whether anything of it has a loss."""
        return bool(self.advantages.any())

    @property
    def datum(self) -> Datum:
        """For the losses that compare with sampled log-probabilities; what was not sampled is masked by zeros."""
        tokens = self.segment.tokens
        predicted = np.asarray(self.segment.places, dtype=np.int64) - 1
        logprobs, advantages = (np.zeros(len(tokens) - 1, dtype=np.float32) for _ in range(2))
        logprobs[predicted] = self.segment.logprobs if self.anchor is None else self.anchor
        advantages[predicted] = self.advantages
        return Datum(
            tokens=Array.of(np.asarray(tokens[:-1], dtype=np.int32)),
            inputs={
                "target_tokens": Array.of(np.asarray(tokens[1:], dtype=np.int64)),
                "logprobs": Array.of(logprobs),
                "advantages": Array.of(advantages),
            },
        )


def weigh(groups: Sequence[Group], *, by_deviation: bool) -> list[Weighed]:
    """The segments of all members of all groups, each token with its rollout's advantage and what its answer adds."""
    return [weighed for group in groups for weighed in _weigh(group.members, by_deviation)]


def _weigh(members: Sequence[Graded], by_deviation: bool) -> list[Weighed]:
    advantages = group_advantages([member.reward for member in members], by_deviation=by_deviation)
    by_turn = turn_advantages(members, by_deviation=by_deviation)
    return [
        Weighed(segment, np.asarray([advantage + added.get(answer, 0.0) for answer in segment.turns], dtype=np.float32))
        for member, advantage, added in zip(members, advantages, by_turn, strict=True)
        for segment in member.rollout.segments
    ]


def mask_stale(weighed: Sequence[Weighed], lag_of: Callable[[str], int], max_lag: int) -> list[Weighed]:
    """Without loss where a token's weights are more than `max_lag` versions old."""
    return [_masked(row, [lag_of(version) > max_lag for version in row.segment.versions]) for row in weighed]


def _masked(row: Weighed, stale: Sequence[bool]) -> Weighed:
    return row._replace(advantages=np.where(stale, np.float32(0), row.advantages), masked=sum(stale))


def pull_to_reference(weighed: Sequence[Weighed], reference: Sequence[Sequence[float]], coefficient: float) -> list[Weighed]:
    """Take `coefficient` times the log-ratio to a reference, less the batch's mean of it, off each token's advantage: a penalty on KL to it.

    `reference` are the reference's log-probabilities [S] of each segment's sampled tokens.
    """
    ratios = [np.asarray(row.segment.logprobs) - np.asarray(given) for row, given in zip(weighed, reference, strict=True)]
    mean = float(np.concatenate(ratios).mean()) if ratios else 0.0
    return [row._replace(advantages=row.advantages - coefficient * (ratio - mean)) for row, ratio in zip(weighed, ratios, strict=True)]


def anchor_at(row: Weighed, old: Sequence[float], cap: float) -> Weighed:
    """With the ratio of the loss to an old policy, whose log-probabilities [S] are `old`, and the ratio of that to the rollout as a weight.

    The weight is a constant, cut off at `cap` (decoupled PPO, arXiv 2110.00641, with truncated weights).
    """
    weights = np.minimum(np.exp(np.asarray(old) - np.asarray(row.segment.logprobs)), cap).astype(np.float32)
    return row._replace(advantages=row.advantages * weights, anchor=tuple(old))


def mean_over_tokens(weighed: Sequence[Weighed]) -> list[Weighed]:
    """Losses are sums; dividing makes this one a mean over the batch's tokens, so that long rollouts count by their length.

    Rows without any loss are left out: they would only cost time. Tokens with an advantage of 0 count all the same, or the last bit of a reward that
    is nearly its group's mean would decide how far all others move the weights. Masked ones do not.
    """
    tokens = sum(len(row.advantages) - row.masked for row in weighed)
    return [row._replace(advantages=row.advantages / np.float32(tokens)) for row in weighed if row.teaches]

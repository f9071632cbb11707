"""What a step of reinforcement learning shows: rewards before and after filtering, lags, ratios, failures, and who waited for whom."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from bloomery.recipes.advantages import Sorted, Weighed
from bloomery.recipes.agreement import k3
from bloomery.recipes.holding import Scores
from bloomery.recipes.rewards import FailureKind
from bloomery.recipes.rollouts import Group
from bloomery.types.statistics import normal_interval

HELD: Final = "held:sum"
"""Tokens of an update that were held to what was served of them, beside the metrics of the server."""
MAX_SHOWN_PARTS: Final = 500
"""Of a step, those that most rollouts have: names that belong to one rollout each are as many as there are rollouts, and a cursor holds them all."""
_NOT_THE_GRADERS: Final[frozenset[FailureKind]] = frozenset({"sampling", "foreign_version", "no_tokens"})
"""Failures of those who sample."""


class Seconds(NamedTuple):
    """Wall time of a step. The idle ones are those in which trainer or rollouts stood still, waiting for the other."""

    total: float
    rollouts: float
    training: float
    trainer_idle: float
    rollouts_idle: float
    overlap: float = 0.0
    """Groups were in the making while the trainer trained."""


class Looked(NamedTuple):
    """What was looked at beside the training of a step."""

    scores: Scores
    kl: float | None
    """To the weights that training began with, in nats a token; None where nothing was scored by them."""
    graded_s: Sequence[float]
    """Of each call of the grader or the agent."""


def round_metrics(
    groups: Sequence[Group], kept: Sorted, data: Sequence[Weighed], lag_of: Callable[[str], int], looked: Looked | None = None
) -> dict[str, float]:
    """What is known of a step before anything of it is trained, one flat row; what nobody could measure in this step is left out."""
    through = sum(len(row.segment.tokens) for row in data if row.teaches)
    return {
        **_rewards(groups, kept),
        **sampled_metrics(groups),
        **_lags(data, lag_of),
        **_looked(looked),
        "tokens/trained": float(through),
    }


def sampled_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What there is to say of rollouts, whatever they are for."""
    sampled = sum(len(member.rollout.tokens) for group in groups for member in group.members)
    return {**_rollouts(groups), **_agents(groups), **_failures(groups), "tokens/sampled": float(sampled)}


def update_metrics(trained: Mapping[str, float]) -> dict[str, float]:
    """What the trainer measured of it."""
    tokens = trained.get("tokens:sum")
    found = {
        "loss": trained.get("loss:sum"),
        "ratio/mean": _per(trained.get("ratio:sum"), tokens),
        "ratio/k3": _per(trained.get("k3:sum"), tokens),
        "ratio/clipped_share": _per(trained.get("clipped:sum"), tokens),
        "ratio/largest_difference": trained.get("logprob_diff:max"),
        "gradient_norm": trained.get("grad_norm"),
        "agreement/trainer_tokens": trained.get(HELD),
    }
    return _known(found)


def times(shown: Mapping[str, float], seconds: Seconds) -> dict[str, float]:
    """How long it took; `shown` are its `round_metrics`."""
    total = seconds.total or 1.0
    found = {
        "seconds/step": seconds.total,
        "seconds/rollouts": seconds.rollouts,
        "seconds/training": seconds.training,
        "idle/trainer_share": seconds.trainer_idle / total,
        "idle/rollouts_share": seconds.rollouts_idle / total,
        "overlap/share": seconds.overlap / total,
        "tokens/sampled_per_s": _per(shown["tokens/sampled"], seconds.rollouts),
        "tokens/trained_per_s": _per(shown["tokens/trained"], seconds.training),
    }
    return _known(found)


def stale_share(data: Sequence[Weighed], lag_of: Callable[[str], int], max_lag: int) -> dict[str, float]:
    """How much of the data was masked because its weights are too old."""
    lags = [lag_of(version) for row in data for version in row.segment.versions]
    return {"lag/masked_share": sum(lag > max_lag for lag in lags) / len(lags)} if lags else {}


def anchor_metrics(data: Sequence[Weighed], cap: float) -> dict[str, float]:
    """How far rollouts are from the snapshot that their ratios begin from; empty where they begin from the rollouts."""
    d = np.array([old - served for row in data if row.anchor for old, served in zip(row.anchor, row.segment.logprobs, strict=True)])
    if not len(d):
        return {}
    found = {"mean": np.mean(np.exp(d)), "k3": k3(d), "capped_share": np.mean(np.exp(d) > cap)}
    return {f"staleness/{name}": float(value) for name, value in found.items()}


def _rewards(groups: Sequence[Group], kept: Sorted) -> dict[str, float]:
    raw = [member.reward for group in groups for member in group.members]
    filtered = [member.reward for group in kept.trained for member in group.members]
    spread = [statistics.pstdev([member.reward for member in group.members]) for group in groups if group.members]
    by_problem = [_mean([member.reward for member in group.members]) for group in groups]
    low, high = normal_interval([mean for mean in by_problem if mean is not None])
    found = {
        "reward/raw": _mean(raw),
        # One group has no spread to tell it from.
        "reward/raw_low": low if math.isfinite(low) else None,
        "reward/raw_high": high if math.isfinite(high) else None,
        "reward/filtered": _mean(filtered),
        "reward/group_std": _mean(spread),
        "groups/zero_variance_share": len(kept.zero_variance) / kept.compared if kept.compared else None,
    }
    counts = {"groups/made": len(groups), "groups/trained": len(kept.trained), "groups/too_small": len(kept.too_small)}
    return _known(found) | _parts(groups) | {name: float(count) for name, count in counts.items()}


def _parts(groups: Sequence[Group]) -> dict[str, float]:
    given: defaultdict[str, list[float]] = defaultdict(list)
    for member in (member for group in groups for member in group.members):
        for name, value in member.parts.items():
            given[name].append(value)
    shown = sorted(given, key=lambda name: len(given[name]), reverse=True)[:MAX_SHOWN_PARTS]
    left_out = {"reward/parts_left_out": float(len(given) - len(shown))} if len(given) > len(shown) else {}
    return {f"reward/part/{name}": statistics.fmean(given[name]) for name in shown} | left_out


def _rollouts(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [member.rollout for group in groups for member in group.members]
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    found = {
        "rollouts/kept_share": _per(float(sum(rollout.kept for rollout in rollouts)), tokens),
        "rollouts/length": _mean([float(len(rollout.tokens)) for rollout in rollouts]),
        "rollouts/cut_off_share": _mean([float(not rollout.stopped) for rollout in rollouts]),
        "rollouts/entropy_estimate": _mean([-logprob for rollout in rollouts for logprob in rollout.logprobs]),
        "rollouts/of_several_versions_share": _mean([float(len(set(rollout.versions)) > 1) for rollout in rollouts]),
    }
    return _known(found)


def _agents(groups: Sequence[Group]) -> dict[str, float]:
    members = [member for group in groups for member in group.members if member.rollout.laid_out]
    drifted = [float(any(segment.drift is not None for segment in member.rollout.laid_out)) for member in members]
    found = {
        "agents/answers": _mean([float(len(member.rollout.answers)) for member in members]),
        "agents/segments": _mean([float(len(member.rollout.laid_out)) for member in members]),
        "agents/drifted_share": _mean(drifted),
        "reward/turns": _mean([sum(reward for _, reward in member.turns) for member in members if member.turns]),
    }
    return _known(found)


def _failures(groups: Sequence[Group]) -> dict[str, float]:
    failures = [failure for group in groups for failure in group.failures]
    kinds = Counter(failure.kind for failure in failures)
    lost = sum(failure.final for failure in failures)
    invalid = sum(failure.kind not in _NOT_THE_GRADERS for failure in failures)
    judged = sum(len(group.members) for group in groups) + invalid
    share = {"grading/invalid_share": invalid / judged} if judged else {}
    counts = {"failures/lost": lost, "failures/retried": len(failures) - lost} | {f"failures/{kind}": count for kind, count in kinds.items()}
    return share | {name: float(count) for name, count in counts.items()}


def _lags(data: Sequence[Weighed], lag_of: Callable[[str], int]) -> dict[str, float]:
    lags = [lag_of(version) for row in data for version in row.segment.versions]
    found = {"lag/mean": _mean(lags), "lag/max": float(max(lags)) if lags else None}
    return _known(found) | {f"lag/tokens/{lag}": float(count) for lag, count in sorted(Counter(lags).items())}


def _looked(looked: Looked | None) -> dict[str, float]:
    if looked is None:
        return {}
    found = {
        "agreement/held_share": looked.scores.held_share,
        "agreement/scored_tokens": float(looked.scores.tokens),
        "agreement/drawn_deviation": looked.scores.deviation,
        "kl/reference": looked.kl,
        "grading/seconds_mean": _mean(looked.graded_s),
        "grading/seconds_max": max(looked.graded_s, default=None),
    }
    return _known(found)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _per(total: float | None, count: float | None) -> float | None:
    return None if total is None or not count else total / count


def _known(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None}

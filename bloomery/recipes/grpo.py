"""Group-relative policy optimisation over the public API, one step at a time: publish, sample groups, grade, train.

    with Client() as client:
        policy = train(client, problems, grade, GrpoConfig(policy=PolicyConfig(base_model="bloomery-tiny")), Path("loop.json"))

Every group is of the newest weights, so nothing is off policy: `ratio/k3` says how far sampler and trainer disagree, which is 0 where the server is
bit-exact, and another number is refused there (`PolicyConfig.agreement`). A loop that was killed goes on with the same groups when it is called again
with the same file. `async_grpo` overlaps sampling and training, and shares the parts: `rollouts` makes groups, `holding` compares them with what was
served, `advantages` decides what they teach, `policy` trains and publishes, `rl_metrics` counts.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

from bloomery.client import Client, Sampler
from bloomery.recipes.advantages import Sorted, Weighed, ZeroVariance, mean_over_tokens, sort_groups, weigh
from bloomery.recipes.checks import (
    check_finite,
    check_held_out,
    check_least,
    check_problems,
    check_prompts,
    check_reuse,
    check_rollouts,
    check_stopping,
)
from bloomery.recipes.cursors import CursorStore, Shown, alone, fingerprint
from bloomery.recipes.deadlines import check_times, times_of
from bloomery.recipes.environments import groups_by
from bloomery.recipes.failures import Losses, Reason, reasons
from bloomery.recipes.holding import Holding
from bloomery.recipes.policy import Policy, PolicyConfig, at_temperature
from bloomery.recipes.recording import Recorder, Recording, Taught
from bloomery.recipes.reference import Reference
from bloomery.recipes.rl_metrics import Looked, Seconds, round_metrics, times
from bloomery.recipes.rollouts import Environment, Grade, Group, MakesGroups, Problem, RolloutConfig, without_foreign, without_outdated
from bloomery.recipes.stopping import Stopping
from bloomery.types.errors import InvalidInput
from bloomery.types.statistics import Interval, normal_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """What is trained, how groups are made, and what they teach."""

    policy: PolicyConfig
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    groups_per_step: int = 8
    min_group_size: int = 2
    """A group with fewer members left is dropped and counted."""
    by_deviation: bool = True
    """Whether advantages are divided by their group's standard deviation."""
    zero_variance: ZeroVariance = "drop"
    """Groups rewarded alike have no advantage: `drop` leaves them out, `keep` counts their tokens in the batch's mean and pulls them to the first
    weights as the others are."""
    kl_coefficient: float = 0.0
    """How strongly the policy is held to the weights that it began with."""
    kl_rollouts: int = 4
    """So many rollouts of a step are scored by those weights to show the distance; with a coefficient all are."""
    evaluate_every: int = 0
    """Steps between two measurements on the held-out problems that `train` is given; 0 where there are none."""
    patience: int = 0
    """So many measurements in a row without a better mean reward end the loop; 0: none do."""
    min_delta: float = 0.0
    """By how much it has to be better than the best before."""
    evaluation: RolloutConfig = field(default_factory=RolloutConfig)
    """How those are put: the same seeds every time. With `reuse` an answer of before is verified."""
    concurrency: int = 8
    """Groups in the making at a time."""
    checkpoint_every: int = 0
    """Steps between two that are kept under a name (`step-N`), resumable and to be served: where one teaches nothing, the next. 0: none is."""
    max_lost_rounds: int = 3
    """So many rounds in a row of which failures left no group to compare end the loop with an error. Groups rewarded alike are not lost."""


class StepReport(NamedTuple):
    """One step, from 1, and what it showed; `version` are the weights that it ended with."""

    step: int
    version: str
    metrics: dict[str, float]
    failures: tuple[Reason, ...]
    """Why attempts at rollouts failed, the most frequent of each kind first; `metrics` has how many did."""
    kept: bool = False
    """Whether its weights are kept under a name, as `checkpoint_every` asks for."""


OnStep = Callable[[StepReport], None]


def train(
    client: Client,
    problems: Sequence[Problem],
    grade: Grade | Environment,
    config: GrpoConfig,
    path: Path | CursorStore,
    *,
    steps: int,
    held_out: Sequence[Problem] = (),
    on_step: OnStep = lambda _: None,
    recorder: Recorder | None = None,
) -> Policy:
    """Go on until `steps` steps are done, or `patience` is over, also where a loop was killed that had the same cursor at `path`: it tells its last
    step once more. With a `recorder` the server keeps what each step is trained on."""
    if type(config) is not GrpoConfig:
        raise InvalidInput(f"`config` is a {type(config).__name__}, whose other settings this loop would ignore: give a GrpoConfig", field="config")
    check(problems, grade, config, held_out)
    with alone(path), ThreadPoolExecutor(config.concurrency) as pool:
        policy = Policy.open(client, at_temperature(config.policy, config.rollouts.temperature), path, fingerprint(problems, config))
        parts = Parts(policy, problems, grade, config, held_out, max_behind=0)
        losses = Losses(config.max_lost_rounds)
        parts.reports.tell(on_step)
        with Recording(recorder, policy.run, policy.cursor.round) as recording:
            for step in range(policy.cursor.round, steps):
                if parts.reports.ended:
                    break
                numbers = range(step * config.groups_per_step, (step + 1) * config.groups_per_step)
                started = time.monotonic()
                groups = list(pool.map(parts.make, numbers))
                sampled = time.monotonic()
                kept = sort_groups(groups, config.min_group_size, config.zero_variance)
                weighed = parts.teach(kept.trained)
                shown = parts.shown(groups, kept, weighed)
                taught = mean_over_tokens(weighed)
                timed = partial(_timed, shown.metrics, started, sampled)
                data, served = [row.datum for row in taught], [row.segment for row in taught]
                if step + 1 == steps and not policy.step:
                    losses.end(kept.compared, shown.failures)
                keep_every = config.checkpoint_every if step + 1 < steps else 0
                begun = recording.of(Taught(step + 1, groups, kept, weighed))
                policy.train(data, numbers, served=served, shown=shown, timed=timed, keep_every=keep_every, begun=begun)
                parts.reports.tell(on_step)
                losses.note(kept.compared, shown.failures)
        policy.told()
    return policy


def _timed(shown: Mapping[str, float], started: float, sampled: float) -> dict[str, float]:
    ended = time.monotonic()
    return times(shown, Seconds(ended - started, sampled - started, ended - sampled, sampled - started, ended - sampled))


class Parts:
    """What both loops do in a step beside training: make groups and hold them, weigh them, and look at what came of it."""

    def __init__(
        self,
        policy: Policy,
        problems: Sequence[Problem],
        grade: Grade | Environment,
        config: GrpoConfig,
        held_out: Sequence[Problem],
        *,
        max_behind: int,
    ) -> None:
        """How many versions the weights of a token may be behind: of groups that are all of the newest, one rollout is scored by the weights that
        drew it, because the trainer's own forward is held to the others; else all are."""
        attempts, timeout_s = config.rollouts.attempts, config.rollouts.sample_timeout_s
        self._policy, self._problems, self._config, self._held_out, self._max_behind = policy, problems, config, held_out, max_behind
        self._rollouts = groups_by(lambda: policy.sampler, grade, config.rollouts)
        self._holding = Holding(policy.bar, policy.sampler_of, every=max_behind > 0, attempts=attempts, timeout_s=timeout_s)
        self._reference = Reference(policy.first, config.kl_coefficient, config.kl_rollouts, attempts=attempts, timeout_s=timeout_s)
        self._evaluation = groups_by(lambda: policy.sampler, grade, config.evaluation)
        stopping = Stopping(measure="evaluation/reward", higher_is_better=True, patience=config.patience, min_delta=config.min_delta)
        self.reports = Reports(policy, self._evaluated, stopping)

    def make(self, number: int) -> Group:
        """The group of a number, whose tokens are those that were served; threads may ask side by side."""
        policy, newest = self._policy, self._policy.newest
        made = self._rollouts.group(number, problem_of(self._problems, number, self._config.rollouts.seed))
        known = without_foreign(made, policy.knows)
        return self._holding.held(without_outdated(known, lambda version: policy.behind(version, newest) <= self._max_behind))

    def teach(self, groups: Sequence[Group]) -> list[Weighed]:
        """The segments with their advantages, held to the first weights where that is asked."""
        return self._reference.pull(weigh(groups, by_deviation=self._config.by_deviation))

    def shown(self, groups: Sequence[Group], kept: Sorted, data: Sequence[Weighed], more: Mapping[str, float] | None = None) -> Shown:
        """All that is known of a step before it is trained. Who dies then has told it to the cursor, so that also the reference is waited for."""
        looked = Looked(self._holding.take_scores(), self._reference.kl(), self._rollouts.take_times_s())
        return Shown({**round_metrics(groups, kept, data, self._policy.lag, looked), **(more or {})}, reasons(groups))

    def _evaluated(self, step: int) -> dict[str, float]:
        """How the newest weights do on problems that nobody trains on; empty between two measurements."""
        every = self._config.evaluate_every
        if not every or step % every:
            return {}
        started = time.monotonic()
        newest = self._policy.newest
        groups = groups_of(self._evaluation, self._held_out, self._config.concurrency)
        measured = measured_of([without_outdated(group, newest.__eq__) for group in groups])
        found = {"lost": float(measured.lost)} | ({"reward": measured.mean} if measured.means else {})
        if len(measured.means) > 1:
            found |= {"reward_low": measured.interval.low, "reward_high": measured.interval.high}
        return {f"evaluation/{name}": value for name, value in found.items()} | {"seconds/evaluation": time.monotonic() - started}


class Reports:
    """Reports every round once, with what is `evaluated` of it, by which the loop may end early."""

    def __init__(self, policy: Policy, evaluated: Callable[[int], dict[str, float]], stopping: Stopping) -> None:
        self._policy, self._evaluated, self._stopping = policy, evaluated, stopping

    def tell(self, on_step: OnStep) -> None:
        """Report the last round, unless that was told: a loop that is started again need not know whether it was."""
        cursor, shown = self._policy.cursor, self._policy.shown
        if shown is not None:
            found = self._evaluated(cursor.round)
            on_step(StepReport(cursor.round, cursor.version, shown.metrics | found, shown.failures, kept=0 < cursor.kept == cursor.round))
            # Behind it: of a round that is counted everything was told.
            self._policy.count(self._stopping, found)

    @property
    def ended(self) -> bool:
        """Whether the loop ends before its last step."""
        return self._stopping.ends(self._policy.cursor)


def problem_of(problems: Sequence[Problem], group: int, seed: int) -> Problem:
    """The problem of a group: every one once per epoch, in an order that depends on the seed and the epoch alone."""
    epoch, place = divmod(group, len(problems))
    return problems[random.Random(f"{seed} {epoch}").sample(range(len(problems)), len(problems))[place]]


def check(problems: Sequence[Problem], grade: Grade | Environment, config: GrpoConfig, held_out: Sequence[Problem]) -> None:
    """What would only be noticed after minutes."""
    rollouts = config.rollouts
    check_least(1, groups_per_step=config.groups_per_step, concurrency=config.concurrency, max_lost_rounds=config.max_lost_rounds)
    check_least(0, checkpoint_every=config.checkpoint_every, kl_rollouts=config.kl_rollouts)
    check_rollouts(rollouts, computed=True)
    check_rollouts(config.evaluation)
    at_temperature(config.policy, rollouts.temperature)
    if not 2 <= config.min_group_size <= rollouts.group_size:
        wanted = "two rollouts are the least that can be compared, and no group has more than were asked for"
        raise InvalidInput(f"`min_group_size` is {config.min_group_size} of {rollouts.group_size}: {wanted}", field="min_group_size")
    if config.zero_variance not in get_args(ZeroVariance):
        raise InvalidInput(f'`zero_variance` is `{config.zero_variance}`: it must be "drop" or "keep"', field="zero_variance")
    check_times(**times_of(config.policy), **times_of(config))
    # A run whose update is refused cannot go on.
    check_finite(learning_rate=config.policy.learning_rate, kl_coefficient=config.kl_coefficient)
    check_problems(problems)
    check_held_out(config.evaluate_every, held_out)
    check_stopping(config.patience, config.min_delta, config.evaluate_every)
    if rollouts.reuse:
        check_reuse(problems, config.groups_per_step, "groups_per_step")
    if not isinstance(grade, Environment):
        # An environment says itself what the model is asked.
        check_prompts(problems)


class Measured(NamedTuple):
    """Mean rewards on problems that nobody trained on, one for each; `lost` rollouts have no reward, and count nowhere."""

    means: tuple[float, ...]
    lost: int

    @property
    def mean(self) -> float:
        """Of all problems that have one; NaN where none has, which is no reward of zero."""
        return statistics.fmean(self.means) if self.means else math.nan

    @property
    def interval(self) -> Interval:
        """95 %, of the mean over such problems: draws of one problem are not independent, problems are."""
        return normal_interval(self.means)


def measure(sampler: Sampler, problems: Sequence[Problem], grade: Grade | Environment, config: RolloutConfig, *, concurrency: int = 8) -> Measured:
    """How these weights do; the same seeds every time, so that two versions are compared on the same draws."""
    return measured_of(groups_of(groups_by(lambda: sampler, grade, config), problems, concurrency))


def groups_of(rollouts: MakesGroups, problems: Sequence[Problem], concurrency: int = 8) -> list[Group]:
    """One of each problem, so many at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(rollouts.group, range(len(problems)), problems))


def measured_of(groups: Sequence[Group]) -> Measured:
    """What the groups of problems come to."""
    means = tuple(sum(member.reward for member in group.members) / len(group.members) for group in groups if group.members)
    return Measured(means, sum(failure.final for group in groups for failure in group.failures))

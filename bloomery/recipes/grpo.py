"""Group-relative policy optimisation over the public API, one step at a time: publish, sample groups, grade, train.

    with Client() as client:
        policy = train(client, problems, grade, GrpoConfig(policy=PolicyConfig(base_model="bloomery-tiny")), Path("loop.json"))

Every group is of the newest weights, so nothing is off policy: `ratio/k3` says how far sampler and trainer disagree, which is 0 where the server is
bit-exact, and another number is refused there (`PolicyConfig.agreement`). A loop that was killed goes on with the same groups when it is called again
with the same file. `async_grpo` overlaps sampling and training, and shares the parts: `rollouts` makes groups, `holding` compares them with what was
served, `advantages` decides what they teach, `policy` trains and publishes, `rl_metrics` counts.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bloomery.client import Client, Sampler
from bloomery.recipes.advantages import Weighed, mean_over_tokens, pull_to_reference, sort_groups, weigh
from bloomery.recipes.failures import Losses, Reason, reasons
from bloomery.recipes.holding import Holding
from bloomery.recipes.policy import Policy, PolicyConfig, fingerprint
from bloomery.recipes.rl_metrics import Seconds, step_metrics
from bloomery.recipes.rollouts import Environment, Grade, Group, Problem, RolloutConfig, groups_by, without_foreign
from bloomery.recipes.statistics import Interval, normal_interval
from bloomery.types.errors import InvalidInput


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
    kl_coefficient: float = 0.0
    """How strongly the policy is held to the weights that it began with."""
    concurrency: int = 8
    """Groups in the making at a time."""
    max_lost_rounds: int = 3
    """So many rounds in a row of which failures left no group to compare end the loop with an error. Groups rewarded alike are not lost."""


class StepReport(NamedTuple):
    """One step, from 1, and what it showed; `version` are the weights that it ended with."""

    step: int
    version: str
    metrics: dict[str, float]
    failures: tuple[Reason, ...]
    """Why attempts at rollouts failed, the most frequent of each kind first; `metrics` has how many did."""


OnStep = Callable[[StepReport], None]


def train(
    client: Client,
    problems: Sequence[Problem],
    grade: Grade | Environment,
    config: GrpoConfig,
    path: Path,
    *,
    steps: int,
    on_step: OnStep = lambda _: None,
) -> Policy:
    """Go on until `steps` steps are done, also where a loop was killed that had the same cursor at `path`."""
    check(problems, grade, config)
    policy = Policy.open(client, config.policy, path, fingerprint(problems, config))
    reference = policy.first if config.kl_coefficient else None
    make, holding = maker(policy, problems, grade, config, every=False)
    losses = Losses(config.max_lost_rounds)
    with ThreadPoolExecutor(config.concurrency) as pool:
        for step in range(policy.cursor.round, steps):
            numbers = range(step * config.groups_per_step, (step + 1) * config.groups_per_step)
            started = time.monotonic()
            groups = list(pool.map(make, numbers))
            sampled = time.monotonic()
            kept = sort_groups(groups, config.min_group_size)
            data = teach(kept.trained, config, reference)
            lags = {version: policy.lag(version) for version in versions_of(data)}
            taught = mean_over_tokens(data)
            trained = policy.train([row.datum for row in taught], numbers, served=[row.segment for row in taught])
            ended = time.monotonic()
            seconds = Seconds(ended - started, sampled - started, ended - sampled, sampled - started, ended - sampled)
            metrics = step_metrics(groups, kept, data, trained, lags.__getitem__, seconds, holding.looked())
            failed = reasons(groups)
            on_step(StepReport(step + 1, policy.cursor.version, metrics, failed))
            losses.note(kept.compared, failed)
    return policy


def maker(
    policy: Policy, problems: Sequence[Problem], grade: Grade | Environment, config: GrpoConfig, *, every: bool
) -> tuple[Callable[[int], Group], Holding]:
    """What makes the group of a number, and what its rollouts are held to: `every` one of them, or one of each group."""
    rollouts = groups_by(lambda: policy.sampler, grade, config.rollouts)
    attempts, timeout_s = config.rollouts.attempts, config.rollouts.sample_timeout_s
    holding = Holding(policy.bar, policy.sampler_of, every=every, attempts=attempts, timeout_s=timeout_s)

    def make(number: int) -> Group:
        made = rollouts.group(number, problem_of(problems, number, config.rollouts.seed))
        return holding.held(without_foreign(made, policy.knows))

    return make, holding


def teach(groups: Sequence[Group], config: GrpoConfig, reference: Sampler | None) -> list[Weighed]:
    """The segments with their advantages, held to the reference where that is asked."""
    data = weigh(groups, by_deviation=config.by_deviation)
    if reference is None:
        return data
    asked = [reference.score(row.segment.tokens) for row in data]
    scored = [pending.prompt_logprobs(config.rollouts.sample_timeout_s) for pending in asked]
    given = [[logprobs[place] for place in row.segment.places] for row, logprobs in zip(data, scored, strict=True)]
    return pull_to_reference(data, given, config.kl_coefficient)


def problem_of(problems: Sequence[Problem], group: int, seed: int) -> Problem:
    """The problem of a group: every one once per epoch, in an order that depends on the seed and the epoch alone."""
    epoch, place = divmod(group, len(problems))
    return problems[random.Random(f"{seed} {epoch}").sample(range(len(problems)), len(problems))[place]]


def versions_of(data: Sequence[Weighed]) -> set[str]:
    """Of all tokens."""
    return {version for row in data for version in row.segment.versions}


def check(problems: Sequence[Problem], grade: Grade | Environment, config: GrpoConfig) -> None:
    """What would only be noticed after minutes."""
    rollouts = config.rollouts
    if not 2 <= config.min_group_size <= rollouts.group_size:
        wanted = "two rollouts are the least that can be compared, and no group has more than were asked for"
        raise InvalidInput(f"`min_group_size` is {config.min_group_size} of {rollouts.group_size}: {wanted}", field="min_group_size")
    least_one = {"groups_per_step": config.groups_per_step, "concurrency": config.concurrency, "attempts": rollouts.attempts}
    least_one |= {"max_lost_rounds": config.max_lost_rounds}
    least_one |= {"max_tokens": rollouts.max_tokens, "piece_tokens": 1 if rollouts.piece_tokens is None else rollouts.piece_tokens}
    for name, value in least_one.items():
        if value < 1:
            raise InvalidInput(f"`{name}` is {value}: it must be at least 1", field=name)
    if not problems:
        raise InvalidInput("there are no problems to train on", field="problems")
    if len({problem.id for problem in problems}) < len(problems):
        raise InvalidInput("two problems have one id: their rewards could not be told apart", field="problems")
    if rollouts.reuse:
        check_reuse(problems, config)
    # An environment says itself what the model is asked.
    if empty := [problem.id for problem in problems if not problem.prompt and not isinstance(grade, Environment)]:
        raise InvalidInput(f"problem `{empty[0]}` has an empty prompt: it needs at least one token", field="problems")


def check_reuse(problems: Sequence[Problem], config: GrpoConfig) -> None:
    """One seed for a prompt is one group for it, as long as the weights are the same."""
    if config.groups_per_step > len(problems):
        same = f"with `reuse` a problem has one seed, so {config.groups_per_step} groups a step of {len(problems)} problems would be the same ones"
        raise InvalidInput(f"{same}: give more problems, or fewer groups a step", field="groups_per_step")
    prompts = [problem.prompt for problem in problems if problem.prompt]
    if len(set(prompts)) < len(prompts):
        raise InvalidInput("two problems have one prompt, and with `reuse` one seed: they would get the same rollouts", field="problems")


class Measured(NamedTuple):
    """Mean rewards on problems that nobody trained on, one for each; `lost` rollouts have no reward, and count nowhere."""

    means: tuple[float, ...]
    lost: int

    @property
    def mean(self) -> float:
        """Of all problems that have one."""
        return statistics.fmean(self.means) if self.means else 0.0

    @property
    def interval(self) -> Interval:
        """95 %, of the mean over such problems: draws of one problem are not independent, problems are."""
        return normal_interval(self.means)


def measure(sampler: Sampler, problems: Sequence[Problem], grade: Grade | Environment, config: RolloutConfig, *, concurrency: int = 8) -> Measured:
    """How these weights do; the same seeds every time, so that two versions are compared on the same draws."""
    rollouts = groups_by(lambda: sampler, grade, config)
    with ThreadPoolExecutor(concurrency) as pool:
        groups = list(pool.map(rollouts.group, range(len(problems)), problems))
    means = tuple(sum(member.reward for member in group.members) / len(group.members) for group in groups if group.members)
    return Measured(means, sum(failure.final for group in groups for failure in group.failures))

"""How a version does on problems that nobody trained on, again and again, at a fraction of the cost.

    before = evaluate(policy.sampler, held_out, grade, config)
    ...
    after = evaluate(policy.sampler, held_out, grade, config, earlier=before)

The seed of a problem follows from its prompt alone, so every version meets the same noise, and what an earlier version answered is what a later one
answers too until their weights part. `earlier` gives those answers as drafts: the server verifies them in one pass and samples on from where they go
wrong. Nothing but the time changes: `digest` is the same with and without. A canary is the same with few problems: it costs little at every version,
and `moved` says which of its answers are others now.

Rollouts to train on are better sampled with seeds of their own: with the same ones in every epoch a problem meets the same noise again, its answers
resemble those of the epoch before, and a policy learns from fewer different ones. Whoever wants that sets `RolloutConfig.reuse`.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from bloomery.client import Sampler
from bloomery.client.sampling import Sampled
from bloomery.recipes.checks import check_least
from bloomery.recipes.deadlines import Deadlines, check_times, times_of
from bloomery.recipes.rollouts import Failure, Grade, Graded, Problem, Rollout, derived_seed, judge
from bloomery.types.errors import BloomeryError, InvalidInput
from bloomery.types.statistics import Interval, normal_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """How problems are put, at temperature 1."""

    samples: int = 4
    """Of each problem."""
    max_tokens: int = 256
    stop: tuple[int, ...] | None = None
    """End tokens instead of the model's own; an empty one means none."""
    attempts: int = 3
    sample_timeout_s: float = 300.0
    grade_timeout_s: float = 30.0
    seed: int = 0
    concurrency: int = 8
    """Problems in the making at a time."""


class Answered(NamedTuple):
    """One problem: what was sampled of it, and the rewards of what could be graded."""

    problem: Problem
    sampled: Sampled | None
    """None where the server failed at it time and again."""
    rewards: tuple[float, ...]
    failures: tuple[Failure, ...]

    @property
    def continuations(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of all samples."""
        return () if self.sampled is None else tuple(sequence.tokens for sequence in self.sampled.sequences)


class Evaluated(NamedTuple):
    """What came of all problems, in their order."""

    answers: tuple[Answered, ...]

    @property
    def means(self) -> tuple[float, ...]:
        """Of the rewards of each problem that has any."""
        return tuple(statistics.fmean(each.rewards) for each in self.answers if each.rewards)

    @property
    def mean(self) -> float:
        """Of all problems that have one; NaN where none has, which is no reward of zero."""
        return statistics.fmean(self.means) if self.means else math.nan

    @property
    def interval(self) -> Interval:
        """95 %, of the mean over such problems."""
        return normal_interval(self.means)

    @property
    def lost(self) -> int:
        """Samples without a reward, which count nowhere."""
        return sum(failure.final for each in self.answers for failure in each.failures)

    @property
    def tokens(self) -> int:
        """Sampled."""
        return sum(len(tokens) for each in self.answers for tokens in each.continuations)

    @property
    def kept(self) -> int:
        """Of these, those that an earlier evaluation had right."""
        return sum(sum(each.sampled.kept) for each in self.answers if each.sampled is not None)

    @property
    def digest(self) -> str:
        """Of all tokens and the bits of their log-probabilities: two evaluations of one version have the same."""
        told = hashlib.sha256()
        for each in self.answers:
            told.update(each.problem.id.encode(errors="surrogatepass") + b"\0")
            for sequence in () if each.sampled is None else each.sampled.sequences:
                told.update(np.array([len(sequence.tokens), *sequence.tokens], "<i8").tobytes() + np.array(sequence.logprobs, "<f8").tobytes())
        return told.hexdigest()

    def moved(self, earlier: "Evaluated") -> tuple[str, ...]:
        """Ids of the problems that were answered otherwise before."""
        before = {each.problem.id: each.continuations for each in earlier.answers}
        return tuple(each.problem.id for each in self.answers if before.get(each.problem.id, each.continuations) != each.continuations)


def evaluate(sampler: Sampler, problems: Sequence[Problem], grade: Grade, config: EvaluationConfig, *, earlier: Evaluated | None = None) -> Evaluated:
    """Sample and grade every problem; `earlier` is what another version answered to some of them, under the same settings or others."""
    _check(problems, config)
    drafts = {} if earlier is None else {each.problem.prompt: each.continuations for each in earlier.answers}
    deadlines = Deadlines()
    with ThreadPoolExecutor(config.concurrency) as pool:
        return Evaluated(tuple(pool.map(lambda problem: _answer(sampler, problem, grade, config, drafts, deadlines), problems)))


def seed_of(prompt: Sequence[int], seed: int) -> int:
    """Of a prompt, whatever stands before and after it among the problems."""
    return derived_seed(seed, *prompt)


def _answer(
    sampler: Sampler,
    problem: Problem,
    grade: Grade,
    config: EvaluationConfig,
    drafts: Mapping[tuple[int, ...], Sequence[tuple[int, ...]]],
    deadlines: Deadlines,
) -> Answered:
    failures: list[Failure] = []
    sampled = _sample(sampler, problem, config, drafts.get(problem.prompt, ()), failures)
    if sampled is None:
        return Answered(problem, None, (), tuple(failures))
    rollouts = [
        Rollout(f"{problem.id}.{member}", problem, each.tokens, each.logprobs, (sampled.version,) * len(each.tokens), each.stopped)
        for member, each in enumerate(sampled.sequences)
    ]
    outcomes = deadlines.all([partial(grade, rollout) for rollout in rollouts], config.grade_timeout_s)
    judged = [judge(rollout, outcome) for rollout, outcome in zip(rollouts, outcomes, strict=True)]
    failures += [one._replace(final=True) for one in judged if isinstance(one, Failure)]
    return Answered(problem, sampled, tuple(one.reward for one in judged if isinstance(one, Graded)), tuple(failures))


def _sample(
    sampler: Sampler, problem: Problem, config: EvaluationConfig, drafts: Sequence[tuple[int, ...]], failures: list[Failure]
) -> Sampled | None:
    # Answers of other settings may be fewer, more or longer.
    fitting = [draft[: config.max_tokens] for draft in drafts[: config.samples]]
    fitting += [()] * (config.samples - len(fitting))
    for attempt in range(config.attempts):
        try:
            pending = sampler.sample(
                problem.prompt,
                max_tokens=config.max_tokens,
                seed=seed_of(problem.prompt, config.seed),
                num_samples=config.samples,
                stop=config.stop,
                drafts=fitting if any(fitting) else None,
            )
            return pending.result(config.sample_timeout_s)
        except BloomeryError as error:
            if error.category == "user":
                raise
            final = attempt + 1 == config.attempts
            failures += [Failure(f"{problem.id}.{member}", "sampling", error.message, final) for member in range(config.samples)]
    return None


def _check(problems: Sequence[Problem], config: EvaluationConfig) -> None:
    check_least(1, samples=config.samples, max_tokens=config.max_tokens, attempts=config.attempts, concurrency=config.concurrency)
    check_times(**times_of(config))
    if len({problem.id for problem in problems}) < len(problems):
        raise InvalidInput("two problems have one id: `moved` could not tell them apart", field="problems")
    if len({problem.prompt for problem in problems}) < len(problems):
        raise InvalidInput("two problems have one prompt, and so one seed: they would get the same answers", field="problems")

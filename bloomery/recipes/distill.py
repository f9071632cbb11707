"""Distillation over the public API: a student learns to answer prompts as a teacher does, one step at a time.

On policy the student answers, the teacher scores every token of it, and a token is worth how much likelier the teacher has it: the gradient is that
of the distance KL(student || teacher), token by token (Agarwal et al. 2024, arXiv 2306.13649; Gu et al. 2024, arXiv 2306.08543). Otherwise the
teacher answers, and the student learns its answers word for word. Steps, cursor and what is told are those of `policy`, so that a loop which was
killed goes on as `grpo` does.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from bloomery.client import Client, Sampler
from bloomery.recipes.advantages import Sorted, Weighed, mean_over_tokens, pull_to_reference
from bloomery.recipes.agreement import k3
from bloomery.recipes.attempts import patiently
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
from bloomery.recipes.failures import Losses, reasons
from bloomery.recipes.grpo import OnStep, Reports, problem_of
from bloomery.recipes.holding import Holding
from bloomery.recipes.policy import Policy, PolicyConfig, at_temperature
from bloomery.recipes.recording import Recorder, Recording, Taught
from bloomery.recipes.rl_metrics import sampled_metrics
from bloomery.recipes.rollouts import Group, Problem, RolloutConfig, Rollouts, without_foreign, without_outdated
from bloomery.recipes.segments import Segment
from bloomery.recipes.stopping import Stopping
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum
from bloomery.types.statistics import normal_interval

Mode = Literal["on_policy", "teacher_answers"]
DISTANCE: Final = "kl/teacher"
"""Nats a token of the student's answers, from its distribution to the teacher's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """`rollouts.group_size` answers of each prompt."""

    policy: PolicyConfig
    teacher: str
    """A base model or a version."""
    mode: Mode = "on_policy"
    rollouts: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=4))
    prompts_per_step: int = 8
    evaluate_every: int = 0
    """Steps between two measurements of the distance on held-out prompts; 0 where there are none."""
    patience: int = 0
    """So many measurements in a row without a better distance end the loop; 0: none do."""
    min_delta: float = 0.0
    """By how much it has to be better than the best before."""
    evaluation: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=4))
    concurrency: int = 8
    checkpoint_every: int = 0
    """Steps between two that are kept under a name (`step-N`); 0: none is."""
    max_lost_rounds: int = 3


def train(
    client: Client,
    problems: Sequence[Problem],
    config: DistillConfig,
    path: Path | CursorStore,
    *,
    steps: int,
    held_out: Sequence[Problem] = (),
    on_step: OnStep = lambda _: None,
    recorder: Recorder | None = None,
) -> Policy:
    """Go on until `steps` steps are done, or `patience` is over, also where a loop was killed that had the same cursor at `path`: it tells its last
    step once more. With a `recorder` the server keeps the student's answers that each step is trained on; a teacher's are not recorded."""
    check(problems, config, held_out)
    teacher = client.sampler(config.teacher)
    with alone(path), ThreadPoolExecutor(config.concurrency) as pool:
        policy = Policy.open(client, losing(config), path, fingerprint(problems, config))
        parts = _Parts(policy, teacher, problems, config, held_out)
        losses = Losses(config.max_lost_rounds)
        parts.reports.tell(on_step)
        with Recording(recorder if config.mode == "on_policy" else None, policy.run, policy.cursor.round) as recording:
            for step in range(policy.cursor.round, steps):
                if parts.reports.ended:
                    break
                numbers, started = range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step), time.monotonic()
                groups = list(pool.map(parts.make, numbers))
                lesson = parts.teach(groups)
                shown, timed = Shown({**sampled_metrics(groups), **lesson.shown}, reasons(groups)), partial(_timed, started, time.monotonic())
                answered = tuple(group for group in groups if group.members)
                if step + 1 == steps and not policy.step:
                    losses.end(len(answered), shown.failures)
                keep_every = config.checkpoint_every if step + 1 < steps else 0
                kept = Sorted(answered, (), tuple(group for group in groups if not group.members))
                begun = recording.of(Taught(step + 1, groups, kept, lesson.weighed, rewarded=False))
                policy.train(lesson.data, numbers, served=lesson.served, shown=shown, timed=timed, keep_every=keep_every, begun=begun)
                parts.reports.tell(on_step)
                losses.note(len(answered), shown.failures)
        policy.told()
    return policy


def losing(config: DistillConfig) -> PolicyConfig:
    """With the loss of its mode: of the student's answers at their temperature; those of the teacher are learnt as any others are."""
    if config.mode == "on_policy":
        return at_temperature(config.policy, config.rollouts.temperature)
    return replace(config.policy, loss="cross_entropy", loss_config=())


def worth(segments: Sequence[Segment], teacher: Sequence[Sequence[float]]) -> list[Weighed]:
    """The student's answers, each token with how much likelier the teacher has it than the student, less the mean of that over all of them.

    `teacher` are the teacher's log-probabilities [S] of each segment's sampled tokens. With p and q those of student and teacher, the gradient of
    KL(p || q) of a next token is the mean over p of (log p - log q) times that of log p, whatever constant is taken off the factor.
    """
    blank = [Weighed(segment, np.zeros(len(segment.places), dtype=np.float32)) for segment in segments]
    return pull_to_reference(blank, teacher, 1.0)


def distance(sampled: Sequence[Sequence[float]], teacher: Sequence[Sequence[float]]) -> float:
    """Of the student to the teacher in nats a token, from the log-probabilities [S] that both have of each segment's sampled tokens."""
    return k3(np.concatenate([np.asarray(theirs) - np.asarray(ours) for ours, theirs in zip(sampled, teacher, strict=True)]))


def distances(student: Sampler, teacher: Sampler, problems: Sequence[Problem], config: RolloutConfig, concurrency: int = 8) -> list[float | None]:
    """Of each problem, over `group_size` answers of the student with the same seeds every time; None where none came."""
    made = Rollouts(lambda: student, _ungraded, config)

    def of(number: int, problem: Problem) -> float | None:
        segments = _segments([made.group(number, problem)])
        return distance([each.logprobs for each in segments], scored(teacher, segments, config)) if segments else None

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(of, range(len(problems)), problems))


def scored(teacher: Sampler, segments: Sequence[Segment], config: RolloutConfig) -> list[list[float]]:
    """The teacher's log-probabilities of the tokens that were sampled, at the temperature at which they were."""

    def score() -> list[tuple[float, ...]]:
        asked = [teacher.score(segment.tokens, temperature=segment.temperature) for segment in segments]
        return [pending.prompt_logprobs(config.sample_timeout_s) for pending in asked]

    whole = patiently(config.attempts, score)
    return [[logprobs[place] for place in segment.places] for segment, logprobs in zip(segments, whole, strict=True)]


class _Lesson(NamedTuple):
    """What a step trains on, and what it shows."""

    data: Sequence[Datum]
    served: Sequence[Segment] = ()
    """What of it the student served."""
    weighed: Sequence[Weighed] = ()
    """All that the student served, and what it is worth."""
    shown: Mapping[str, float] = MappingProxyType({})


class _Parts:
    """What a step does beside training."""

    def __init__(self, policy: Policy, teacher: Sampler, problems: Sequence[Problem], config: DistillConfig, held_out: Sequence[Problem]) -> None:
        rollouts = config.rollouts
        self._policy, self._teacher, self._problems, self._config, self._held_out = policy, teacher, problems, config, held_out
        measure = f"evaluation/{DISTANCE}"
        stopping = Stopping(measure=measure, higher_is_better=False, patience=config.patience, min_delta=config.min_delta)
        self.reports = Reports(policy, self._evaluated, stopping)
        answers: Callable[[], Sampler] = (lambda: policy.sampler) if config.mode == "on_policy" else (lambda: teacher)
        self._rollouts = Rollouts(answers, _ungraded, rollouts)
        self._holding = Holding(policy.bar, policy.sampler_of, every=False, attempts=rollouts.attempts, timeout_s=rollouts.sample_timeout_s)

    def make(self, number: int) -> Group:
        """The group of a number; threads may ask side by side."""
        policy, newest = self._policy, self._policy.newest
        made = self._rollouts.group(number, problem_of(self._problems, number, self._config.rollouts.seed))
        if self._config.mode == "teacher_answers":
            return made
        return self._holding.held(without_outdated(without_foreign(made, policy.knows), newest.__eq__))

    def teach(self, groups: Sequence[Group]) -> _Lesson:
        """Of what the groups answered."""
        segments = _segments(groups)
        if not segments:
            return _Lesson(())
        if self._config.mode == "teacher_answers":
            return _Lesson(learnt(segments))
        theirs = scored(self._teacher, segments, self._config.rollouts)
        weighed = worth(segments, theirs)
        taught = mean_over_tokens(weighed)
        shown = {
            DISTANCE: distance([each.logprobs for each in segments], theirs),
            "agreement/scored_tokens": float(self._holding.take_scores().tokens),
        }
        return _Lesson([row.datum for row in taught], [row.segment for row in taught], weighed, shown)

    def _evaluated(self, step: int) -> dict[str, float]:
        config = self._config
        if not config.evaluate_every or step % config.evaluate_every:
            return {}
        found = distances(self._policy.sampler, self._teacher, self._held_out, config.evaluation, config.concurrency)
        known = [each for each in found if each is not None]
        if not known:
            return {}
        mean = {f"evaluation/{DISTANCE}": statistics.fmean(known)}
        if len(known) < 2:
            return mean
        low, high = normal_interval(known)
        return mean | {f"evaluation/{DISTANCE}_low": low, f"evaluation/{DISTANCE}_high": high}


def learnt(segments: Sequence[Segment]) -> list[Datum]:
    """Answers to be learnt word for word, as a mean over all of their tokens."""
    weight = np.float32(1.0 / sum(len(segment.places) for segment in segments))
    return [_learnt(segment, weight) for segment in segments]


def _learnt(segment: Segment, weight: np.float32) -> Datum:
    weights = np.zeros(len(segment.tokens) - 1, dtype=np.float32)
    weights[np.asarray(segment.places) - 1] = weight
    targets = np.asarray(segment.tokens[1:], dtype=np.int64)
    return Datum(
        tokens=Array.of(np.asarray(segment.tokens[:-1], dtype=np.int32)), inputs={"target_tokens": Array.of(targets), "weights": Array.of(weights)}
    )


def check(problems: Sequence[Problem], config: DistillConfig, held_out: Sequence[Problem]) -> None:
    """What would only be noticed after minutes."""
    policy = config.policy
    if config.mode not in get_args(Mode):
        raise InvalidInput(f'`mode` is `{config.mode}`: it must be "on_policy" or "teacher_answers"', field="mode")
    if config.mode == "teacher_answers" and (policy.loss_config or policy.loss not in ("importance_sampling", "cross_entropy")):
        raise InvalidInput(
            f"`loss` is `{policy.loss}`, and a teacher's answers are learnt by `cross_entropy`: leave it and its options out", field="loss"
        )
    check_least(1, prompts_per_step=config.prompts_per_step, concurrency=config.concurrency, max_lost_rounds=config.max_lost_rounds)
    check_least(0, checkpoint_every=config.checkpoint_every)
    # Both are compared with the teacher, at their temperature.
    check_rollouts(config.rollouts, computed=True)
    check_rollouts(config.evaluation, computed=True)
    losing(config)
    check_times(**times_of(config.policy))
    check_finite(learning_rate=policy.learning_rate)
    check_problems(problems)
    check_prompts(problems)
    check_held_out(config.evaluate_every, held_out)
    check_stopping(config.patience, config.min_delta, config.evaluate_every)
    if config.rollouts.reuse:
        check_reuse(problems, config.prompts_per_step, "prompts_per_step")


def _segments(groups: Sequence[Group]) -> list[Segment]:
    return [segment for group in groups for member in group.members for segment in member.rollout.segments]


def _ungraded(_: object) -> float:
    return 0.0


def _timed(started: float, sampled: float) -> dict[str, float]:
    ended = time.monotonic()
    return {"seconds/step": ended - started, "seconds/rollouts": sampled - started, "seconds/training": ended - sampled}

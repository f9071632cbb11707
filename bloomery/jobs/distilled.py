"""Distillation as a job: prompts of a data set, a teacher that this server has, and the loop of `recipes/distill`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bloomery.client import Sampler
from bloomery.jobs.comparison import Both, answers_of, paired
from bloomery.jobs.looping import looped, policy_config, recorder_of, stopping_config
from bloomery.jobs.rows import Question, problems, prompt_words, rows_of
from bloomery.jobs.samples import LOOKED_AT, answered, telling
from bloomery.jobs.work import Work
from bloomery.recipes import distill
from bloomery.recipes.distill import DISTANCE, DistillConfig
from bloomery.recipes.rollouts import Problem, RolloutConfig
from bloomery.types.jobs import Compared, JobResult, JobSpec
from bloomery.types.methods import Distillation
from bloomery.types.resources import RunOptions
from bloomery.types.statistics import mean_of

_SAMPLES: Final = 4
"""Answers of each held-out prompt, by both models."""


def train(work: Work) -> JobResult:
    """Train, publish, compare. Begun again after any death, it goes on with the same prompts."""
    spec, wanted, method = work.spec, work.spec.evaluation, work.spec.method
    assert isinstance(method, Distillation)
    every = wanted.every
    given = problems(rows_of(work.client, spec, spec.data.train), work.tokenizer, spec.room, spec.data.train)
    held_out = problems(rows_of(work.client, spec, wanted.split, wanted.rows), work.tokenizer, spec.room, wanted.split)
    work.reporter.note(f"{len(given)} prompts to train on, {len(held_out)} held out", key="rows")
    config = replace(distill_config(spec, work.run_options, work.request), evaluate_every=every)
    teacher = work.client.sampler(config.teacher)

    def look(sampler: Sampler) -> dict[str, float]:
        found = [each for each in distill.distances(sampler, teacher, held_out, config.evaluation) if each is not None]
        return {DISTANCE: mean_of(found).value} if found else {}

    loop = looped(
        work,
        method.steps,
        lambda cursor, stepped: distill.train(
            work.client, given, config, cursor, steps=method.steps, held_out=held_out if every else (), on_step=stepped, recorder=recorder_of(work)
        ),
        look,
        stopped="the distance to the teacher fell no more",
    )
    both = Both(work.client.sampler(loop.first), work.client.sampler(loop.published.version))
    words = prompt_words(held_out)
    asked = [Question(problem.prompt, words[problem.id]) for problem in held_out[: min(wanted.answers, LOOKED_AT)]]
    samples = telling(answered(asked, answers_of(both, asked, work.tokenizer, method.max_tokens)))
    return loop.published.result(compare_distances(work, both, held_out, config), samples, loop.first)


def compare_distances(work: Work, both: Both, held_out: Sequence[Problem], config: DistillConfig) -> list[Compared]:
    """How far each of both is from the teacher on held-out prompts, in nats a token of its own answers."""
    teacher = work.client.sampler(config.teacher)
    measured = [distill.distances(student, teacher, held_out, config.evaluation) for student in both]
    known = [(old, new) for old, new in zip(*measured, strict=True) if old is not None and new is not None]
    if lost := len(held_out) - len(known):
        work.reporter.note(f"{lost} held-out prompts got no answer, and are left out", level="warning", key="lost")
    if not known:
        return []
    return [paired(DISTANCE, [old for old, _ in known], [new for _, new in known], higher_is_better=False)]


def distill_config(spec: JobSpec, run_options: RunOptions, request: str) -> DistillConfig:
    """The recipe's settings of a resolved spec."""
    method = spec.method
    assert isinstance(method, Distillation)
    assert method.teacher_version is not None
    assert spec.seed is not None
    return DistillConfig(
        policy=policy_config(spec, method.optimizer, method.steps, run_options, request),
        teacher=method.teacher_version,
        mode=method.mode,
        rollouts=RolloutConfig(group_size=method.samples, max_tokens=method.max_tokens, seed=spec.seed),
        evaluation=RolloutConfig(group_size=_SAMPLES, max_tokens=method.max_tokens),
        prompts_per_step=method.prompts_per_step,
        checkpoint_every=spec.checkpoint_every,
        **stopping_config(spec, method.early_stopping),
    )

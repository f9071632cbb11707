"""Supervised fine-tuning as a job: rows of a data set, the recipe of `recipes/sft`, and what held-out rows say in the end."""

from itertools import accumulate

from bloomery.jobs.comparison import Both, answers_of, compare_examples, look_at_examples
from bloomery.jobs.rows import examples, questions, rows_of
from bloomery.jobs.samples import answered, telling
from bloomery.jobs.served import Served
from bloomery.jobs.work import Work, adam_config, pace_of
from bloomery.recipes.sft import SftConfig, Supervised, datum, fine_tune
from bloomery.types.jobs import JobResult, JobSpec
from bloomery.types.methods import Supervised as Method


def train(work: Work) -> JobResult:
    """Train, publish, compare. Begun again after any death, it does what is left."""
    spec, wanted = work.spec, work.spec.evaluation
    given, held = rows_of(work.client, spec, spec.data.train), rows_of(work.client, spec, wanted.split, wanted.rows)
    data = [datum(*each) for each in examples(given, work.tokenizer, spec.room, spec.data.train)]
    held_out = examples(held, work.tokenizer, spec.room, wanted.split)
    work.reporter.note(f"{len(data)} rows to train on, {len(held_out)} held out", key="rows")
    run, before = work.begin()
    config = sft_config(spec)
    planned = Supervised(run, data, config).tokens
    told = [0, *accumulate(planned)]
    asked = questions(held[: wanted.answers], work.tokenizer)
    with Served(work, lambda sampler: look_at_examples(sampler, asked, work.tokenizer, wanted.max_tokens)) as served:
        report = fine_tune(
            run,
            data,
            config,
            lambda done, steps, values: work.measured(done, steps, values, tokens=told[done]),
            held_out=[datum(*each) for each in held_out],
            on_kept=work.note_kept,
            on_published=served.look,
        )
        published = work.publish(run, done=report.steps, planned=len(planned))
    both = Both(work.client.sampler(before), work.client.sampler(published.version))
    answers = answers_of(both, asked, work.tokenizer, wanted.max_tokens)
    return published.result(compare_examples(both, held_out, asked, answers), telling(answered(asked, answers)), before)


def sft_config(spec: JobSpec) -> SftConfig:
    """The recipe's settings of a resolved spec."""
    method = spec.method
    assert isinstance(method, Method)
    assert spec.seed is not None
    return SftConfig(
        epochs=method.batches.epochs,
        adam=adam_config(method.optimizer),
        batch_size=method.batches.rows or 1,
        batch_tokens=method.batches.tokens,
        seed=spec.seed,
        pace=pace_of(spec, method.early_stopping),
    )

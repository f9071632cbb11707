"""Preference optimisation as a job, direct or by odds ratios: pairs of a data set, and the recipe of `recipes/preference`."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Final

from bloomery.client import Sampler
from bloomery.jobs.comparison import Both, answers_of, compare_pairs, look_at_pairs, sum_logprob
from bloomery.jobs.rows import Preference, pair_questions, pairs, rows_of
from bloomery.jobs.samples import LOOKED_AT, answered, telling
from bloomery.jobs.served import Served
from bloomery.jobs.work import Work, adam_config, pace_of
from bloomery.recipes.preference import Dpo, Orpo, Pair, PairLoss, PreferenceConfig, Preferences, optimise
from bloomery.recipes.sft import datum
from bloomery.recipes.steps import EVALUATED
from bloomery.types.jobs import JobResult, JobSpec
from bloomery.types.methods import DirectPreference, OddsRatioPreference

_CONCURRENCY: Final = 16


def train(work: Work) -> JobResult:
    """Train, publish, compare. Begun again after any death, it does what is left."""
    spec, wanted = work.spec, work.spec.evaluation
    given = pairs(rows_of(work.client, spec, spec.data.train), work.tokenizer, spec.room, spec.data.train)
    held = rows_of(work.client, spec, wanted.split, wanted.rows)
    held_out = pairs(held, work.tokenizer, spec.room, wanted.split)
    work.reporter.note(f"{len(given)} pairs to train on, {len(held_out)} held out", key="rows")
    run, before = work.begin()
    config = preference_config(spec)
    reference = work.client.sampler(before) if isinstance(spec.method, DirectPreference) else None
    data = with_reference(given, reference)
    planned = Preferences(run, data, config).tokens
    told = [0, *accumulate(planned)]
    sides = [each.rendered for each in held_out]
    with Served(work, lambda sampler: look_at_pairs(sampler, sides)) as served:
        done = optimise(
            run,
            data,
            config,
            lambda done, steps, values: work.measured(done, steps, values, tokens=told[done]),
            held_out=with_reference(held_out, reference),
            on_kept=work.note_kept,
            on_published=served.look,
            evaluated=work.told(EVALUATED),
        )
        published = work.publish(run, done=done, planned=len(planned))
    both = Both(work.client.sampler(before), work.client.sampler(published.version))
    asked = pair_questions(held, held_out, work.tokenizer)[: min(wanted.answers, LOOKED_AT)]
    samples = telling(answered(asked, answers_of(both, asked, work.tokenizer, wanted.max_tokens)))
    return published.result(compare_pairs(both, sides), samples, before)


def with_reference(rows: Sequence[Preference], reference: Sampler | None) -> list[Pair]:
    """As the recipe takes them; scored by what is served of the weights that training is held to, if there are such."""
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        answers = [answer for row in rows for answer in row.rendered]
        scored = [0.0] * len(answers) if reference is None else list(pool.map(lambda answer: sum_logprob(reference, answer), answers))
    data = [datum(answer.tokens, answer.weights) for answer in answers]
    return [
        Pair(data[place], data[place + 1], (scored[place], scored[place + 1]), row.weight)
        for place, row in zip(range(0, len(data), 2), rows, strict=True)
    ]


def preference_config(spec: JobSpec) -> PreferenceConfig:
    """The recipe's settings of a resolved spec."""
    method = spec.method
    assert isinstance(method, DirectPreference | OddsRatioPreference)
    assert spec.seed is not None
    return PreferenceConfig(
        epochs=method.batches.epochs,
        loss=_loss(method),
        adam=adam_config(method.optimizer),
        batch_pairs=method.batches.rows or 1,
        batch_tokens=method.batches.tokens,
        seed=spec.seed,
        pace=pace_of(spec, method.early_stopping),
    )


def _loss(method: DirectPreference | OddsRatioPreference) -> PairLoss:
    if isinstance(method, DirectPreference):
        return Dpo(beta=method.beta, label_smoothing=method.label_smoothing)
    return Orpo(weight=method.odds_weight)

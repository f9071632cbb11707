"""The figures of an evaluation, from its answers and scores. Pure functions.

A row is the unit of every mean: several answers to it count as their mean, and differences are of two models on one row. What has no score is in no
mean and in `invalid`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, NamedTuple

from bloomery.types.evaluations import Difference, EvaluationResult, GraderSummary, Measured, ModelSummary
from bloomery.types.resources import Price
from bloomery.types.statistics import score_of

NO_ANSWER: Final = "no_answer"
FREE: Final = Price(prompt_usd_per_mtok=0.0, completion_usd_per_mtok=0.0)
_THOUSAND: Final = 1000


class AnswerFigures(NamedTuple):
    """What is counted of one answer."""

    row: int
    model: int
    number: int
    given: bool
    latency_s: float
    prompt_tokens: int
    completion_tokens: int


class ScoreFigures(NamedTuple):
    """What is counted of what one grader said of one answer, by its number."""

    number: int
    grader: int
    score: float | None
    passed: bool | None
    failure: str | None


class Named(NamedTuple):
    """A model as results show it; `price` None: what its tokens cost is not known."""

    name: str
    version: str | None
    price: Price | None


class GraderName(NamedTuple):
    """A grader as results show it."""

    label: str
    hash: str


@dataclass
class _Tally:
    """Of one model and one grader."""

    scores: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By row."""
    passes: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """The same of whether they pass, where the grader says that."""
    failures: Counter[str] = field(default_factory=Counter)

    def take(self, row: int, said: ScoreFigures) -> None:
        if said.score is None:
            self.failures[said.failure or NO_ANSWER] += 1
            return
        self.scores[row].append(said.score)
        if said.passed is not None:
            self.passes[row].append(said.passed)

    @property
    def means(self) -> dict[int, float]:
        """Of each row with a score."""
        return {row: math.fsum(scores) / len(scores) for row, scores in sorted(self.scores.items())}

    @property
    def share(self) -> Measured | None:
        """Of answers that pass, by row: several to one are no independent tries."""
        shares = [sum(of_row) / len(of_row) for of_row in self.passes.values()]
        return Measured.of(score_of(shares)) if shares else None


def summarise(
    models: Sequence[Named], graders: Sequence[GraderName], answers: Sequence[AnswerFigures], scores: Sequence[ScoreFigures]
) -> EvaluationResult:
    """What it all comes to."""
    tallies = {(model, grader): _Tally() for model in range(len(models)) for grader in range(len(graders))}
    by_number = {answer.number: answer for answer in answers}
    for said in scores:
        answer = by_number[said.number]
        tallies[answer.model, said.grader].take(answer.row, said)
    for answer in answers:
        if not answer.given:
            for grader in range(len(graders)):
                tallies[answer.model, grader].failures[NO_ANSWER] += 1
    of_models: dict[int, list[AnswerFigures]] = {place: [] for place in range(len(models))}
    for answer in answers:
        of_models[answer.model].append(answer)
    summaries = [
        _summary(named, of_models[place], [tallies[place, grader] for grader in range(len(graders))], graders) for place, named in enumerate(models)
    ]
    pairs = [
        Difference.between(name.label, (models[one].name, tallies[one, grader].means), (models[other].name, tallies[other, grader].means))
        for grader, name in enumerate(graders)
        for one, other in combinations(range(len(models)), 2)
    ]
    return EvaluationResult(models=summaries, differences=pairs)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The least value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _summary(named: Named, answers: Sequence[AnswerFigures], tallies: Sequence[_Tally], graders: Sequence[GraderName]) -> ModelSummary:
    given = [answer for answer in answers if answer.given]
    latencies = [answer.latency_s for answer in given]
    prompt_tokens, completion_tokens = sum(each.prompt_tokens for each in given), sum(each.completion_tokens for each in given)
    return ModelSummary(
        model=named.name,
        version=named.version,
        answers=len(given),
        failed=len(answers) - len(given),
        latency_p50_s=percentile(latencies, 0.5),
        latency_p95_s=percentile(latencies, 0.95),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        seconds=math.fsum(latencies),
        usd_per_1000=_cost(named.price, prompt_tokens, completion_tokens, len(given)),
        graders=[_graded(grader, tally) for grader, tally in zip(graders, tallies, strict=True)],
    )


def _cost(price: Price | None, prompt_tokens: int, completion_tokens: int, answers: int) -> float | None:
    if price is None or not answers:
        return None
    return price.of(prompt_tokens, completion_tokens) / answers * _THOUSAND


def _graded(grader: GraderName, tally: _Tally) -> GraderSummary:
    means, invalid = list(tally.means.values()), tally.failures.total()
    total = invalid + sum(map(len, tally.scores.values()))
    return GraderSummary(
        grader=grader.label,
        hash=grader.hash,
        rows=len(means),
        mean=Measured.of(score_of(means)) if means else None,
        passed=tally.share,
        invalid=invalid,
        invalid_rate=invalid / total if total else 0.0,
        failures=dict(sorted(tally.failures.items())),
    )

"""What came of a job beside what it began with: the same held-out rows, scored and answered by what is served, and compared row by row."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from bloomery.client import Sampler
from bloomery.jobs.rows import Question
from bloomery.render import ChatTokenizer, Rendered
from bloomery.render.rows import RenderedPair
from bloomery.types.jobs import Compared
from bloomery.types.statistics import difference_of, mean_of, score_of

_CONCURRENCY: Final = 16

Row = TypeVar("Row")
Found = TypeVar("Found")


class Both(NamedTuple):
    """The weights that a job began with, and those that came of it."""

    before: Sampler
    after: Sampler


class Answers(NamedTuple):
    """What both say to the same questions, the likeliest token at a time."""

    before: list[str]
    after: list[str]


def answers_of(both: Both, asked: Sequence[Question], tokenizer: ChatTokenizer, max_tokens: int) -> Answers:
    """Of each question one."""
    return Answers(*(_greedy(sampler, asked, tokenizer, max_tokens) for sampler in both))


def compare_examples(both: Both, rows: Sequence[Rendered], answered: Sequence[Question], answers: Answers) -> list[Compared]:
    """The loss per trained token of all rows, and of some whether the greedy answer is the row's own, word for word."""
    compared = list[Compared]()
    if rows:
        before, after = (_each(sampler, rows, lambda sampler, row: -mean_logprob(sampler, row)) for sampler in both)
        compared.append(paired("loss", before, after, higher_is_better=False))
    if answered:
        compared.append(paired("exact", *(_exact(answered, said) for said in answers), higher_is_better=True))
    return compared


def compare_pairs(both: Both, rows: Sequence[RenderedPair]) -> list[Compared]:
    """How often the preferred answer is the likelier one per token, and by how much."""
    if not rows:
        return []
    before, after = (_each(sampler, rows, _margin) for sampler in both)
    prefers = paired("prefers", _positive(before), _positive(after), higher_is_better=True)
    return [prefers, paired("margin", before, after, higher_is_better=True)]


def look_at_examples(sampler: Sampler, answered: Sequence[Question], tokenizer: ChatTokenizer, max_tokens: int) -> dict[str, float]:
    """What `compare_examples` says of answers, of one version alone."""
    return {"exact": mean_of(_exact(answered, _greedy(sampler, answered, tokenizer, max_tokens))).value}


def look_at_pairs(sampler: Sampler, rows: Sequence[RenderedPair]) -> dict[str, float]:
    """What `compare_pairs` says, of one version alone."""
    margins = _each(sampler, rows, _margin)
    return {"prefers": mean_of(_positive(margins)).value, "margin": mean_of(margins).value}


def paired(name: str, before: Sequence[float], after: Sequence[float], *, higher_is_better: bool) -> Compared:
    """Means and 95 % intervals, of the differences row by row too."""
    old, new, difference = score_of(before), score_of(after), difference_of(before, after)
    return Compared(
        name=name,
        rows=len(before),
        before=old.value,
        after=new.value,
        before_interval=old.interval,
        after_interval=new.interval,
        difference=difference.value,
        difference_interval=difference.interval,
        higher_is_better=higher_is_better,
    )


def mean_logprob(sampler: Sampler, rendered: Rendered) -> float:
    """Of the tokens that carry loss, by their weights, in nats a token."""
    weights = rendered.weights[1:]
    return sum_logprob(sampler, rendered) / sum(weights)


def sum_logprob(sampler: Sampler, rendered: Rendered) -> float:
    """The weighted sum over the same tokens, in nats."""
    logprobs = sampler.score(rendered.tokens).prompt_logprobs()
    # The first token is predicted by none.
    return sum(weight * logprob for weight, logprob in zip(rendered.weights[1:], logprobs[1:], strict=True))


def _each(sampler: Sampler, rows: Sequence[Row], find: Callable[[Sampler, Row], Found]) -> list[Found]:
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        return list(pool.map(lambda row: find(sampler, row), rows))


def _margin(sampler: Sampler, row: RenderedPair) -> float:
    return mean_logprob(sampler, row.preferred) - mean_logprob(sampler, row.rejected)


def _positive(margins: Sequence[float]) -> list[float]:
    return [float(margin > 0) for margin in margins]


def _greedy(sampler: Sampler, asked: Sequence[Question], tokenizer: ChatTokenizer, max_tokens: int) -> list[str]:
    def answer(sampler: Sampler, question: Question) -> str:
        sequence = sampler.sample(question.prompt, max_tokens=max_tokens, seed=0, temperature=0.0).result().sequences[0]
        return said(sequence.tokens, tokenizer)

    return _each(sampler, asked, answer)


def said(tokens: Sequence[int], tokenizer: ChatTokenizer) -> str:
    """An answer as its reader has it."""
    return tokenizer.decode([token for token in tokens if token not in tokenizer.end_tokens])


def _exact(answered: Sequence[Question], answers: Sequence[str]) -> list[float]:
    return [float(answer.strip() == (question.words.reference or "").strip()) for question, answer in zip(answered, answers, strict=True)]

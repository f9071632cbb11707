"""Rows of a data set as a method takes them; those that the model cannot take are named before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple, TypeVar

from bloomery.client import Client
from bloomery.recipes.rollouts import Problem
from bloomery.render import ChatTokenizer, Rendered
from bloomery.render.rows import RenderedPair, plain_message, plain_tools, row_examples, row_pair, row_prompt
from bloomery.types.datasets import AnyRow, ChatRow, CompletionRow, PreferenceRow, PromptRow
from bloomery.types.errors import InvalidInput
from bloomery.types.jobs import JobSpec
from bloomery.types.resources import Split

_NAMED: Final = 10

Made = TypeVar("Made")


class Words(NamedTuple):
    """A held-out row as people read it: its place in the split, what it asks last, and its own answers as the model's template writes them."""

    row: int
    asked: str
    reference: str | None = None
    rejected: str | None = None


class Question(NamedTuple):
    """What asks for the answer of a row, as tokens and in words."""

    prompt: Sequence[int]
    words: Words


class Preference(NamedTuple):
    """A pair of answers, rendered, and how much it counts beside others."""

    rendered: RenderedPair
    weight: float


def rows_of(client: Client, spec: JobSpec, split: Split, limit: int | None = None) -> list[AnyRow]:
    """Of the version that the job trains on."""
    assert spec.data.version is not None
    return client.datasets.rows(spec.data.dataset, spec.data.version, split, limit=limit)


def examples(rows: Sequence[AnyRow], tokenizer: ChatTokenizer, room: int, split: str) -> list[Rendered]:
    """For supervised fine-tuning; several of a row where the template rewrites earlier turns."""

    def of(row: AnyRow) -> list[Rendered]:
        return row_examples(tokenizer, _supervised(row))

    return [each for made in _all(rows, of, lambda made: [each.tokens for each in made], room, split) for each in made]


def questions(rows: Sequence[AnyRow], tokenizer: ChatTokenizer) -> list[Question]:
    """One of each row that is learnt from: its last answer, whatever came before it."""
    return [_question(place, _supervised(row), tokenizer) for place, row in enumerate(rows)]


def pair_questions(rows: Sequence[AnyRow], made: Sequence[Preference], tokenizer: ChatTokenizer) -> list[Question]:
    """What asks for both answers of each pair, `made` of its row; nothing asks where there is no prompt."""
    found = list[Question]()
    for place, (row, pair) in enumerate(zip(rows, made, strict=True)):
        assert isinstance(row, PreferenceRow)
        tokens, weights = pair.rendered.preferred
        prompt = [token for token, _ in takewhile(lambda each: not each[1], zip(tokens, weights, strict=True))]
        asked = last_asked(row.messages) if row.prompt is None else row.prompt
        if prompt:
            found.append(Question(prompt, Words(place, asked, *(_answer_of(side, tokenizer) for side in pair.rendered))))
    return found


def prompt_words(made: Sequence[Problem]) -> dict[str, Words]:
    """Of all problems of a split, by their ids."""
    return {problem.id: Words(place, last_asked(problem.data.messages)) for place, problem in enumerate(made)}


def last_asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the last message says."""
    return str(messages[-1].get("content") or "") if messages else ""


def pairs(rows: Sequence[AnyRow], tokenizer: ChatTokenizer, room: int, split: str) -> list[Preference]:
    """For preference optimisation."""

    def of(row: AnyRow) -> Preference:
        if not isinstance(row, PreferenceRow):
            raise InvalidInput(f"is a row of `{row.kind}`: preference optimisation takes pairs")
        return Preference(row_pair(tokenizer, row), row.weight)

    return _all(rows, of, lambda made: [side.tokens for side in made.rendered], room, split)


def problems(rows: Sequence[AnyRow], tokenizer: ChatTokenizer, room: int, split: str) -> list[Problem]:
    """For reinforcement; what the grader reads is the row."""

    def of(numbered: tuple[int, AnyRow]) -> Problem:
        number, row = numbered
        if not isinstance(row, PromptRow):
            raise InvalidInput(f"is a row of `{row.kind}`: reinforcement takes prompts")
        return Problem(f"{split}-{number}", tuple(row_prompt(tokenizer, row)), row)

    return _all(list(enumerate(rows, start=1)), of, lambda made: [made.prompt], room, split)


def _supervised(row: AnyRow) -> ChatRow | CompletionRow:
    if isinstance(row, ChatRow | CompletionRow):
        return row
    raise InvalidInput(f"is a row of `{row.kind}`: supervised fine-tuning takes conversations and completions")


def _question(place: int, row: ChatRow | CompletionRow, tokenizer: ChatTokenizer) -> Question:
    if isinstance(row, CompletionRow):
        return Question(tokenizer.encode(row.prompt), Words(place, row.prompt, row.completion))
    *asked, said = map(plain_message, row.messages)
    tools = plain_tools(row.tools)
    # Of the whole conversation: calls of tools, and reasoning, are in no text but the template's.
    (rendered,) = tokenizer.render_examples([*({**message, "weight": 0} for message in asked), {**said, "weight": 1}], tools)
    words = Words(place, last_asked(asked), _answer_of(rendered, tokenizer))
    return Question(tokenizer.render_prompt(asked, tools=tools), words)


def _answer_of(rendered: Rendered, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode([token for token, weight in zip(*rendered, strict=True) if weight and token not in tokenizer.end_tokens])


def _all(rows: Sequence[Any], of: Callable[[Any], Made], tokens: Callable[[Made], Sequence[Sequence[int]]], room: int, split: str) -> list[Made]:
    """What each row gives; InvalidInput names those that give nothing, and those that have more tokens than there is room for."""
    found, refused = list[Made](), list[str]()
    # By their places in the split, as previews and statistics name them.
    for place, row in enumerate(rows):
        try:
            made = of(row)
        except InvalidInput as error:
            refused.append(f"row {place}: {error.message}")
            continue
        if (length := max(map(len, tokens(made)))) > room:
            refused.append(f"row {place}: {length} tokens, and {room} are taken")
            continue
        found.append(made)
    if refused:
        more = f", and {len(refused) - _NAMED} others" if len(refused) > _NAMED else ""
        raise InvalidInput(f"{len(refused)} rows of `{split}` cannot be used: {'; '.join(refused[:_NAMED])}{more}", field="data")
    return found

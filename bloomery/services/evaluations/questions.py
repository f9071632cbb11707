"""What rows of a data set ask of a model, and what graders are told of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from bloomery.grade.declared import Multi, Spec, templates
from bloomery.grade.template import Missing, Reference
from bloomery.services.data.row import Row
from bloomery.services.data.stored_rows import Blob
from bloomery.types.datasets import RowKind
from bloomery.types.errors import InvalidInput, shown
from bloomery.types.grading import GradeInput, Sample
from bloomery.types.resources import Split

KINDS: Final[tuple[RowKind, ...]] = ("chat", "prompt", "completion")
"""Of rows that can be asked."""
GIVEN: Final = "sample"
"""Field of a stored row that has its answer already."""
PROBLEM: Final = "problem"
"""Field of a stored row that cannot be asked: why not."""
_NAMED: Final = 20
"""Columns that a refusal names."""


class Question(NamedTuple):
    """What one row asks: a conversation, or a `prompt` that is continued without a chat template."""

    messages: Sequence[Mapping[str, Any]]
    item: Mapping[str, Any]
    prompt: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    given: Mapping[str, Any] | None = None
    """An answer that is there already."""
    problem: str | None = None


def question_of(row: Row) -> Question:
    """Of a conversation all up to its last answer, which graders find as `item.reference`, as they do that of a completion."""
    tools = row.rest.get("tools")
    match row.kind:
        case "chat":
            *asked, answer = row.messages
            item = {"messages": asked, "reference": answer.get("content") or "", "answer": answer}
            return Question(asked, item, tools=tools)
        case "completion":
            prompt, completion = row.rest["prompt"], row.rest["completion"]
            return Question((), {"prompt": prompt, "completion": completion, "reference": completion}, prompt=prompt)
    return Question(row.messages, row.rest.get("item", {}), tools=tools, given=row.rest.get(GIVEN), problem=row.rest.get(PROBLEM))


def questions_of(blob: Blob, split: Split, count: int, *, start: int = 0, limit: int | None = None) -> list[Question]:
    """Of the first `count` rows those from `start` on, `limit` at most."""
    most = count - start if limit is None else min(limit, count - start)
    return [question_of(row) for row in blob.page(split, limit=max(most, 0), offset=start)]


def check_references(specs: Mapping[str, Spec], questions: Iterable[Question]) -> None:
    """Refuse graders, by their fields, that ask for a column which no row has: they could score nothing."""
    open_ = {(field, reference) for field, spec in specs.items() for reference in references(spec) if reference.namespace == "item"}
    columns: dict[str, None] = {}
    for question in questions:
        given = GradeInput.model_construct(item=dict(question.item), sample=Sample(output_text=""), messages=[], trace=None)
        open_ = {each for each in open_ if not _leads_somewhere(each[1], given)}
        if not open_:
            return
        columns |= dict.fromkeys(question.item)
    for field, reference in sorted(open_, key=lambda each: (each[0], each[1].text)):
        known = ", ".join(f"`{shown(name)}`" for name in islice(columns, _NAMED)) or "none"
        raise InvalidInput(f"`{field}`: `{{{{ {shown(reference.text)} }}}}` leads nowhere in any row: columns of `item` are {known}", field=field)


def references(spec: Spec) -> Iterator[Reference]:
    """All in the templates of a grader."""
    for single in spec.graders.values() if isinstance(spec, Multi) else (spec,):
        for template in templates(single):
            yield from template.references


def given_output(sample: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Text and calls of an answer that a row has."""
    text, tools = sample.get("output_text"), sample.get("output_tools")
    return text if isinstance(text, str) else "", [each for each in tools if isinstance(each, dict)] if isinstance(tools, list) else []


def _leads_somewhere(reference: Reference, given: GradeInput) -> bool:
    try:
        reference.find(given)
    except Missing:
        return False
    return True

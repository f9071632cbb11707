"""A grader of any kind: read once, and then asked for scores.

`hash` says what decides its scores, and is stored with each of them. Comparisons are computed here, programs run in the jail, judges are models: who
gives what is not at hand says so before anything is graded. Where a multi grader's formula needs a score that there is not, it has none either.
"""

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar, assert_never

from blake3 import blake3

from bloomery.grade.declared import (
    Function,
    LabelModel,
    Multi,
    Python,
    ScoreModel,
    Single,
    Spec,
    StringCheck,
    TextSimilarity,
    canonical,
    parse_spec,
    templates,
)
from bloomery.grade.formula import NoNumber, parse_formula
from bloomery.grade.judges import Judge, Patience
from bloomery.grade.models import Models, Vectors, added
from bloomery.grade.pool import Limits, Program
from bloomery.grade.similarity import NOTES, TooLong, cosine, similarity
from bloomery.grade.template import Missing
from bloomery.types.errors import BloomeryError, Forbidden, InvalidInput, NotFound, Unauthorized, Unavailable, reason, shown
from bloomery.types.grading import FailureKind, GradeInput, GradeResult, GradeUsage, Sample

SEMANTICS: Final = 1
"""Counted up when the same grader would score otherwise than before: its hash changes with it."""
ASKED_AT_ONCE: Final = 16
"""Questions of one grader that models answer together."""
EMBEDDING_MODEL: Final = "text-embedding-3-large"
"""Of `cosine`, as published."""
PYTHON_ENTRY: Final = "grade"
PYTHON_LIMITS: Final = Limits(wall_s=120.0, load_s=60.0, memory_bytes=2 << 30, disk_bytes=64 << 20)
"""Of time and memory as published; the jail gives no more disk than this."""
_AT_ONCE_CHARS: Final = 1 << 11
"""Texts up to these are compared on the event loop: to hand them to a thread takes about as long."""


T = TypeVar("T")


class RunsPrograms(Protocol):
    """A jail (`pool`): one result for each row, in their order; failures of the program are results."""

    async def grade(self, program: Program, inputs: Sequence[GradeInput], limits: Limits) -> list[GradeResult]:
        """Raises where there is no jail to be had."""
        ...


class Graded(NamedTuple):
    """A result, and of a multi grader those of its graders by name."""

    result: GradeResult
    parts: Mapping[str, GradeResult]


class Grader:
    """What scores outputs; it may be asked from many tasks at a time."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.name = spec.name or spec.type
        self.canonical = canonical(spec)
        said = json.dumps({"semantics": SEMANTICS, "grader": self.canonical}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        self.hash = blake3(said.encode()).hexdigest()
        self._singles: dict[str, _Single] = {name: _single(below) for name, below in _below(spec).items()}

    @classmethod
    def parse(cls, spec: str | bytes | Mapping[str, Any], *, field: str = "grader") -> Self:
        """Read a grader from JSON or from what was read of it; InvalidInput names the field, below `field`."""
        if isinstance(spec, str | bytes):
            try:
                spec = json.loads(spec)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"`{field}` is not JSON: {error}", field=field) from None
        return cls(parse_spec(spec, field))

    @property
    def kinds(self) -> dict[str, str]:
        """The types of the graders in it, by name."""
        return {name: below.type for name, below in _below(self.spec).items()}

    @property
    def models(self) -> list[str]:
        """Names of the models that it asks."""
        return list(dict.fromkeys(single.model for single in self._singles.values() if single.model is not None))

    @property
    def judges(self) -> dict[str, str]:
        """The version of each judge in it, by the grader's name: a hash of prompt, model, parameters and form of the answer."""
        return {name: single.judge.version for name, single in self._singles.items() if isinstance(single, _Judged)}

    @property
    def programs(self) -> bool:
        """Whether it runs a program."""
        return any(isinstance(single, _Programmed) for single in self._singles.values())

    async def grade(
        self, inputs: Sequence[GradeInput], *, jail: RunsPrograms | None = None, models: Models | None = None, patience: Patience | None = None
    ) -> list[GradeResult]:
        """One result for each row, in their order; rows that belong together (a group of TRL's) are given together."""
        return [graded.result for graded in await self.grade_parts(inputs, jail=jail, models=models, patience=patience)]

    async def grade_parts(
        self, inputs: Sequence[GradeInput], *, jail: RunsPrograms | None = None, models: Models | None = None, patience: Patience | None = None
    ) -> list[Graded]:
        """The same, with the results of the graders in a multi one."""
        hands = _Hands(jail, models, patience or Patience(), asyncio.Semaphore(ASKED_AT_ONCE))
        self._check(hands)
        columns = await gathered([single.grade(inputs, hands) for single in self._singles.values()])
        rows = [dict(zip(self._singles, row, strict=True)) for row in zip(*columns, strict=True)]
        if isinstance(self.spec, Multi):
            return [Graded(_combined(self.spec, row), row) for row in rows]
        return [Graded(next(iter(row.values())), {}) for row in rows]

    def _check(self, hands: "_Hands") -> None:
        if self.programs and hands.jail is None:
            raise Unavailable(f"grader `{shown(self.name)}` runs a program, and there is no jail here to run it in")
        if self.models and hands.models is None:
            named = ", ".join(f"`{shown(model)}`" for model in self.models)
            raise InvalidInput(f"grader `{shown(self.name)}` asks {named}, and no endpoint that has models was given to it", field="model")


def sample_of(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Sample:
    """What graders are told of an output that is known by its text, and of the tools that it called."""
    called = [dict(tool) for tool in tools]
    message: dict[str, Any] = {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if called else "stop"}
    return Sample(output_text=text, output_json=_as_json(text), output_tools=called, choices=[choice])


def _as_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class _Hands(NamedTuple):
    """Who helps with one batch."""

    jail: RunsPrograms | None
    models: Models | None
    patience: Patience
    places: asyncio.Semaphore


def _below(spec: Spec) -> dict[str, Single]:
    return dict(spec.graders) if isinstance(spec, Multi) else {spec.name or spec.type: spec}


def _combined(spec: Multi, row: Mapping[str, GradeResult]) -> GradeResult:
    formula = parse_formula(spec.calculate_output, spec.graders)
    usage = _total([result.usage for result in row.values() if result.usage is not None])
    labels = {f"{name}.{key}": label for name, result in row.items() for key, label in result.labels.items()}
    scores = {name: result.score for name, result in row.items() if result.score is not None}
    for name in spec.graders:
        if name in formula.names and (error := row[name].error) is not None:
            return GradeResult(error=error.model_copy(update={"detail": f"`{name}`: {error.detail}"}), metrics=scores, labels=labels, usage=usage)
    try:
        score = formula.value(scores)
    except NoNumber as problem:
        return GradeResult.failed("not_finite", str(problem)).model_copy(update={"metrics": scores, "labels": labels, "usage": usage})
    reasons = [f"{name}: {result.reason}" for name, result in row.items() if result.reason is not None]
    return GradeResult(score=score, reason="\n".join(reasons) or None, metrics=scores, labels=labels, usage=usage)


def _total(usages: Sequence[GradeUsage]) -> GradeUsage | None:
    total = None
    for usage in usages:
        total = usage if total is None else added(total, usage)
    return total


class _Single:
    """A grader that is not put together of others."""

    model: str | None = None

    async def grade(self, inputs: Sequence[GradeInput], hands: _Hands) -> list[GradeResult]:
        """One result for each row."""
        raise NotImplementedError


def _single(spec: Single) -> _Single:
    match spec:
        case StringCheck() | TextSimilarity():
            return _Compared(spec)
        case ScoreModel() | LabelModel():
            return _Judged(spec)
        case Python():
            return _Programmed(Program(spec.source, PYTHON_ENTRY, "openai"), PYTHON_LIMITS)
        case Function():
            return _Programmed(Program(spec.source, spec.entry, spec.style), Limits())
    assert_never(spec)


class _Programmed(_Single):
    def __init__(self, program: Program, limits: Limits) -> None:
        self._program, self._limits = program, limits

    async def grade(self, inputs: Sequence[GradeInput], hands: _Hands) -> list[GradeResult]:
        assert hands.jail is not None
        return await hands.jail.grade(self._program, inputs, self._limits)


class _Judged(_Single):
    def __init__(self, spec: ScoreModel | LabelModel) -> None:
        self.judge, self.model = Judge(spec), spec.model

    async def grade(self, inputs: Sequence[GradeInput], hands: _Hands) -> list[GradeResult]:
        async def judge(given: GradeInput) -> GradeResult:
            assert hands.models is not None
            async with hands.places:
                return await self.judge.grade(given, hands.models, hands.patience)

        return await gathered([judge(given) for given in inputs])


class _Compared(_Single):
    """Two texts, each from a template."""

    def __init__(self, spec: StringCheck | TextSimilarity) -> None:
        self._spec = spec
        self._input, self._reference = templates(spec)
        if isinstance(spec, TextSimilarity) and spec.evaluation_metric == "cosine":
            self.model = spec.embedding_model or EMBEDDING_MODEL

    async def grade(self, inputs: Sequence[GradeInput], hands: _Hands) -> list[GradeResult]:
        return await gathered([self._one(given, hands) for given in inputs])

    async def _one(self, given: GradeInput, hands: _Hands) -> GradeResult:
        try:
            text, reference = self._input.fill(given), self._reference.fill(given)
        except Missing as missing:
            return GradeResult.failed("template", str(missing))
        if self.model is not None:
            return await self._embedded(text, reference, hands)
        if len(text) + len(reference) <= _AT_ONCE_CHARS:
            return self._compared(text, reference)
        return await asyncio.to_thread(self._compared, text, reference)

    def _compared(self, text: str, reference: str) -> GradeResult:
        match self._spec:
            case StringCheck(operation=operation):
                return GradeResult(score=float(_CHECKS[operation](text, reference)))
            case TextSimilarity(evaluation_metric=metric):
                try:
                    return GradeResult(score=similarity(metric, text, reference), reason=NOTES.get(metric))
                except TooLong as problem:
                    return GradeResult.failed("no_score", str(problem))

    async def _embedded(self, text: str, reference: str, hands: _Hands) -> GradeResult:
        try:
            async with hands.places:
                found = await _vectors(hands, self.model or "", [text, reference])
            return GradeResult(score=cosine(*found.vectors), usage=found.usage)
        except (NotFound, Forbidden, Unauthorized):
            raise
        except BloomeryError as error:
            kind: FailureKind = "no_score" if error.category == "user" and error.code != "rate_limit_exceeded" else "unavailable"
            return GradeResult.failed(kind, f"`{shown(self.model or '')}`: {reason(error)}")
        except (TimeoutError, ValueError) as error:
            return GradeResult.failed("unavailable", f"`{shown(self.model or '')}`: {error or 'no vectors in time'}")


async def _vectors(hands: _Hands, model: str, texts: Sequence[str]) -> Vectors:
    assert hands.models is not None
    async with asyncio.timeout(hands.patience.deadline_s):
        return await hands.models.embed(model, texts)


async def gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them, or the first refusal, with whatever is still in the making ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_CHECKS: Final[Mapping[str, Any]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}

"""How the functions of graders are called, and what counts as a score: the same in a jail and outside of one.

A `style` says by which contract. Arguments are bound by the names of parameters, but for OpenAI's `grade(sample, item)`, whose places count. Whatever
is no score is a `NoScore` with its kind; nothing here gives 0 for want of something better. Standard library alone: jails import it.
"""

import importlib.util
import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple

MODULE: Final = "grader"
FILE: Final = "<grader>"
_REASON_CHARS: Final = 2000
_METRICS: Final = 64
_MOST_SCORE: Final = 1e100
"""That of `types/grading`, which jails cannot import."""
_MISSING: Final = object()

Row = Mapping[str, Any]
"""A `GradeInput` as JSON."""
Outcome = dict[str, Any]
"""`score`, `reason`, `metrics`; or `kind` and `detail`."""


class NoScore(Exception):
    """Why there is none, with the kind of `types/grading`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class Grader(NamedTuple):
    """A function that was loaded. `together`: it takes all rows of a batch in one call."""

    function: Callable[..., Any]
    style: str
    together: bool

    def outcomes(self, rows: Sequence[Row]) -> list[Outcome]:
        """One for each row, in their order."""
        if not self.together:
            return [attempted(lambda row=row: scored(_ONE_ROW[self.style](self.function, row))) for row in rows]  # type: ignore[misc]
        try:
            given = _ALL_ROWS[self.style](self.function, rows)
            if not isinstance(given, Sequence) and hasattr(given, "tolist"):
                given = given.tolist()
            if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(rows):
                size = f" of {len(given)}" if isinstance(given, list | tuple) else ""
                raise NoScore("wrong_type", f"one score for each of {len(rows)} completions is wanted, and it gave {_type(given)}{size}")
        except BaseException as error:
            return [failure(error)] * len(rows)
        return [attempted(lambda score=score: scored(score)) for score in given]  # type: ignore[misc]


def loaded(source: str, entry: str, style: str) -> Grader:
    """Run the source as a module, and find the function in it. Whatever the module raises goes through."""
    if (package := _PACKAGES.get(style)) is not None and importlib.util.find_spec(package.module) is None:
        raise NoScore("raised", f"graders of this style need the package {package.name}: install it beside Bloomery (`pip install {package.name}`)")
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    exec(compile(source, FILE, "exec"), module.__dict__)
    function = getattr(module, entry, None)
    if not callable(function):
        raise NoScore("raised", f"the source has no function `{entry}`")
    style = _style_of(function) if style == "auto" else style
    return Grader(function, style, style in _ALL_ROWS)


def forget() -> None:
    """The module that was loaded last."""
    sys.modules.pop(MODULE, None)
    linecache.cache.pop(FILE, None)


def attempted(what: Callable[[], Outcome]) -> Outcome:
    """What it gives, or why it does not."""
    try:
        return what()
    except BaseException as error:
        return failure(error)


def failure(error: BaseException) -> Outcome:
    """Of what a grader raised."""
    if isinstance(error, NoScore):
        return {"kind": error.kind, "detail": _told(error.detail)}
    try:
        said = str(error)
    except BaseException:
        said = "(what it says raises)"
    kind = "memory" if isinstance(error, MemoryError) else "raised"
    said = said or ("it wanted more memory than it may have" if kind == "memory" else "")
    return {"kind": kind, "detail": _told(f"{_place(error)}{type(error).__name__}: {said}")}


def scored(given: Any) -> Outcome:
    """A number, or something with `score`, `reason`, `metrics` and `is_score_valid`, as a score."""
    reason, metrics = None, {}
    if not _is_number(given) and (isinstance(given, Mapping) or hasattr(given, "score")):
        whole = given
        given = _part(whole, "score")
        reason, measured = _part(whole, "reason"), _part(whole, "metrics")
        if _part(whole, "is_score_valid") is False:
            raise NoScore("no_score", f"the grader says that its score is not valid: {_part(whole, 'error') or reason or 'it gives no reason'}")
        metrics = _metrics(measured) if measured is not None else {}
    score = _number(given, "the score")
    return {"score": score, "reason": None if reason is None else _told(reason), "metrics": metrics}


def _metrics(measured: Any) -> dict[str, float]:
    if not isinstance(measured, Mapping) or len(measured) > _METRICS:
        raise NoScore("wrong_type", f"`metrics` are at most {_METRICS} numbers by name, and not {_type(measured)}")
    return {
        _told(name, _METRICS): _number(_part(each, "score") if not _is_number(each) else each, f"the metric {name!s:.64}")
        for name, each in measured.items()
    }


def _told(given: Any, chars: int = _REASON_CHARS) -> str:
    """As a text that can be kept: of halves of characters, which a Python text may have, no result can be made."""
    return str(given)[:chars].encode("utf-8", "replace").decode()


def _part(whole: Any, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)


def _is_number(given: Any) -> bool:
    # Texts have neither, whatever they look like.
    return not isinstance(given, Mapping) and (hasattr(given, "__float__") or hasattr(given, "__index__"))


def _number(given: Any, what: str) -> float:
    if given is None:
        raise NoScore("no_score", f"{what} is None")
    if not _is_number(given):
        raise NoScore("wrong_type", f"{what} is {_type(given)}, and not a number")
    try:
        number = float(given)
    except OverflowError:
        raise NoScore("not_finite", f"{what} is larger than any float") from None
    except (TypeError, ValueError) as error:
        raise NoScore("wrong_type", f"{what} is {_type(given)}, which is no single number: {error}") from None
    if not math.isfinite(number):
        raise NoScore("not_finite", f"{what} is {number}")
    if abs(number) > _MOST_SCORE:
        raise NoScore("not_finite", f"{what} is {number:g}, and {_MOST_SCORE:g} is the most that is one")
    # An instance of a subclass could be anything when it is written.
    return float.__add__(number, 0.0)


def _type(given: Any) -> str:
    return f"a {type(given).__name__}"


def _place(error: BaseException) -> str:
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    return f"line {lines[-1].lineno}, in {lines[-1].name}: " if lines else ""


# The contracts.


def _style_of(function: Callable[..., Any]) -> str:
    names = set(inspect.signature(function).parameters)
    return "trl" if "completions" in names else "plain"


def _plain(function: Callable[..., Any], row: Row) -> Any:
    return _awaited(_bound(function, _plain_arguments(row), row["item"]))


def _plain_arguments(row: Row) -> dict[str, Any]:
    item, output = row["item"], row["sample"]["output_text"]
    references = item["references"] if "references" in item else [item["reference"]] if "reference" in item else _MISSING
    reference = item["reference"] if "reference" in item else references[0] if isinstance(references, list) and references else _MISSING
    named = {"output": output, "completion": output, "reference": reference, "references": references, "item": item}
    named |= {"sample": row["sample"], "messages": row["messages"], "trace": row["trace"]}
    return {name: value for name, value in named.items() if value is not _MISSING}


def _openai(function: Callable[..., Any], row: Row) -> Any:
    return _awaited(function(row["sample"], row["item"]))


def _trl(function: Callable[..., Any], rows: Sequence[Row]) -> Any:
    return _awaited(
        _bound(function, {"prompts": [_trl_prompt(row) for row in rows], "completions": [_trl_completion(row) for row in rows]}, _columns(rows))
    )


def _trl_prompt(row: Row) -> Any:
    return row["item"].get("prompt", row["messages"])


def _trl_completion(row: Row) -> Any:
    """As that library gives it: a text where the prompt is one, and messages where it is messages."""
    if isinstance(_trl_prompt(row), str):
        return row["sample"]["output_text"]
    return _answer(row)


def _answer(row: Row) -> list[dict[str, Any]]:
    tools = row["sample"]["output_tools"]
    return [{"role": "assistant", "content": row["sample"]["output_text"], **({"tool_calls": tools} if tools else {})}]


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row["item"] if name != "prompt")
    return {name: [row["item"].get(name) for row in rows] for name in names}


def _verifiers(function: Callable[..., Any], row: Row) -> Any:
    """One reward function of a rubric."""
    item = row["item"]
    asked = {"answer": item.get("answer", ""), "info": item.get("info", {}), "task": item.get("task", "default")}
    named = {"prompt": row["messages"], "completion": _answer(row), **asked}
    return _awaited(_bound(function, {**named, "state": dict(named)}, item))


def _eval_protocol(function: Callable[..., Any], row: Row) -> Any:
    """A function of an `EvaluationRow`, which it gives back rated, or one of messages, which gives the rating."""
    from eval_protocol.models import EvaluationRow, Message  # type: ignore[import-not-found]

    messages = [Message.model_validate(message) for message in [*row["messages"], *_answer(row)]]
    item = row["item"]
    # What `@evaluation_test` gives is a test of pytest, which has the function itself here.
    function = getattr(function, "_origin_func", function)
    names = inspect.signature(function).parameters
    if "rows" in names:
        raise NoScore("raised", "evaluations of one row (mode `pointwise`) are graders, and this one takes `rows`")
    if "row" not in names:
        return _awaited(_bound(function, {"messages": messages}, item))
    asked = EvaluationRow(messages=messages, tools=item.get("tools"), ground_truth=item.get("ground_truth"))
    return _awaited(function(row=asked)).evaluation_result


def _bound(function: Callable[..., Any], named: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    """Call it with what its parameters name: the contract's own names first, then fields of the row."""
    given = {**fields, **named}
    positional, by_name = [], {}
    takes_all = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif name in given:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(given[name])
            else:
                by_name[name] = given[name]
        elif parameter.default is parameter.empty:
            raise NoScore("template", f"the function wants `{name:.64}`, and the row has no such field: there are {', '.join(sorted(given))[:500]}")
    rest = {name: value for name, value in fields.items() if name not in named} if takes_all else {}
    return function(*positional, **{**rest, **by_name})


def _awaited(given: Any) -> Any:
    if not inspect.isawaitable(given):
        return given
    import asyncio

    return asyncio.run(_result(given))


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _Package(NamedTuple):
    module: str
    name: str


_PACKAGES: Final = {"eval_protocol": _Package("eval_protocol", "eval-protocol"), "verifiers": _Package("verifiers", "verifiers")}
_ONE_ROW: Final = {"plain": _plain, "openai": _openai, "verifiers": _verifiers, "eval_protocol": _eval_protocol}
_ALL_ROWS: Final = {"trl": _trl}

"""Runs planted graders as their forms are called, by the shortest way: it shows that the cases are what they say, and is no grading of Bloomery's.

`scores` runs a case in this process, or where it executes what it grades in one of its own, which `python -m tests.grade.planted.running` is.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tests.grade.planted import later, seen, unseen
from tests.grade.planted.unseen import Case, Row

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120


def scores(case: Case, answers: list[tuple[Row, str]]) -> list[float]:
    """What the case gives to each answer."""
    if not case.runs_code:
        return _scores_here(case, answers)
    given = json.dumps([case.name, [(case.rows.index(row), output) for row, output in answers]])
    command = [sys.executable, "-m", "tests.grade.planted.running"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=DEADLINE_S, check=True, cwd=ROOT)
    return [float(score) for score in json.loads(done.stdout)]


def _scores_here(case: Case, answers: list[tuple[Row, str]]) -> list[float]:
    if case.form == "json":
        return [_declared(json.loads(case.grader), _scope(row, output)) for row, output in answers]
    namespace: dict[str, Any] = {"__name__": case.name}
    exec(compile(case.grader, case.name, "exec"), namespace)
    call = CALLS[case.form]
    return [float(call(namespace[case.entry], row, output)) for row, output in answers]


def _score(function: Callable[..., float], row: Row, output: str) -> float:
    wanted = function.__code__.co_argcount
    return function(*(output, row.reference, _item(row))[:wanted])


def _openai(function: Callable[..., float], row: Row, output: str) -> float:
    return function({"output_text": output}, _item(row))


def _trl(function: Callable[..., list[float]], row: Row, output: str) -> float:
    columns = {name: [value] for name, value in _item(row).items()}
    (reward,) = function(prompts=[row.messages], completions=[[{"role": "assistant", "content": output}]], **columns)
    return reward


CALLS: dict[str, Callable[..., float]] = {"score": _score, "openai": _openai, "trl": _trl}


def _item(row: Row) -> dict[str, Any]:
    return {"reference": row.reference, **row.item}


def _scope(row: Row, output: str) -> dict[str, Any]:
    sample: dict[str, Any] = {"output_text": output}
    with suppress(json.JSONDecodeError):
        sample["output_json"] = json.loads(output)
    return {"item": _item(row), "sample": sample}


def _declared(grader: dict[str, Any], scope: dict[str, Any]) -> float:
    """Of what OpenAI declares only what the cases use; a template that leads nowhere, which is no score, counts as 0 here."""
    if grader["type"] == "multi":
        parts = {name: _declared(part, scope) for name, part in grader["graders"].items()}
        return _weighted_sum(ast.parse(grader["calculate_output"], mode="eval").body, parts)
    try:
        said, wanted = _filled(grader["input"], scope), _filled(grader["reference"], scope)
    except (KeyError, TypeError):
        return 0.0
    if grader["type"] == "text_similarity":
        return SequenceMatcher(None, said, wanted).ratio()
    operations = {"eq": said == wanted, "ne": said != wanted, "like": wanted in said, "ilike": wanted.lower() in said.lower()}
    return float(operations[grader["operation"]])


def _filled(template: str, scope: dict[str, Any]) -> str:
    def value(found: re.Match[str]) -> str:
        at: Any = scope
        for name in found.group(1).split("."):
            at = at[name]
        return str(at)

    return re.sub(r"\{\{\s*([\w.]+)\s*\}\}", value, template)


def _weighted_sum(node: ast.expr, parts: dict[str, float]) -> float:
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return _weighted_sum(left, parts) + _weighted_sum(right, parts)
        case ast.BinOp(left, ast.Mult(), right):
            return _weighted_sum(left, parts) * _weighted_sum(right, parts)
        case ast.Name(name):
            return parts[name]
        case ast.Constant(float(number)):
            return number
    raise ValueError(f"{ast.unparse(node)} is more than a weighted sum")


def main() -> None:
    """Reads the name of a case with indexes of rows and outputs, and writes their scores."""
    name, answers = json.load(sys.stdin)
    (case,) = (case for case in [*unseen.cases(), *seen.cases(), *later.cases()] if case.name == name)
    json.dump(_scores_here(case, [(case.rows[index], output) for index, output in answers]), sys.stdout)


if __name__ == "__main__":
    main()

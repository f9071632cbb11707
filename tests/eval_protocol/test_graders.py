"""Functions of Eval Protocol as graders, in a jail that can import the package."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.cookbook.setup import ROOT
from tests.eval_protocol.setup import interpreter

pytestmark = pytest.mark.slow


def graded(entry: str, *outputs: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "How much?"}]
    rows = [{"item": {"ground_truth": "4", "level": "easy"}, "sample": {"output_text": output}, "messages": messages} for output in outputs]
    argv = [str(interpreter()), "-m", "tests.grade.one", "eval_protocol", entry, "tests/eval_protocol/graders.py"]
    done = subprocess.run(
        argv, input=json.dumps(rows), capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def test_evaluations_of_one_row_and_reward_functions_are_graders() -> None:
    right, wrong, invalid = graded("of_a_row", "4", "5", "")
    assert (right["score"], right["reason"], right["metrics"]) == (1.0, "compared", {"half": 0.5})
    assert wrong["score"] == 0.0
    assert invalid["error"] == {"kind": "no_score", "detail": "the grader says that its score is not valid: compared"}
    assert [(result["score"], result["reason"]) for result in graded("of_messages", "4", "5")] == [(1.0, "easy"), (0.0, "easy")]


def test_evaluations_of_many_rows_are_refused_by_name() -> None:
    (refused,) = graded("of_all_rows", "4")
    assert "this one takes `rows`" in refused["error"]["detail"]

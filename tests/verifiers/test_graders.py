"""Reward functions of `verifiers` as graders, in a jail that can import the package."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.cookbook.setup import ROOT, environment
from tests.verifiers.setup import ENVIRONMENT, REQUIREMENTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("entry", "scores"), [("with_state", [1.0, 0.0]), ("asynchronous", [3.0, 3.0])])
def test_functions_of_rubrics_are_graders(entry: str, scores: list[float]) -> None:
    item, messages = {"answer": "4", "info": {"level": 2}}, [{"role": "user", "content": "How much?"}]
    rows = [{"item": item, "sample": {"output_text": output}, "messages": messages} for output in ("4", "5")]
    argv = [str(environment(ENVIRONMENT, REQUIREMENTS)), "-m", "tests.grade.one", "verifiers", entry, "tests/verifiers/graders.py"]
    done = subprocess.run(
        argv, input=json.dumps(rows), capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert [result["score"] for result in results] == scores, results

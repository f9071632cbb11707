"""Every family trains and samples on a device that is not the processor: on one that is not there, everywhere, and on a GPU where there is one."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.devices.learning import CASES, Case, outcomes
from tests.elsewhere import NAME

DEVICES = [
    pytest.param(NAME, marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]),
]
DEADLINE_S = 1800.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)
"""The first test waits for all of them."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    argv = [sys.executable, "-m", "tests.devices.learning", request.param]
    return dict(outcomes(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S).stdout))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("found", DEVICES, indirect=True)
def test_a_run_learns_as_on_the_processor_and_is_served_as_it_was_trained(found: dict[str, dict[str, Any]], case: Case) -> None:
    told = found[case.name]
    assert "error" not in told, told["error"]
    assert told["losses"] == pytest.approx(told["expected"], rel=1e-3 if case.dtype == "float32" else 3e-2)
    assert told["stale"] is None
    assert told["verdict"] == "pass", told

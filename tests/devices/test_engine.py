"""An engine on a device that is not the processor passes the tests of one that computes on it."""

import os
import subprocess
import sys

import pytest
import torch

from tests.elsewhere import NAME

DEVICES = [
    pytest.param(NAME, marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]),
]


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_trains_samples_dies_and_resumes(device: str) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/engine/test_engine.py"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=540, env={**os.environ, "BLOOMERY_TEST_DEVICE": device})
    assert done.returncode == 0, done.stdout[-4000:]

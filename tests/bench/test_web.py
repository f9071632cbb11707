"""The benchmark of the dashboard runs, on little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]


def test_loads_and_frames_are_measured_beside_an_empty_page() -> None:
    few = ["--points", "1000", "--rows", "300", "--loads", "1", "--seconds", "0.5"]
    ran = subprocess.run(
        [sys.executable, "-m", "bench.web", *few], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert {"ms", "kept_ms", "least_ms"} <= found["load"].keys()
    for measured, count in (("curve", {"points": 1000}), ("table", {"rows": 300})):
        assert found[measured].items() >= count.items()
        assert 0 < found[measured]["frames_per_s"] < 200
        assert found[measured]["ratio"] == pytest.approx(found[measured]["frames_per_s"] / found[measured]["empty_frames_per_s"], abs=0.01)

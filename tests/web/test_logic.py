"""What the dashboard computes before it shows anything: claims of `web/tests/logic.mjs`, which need no browser."""

import subprocess

import pytest

from tests.web.api_types import WEB

pytestmark = pytest.mark.web


def test_what_the_dashboard_computes_is_right() -> None:
    ran = subprocess.run(["npm", "test", "--silent"], cwd=WEB, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr

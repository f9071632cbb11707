"""`bloomery demo` where it ends early: what it leaves behind."""

import os
import subprocess
from pathlib import Path

from bloomery.config.data_dir import DataDir
from bloomery.up.lock import Holder, holder
from tests.live import BLOOMERY, alive, wait_until


def server_of_demo(place: Path) -> Holder | None:
    return next((found for data in place.glob("bloomery-demo-*/data") if (found := holder(DataDir(data)))), None)


def test_the_server_of_a_killed_demo_stops_with_it(tmp_path: Path) -> None:
    with subprocess.Popen([BLOOMERY, "demo"], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL) as demo:
        wait_until(lambda: server_of_demo(tmp_path) is not None)
        server = server_of_demo(tmp_path)
        assert server is not None
        demo.kill()
    wait_until(lambda: not alive(server.pid))


def test_where_figures_cannot_be_written_nothing_is_started(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "figures.json"
    done = subprocess.run([BLOOMERY, "demo", "--json", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"there is no directory {target.parent}" in done.stderr

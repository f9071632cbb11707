"""`bloomery demo`: what it leaves behind when it ends early, and how its table reads."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bloomery.cli.demo import Bars, console_for, show
from bloomery.cli.demo_server import remove_leftovers
from bloomery.config.data_dir import DataDir
from bloomery.recipes.loop import LoopReport, Outcome
from bloomery.recipes.sft import SftReport
from bloomery.types.datasets import DatasetVersion
from bloomery.types.statistics import Mismatch, Paired
from bloomery.up.lock import Holder, holder, locked
from tests.live import BLOOMERY, alive, wait_until

ENDS_S = 120.0


def server_of_demo(place: Path) -> Holder | None:
    return next((found for data in place.glob("bloomery-demo-*/data") if (found := holder(DataDir(data)))), None)


@contextmanager
def demo(temporary: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A demo that has started its server; `temporary` is its directory for temporary files."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([BLOOMERY, "demo", *options], env=environment, preexec_fn=heed_signals, **piped) as process:
        try:
            wait_until(lambda: server_of_demo(temporary) is not None or process.poll() is not None)
            yield process
        finally:
            process.kill()


def heed_signals() -> None:
    """A job in the background of a shell ignores Ctrl-C, and so would its children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_leaves_neither_server_nor_files(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        server = server_of_demo(tmp_path)
        assert server is not None
        process.send_signal(number)
        assert process.wait(ENDS_S) != 0
    assert not alive(server.pid)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_demo_that_is_told_to_end_while_it_asks_leaves_nothing_either(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        wait_until(lambda: any(tmp_path.glob("bloomery-demo-*/data/blobs/bodies/**/*")), 300)
        process.terminate()
        assert process.wait(ENDS_S) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_second_signal_ends_a_demo_at_once_and_leaves_nothing_either(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        server = server_of_demo(tmp_path)
        assert server is not None
        # Held by SIGSTOP, the server cannot end by itself.
        os.kill(server.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: "State:\tT" in kernel_status(server.pid))
            process.terminate()
            wait_until(lambda: "SIGTERM" in pending_signals(server.pid))
            process.terminate()
            assert process.wait(ENDS_S) == 128 + signal.SIGTERM
            assert not alive(server.pid)
        finally:
            if alive(server.pid):
                os.kill(server.pid, signal.SIGCONT)
    assert list(tmp_path.iterdir()) == []


def kernel_status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def pending_signals(pid: int) -> set[str]:
    """Names of the signals that wait for a process, as the kernel says."""
    masks = [int(line.split()[1], 16) for line in kernel_status(pid).splitlines() if line.startswith(("ShdPnd:", "SigPnd:"))]
    return {number.name for number in signal.Signals for mask in masks if mask >> (number - 1) & 1}


@pytest.mark.slow
def test_the_server_of_a_killed_demo_stops_and_the_next_demo_removes_what_is_left(tmp_path: Path) -> None:
    with demo(tmp_path) as first:
        server = server_of_demo(tmp_path)
        assert server is not None
        first.kill()
    wait_until(lambda: not alive(server.pid))
    (left,) = tmp_path.glob("bloomery-demo-*")
    with demo(tmp_path) as second:
        assert not left.exists()
        second.terminate()
        said, _ = second.communicate(timeout=ENDS_S)
    assert f"removed {left}, which a killed demo had left" in said.decode()
    assert list(tmp_path.iterdir()) == []


def leftover(parent: Path, name: str) -> Path:
    """What `kill -9` leaves of a demo."""
    place = parent / f"bloomery-demo-{name}"
    (place / "data").mkdir(parents=True)
    for file in ("DEMO", "up.log", "data/lock", "data/VERSION"):
        (place / file).touch()
    return place


def test_only_what_is_provably_dead_is_removed(tmp_path: Path) -> None:
    dead, alive_demo, alive_server, kept, linked = (leftover(tmp_path, name) for name in ("dead", "demo", "server", "kept", "linked"))
    (kept / "DEMO").unlink()
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    sockets = tmp_path / "bloomery-sockets"
    sockets.mkdir()
    with locked(DataDir(dead / "data")) as lock:
        lock.announce(Holder(pid=2**22 + 1, host="127.0.0.1", port=8700, started_us=1, runtime_dir=str(sockets)))
    with (alive_demo / "DEMO").open("r+") as marker, locked(DataDir(alive_server / "data")) as lock:
        fcntl.flock(marker, fcntl.LOCK_EX)
        lock.announce(Holder(pid=os.getpid(), host="127.0.0.1", port=8701, started_us=1, runtime_dir=""))
        before = sorted(path for path in tmp_path.rglob("*") if dead not in (path, *path.parents) and path != sockets)
        assert remove_leftovers(tmp_path) == [dead]
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_demo_that_is_kept_leaves_its_directory_to_the_user(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"{word} {index},{word}\n" for index in range(60) for word in ("red", "blue")))
    with demo(tmp_path, "--keep", "--data", str(rows)) as process:
        said, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors.decode()
    (place,) = tmp_path.glob("bloomery-demo-*")
    assert f"bloomery stop --data-dir {place / 'data'}\n" in said.decode()
    assert remove_leftovers(tmp_path) == []
    subprocess.run([BLOOMERY, "stop", "--data-dir", str(place / "data")], check=True, capture_output=True)
    assert remove_leftovers(tmp_path) == []


def test_where_figures_cannot_be_written_nothing_is_started(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "figures.json"
    done = subprocess.run([BLOOMERY, "demo", "--json", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"there is no directory {target.parent}" in done.stderr


def outcomes(right: int, total: int) -> list[Outcome]:
    return [Outcome(id=f"span-{row}", content="asyncio", label="asyncio", correct=row < right, version="1" * 32) for row in range(total)]


REPORT = LoopReport(
    base=outcomes(0, 757),
    v1=outcomes(757, 757),
    v2=outcomes(673, 757),
    neighbours={f"{name}_{version}": [True] * 757 for name in ("bag_of_words", "majority") for version in ("v1", "v2")},
    trained_rows={"v1": 1390, "v2": 2182, "traffic": 1512},
    curated=DatasetVersion(id="d", dataset="d", number=2, manifest="m", parent="p", counts={}, recipe={}, created_us=0),
    training={version: SftReport(steps=100, tokens=1_234_567, seconds=1.0, losses=()) for version in ("v1", "v2")},
    comparison=Paired(gained=38, lost=16, p_value=0.0038),
    promoted=True,
    versions={"v1": "1" * 32, "v2": "2" * 32},
    live=outcomes(1, 1)[0]._replace(content="word " * 60),
    parity=Mismatch(k3=0.0, max_difference=0.0, tokens=523),
    swap_s=0.055,
    seconds={},
)


def test_in_a_pipe_each_stage_is_one_line_as_soon_as_it_is_over() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w") as output, Bars(output) as bars:
        bars.advance("import rows", 0, None, "")
        bars.advance("import rows", 1, None, "")
        assert re.fullmatch(r"import rows: done in \d+\.\d s\n", pipe.readline())
        bars.advance("train v1", 0, None, "")
        for step in range(1, 4):
            bars.advance("train v1", step, 3, f"loss {1 / step:.3f}")
        bars.advance("train v1", 1, None, "")
        assert re.fullmatch(r"train v1: 3 of 3 in \d+\.\d s, loss 0\.333\n", pipe.readline())


def test_the_table_keeps_its_cells_whole_in_a_pipe_of_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(REPORT, 257.0, console_for(sys.stdout))
    lines = capsys.readouterr().out.splitlines()
    (accuracy,) = [line for line in lines if line.strip().startswith("accuracy")]
    assert accuracy.split("  ")[-1].strip() == "88.9% [86.5, 90.9]"
    assert "100.0% [99.5, 100.0]" in accuracy
    # A title, a head, seven rows with the rules around them, and one line for each sentence.
    assert len([line for line in lines if line.strip()]) == 1 + 2 + 7 + 6

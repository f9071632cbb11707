import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bloomery.up.children import MAX_UNREADY_DEATHS
from tests.live import alive, wait_until
from tests.up.stand_in import BROKEN, OBEDIENT, STUBBORN

ENDS_S = 120.0


class Running:
    """A stand-in supervisor and what it says."""

    def __init__(self, directory: Path, process: "subprocess.Popen[str]") -> None:
        self.directory, self.process = directory, process

    def said(self) -> str:
        return (self.directory / "said").read_text()

    def pid(self, name: str) -> int | None:
        rows = json.loads((self.directory / "processes.json").read_text())["children"]
        found: int | None = next(row["pid"] for row in rows if row["name"] == name)
        return found

    def restarted(self, name: str, old: int) -> bool:
        return self.pid(name) not in (None, old)


@contextmanager
def supervisor(directory: Path, *programs: str) -> Iterator[Running]:
    with (directory / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", "tests.up.stand_in", str(directory), *programs], stdout=said, stderr=said, text=True)
    running = Running(directory, process)
    try:
        wait_until(lambda: "READY" in running.said() or process.poll() is not None)
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["api", "engine"])
def test_a_killed_child_is_started_again(tmp_path: Path, name: str) -> None:
    with supervisor(tmp_path) as running:
        first = running.pid(name)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.restarted(name, first))
        assert f"{name} was killed by SIGKILL; starting it again in 0.1 s\n" in running.said()


def test_a_state_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    # Where the file should come there is a directory: for the supervisor the same as a full disk.
    (tmp_path / "processes.json.new").mkdir()
    with supervisor(tmp_path) as running:
        (tmp_path / "ready-engine").unlink()
        children = [int(found) for found in Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "engine was killed by SIGKILL; starting it again" in running.said() and (tmp_path / "ready-engine").exists())
        assert running.process.poll() is None


def test_a_child_that_dies_young_waits_before_it_starts_again_and_it_is_said_how_long_and_why_it_died(tmp_path: Path) -> None:
    (tmp_path / "wanted").touch()
    with supervisor(tmp_path, OBEDIENT, OBEDIENT, LISTENING_AND_BROKEN) as running:
        wait_until(lambda: running.said().count(f"{REPLICA} exited with status 1; starting it again in ") >= 5)
        said = [line for line in running.said().splitlines() if line.startswith(REPLICA) and "again" in line]
        assert said[0] == f"{REPLICA} exited with status 1; starting it again in 0.1 s; its log ends: cannot open the model"
        assert said[4] == said[0].replace("0.1", "1.6")
        wait_until(lambda: process(running, REPLICA)["next_start_us"] is not None)
        assert process(running, REPLICA)["died"] == "exited with status 1: cannot open the model"
        assert running.process.poll() is None


LISTENING_AND_BROKEN = f"import pathlib, sys; pathlib.Path(sys.argv[1] + '.sock').touch()\n{BROKEN}"
LISTENING_AND_POISONED = f"""
import os, pathlib
pathlib.Path("engine.sock").touch()
deaths = pathlib.Path("deaths")
died = len(deaths.read_text()) if deaths.exists() else 0
if pathlib.Path("ready-engine").exists() and died < 8:
    deaths.write_text("x" * (died + 1))
    os.abort()
{OBEDIENT}"""


@pytest.mark.slow
def test_an_engine_that_one_operation_after_the_other_kills_is_started_until_it_lives(tmp_path: Path) -> None:
    with supervisor(tmp_path, OBEDIENT, LISTENING_AND_POISONED) as running:
        engine = running.pid("engine")
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: running.said().count("engine was killed by SIGABRT; starting it again") == 8)
        wait_until(lambda: rows(running)["engine"] == "ready")
        assert running.process.poll() is None


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with supervisor(tmp_path) as running:
        children = [running.pid("api"), running.pid("engine")]
        assert all(pid and alive(pid) for pid in children)
        running.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in children if pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_stops_the_api_before_the_engine(tmp_path: Path, number: signal.Signals) -> None:
    with supervisor(tmp_path) as running:
        running.process.send_signal(number)
        assert running.process.wait(ENDS_S) == 0
        assert (tmp_path / "events").read_text() == "api stopped\nengine stopped\n"
        assert running.said().endswith("DONE\n")


def test_a_second_stop_signal_kills_who_does_not_listen(tmp_path: Path) -> None:
    with supervisor(tmp_path, STUBBORN, OBEDIENT) as running:
        api = running.pid("api")
        running.process.send_signal(signal.SIGTERM)
        while running.process.poll() is None and api and alive(api):
            running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(ENDS_S) == 0
        assert api is not None
        assert not alive(api)


def test_a_child_that_cannot_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    with supervisor(tmp_path, OBEDIENT, BROKEN) as running:
        assert running.process.wait(ENDS_S) == 1
        assert "engine exited with status 1, 5 times without becoming ready" in running.said()
        assert running.said().endswith("cannot open the model\n")
        assert (tmp_path / "events").read_text() == "api stopped\n"


REPLICA = "replica-tiny-0"


def process(running: Running, name: str) -> dict[str, object]:
    children = json.loads((running.directory / "processes.json").read_text())["children"]
    return next(row for row in children if row["name"] == name)


def rows(running: Running) -> dict[str, str]:
    children = json.loads((running.directory / "processes.json").read_text())["children"]
    return {row["name"]: row["state"] for row in children}


@pytest.mark.slow
def test_a_replica_is_started_when_it_is_wanted_and_again_when_it_dies_and_stops_with_the_engine(tmp_path: Path) -> None:
    with supervisor(tmp_path) as running:
        assert REPLICA not in rows(running)
        (tmp_path / "wanted").touch()
        wait_until(lambda: rows(running).get(REPLICA) == "ready")
        first = running.pid(REPLICA)
        assert first is not None
        (tmp_path / f"ready-{REPLICA}").unlink()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.restarted(REPLICA, first))
        wait_until(lambda: rows(running)[REPLICA] == "ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(ENDS_S) == 0
        assert set((tmp_path / "events").read_text().splitlines()[1:]) == {"engine stopped", f"{REPLICA} stopped"}


ROLLOUTS = "rollouts-tiny-0"


def test_a_replica_for_rollouts_runs_from_the_start_and_again_when_it_dies_and_stops_with_the_engine(tmp_path: Path) -> None:
    (tmp_path / "rollouts").touch()
    with supervisor(tmp_path) as running:
        wait_until(lambda: rows(running) == {"api": "ready", "engine": "ready", ROLLOUTS: "ready"})
        first = running.pid(ROLLOUTS)
        assert first is not None
        (tmp_path / f"ready-{ROLLOUTS}").unlink()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: running.restarted(ROLLOUTS, first) and rows(running)[ROLLOUTS] == "ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(ENDS_S) == 0
        assert set((tmp_path / "events").read_text().splitlines()[1:]) == {"engine stopped", f"{ROLLOUTS} stopped"}


def test_a_replica_for_rollouts_that_cannot_start_keeps_the_server_from_being_ready(tmp_path: Path) -> None:
    (tmp_path / "rollouts").touch()
    with supervisor(tmp_path, OBEDIENT, OBEDIENT, BROKEN) as running:
        assert running.process.wait(ENDS_S) == 1
        assert f"{ROLLOUTS} exited with status 1, 5 times without becoming ready" in running.said()


@pytest.mark.slow
def test_a_replica_that_stands_still_is_killed_once_and_starts_again(tmp_path: Path) -> None:
    (tmp_path / "wanted").touch()
    with supervisor(tmp_path) as running:
        wait_until(lambda: rows(running).get(REPLICA) == "ready")
        first = running.pid(REPLICA)
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        (tmp_path / "silent").touch()
        (tmp_path / f"ready-{REPLICA}").unlink()
        wait_until(lambda: running.restarted(REPLICA, first) and rows(running)[REPLICA] == "ready")
        assert f"{REPLICA} lives and says nothing: it is killed" in running.said()
        assert running.said().count("starting it again") == 1


@pytest.mark.slow
def test_a_replica_that_cannot_start_stops_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "wanted").touch()
    with supervisor(tmp_path, OBEDIENT, OBEDIENT, BROKEN) as running:
        wait_until(lambda: running.said().count(f"{REPLICA} exited with status 1; starting it again") >= MAX_UNREADY_DEATHS)
        assert running.process.poll() is None
        assert rows(running) == {"api": "ready", "engine": "ready", REPLICA: "restarting"}

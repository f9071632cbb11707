"""`bloomery up` as its user meets it: real processes, a real model, signals."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest

from bloomery.client import Client, TrainingRun
from bloomery.config.data_dir import DataDir
from bloomery.types.arrays import Array
from bloomery.types.operations import Datum
from bloomery.up import control
from tests.live import BLOOMERY, STOP_S, LiveServer, alive, running_server, wait_until
from tests.up.builders import model


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[LiveServer]:
    with running_server(tmp_path_factory.mktemp("up") / "data", "--model", str(small_model), "--model", f"again={small_model}") as running:
        yield running


def bloomery(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([BLOOMERY, *arguments], capture_output=True, text=True, check=False)


def healthy(server: LiveServer) -> bool:
    try:
        return httpx.get(f"{server.url}/healthz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def models(server: LiveServer) -> list[str]:
    answer = httpx.get(f"{server.url}/api/v1/models", headers={"x-api-key": server.key})
    assert answer.status_code == 200
    return [row["alias"] for row in answer.json()["data"]]


def runtime_dir(server: LiveServer) -> Path:
    return Path(control.running(DataDir(server.data_dir)).runtime_dir)


def test_the_first_start_prints_the_address_and_the_key(server: LiveServer) -> None:
    said = (server.data_dir.parent / "data.up.log").read_text()
    assert f"is ready: {server.url}\n" in said
    assert f"API key: {server.key} " in said
    assert f"Ctrl-C or `bloomery stop --data-dir {server.data_dir}` stops it.\n" in said
    assert "small: " in said
    assert " GB free" in said


def test_two_names_of_one_model_share_an_engine(server: LiveServer) -> None:
    assert models(server) == ["small", "again"]
    assert server.pids().keys() == {"supervisor", "api", "engine-small"}


def test_a_wrong_key_is_turned_away(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/api/v1/models", headers={"x-api-key": "tml-wrong"}).status_code == 401


def test_the_api_process_has_no_torch(server: LiveServer) -> None:
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in server.pids().items()}
    assert {name for name, text in maps.items() if "libtorch" in text} == {"engine-small"}


def test_a_second_up_names_the_holder(server: LiveServer, small_model: Path) -> None:
    done = bloomery("up", "--data-dir", str(server.data_dir), "--port", "0", "--model", str(small_model))
    assert done.returncode == 2
    assert f"in use by process {server.process.pid}, which serves {server.url}" in done.stderr


@pytest.mark.slow
def test_status_shows_processes_and_where_they_answer(server: LiveServer) -> None:
    done = bloomery("status", "--data-dir", str(server.data_dir))
    assert done.stdout.splitlines()[0] == f"{server.url} answers (supervisor: process {server.process.pid})"
    assert all(str(pid) in done.stdout for pid in server.pids().values())


def states(said: str) -> dict[str, str]:
    """What `bloomery status` says of each process, without its id and its restarts."""
    return {line.split()[0]: " ".join(line.partition("  restarts ")[0].split()[3:]) for line in said.splitlines()[1:]}


@pytest.mark.slow
def test_status_says_which_process_restarts_and_since_when(server: LiveServer) -> None:
    wait_until(lambda: bloomery("status", "--data-dir", str(server.data_dir)).returncode == 0)
    done = None
    while done is None or not states(done.stdout)["engine-small"].startswith("restarting"):
        # A quick engine was ready again before it could be stopped: another death, another look.
        died, before = datetime.now(UTC), server.pid("engine-small")
        os.kill(before, signal.SIGKILL)
        wait_until(lambda before=before: server.pids().get("engine-small", before) != before)
        # Stopped, it does not become ready while it is looked at.
        os.kill(server.pid("engine-small"), signal.SIGSTOP)
        try:
            done = bloomery("status", "--data-dir", str(server.data_dir))
        finally:
            os.kill(server.pid("engine-small"), signal.SIGCONT)
    assert done.returncode == 1
    assert states(done.stdout)["api"] == "ready"
    state, _, since = states(done.stdout)["engine-small"].partition(" since ")
    assert state == "restarting"
    assert [line.partition("  was ")[2] for line in done.stdout.splitlines()[1:]] == ["killed by SIGKILL", ""]
    assert died - timedelta(seconds=1) <= datetime.fromisoformat(since) <= datetime.now(UTC)
    wait_until(lambda: bloomery("status", "--data-dir", str(server.data_dir)).returncode == 0)


@pytest.mark.slow
def test_status_of_a_server_whose_api_is_away_says_so(server: LiveServer) -> None:
    os.kill(server.pid("api"), signal.SIGSTOP)
    try:
        done = bloomery("status", "--data-dir", str(server.data_dir))
    finally:
        os.kill(server.pid("api"), signal.SIGCONT)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{server.url} does not answer ")
    wait_until(lambda: bloomery("status", "--data-dir", str(server.data_dir)).returncode == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["api", "engine-small"])
def test_a_killed_process_is_back_and_the_server_serves_on(server: LiveServer, name: str) -> None:
    wait_until(lambda: name in server.pids() and healthy(server))
    before, restarts = server.pid(name), server.children()[name]["restarts"]
    assert isinstance(restarts, int)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: server.pids().get(name, before) != before and healthy(server))
    assert models(server) == ["small", "again"]
    assert server.children()[name]["restarts"] == restarts + 1


@pytest.mark.slow
def test_garbage_is_collected_by_the_running_server(server: LiveServer) -> None:
    done = bloomery("gc", "--data-dir", str(server.data_dir))
    assert done.stdout == "removed 0 spans and 0 blobs (0.0 MB)\n", done.stderr


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_process_and_a_clean_stop_leaves_nothing(tmp_path: Path, small_model: Path) -> None:
    with running_server(tmp_path / "data", "--model", str(small_model)) as first:
        pids, abandoned = first.pids(), runtime_dir(first)
        first.process.kill()
        first.process.wait()
        wait_until(lambda: not any(alive(pid) for pid in pids.values()))
    with running_server(tmp_path / "data", "--model", str(small_model)) as second:
        pids, runtime = second.pids(), runtime_dir(second)
        assert not abandoned.exists()
        assert second.key == first.key
        assert second.key not in (tmp_path / "data.up.log").read_text()
        done = bloomery("stop", "--data-dir", str(second.data_dir))
        assert done.stdout == f"stopped process {second.process.pid}, which served {second.url}\n", done.stderr
        assert second.process.wait(STOP_S) == 0
        assert not any(alive(pid) for pid in pids.values())
        assert not runtime.exists()


def train(run: TrainingRun) -> str:
    """A step on eight made-up tokens; the hash of the weights after it."""
    tokens = np.arange(8, dtype=np.int32)
    inputs = {"target_tokens": Array.of((tokens + 1).astype(np.int64)), "weights": Array.of(np.ones(8, dtype=np.float32))}
    run.forward_backward([Datum(tokens=Array.of(tokens), inputs=inputs)])
    step = run.optim_step(1e-2)
    step.result()
    return run.save_checkpoint(f"after-{step.seq}").result().digest


ALARMING = ("WARNING", "ERROR", "CRITICAL", "Traceback", "Error:", "0 bytes read")


@pytest.mark.slow
def test_a_clean_stop_cuts_open_requests_and_logs_nothing_alarming(tmp_path: Path, small_model: Path) -> None:
    with running_server(tmp_path / "data", "--model", str(small_model)) as server:
        with Client(server.url, server.key) as client:
            run = client.create_run("small", rank=4)
            train(run)
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port)) as waiting:
            # An operation behind a gap has no result before the server stops.
            later = f"/api/v1/runs/{run.id}/operations/100"
            httpx.post(f"{url}{later}/checkpoint", json={"name": "later"}, headers={"x-api-key": server.key}).raise_for_status()
            waiting.sendall(f"GET {later}?wait=20 HTTP/1.1\r\nhost: {url.host}\r\nx-api-key: {server.key}\r\n\r\n".encode())
            assert bloomery("stop", "--data-dir", str(server.data_dir)).returncode == 0
        assert server.process.wait(STOP_S) == 0
        lines = server.logs().splitlines()
    assert [line for line in lines if any(word in line for word in ALARMING)] == []
    assert any("Cancel 1 running task" in line for line in lines)


@pytest.mark.slow
def test_a_run_goes_on_from_the_backup_of_a_running_server_bit_for_bit(server: LiveServer, tmp_path: Path, small_model: Path) -> None:
    archive, copy = tmp_path / "saved.tar.zst", tmp_path / "copy"
    with Client(server.url, server.key) as client:
        run = client.create_run("small", rank=4)
        train(run)
        assert bloomery("backup", str(archive), "--data-dir", str(server.data_dir)).returncode == 0
        undisturbed = train(run)
    assert bloomery("restore", str(archive), "--data-dir", str(copy)).returncode == 0
    with running_server(copy, "--model", str(small_model)) as restored, Client(restored.url, server.key) as client:
        assert train(client.run(run.id)) == undisturbed

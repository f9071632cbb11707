"""`bloomery status` of a running server says what was proved of the weights that its processes hold."""

import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bloomery.cli.main import app
from bloomery.client import Client
from bloomery.types.graders import OutputRow
from tests.live import LiveServer, running_server, wait_until
from tests.outside import KEY, outside
from tests.train.builders import supervised


def shown(server: LiveServer) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", "--data-dir", str(server.data_dir)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_says_who_proved_which_base_how_probes_were_answered_and_how_often_memory_was_looked_at(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        (engine,) = client.status().engines
        run = client.create_run("bloomery-tiny", rank=8, seed=3)
        run.forward_backward(supervised([40]), "cross_entropy").result()
        run.optim_step(1e-3).result()
        client.deployments.create("shown-by-status", run.save_snapshot("shown").result().version)
        client.chat("shown-by-status", [{"role": "user", "content": "Hello"}], max_tokens=2)
        wait_until(lambda: client.deployments.get("shown-by-status").proved != [])
    (line,) = [line for line in shown(live_server).splitlines() if "bloomery-tiny" in line and " proved: " in line]
    assert f"base {engine.detail['proved']['root'][:12]}, probe with the trainer's bits" in line
    assert re.search(r"; [1-9]\d* versions in memory, probes with the trainer's bits; \d+ rounds of scrubbing", line)
    assert "out of service" not in line


@pytest.mark.slow
def test_a_server_asks_models_elsewhere_by_its_file_of_endpoints_and_says_which_it_has(tmp_path: Path) -> None:
    verdict = {"steps": [], "result": 0.5}
    with outside(lambda _: verdict) as elsewhere:
        file = tmp_path / "endpoints.yaml"
        file.write_text(f"elsewhere: {{base_url: '{elsewhere.url}', key_env: KEY_OF_ELSEWHERE}}")
        with running_server(tmp_path / "data", "--endpoints", str(file), env={"KEY_OF_ELSEWHERE": KEY}) as server:
            judge = {"type": "score_model", "name": "j", "model": "elsewhere:m", "input": [{"role": "user", "content": "?"}]}
            with Client(server.url, server.key) as client:
                client.graders.create("judge", judge)
                assert client.graders.run("judge", [OutputRow(output="x")]).results[0].score == 0.5
                pid = server.pid("api")
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: server.pids().get("api", pid) != pid)
                assert client.graders.run("judge", [OutputRow(output="x")]).results[0].score == 0.5
            wait_until(lambda: f"endpoint elsewhere at {elsewhere.url}: any model" in shown(server))
            said = "".join(path.read_text() for path in [*server.data_dir.glob("logs/*.log"), tmp_path / "data.up.log"])
            assert f"endpoint elsewhere: {elsewhere.url}, any model, key from KEY_OF_ELSEWHERE, for default" in said
            assert KEY not in said
            assert not [path for path in server.data_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_what_is_proved_is_left_out_where_it_cannot_be_asked_and_changes_no_verdict(live_server: LiveServer) -> None:
    key, away = live_server.data_dir / "api_key", live_server.data_dir / "api_key.away"
    key.rename(away)
    try:
        assert " proved: " not in shown(live_server)
        key.write_text("tml-of-nobody")
        assert " proved: " not in shown(live_server)
    finally:
        away.replace(key)
    assert " proved: " in shown(live_server)

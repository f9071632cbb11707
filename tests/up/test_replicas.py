"""Replicas as their user meets them: started when something is deployed, seen, and deaf to what the engine does."""

import os
import signal
import subprocess
from pathlib import Path

import openai
import pytest

from bloomery.client import Client
from tests.live import BLOOMERY, LiveServer, running_server, wait_until

REPLICA, ENGINE = "replica-bloomery-tiny-0", "engine-bloomery-tiny"


@pytest.mark.slow
def test_a_deployment_starts_a_replica_that_serves_while_the_engine_stands_still(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", replicas=None) as server, Client(server.url, server.key, patience_s=60) as client:
        assert REPLICA not in server.pids()
        assert "1 replica with 1 thread will serve, started when something is deployed or the model is asked" in server.logs()
        client.deployments.create("served", client.create_run("bloomery-tiny", rank=4, seed=1).save_snapshot("first").result().version)
        wait_until(lambda: server.children().get(REPLICA, {}).get("state") == "ready")
        (shown,) = client.status().replicas
        assert (shown.name, shown.wanted, shown.ready) == (REPLICA, True, True)
        assert shown.detail["pid"] == server.pid(REPLICA)
        status = subprocess.run([BLOOMERY, "status", "--data-dir", str(server.data_dir)], capture_output=True, text=True, check=True)
        assert REPLICA in status.stdout
        before = [answer(server, name) for name in ("served", "bloomery-tiny")]
        os.kill(server.pid(ENGINE), signal.SIGSTOP)
        try:
            assert [answer(server, name) for name in ("served", "bloomery-tiny")] == before
        finally:
            os.kill(server.pid(ENGINE), signal.SIGCONT)
        engine, replica = server.pid(ENGINE), server.pid(REPLICA)
        yields = os.getpriority(os.PRIO_PROCESS, engine) > os.getpriority(os.PRIO_PROCESS, replica)
        assert yields or not os.sched_getaffinity(engine) & os.sched_getaffinity(replica)
        assert server.stop() == 0


def answer(server: LiveServer, model: str) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60) as sdk:
        return sdk.completions.create(model=model, prompt="import", max_tokens=8, seed=1).choices[0].text

"""A damaged run at the doors of both contracts: each request is told what is wrong, the log once, and nobody where the server keeps its files."""

import logging
from pathlib import Path

import httpx
import pytest

from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, served
from tests.tinker.tenants import ADAM


def test_many_requests_for_a_damaged_run_are_one_entry_of_the_log_and_name_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(tmp_path) as server, connected(server) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        for _ in range(3):
            run.optim_step(ADAM).result()
    (segment,) = (tmp_path / "runs").glob("run-*/ops-*.seg")
    segment.write_bytes(segment.read_bytes()[:-200] + b"x" * 200)
    with served(tmp_path) as server, httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": KEY}, timeout=40) as http:
        future = {"request_id": f"operation|{run.model_id}|1|"}
        step = {"model_id": run.model_id, "seq_id": 4, "adam_params": {"learning_rate": 1e-3}}
        asked = [http.post("/retrieve_future", json=future) for _ in range(3)]
        sent = [http.post("/optim_step", json=step) for _ in range(2)]
        ours = [http.get(f"/runs/{segment.parent.name}/operations/1") for _ in range(2)]
    assert [answer.status_code for answer in (*asked, *sent, *ours)] == [200] * 3 + [400] * 2 + [500] * 2
    told = {answer.json()["error"] for answer in (*asked, *sent)} | {answer.json()["error"]["message"] for answer in ours}
    assert len(told) == 1
    assert f"run `{segment.parent.name}`, segment {segment.name}: " in min(told)
    assert str(tmp_path) not in min(told)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR and segment.name in record.getMessage()]) == 1

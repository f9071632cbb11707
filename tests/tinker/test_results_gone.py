"""A result that is not there any more is an answer, of which the SDK tells what it says: not a promise that broke, and not silence."""

from pathlib import Path

import httpx
import tinker
from tinker import types

from bloomery.store.journal import Bounds
from tests.live import wait_until
from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served

ADAM = types.AdamParams(learning_rate=1e-3)


def retrieved(server: Served, future: str) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": future}, headers={"x-api-key": KEY}, timeout=40)


def test_a_future_whose_result_made_room_for_others_says_so_with_its_category(tmp_path: Path) -> None:
    with served(tmp_path) as server, connected(server) as client:
        # Runs that are taken up from here on keep no results but those that a replay needs.
        server.services.runs._activity._bounds = Bounds(most_bytes=0, segment_bytes=1)
        run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        for _ in range(12):
            metrics = run.optim_step(ADAM).result().metrics
        assert metrics["optimizer_step"] == 12.0
        # They are dropped behind the rows, which follow the answers.
        wait_until(lambda: "error" in retrieved(server, f"operation|{run.model_id}|1|").json())
        gone, there = retrieved(server, f"operation|{run.model_id}|1|"), retrieved(server, f"operation|{run.model_id}|12|")
        assert (gone.status_code, gone.json()["category"]) == (200, "user")
        assert "the result of operation 1 was dropped and cannot be had again, what the operation did stays" in gone.json()["error"]
        assert there.json()["metrics"] == metrics
        assert isinstance(run.optim_step(ADAM).result(), tinker.OptimStepResponse)

"""What the benchmark of training through the SDK counts: steps that trained, in whatever order they were submitted."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import skyrl
from bench.peers import tinker_steps
from bench.shapes import EMPTY, write_directory
from tests.live import running_server
from tests.sdk import LEAVES_CONNECTIONS, connected

pytestmark = LEAVES_CONNECTIONS

LOG = """
INFO - tx: (timing) process_batch_requests(forward_backward, n=1) took 0.300s
INFO - uvicorn.access: 127.0.0.1:40000 - "POST /api/v1/retrieve_future HTTP/1.1" 200
INFO - tx: (timing) process_single_request(optim_step) took 0.020s
INFO - tx: (timing) process_batch_requests(forward_backward, n=1) took 5.000s
INFO - tx: (timing) process_single_request(optim_step) took 1.000s
INFO - tx: (timing) process_batch_requests(forward_backward, n=1) took 0.310s
INFO - tx: (timing) process_single_request(optim_step) took 0.015s
INFO - tx: (timing) process_single_request(optim_step) took 0.001s
INFO - tx: (timing) process_batch_requests(forward_backward, n=18) took 9.000s
"""


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What the SDK left is collected where its warning is ignored."""
    yield
    gc.collect()


@pytest.mark.slow
def test_steps_train_the_same_however_many_are_submitted_ahead(tmp_path: Path) -> None:
    model = write_directory(EMPTY, tmp_path / "model")
    data = [tinker_steps.datum(list(range(10, 40)), "cross_entropy")]
    losses = []
    with running_server(tmp_path / "data", "--model", str(model)) as server, connected(server) as sdk:
        for ahead in skyrl.AHEAD:
            run = sdk.create_lora_training_client(base_model="model", rank=8, seed=7)
            losses.append(tinker_steps.train(run.result(), data, "cross_entropy", 6, ahead))
    assert losses[0] == losses[1] == losses[2]
    assert sorted(losses[0], reverse=True) == losses[0]
    assert len(set(losses[0])) == 6


def test_a_form_in_which_a_step_did_not_train_has_no_speed() -> None:
    shown = skyrl.shown_form({"seconds": 2.0, "losses": [3.0, 2.0, 2.0, 1.0]}, tokens=400)
    assert "tokens_per_s" not in shown
    assert shown["trained_steps"] == 3
    assert skyrl.shown_form({"seconds": 2.0, "losses": [3.0, 2.0, 1.5, 1.0]}, tokens=400)["tokens_per_s"] == 200


def test_the_peer_computes_for_what_its_log_says_of_single_forwards_and_the_step_behind_each() -> None:
    assert skyrl.computed_s(LOG) == pytest.approx(0.325)

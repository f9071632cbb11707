"""A client that sends faster than its run is computed, with the unmodified SDK: it is held up, comes again by itself, and misses nothing."""

from pathlib import Path
from typing import Final

import numpy as np
import pytest
import tinker

from bloomery.services.training import backlog, history
from tests.live import wait_until
from tests.sdk import connected
from tests.tinker.contract_traffic import listening
from tests.tinker.over_fake_engine import MODEL, Served, served
from tests.tinker.tenants import ADAM, datum

TOKENS: Final = list(range(1, 30))
EACH_BYTES: Final = (len(TOKENS) - 1) * sum(np.dtype(kind).itemsize for kind in ("int32", "int64", "float32"))
"""Of the tokens, the targets and the weights of a batch."""
ROOM: Final = 2
BATCHES: Final = 8


@pytest.fixture
def room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backlog, history):
        monkeypatch.setattr(module, "MAX_WAITING_BYTES", ROOM * EACH_BYTES)


@pytest.mark.usefixtures("room_for_two")
def test_more_bytes_than_may_wait_are_sent_again_until_they_are_taken_and_all_are_computed_in_order(tmp_path: Path) -> None:
    with served(tmp_path) as server, connected(server) as client, listening() as heard:
        run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        hold(server)
        futures = [run.forward_backward([datum(TOKENS)], "cross_entropy") for _ in range(BATCHES)]
        step = run.optim_step(ADAM)
        wait_until(lambda: [each.response.status_code for each in heard if each.request.url.path.endswith("/forward_backward")][-1:] == [503])
        assert [message.seq for message in server.engine.executed] == []
        (active,) = server.services.runs._activity._runs.values()
        assert active.history.last_known == ROOM
        go_on(server)
        losses = [future.result(timeout=60).metrics["loss:sum"] for future in futures]
        assert len(losses) == BATCHES
        assert step.result(timeout=60).metrics["optimizer_step"] == 1.0
        assert [message.seq for message in server.engine.executed] == list(range(1, BATCHES + 2))


@pytest.mark.usefixtures("room_for_two")
def test_a_call_in_more_pieces_than_may_wait_fails_as_its_callers_and_the_run_goes_on(tmp_path: Path) -> None:
    """The SDK sends the first piece when the others were taken: told to come again it would wait for itself."""
    pieces = [datum(TOKENS)] * 3 * 8192
    with served(tmp_path) as server, connected(server) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match="send less in one call") as failed:
            run.forward_backward(pieces, "cross_entropy").result(timeout=60)
        assert failed.value.category.value == "user"
        with pytest.raises(tinker.RequestFailedError, match="an earlier operation failed"):
            run.optim_step(ADAM).result(timeout=60)
        run.forward_backward([datum(TOKENS)], "cross_entropy").result(timeout=60)
        assert "grad_norm" in run.optim_step(ADAM).result(timeout=60).metrics


def hold(server: Served) -> None:
    async def clear() -> None:
        server.engine.gate.clear()

    server.do(clear)


def go_on(server: Served) -> None:
    async def let_go() -> None:
        server.engine.gate.set()

    server.do(let_go)

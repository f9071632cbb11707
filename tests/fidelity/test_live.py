"""The card of what a real server serves: its sampler against its trainer."""

import pytest

from bloomery.client import Client
from tests.live import LiveServer, running_server, wait_until
from tests.train.builders import supervised


def test_a_real_engine_measures_the_shipped_model(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        card = client.versions.measure_fidelity("bloomery-tiny")
        assert (card.mode, card.verdict, card.max_abs, card.bit_equal) == ("exact", "pass", 0.0, 1.0)
        assert (card.sequences, card.tokens, card.first_difference, card.dtype) == (7, 224, None, "float32")
        assert client.versions.fidelity("bloomery-tiny") == card
        (engine,) = client.status().engines
        assert card.numerics == engine.detail["numerics"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--replicas", "0"), ("--replicas", "1"), ("--replicas", "0", "--plain")], ids=["engine", "replica", "plain"])
def test_what_is_deployed_gets_its_card_by_itself(tmp_path, options) -> None:
    with running_server(tmp_path / "data", *options) as server, Client(server.url, server.key) as client:
        run = client.create_run("bloomery-tiny", rank=8, seed=3)
        for _ in range(3):
            run.forward_backward(supervised([40, 60]), "cross_entropy").result()
            run.optim_step(1e-3).result()
        version = run.save_snapshot("kept").result().version
        assert client.deployments.create("served", version).fidelity is None
        wait_until(lambda: client.deployments.get("served").fidelity is not None)
        card = client.deployments.get("served").fidelity
        assert card is not None
        assert card == client.versions.fidelity("served") == client.versions.fidelity(version)
        assert card.verdict == "pass"
        if "--plain" in options:
            assert card.mode == "plain"
        else:
            assert (card.mode, card.max_abs) == ("exact", 0.0)

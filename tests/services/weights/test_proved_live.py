"""Whoever asks for the status, or for a deployment, learns who has proved which weights."""

import json

from bloomery.client import Client
from tests.live import LiveServer, wait_until
from tests.train.builders import supervised


def test_a_deployment_says_who_has_proved_its_live_version(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        (engine,) = client.status().engines
        base = engine.detail["proved"]
        assert base["probe_bit_equal"]
        assert base["probe_max_abs"] == 0
        run = client.create_run("bloomery-tiny", rank=8, seed=3)
        run.forward_backward(supervised([40, 60]), "cross_entropy").result()
        run.optim_step(1e-3).result()
        published = run.save_snapshot("proved").result()
        client.deployments.create("proved-one", published.version)
        client.chat("proved-one", [{"role": "user", "content": "Hello"}], max_tokens=2)
        wait_until(lambda: client.deployments.get("proved-one").proved != [])
        (proved,) = client.deployments.get("proved-one").proved
        manifest = json.loads((live_server.data_dir / "blobs" / "manifests" / published.version).read_text())
        assert (proved.process, proved.root) == ("engine", manifest["state"])
        (engine,) = client.status().engines
        held = engine.detail["proved_versions"][published.version]
        assert held["root"] == manifest["state"]
        assert (held["probe"]["expected"], held["probe"]["against"], held["probe"]["bit_equal"]) == ("published", engine.base_hash, True)
        assert held["probe"]["tells"]
        assert held["probe"]["moved"] == held["probe"]["predicted"] > 0
        assert engine.detail["condemned"] == {}


def test_what_a_run_publishes_behind_what_is_served_is_proved_before_it_is_promoted(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        run = client.create_run("bloomery-tiny", rank=8, seed=4)
        client.deployments.create("proved-ahead", run.save_snapshot().result().version)
        run.forward_backward(supervised([40, 60]), "cross_entropy")
        run.optim_step(1e-3)
        published = run.save_snapshot().result().version
        wait_until(lambda: published in client.status().engines[0].detail["proved_versions"])
        assert client.deployments.get("proved-ahead").live.version != published

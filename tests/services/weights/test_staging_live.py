"""A live server moves a name to weights only when it can serve them: what a damaged disk holds is refused before any request meets it."""

import pytest

from bloomery.client import Client
from bloomery.types.errors import Corrupt
from tests.live import LiveServer
from tests.train.builders import supervised

NAME = "staged"
ASK = [{"role": "user", "content": "Hello"}]


def test_damaged_weights_are_refused_by_name_and_the_ones_before_go_on_answering(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        run = client.create_run("bloomery-tiny", rank=8, seed=5)
        versions = []
        for _ in range(3):
            run.forward_backward(supervised([40, 60]), "cross_entropy").result()
            run.optim_step(1e-3).result()
            versions.append(run.save_snapshot().result())
        good, damaged, sound = versions
        client.deployments.create(NAME, good.version)
        before = said(client)
        blob = live_server.data_dir / "blobs" / damaged.key
        content = bytearray(blob.read_bytes())
        content[-5] ^= 1
        blob.write_bytes(content)
        with pytest.raises(Corrupt, match=f"version `{damaged.version}` cannot be served, and `{NAME}` stays as it is: .* does not hold version"):
            client.deployments.promote(NAME, damaged.version)
        deployment = client.deployments.get(NAME)
        assert (deployment.live.version, len(deployment.revisions)) == (good.version, 1)
        assert said(client) == before
        moved = client.deployments.promote(NAME, sound.version)
        assert (moved.live.version, moved.live.number) == (sound.version, 2)
        client.deployments.rollback(NAME, 1)
        assert client.deployments.get(NAME).live.version == good.version
        assert said(client) == before


def said(client: Client) -> tuple[str, str]:
    """What the name answers, and of which version that is."""
    answer = client.chat(NAME, ASK, max_tokens=4, seed=1, temperature=0)
    return answer["choices"][0]["message"]["content"], answer["system_fingerprint"]

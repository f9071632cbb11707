"""An adapter through a chain: the blobs that a run publishes, as deltas, and back to the bit."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bloomery.sync.chain.publisher import Publisher
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.codec.layout import MemoryWeights
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import RunChain, weights_of
from bloomery.types.objects import Objects
from bloomery.types.operations import SnapshotResult
from tests.sync.chain.models import RUN
from tests.sync.chain.test_receiver import CONFIG
from tests.sync.codec.weights import same
from tests.train.builders import SAVE, MemoryShelf, decoder, learn, run, step, supervised, train

VERSIONS = 6


class Published(NamedTuple):
    """A version of an adapter, as an engine writes it."""

    manifest: Manifest
    blob: bytes

    @property
    def weights(self) -> MemoryWeights:
        return weights_of(self.blob)


def trained(dtype: torch.dtype, learning_rate: float) -> list[Published]:
    """Versions of one run, the first before any step."""
    shelf = MemoryShelf()
    adapter = run(decoder(dtype=dtype), shelf, rank=8)
    found = []
    for number in range(VERSIONS):
        lessons = [learn(supervised([20, 40], seed=number)), step(learning_rate)] if number else []
        saved = train(adapter, [*lessons, SAVE])[-1]
        assert isinstance(saved, SnapshotResult)
        found.append(Published(Manifest.from_json(shelf.blobs[manifest_key(saved.version)]), shelf.blobs[saved.key]))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_adapter_travels_as_deltas_flips_and_goes_back_and_is_the_blob_that_was_published(
    dtype: torch.dtype, objects: Objects, tmp_path: Path
) -> None:
    versions = trained(dtype, 1e-3)
    assert {version.manifest.kind for version in versions} == {"lora"}
    assert len({version.manifest.state for version in versions}) == VERSIONS
    with Publisher.open(objects, RUN, holder="trainer", config=CONFIG) as publisher:
        base = publisher.publish(None, versions[0].weights).manifest
        assert [step.kind for step in base.steps] == ["base"]
        reader = Receiver.open(objects, MemoryWeights.zeros(versions[0].weights.layout), RUN, folder=tmp_path / "reader")
        with reader as receiver:
            live = receiver.weights
            assert isinstance(live, MemoryWeights)
            receiver.join()
            assert same(live, versions[0].weights)
            for number in range(1, VERSIONS):
                before, after = (versions[at].weights for at in (number - 1, number))
                made = publisher.publish(before, after).manifest
                assert made.steps[0].kind == "delta"
                assert made.new_root == versions[number].manifest.state
                assert receiver.stage() == number
                assert same(live, before)
                receiver.flip()
                assert same(live, after)
            receiver.roll_back()
            assert same(live, versions[-2].weights)
            receiver.stage()
            receiver.flip()
            assert same(live, versions[-1].weights)
    late = MemoryWeights.zeros(versions[0].weights.layout)
    with Receiver.open(objects, late, RUN, folder=tmp_path / "late") as receiver:
        receiver.join()
    assert same(late, versions[-1].weights)
    for version in versions:
        assert RunChain(objects, RUN, trusted=()).whole(version.manifest, tmp_path) == version.blob

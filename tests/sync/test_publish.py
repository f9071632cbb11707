"""In which order what is published becomes durable."""

from collections.abc import Mapping
from threading import Event, current_thread

import pytest

from bloomery.sync.publish import manifest_key, publish, weights_key
from bloomery.types.probe import TrainerSide, probe_key
from tests.sync.test_manifest import BLOB

SIDE = TrainerSide((1, 2), b"\0" * 4)


def published(write, probe):
    names = {"run_id": "r", "base": "b", "parent": "p", "template_hash": "t", "numerics": "n"}
    return publish(write, BLOB, kind="lora", step=1, rank=2, alpha=1.0, targets=(), probe=probe, **names)


def test_the_probe_is_asked_while_the_weights_are_written_and_both_lie_there_before_the_manifest():
    written, asked, threads = [], Event(), []

    def write(blobs: Mapping[str, bytes]) -> None:
        if weights_key(BLOB) in blobs:
            # Who asked only behind the write would never get here.
            assert asked.wait(60)
        written.extend(blobs)

    def probe() -> TrainerSide:
        threads.append(current_thread())
        asked.set()
        return SIDE

    manifest = published(write, probe)
    assert written == [manifest.key, probe_key(manifest.version), manifest_key(manifest.version)]
    assert threads == [current_thread()]


@pytest.mark.parametrize("fails", ["write", "probe", "write and probe"])
def test_no_manifest_names_weights_that_are_not_there_or_that_no_trainer_answered_with(fails: str):
    written = []

    def write(blobs: Mapping[str, bytes]) -> None:
        if "write" in fails:
            raise OSError("the disk is full")
        written.extend(blobs)

    def probe() -> TrainerSide:
        if "probe" in fails:
            raise ArithmeticError("no number")
        return SIDE

    with pytest.raises(OSError if fails == "write" else ArithmeticError) as failed:
        published(write, probe)
    assert written == ([] if "write" in fails else [weights_key(BLOB)])
    assert ["the disk is full" in note for note in getattr(failed.value, "__notes__", [])] == [True] * (fails == "write and probe")

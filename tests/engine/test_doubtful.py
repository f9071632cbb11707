"""Whoever finds the base changed names what was written since it was last sound."""

import time

from bloomery.engine.doubtful import Doubtful
from bloomery.types.operations import SnapshotResult
from bloomery.types.protocol import CheckpointWritten, OperationDone


def saved(version: str, *, replay: bool = False) -> OperationDone:
    return OperationDone(run_id="r", seq=1, result=SnapshotResult(version=version, key="k", size_bytes=1, step=1), seconds=0.0, replay=replay)


def test_what_was_written_since_the_last_clean_round_is_named_once_and_what_was_before_is_not() -> None:
    doubtful = Doubtful()
    doubtful.note(saved("sound"), 0.0)
    clean_s = time.monotonic()
    for message in (CheckpointWritten(run_id="r", seq=2, key="checkpoints/r/2", digest="d"), saved("new"), saved("new"), saved("old", replay=True)):
        doubtful.note(message, 0.0)
    assert doubtful.names(clean_s) == ["checkpoint `checkpoints/r/2`", "version new"]
    assert "checkpoint `checkpoints/r/2`, version new. To be sure, go back" in doubtful.advice(clean_s)
    assert doubtful.names(time.monotonic()) == []
    assert doubtful.advice(time.monotonic()).startswith("nothing was written")


def test_a_checkpoint_that_is_told_again_was_not_written_again() -> None:
    doubtful = Doubtful()
    doubtful.note(CheckpointWritten(run_id="r", seq=2, key="checkpoints/r/2", digest="d"), 0.0)
    clean_s = time.monotonic()
    doubtful.note(CheckpointWritten(run_id="r", seq=9, key="checkpoints/r/2", digest="d"), 0.0)
    assert doubtful.names(clean_s) == []
    doubtful.note(CheckpointWritten(run_id="r", seq=11, key="checkpoints/r/11", digest="d"), 0.0)
    assert doubtful.names(clean_s) == ["checkpoint `checkpoints/r/11`"]

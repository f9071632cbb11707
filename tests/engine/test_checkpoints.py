"""When an engine makes a run durable by itself, and what that costs: also of a run that only computes forwards."""

import os
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.engine.hosted import CheckpointAfter, HostedRun
from bloomery.recipes.sft import datum
from bloomery.store.journal import Journal
from bloomery.train.passes import compute
from bloomery.train.run import TrainableRun
from bloomery.types.operations import Operation
from bloomery.types.protocol import CheckpointWritten, Execute
from tests.live import running_server, wait_until
from tests.train import builders

FORWARD = builders.learn(builders.supervised([9]), backward=False)
LESSON = [builders.learn(builders.supervised([9])), builders.step()]


NEVER_FOR_BYTES = CheckpointAfter(bytes=1 << 40)


class Hosted:
    """A run in an engine whose clock says that every pass took so many seconds; `written` is what reached the disk."""

    def __init__(
        self,
        *,
        pass_s: float = 6.0,
        run: TrainableRun | None = None,
        last_seq: int = -1,
        restored: str | None = None,
        after: CheckpointAfter = NEVER_FOR_BYTES,
    ) -> None:
        self.written: dict[str, bytes] = {}
        self.run = builders.run() if run is None else run
        self.hosted = HostedRun(self.run, self.written.__setitem__, last_seq=last_seq, checkpoint_after=after, restored=restored)
        self._pass_s, self._seq = pass_s, last_seq

    def execute(self, operations: Iterable[Operation]) -> list[CheckpointWritten]:
        """The checkpoints that the engine would have told of."""
        told = []
        for operation in operations:
            self._seq += 1
            self.hosted.receive(Execute(run_id="run-1", seq=self._seq, operation=operation))
            done = self.hosted.begin()
            while done is None:
                assert self.hosted.share is not None
                done = self.hosted.resume(compute([self.hosted.share])[0], self._pass_s)
            if self.hosted.checkpoint_due and (written := self.hosted.checkpoint()) is not None:
                told.append(written)
        return told


def test_forwards_move_the_checkpoint_on_and_write_equal_weights_once():
    one = Hosted()
    told = one.execute([FORWARD] * 8)
    assert [written.seq for written in told] == [1, 3, 5, 7]
    assert {written.key for written in told} == set(one.written)
    assert len(one.written) == 1
    assert {written.digest for written in told} == {one.run.weights_digest()}


def test_what_changes_the_state_is_written_and_nothing_else():
    one = Hosted(pass_s=11.0)
    first, *others = one.execute([*LESSON, FORWARD, builders.SAVE, FORWARD, builders.SAVE, FORWARD, *LESSON])
    # A snapshot that names the weights anew is part of a run's descent; naming them again changes nothing.
    assert [written.seq for written in (first, *others)] == [1, 2, 4, 6, 8]
    assert [written.key for written in (first, *others)] == [first.key, first.key, others[1].key, others[1].key, others[3].key]
    assert len(one.written) == 3
    for key in one.written:
        again = builders.run()
        again.restore(one.written[key])
        assert again.checkpoint_bytes() == one.written[key]
    assert again.checkpoint_bytes() == one.run.checkpoint_bytes()


def test_a_step_that_fails_leaves_a_state_that_can_be_written():
    one = Hosted(pass_s=11.0)
    hopeless = builders.learn(builders.supervised([9], weight=1e30))
    told = one.execute([*LESSON, hopeless, builders.step(), FORWARD])
    assert told[-1].seq == 4
    again = builders.run()
    again.restore(one.written[told[-1].key])
    assert again.weights_digest() == one.run.weights_digest()


def test_a_checkpoint_waits_a_while_for_the_step_behind_which_it_is_smaller():
    one = Hosted(pass_s=11.0)
    assert one.execute([LESSON[0]]) == []
    between, behind = *one.execute([FORWARD]), *one.execute([FORWARD, LESSON[1]])
    assert (between.seq, behind.seq) == (1, 3)
    assert len(one.written[between.key]) > 1.25 * len(one.written[behind.key])


def test_a_run_that_was_restored_goes_on_from_the_blob_it_was_restored_from():
    one = Hosted(pass_s=11.0)
    [checkpoint] = one.execute(LESSON)
    again = builders.run()
    again.restore(one.written[checkpoint.key])
    restored = Hosted(pass_s=11.0, run=again, last_seq=checkpoint.seq, restored=checkpoint.key)
    told = restored.execute([FORWARD, FORWARD])
    assert [(written.seq, written.key, written.digest) for written in told] == [(seq, checkpoint.key, checkpoint.digest) for seq in (2, 3)]
    assert restored.written == {}
    [changed] = restored.execute(LESSON)
    assert list(restored.written) == [changed.key] != [checkpoint.key]


FORWARDS = 24


@pytest.mark.slow
def test_the_journal_of_a_run_that_only_computes_forwards_stays_short_and_little_is_replayed(tmp_path: Path):
    data = tmp_path / "data"
    environment = {"BLOOMERY_CHECKPOINT_SECONDS": "0"}
    with running_server(data, env=environment) as server, Client(server.url, server.key, patience_s=120) as client:
        run = client.create_run("bloomery-tiny", rank=4, seed=1)
        rows = [datum([1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0])]
        results = [run.forward(rows).result() for _ in range(FORWARDS)]
        [directory] = (data / "runs").iterdir()
        wait_until(lambda: len(list(directory.glob("ops-*.seg"))) <= 2)
        [blob] = (data / "blobs" / "checkpoints").rglob("*.safetensors")
        before = blob.stat().st_mtime_ns
        engine = server.pid("engine-bloomery-tiny")
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: server.pids().get("engine-bloomery-tiny", engine) != engine)
        assert run.forward(rows).result() == results[0]
        run.optim_step(1e-3).result()
        assert blob.stat().st_mtime_ns == before
    with ThreadPoolExecutor(1) as pool:
        journal = Journal(directory, pool)
        held = [seq for seq in range(journal.last_operation + 1) if journal.has_operation(seq)]
    assert len(held) <= 4 < FORWARDS

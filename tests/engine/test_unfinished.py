"""Steps of any number of operations: their journal and their replay are bounded, and whoever dies in one goes on with the same bits."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bloomery.client import Client, TrainingRun
from bloomery.engine.hosted import CheckpointAfter, HostedRun
from bloomery.recipes.sft import datum
from bloomery.store.journal import Journal
from bloomery.train.passes import compute
from bloomery.types.operations import Operation
from bloomery.types.protocol import CheckpointWritten, Execute, OperationDone
from tests.engine.harness import engine, history, learn, step
from tests.engine.test_engine import SAVE
from tests.live import running_server, wait_until
from tests.train import builders

PAYLOAD = builders.learn(builders.supervised([200]))
BYTES = 4 * (1 << 10) + 4 * PAYLOAD.input_bytes


def hosted_run(rank: int, size: int, written: dict[str, bytes]) -> HostedRun:
    after = CheckpointAfter(seconds=1e9, bytes=size)
    return HostedRun(builders.run(rank=rank), written.__setitem__, last_seq=-1, checkpoint_after=after)


def execute(hosted: HostedRun, seq: int, operation: Operation) -> CheckpointWritten | None:
    hosted.receive(Execute(run_id="run-1", seq=seq, operation=operation))
    done = hosted.begin()
    while done is None:
        assert hosted.share is not None
        done = hosted.resume(compute([hosted.share])[0], 0.0)
    return hosted.checkpoint() if hosted.checkpoint_due else None


def test_bytes_of_payloads_bring_a_checkpoint_also_while_gradients_wait():
    written: dict[str, bytes] = {}
    one = hosted_run(1, BYTES, written)
    told = [execute(one, seq, PAYLOAD) for seq in range(9)]
    assert [message.seq for message in told if message is not None] == [3, 7]
    assert len(written) == 2


def test_a_journal_as_long_as_a_checkpoint_of_the_run_is_not_too_long():
    assert CheckpointAfter().payload_bytes(10) == 64 << 20
    assert CheckpointAfter().payload_bytes(1 << 23) == 128 << 20
    assert CheckpointAfter(bytes=5).payload_bytes(1 << 23) == 5


def test_a_checkpoint_in_the_middle_of_an_operation_is_as_of_the_last_step():
    written: dict[str, bytes] = {}
    one = hosted_run(1, 1 << 40, written)
    execute(one, 0, PAYLOAD)
    execute(one, 1, builders.step())
    one.receive(Execute(run_id="run-1", seq=2, operation=PAYLOAD))
    assert one.begin() is None
    first = one.checkpoint()
    assert first is not None
    assert first.seq == 1
    assert one.checkpoint() is None
    assert one.share is not None
    one.resume(compute([one.share])[0], 0.0)
    second = one.checkpoint()
    assert second is not None
    assert second.seq == 2
    one.receive(Execute(run_id="run-1", seq=3, operation=PAYLOAD))
    assert one.begin() is None
    assert one.checkpoint() is None, "what lies behind the last one is half done"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8])
def test_an_engine_that_dies_within_a_step_goes_on_from_the_gradients_it_had_gathered(model, tmp_path, references, rank):
    operations = [*history(3), learn(seed=3)]
    with engine(model, tmp_path, checkpoint_s=1000.0, checkpoint_bytes=1) as one:
        done, key = -1, None
        # Behind the first part of the second step, and of the fourth.
        for last in (2, 6):
            with one.connect() as api:
                assert api.open(checkpoint=key, last_seq=done, rank=rank).error is None
                api.execute(done + 1, *operations[done + 1 : last + 1])
                done, key = last, api.wait(CheckpointWritten, lambda message, last=last: message.seq == last).key
            one.kill()
            one.start()
        with one.connect() as api:
            api.open(checkpoint=key, last_seq=done, rank=rank)
            api.execute(done + 1, step(), SAVE)
            assert api.done(done + 2).result.digest == references[rank].digest
            assert [message.seq for message in api.seen if isinstance(message, OperationDone)] == [7, 8]


LESSONS = 24
ROWS = [datum(list(range(1 + seed, 60 + seed)), [1.0] * 59) for seed in range(LESSONS)]


def accumulate(run: TrainingRun) -> TrainingRun:
    for row in ROWS:
        run.forward_backward([row]).result()
    return run


def finished(run: TrainingRun) -> tuple[str, float]:
    """Weights and norm of the step that all of it was for."""
    norm = run.optim_step(1e-3).result().metrics["grad_norm"]
    return run.save_checkpoint("end").result().digest, norm


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_the_journal_of_a_step_without_end_stays_short_and_deaths_of_both_processes_change_no_bit(tmp_path: Path, rank: int):
    # Three operations of 59 tokens and less, and what is written around them.
    size, data = 3 * (1 << 10), tmp_path / "data"
    with running_server(tmp_path / "reference") as server, Client(server.url, server.key, patience_s=120) as client:
        expected = finished(accumulate(client.create_run("bloomery-tiny", rank=rank, seed=1)))
    environment = {"BLOOMERY_CHECKPOINT_SECONDS": "1000", "BLOOMERY_CHECKPOINT_BYTES": str(size)}
    with running_server(data, env=environment) as server, Client(server.url, server.key, patience_s=120) as client:
        run = accumulate(client.create_run("bloomery-tiny", rank=rank, seed=1))
        [directory] = (data / "runs").iterdir()
        wait_until(lambda: len(list(directory.glob("ops-*.seg"))) <= 3)
        before = server.pids()
        for name in ("engine-bloomery-tiny", "api"):
            os.kill(before[name], signal.SIGKILL)
        wait_until(lambda: all(server.pids().get(name, pid) != pid for name, pid in before.items() if name != "supervisor"))
        assert finished(run) == expected
    with ThreadPoolExecutor(1) as pool:
        journal = Journal(directory, pool)
        held = [seq for seq in range(journal.last_operation + 1) if journal.has_operation(seq)]
    assert len(held) <= 9 < LESSONS


def test_what_the_journal_writes_around_payloads_counts_too():
    one = hosted_run(1, 10 << 10, {})
    assert any([execute(one, seq, builders.learn(builders.supervised([3]))) for seq in range(10)])

"""Jobs whose engine can write no weights, as on a full disk: they say so, and lose nothing by it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Evaluation, JobState
from bloomery.types.methods import Distillation, Reinforcement
from tests.jobs.test_jobs_live import ENGINE, import_pairs, spec
from tests.jobs.test_methods_live import BASE, GRADER, lines, pairs, prompt
from tests.live import LiveServer, running_server, wait_until


@contextmanager
def no_room(server: LiveServer) -> Iterator[None]:
    """There is some for what is journaled, and none for weights."""
    engine = server.pid(ENGINE)
    resource.prlimit(engine, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_job_that_cannot_keep_its_weights_stands_still_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        import_pairs(client, "pairs")
        reference = client.jobs.wait(client.jobs.create(spec("undisturbed", "pairs", checkpoint_every=20)).id, 300)
        assert reference.result is not None
        with no_room(server):
            job = client.jobs.create(spec("full", "pairs", checkpoint_every=20)).id
            for _ in range(2):
                wait_until(lambda: client.jobs.get(job).state is JobState.PAUSED)
                reason = client.jobs.get(job).reason
                assert reason is not None
                assert "File too large" in reason
                assert "mend that, a full disk say, and resume the job" in reason
                client.jobs.resume(job)
            wait_until(lambda: client.jobs.get(job).state is JobState.PAUSED)
        client.jobs.resume(job)
        ended = client.jobs.wait(job, 300)
        assert ended.result is not None, ended.reason
        assert (ended.result.digest, ended.result.compared) == (reference.result.digest, reference.result.compared)
        found = [
            [(kept.kind, kept.name, kept.step, kept.digest) for kept in client.run(each.result.run).checkpoints()] for each in (ended, reference)
        ]
        assert found[0] == found[1]


LOOPS: dict[str, Reinforcement | Distillation] = {
    "rft": Reinforcement(grader="right", steps=4, groups_per_step=2, group_size=4, max_tokens=16),
    "distill": Distillation(teacher=BASE, steps=4, prompts_per_step=2, max_tokens=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", LOOPS)
def test_a_loop_that_cannot_keep_its_weights_stands_still_and_goes_on_once_there_is_room(tmp_path: Path, method: str) -> None:
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        client.datasets.create("prompts")
        client.datasets.add_version("prompts", {"train": lines([prompt(each) for each in pairs(8, 1)])})
        client.graders.create("right", {"type": "function", "source": GRADER, "entry": "score"})

        def create(name: str) -> str:
            return client.jobs.create(spec(name, "prompts", method=LOOPS[method], evaluation=Evaluation(), checkpoint_every=2)).id

        def is_paused() -> None:
            wait_until(lambda: client.jobs.get(job).state is JobState.PAUSED)
            reason = client.jobs.get(job).reason
            assert reason is not None
            assert "File too large" in reason
            assert "mend that, a full disk say, and resume the job" in reason

        reference = client.jobs.wait(create("undisturbed"), 300)
        assert reference.result is not None
        # What it begins with, twice, and what it has learnt.
        with no_room(server):
            job = create("full")
            is_paused()
            client.jobs.resume(job)
            is_paused()
        client.jobs.resume(job)
        wait_until(lambda: client.jobs.get(job).progress.step >= 1 or client.jobs.get(job).state.ended)
        with no_room(server):
            is_paused()
            client.jobs.resume(job)
            is_paused()
        client.jobs.resume(job)
        ended = client.jobs.wait(job, 300)
        assert ended.result is not None, ended.reason
        assert ended.result.digest == reference.result.digest
        found = [
            {(kept.kind, kept.name, kept.step, kept.digest) for kept in client.run(each.result.run).checkpoints()} for each in (ended, reference)
        ]
        assert found[0] == found[1]

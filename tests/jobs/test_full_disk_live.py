"""Jobs whose engine can write no weights, as on a full disk: they say so, and lose nothing by it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Evaluation, JobState
from bloomery.types.methods import Reinforcement
from tests.jobs.test_jobs_live import ENGINE, import_pairs, spec
from tests.jobs.test_methods_live import GRADER, lines, pairs, prompt
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
                assert "`bloomery job resume full`" in reason
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


@pytest.mark.slow
def test_a_job_that_fails_of_a_full_disk_says_so(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        client.datasets.create("prompts")
        client.datasets.add_version("prompts", {"train": lines([prompt(each) for each in pairs(8, 1)])})
        client.graders.create("right", {"type": "function", "source": GRADER, "entry": "score"})
        method = Reinforcement(grader="right", steps=2, groups_per_step=2, group_size=4, max_tokens=16)
        with no_room(server):
            job = client.jobs.wait(client.jobs.create(spec("full", "prompts", method=method, evaluation=Evaluation())).id, 300)
        assert job.state is JobState.FAILED
        assert job.reason is not None
        assert "File too large" in job.reason
        assert any(event.level == "error" and "File too large" in event.message for event in client.jobs.events(job.id))

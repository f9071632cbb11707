"""A job whose engine can write no weights, as on a full disk, says so wherever its end is looked at."""

import resource
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.types.jobs import JobState
from tests.jobs.test_jobs_live import ENGINE, import_pairs, spec
from tests.live import running_server


@pytest.mark.slow
def test_a_job_that_fails_of_a_full_disk_says_so(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        import_pairs(client, "pairs")
        engine = server.pid(ENGINE)
        # Room for what is journaled, and none for weights.
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        try:
            job = client.jobs.wait(client.jobs.create(spec("full", "pairs")).id, 300)
        finally:
            resource.prlimit(engine, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert job.state is JobState.FAILED
        assert job.reason is not None
        assert "File too large" in job.reason
        assert any(event.level == "error" and "File too large" in event.message for event in client.jobs.events(job.id))

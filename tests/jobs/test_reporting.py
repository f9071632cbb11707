"""What the process of a job tells the server, over the real api."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.jobs.reporting import Reporter
from bloomery.types.jobs import Data, JobSpec
from bloomery.types.leases import Lease
from tests.api.server import URL, Server, serving

STEPS = 2500
"""More than one report has."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


def begun(client: Client) -> Lease:
    """Of a job that is named `told`."""
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": '{"text": "a", "label": "b"}'})
    client.jobs.create(JobSpec(name="told", base_model="tiny", data=Data(dataset="rows")))
    return claim(client)


def claim(client: Client) -> Lease:
    lease = client.runner("r").claim(0)
    assert lease is not None
    return lease


def test_a_cursor_is_kept_with_all_that_was_said_before_it(server: Server) -> None:
    client = server.client()
    lease = begun(client)
    with Client(URL, lease.token, transport=server.transport) as mine:
        # Not entered: no thread reports by itself.
        reporter = Reporter(mine, lease.job, lease.lease_s)
        for step in range(1, STEPS + 1):
            reporter.point(step, STEPS, {"loss": float(step)}, tokens=step)
        reporter.note("half of it", key="half")
        reporter.keep_cursor("here", run="run-1")
    assert [point.step for point in client.jobs.points("told")] == list(range(1, STEPS + 1))
    assert "half of it" in [event.message for event in client.jobs.events("told")]
    job = client.jobs.get("told")
    assert (job.run, job.progress.step, job.progress.tokens) == ("run-1", STEPS, STEPS)
    assert client.runner("r").release() == [lease.job.id]
    assert claim(client).cursor == "here"


def test_what_is_too_long_to_be_noted_is_cut(server: Server) -> None:
    client = server.client()
    lease = begun(client)
    with Client(URL, lease.token, transport=server.transport) as mine:
        reporter = Reporter(mine, lease.job, lease.lease_s)
        for _ in range(2):
            reporter.note("a" * 10_000, key="b" * 1000)
        reporter.keep_cursor("here", run="run-1")
    assert [len(event.message) for event in client.jobs.events("told") if event.message.startswith("aaa")] == [4096]

"""What a job does about a training that goes wrong, as its spec says it and whoever dies meanwhile, over the real api without a runner."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.jobs.guard import Guard
from bloomery.jobs.reporting import Reporter, StandsStill
from bloomery.types.errors import InvalidInput
from bloomery.types.jobs import Data, JobEvent, JobPoint, JobSpec, Watch
from bloomery.types.leases import FinishJob, ReportJob
from tests.api.server import URL, Server, serving

BROKEN = {"loss": math.nan}
DEAD = {"loss": 1.0, "gradient_norm": 0.0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        server.client().datasets.create("rows")
        server.client().datasets.add_version("rows", {"train": '{"text": "a", "label": "b"}'})
        yield server


def begin(server: Server) -> tuple[Client, Guard, Reporter]:
    """A process of the job that waits, which reports when it is told to."""
    lease = server.client().runner("r").claim(0)
    assert lease is not None
    mine = Client(URL, lease.token, transport=server.transport)
    reporter = Reporter(mine, lease.job, lease.lease_s)
    return mine, Guard(mine, lease.job, reporter), reporter


def make(server: Server, watch: Watch) -> str:
    return server.client().jobs.create(JobSpec(name="a", base_model="tiny", data=Data(dataset="rows"), watch=watch)).id


def told(server: Server, reporter: Reporter) -> list[JobEvent]:
    """The troubles that the job's events name, once its process has said what it knows."""
    reporter.keep_cursor("here", run="run-1")
    return [event for event in server.client().jobs.events("a") if "trouble" in event.data]


def test_the_event_of_a_trouble_names_it_and_its_step(server: Server) -> None:
    make(server, Watch(action="stop"))
    _, guard, reporter = begin(server)
    guard.look(1, {"loss": 2.0, "gradient_norm": 1.0})
    with pytest.raises(InvalidInput, match="not finite at step 2: loss is no finite number: lower the learning rate"):
        guard.look(2, BROKEN)
    (event,) = told(server, reporter)
    assert (event.level, event.data) == ("warning", {"trouble": "not_finite", "step": 2})


def test_a_job_that_only_warns_goes_on_and_names_each_trouble_once(server: Server) -> None:
    make(server, Watch(action="warn"))
    _, guard, reporter = begin(server)
    for step in range(1, 31):
        guard.look(step, BROKEN if step < 4 else DEAD)
    assert [(event.data["trouble"], event.data["step"]) for event in told(server, reporter)] == [("not_finite", 1), ("dead_gradients", 13)]


def test_a_process_that_goes_on_knows_what_those_before_it_measured(server: Server) -> None:
    job = make(server, Watch(action="stop"))
    mine, _, _ = begin(server)
    mine.working(job).report(ReportJob(points=[JobPoint(step=step, values=DEAD) for step in range(1, 10)]))
    server.client().runner("r").ended(job, 1, "was killed by SIGKILL")
    _, guard, _ = begin(server)
    guard.catch_up(server.client().jobs.points(job))
    with pytest.raises(InvalidInput, match="dead gradients at step 10"):
        guard.look(10, DEAD)


def test_a_trouble_stops_a_job_whose_process_died_between_the_note_of_it_and_the_end(server: Server) -> None:
    job = make(server, Watch(action="stop"))
    for life in (1, 2):
        mine, guard, reporter = begin(server)
        with pytest.raises(InvalidInput, match="stopped by its watch: not finite at step 1"):
            guard.look(1, BROKEN)
        reporter.keep_cursor("noted", run="run-1")
        assert server.client().runner("r").ended(job, life, "was killed by SIGKILL").state == "queued"
        mine.close()


def test_a_trouble_pauses_a_job_until_somebody_has_seen_it_paused(server: Server) -> None:
    job = make(server, Watch(action="pause"))
    for life in (1, 2):
        mine, guard, reporter = begin(server)
        with pytest.raises(StandsStill, match="not finite at step 1"):
            guard.look(1, BROKEN)
        reporter.keep_cursor("noted", run="run-1")
        if life == 1:
            server.client().runner("r").ended(job, life, "was killed by SIGKILL")
        else:
            mine.working(job).finish(FinishJob(state="paused", reason="not finite"))
    server.client().jobs.resume(job)
    _, guard, _ = begin(server)
    guard.look(1, BROKEN)


def test_what_is_only_warned_of_is_noted_once(server: Server) -> None:
    job = make(server, Watch(action="warn"))
    for life in (1, 2):
        _, guard, reporter = begin(server)
        guard.look(1, BROKEN)
        guard.look(2, BROKEN)
        reporter.keep_cursor("noted", run="run-1")
        server.client().runner("r").ended(job, life, "was killed by SIGKILL")
    assert [event.data["step"] for event in server.client().jobs.events(job) if "trouble" in event.data] == [1]

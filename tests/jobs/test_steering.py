"""A job is paused or cancelled whatever it waits for, over the real api."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bloomery.client import Client
from bloomery.client.training import TrainingRun
from bloomery.jobs.reporting import LeaseLost, Reporter, Steered
from bloomery.jobs.steering import GRACE_S, steered
from bloomery.types.errors import InvalidInput, Unauthorized
from bloomery.types.jobs import JobPoint, JobState
from bloomery.types.leases import FinishJob, ReportJob
from tests.api.server import URL, serving
from tests.jobs.test_reporting import begun
from tests.live import wait_until

FAILED = FinishJob(state="failed", reason="its work came to its end")


class Worked(NamedTuple):
    """A job that a process has, which is `told`, and who reports of it."""

    client: Client
    job: str
    reporter: Reporter
    mine: Client
    """With the lease of the process."""


@contextmanager
def working(directory: Path) -> Iterator[Worked]:
    with serving(directory) as server:
        client = server.client()
        lease = begun(client)
        with Client(URL, lease.token, transport=server.transport) as mine, Reporter(mine, lease.job, lease.lease_s) as reporter:
            yield Worked(client, lease.job.id, reporter, mine)


class Waits:
    """Work that waits until it is `answered`, as for an agent that is away."""

    def __init__(self) -> None:
        self.began, self.answered = threading.Event(), threading.Event()

    def __call__(self) -> FinishJob:
        self.began.set()
        self.answered.wait()
        return FAILED


def steers(worked: Worked, work: Waits, deed: Callable[[], Any]) -> FinishJob:
    """What comes of the work when that is done in the midst of it."""

    def act() -> None:
        work.began.wait()
        deed()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        return steered(work, worked.reporter)
    finally:
        thread.join()


@pytest.mark.parametrize(("wanted", "state"), [("pause", JobState.PAUSED), ("cancel", JobState.CANCELLED)])
def test_work_that_waits_for_good_is_let_go_when_its_job_is_steered(tmp_path: Path, wanted: str, state: JobState) -> None:
    work = Waits()
    with working(tmp_path) as worked:
        said = steers(worked, work, lambda: getattr(worked.client.jobs, wanted)(worked.job))
        assert said.state == state
        # What retries or threads keep of it is of no use any more.
        for _ in range(2):
            with pytest.raises(Steered, match=wanted):
                worked.reporter.check()
        worked.reporter.finish(said)
        assert worked.client.jobs.get(worked.job).state is state
        work.answered.set()


def test_a_job_that_is_to_go_on_when_its_work_was_let_go_begins_again(tmp_path: Path) -> None:
    work = Waits()
    with working(tmp_path) as worked:
        said = steers(worked, work, lambda: worked.client.jobs.pause(worked.job))
        worked.client.jobs.resume(worked.job)
        worked.reporter.finish(said)
        assert worked.client.jobs.get(worked.job).state is JobState.QUEUED
        work.answered.set()


def test_a_pause_that_turns_into_the_end_meanwhile_is_one(tmp_path: Path) -> None:
    work = Waits()
    with working(tmp_path) as worked:
        said = steers(worked, work, lambda: worked.client.jobs.pause(worked.job))
        worked.client.jobs.cancel(worked.job)
        worked.reporter.finish(said)
        assert worked.client.jobs.get(worked.job).state is JobState.CANCELLED
        work.answered.set()


def test_work_that_was_let_go_and_goes_on_changes_nothing_any_more(tmp_path: Path) -> None:
    work = Waits()
    with working(tmp_path) as worked:
        run = worked.mine.create_run("tiny", 4)
        worked.reporter.keep_cursor("before", run.id)
        said = steers(worked, work, lambda: worked.client.jobs.pause(worked.job))
        with pytest.raises(Steered):
            worked.reporter.keep_cursor("let go", run.id)
        worked.reporter.finish(said)
        refused_all_it_does(worked, run)
        worked.client.jobs.resume(worked.job)
        lease = worked.client.runner("r").claim(0)
        assert lease is not None
        assert lease.cursor == "before"
        refused_all_it_does(worked, run)
        work.answered.set()


def refused_all_it_does(worked: Worked, run: TrainingRun) -> None:
    mine, before = worked.mine.working(worked.job), seen(worked)
    for late in (
        lambda: worked.mine.create_run("tiny", 4),
        lambda: run.optim_step(1e-3).result(),
        lambda: worked.mine.sampler("tiny"),
        lambda: mine.report(ReportJob(cursor="late", points=[JobPoint(step=1, values={"loss": 1.0})])),
        lambda: mine.finish(FAILED),
    ):
        with pytest.raises(Unauthorized):
            late()
    assert seen(worked) == before


def seen(worked: Worked) -> list[Any]:
    """What there is of the job and of all runs."""
    client = worked.client
    runs = [(run.id, run.step, client.run(run.id).next_seq) for run in client.runs()]
    return [client.jobs.get(worked.job), client.jobs.events(worked.job), client.jobs.points(worked.job), runs]


def test_work_that_is_almost_done_comes_to_its_end(tmp_path: Path) -> None:
    work = Waits()

    def pause(worked: Worked) -> None:
        worked.client.jobs.pause(worked.job)
        wait_until(lambda: is_steered(worked.reporter))
        threading.Timer(GRACE_S / 8, work.answered.set).start()

    with working(tmp_path) as worked:
        assert steers(worked, work, lambda: pause(worked)) == FAILED


def test_work_whose_job_is_somebody_elses_is_let_go(tmp_path: Path) -> None:
    work = Waits()
    with working(tmp_path) as worked:
        with pytest.raises(LeaseLost):
            steers(worked, work, lambda: worked.client.runner("r").release())
        work.answered.set()


def test_what_work_raises_is_raised(tmp_path: Path) -> None:
    def refused() -> FinishJob:
        raise InvalidInput("no such thing")

    with working(tmp_path) as worked, pytest.raises(InvalidInput, match="no such thing"):
        steered(refused, worked.reporter)


def is_steered(reporter: Reporter) -> bool:
    try:
        reporter.check()
    except Steered:
        return True
    return False

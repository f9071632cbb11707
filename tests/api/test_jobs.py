"""Jobs and their leases over the real api, without a runner: what runners and the processes of jobs may say, and when they are not heard any more."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import Connection, update

from bloomery.client import Client
from bloomery.config import ModelConfig
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.jobs.job_rows import add_job
from bloomery.services.jobs.leases import FIRST_PAUSE_S, MAX_DEATHS, Leases, pause_s
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthorized
from bloomery.types.ids import now_us
from bloomery.types.jobs import JOB_NEXT, Data, Evaluation, JobPoint, JobProgress, JobResult, JobSample, JobSpec, JobState
from bloomery.types.leases import MAX_REASON, FinishJob, Lease, NewJobEvent, ReportJob
from bloomery.types.methods import DirectPreference, Distillation, Optimizer, Reinforcement, Schedule, Supervised
from tests.api.server import KEY, URL, Server
from tests.render.builders import byte_level, small_config, write
from tests.services.fake_engine import CONTEXT, VOCABULARY

ADMIN = Principal("default", "key", SCOPES)
ROW = '{"text": "a", "label": "b"}'


AT_ONCE = pytest.mark.parametrize("first_pause_s", [0.0])
"""A job whose process dies has the next at once, however often."""


@pytest.fixture
def first_pause_s() -> float:
    return FIRST_PAUSE_S


@pytest.fixture
def server(tmp_path: Path, first_pause_s: float) -> Iterator[Server]:
    server = Server(tmp_path, "full")
    server.first_pause_s = first_pause_s
    with server.running():
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    client = server.client()
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": ROW})
    return client


def make(client: Client, name: str) -> str:
    return client.jobs.create(JobSpec(name=name, base_model="tiny", data=Data(dataset="rows"))).id


def of(server: Server, token: str) -> Client:
    return Client(URL, token, transport=server.transport)


def test_nothing_is_left_open_in_a_job_that_was_made(client: Client) -> None:
    asked = JobSpec(name="open", base_model="tiny", data=Data(dataset="rows"))
    made = client.jobs.create(asked).spec
    assert (asked.seed, asked.max_context, asked.data.version, asked.method.batches.rows) == (None, None, None, None)
    assert None not in (made.seed, made.max_context, made.data.version, made.method.batches.rows)
    assert client.jobs.resolve(made) == made


def test_jobs_are_given_out_once_each_in_the_order_in_which_they_wait(client: Client) -> None:
    jobs, runner = [make(client, name) for name in ("a", "b")], client.runner("r")
    leases = [runner.claim(0), runner.claim(0)]
    assert [lease.job.id for lease in leases if lease is not None] == jobs
    assert [lease.job.state for lease in leases if lease is not None] == [JobState.RUNNING] * 2
    assert runner.claim(0) is None


def test_a_project_with_fewer_jobs_at_work_goes_first(server: Server, client: Client) -> None:
    for name in ("a", "b"):
        make(client, name)
    theirs = of(server, client.keys.create("other", ["train", "read"], project="other").key)
    theirs.datasets.create("rows")
    theirs.datasets.add_version("rows", {"train": ROW})
    other, runner = make(theirs, "a"), client.runner("r")
    assert [lease.job.spec.name for lease in [runner.claim(0)] if lease is not None] == ["a"]
    assert [lease.job.id for lease in [runner.claim(0)] if lease is not None] == [other]


def test_whoever_waits_for_a_job_is_given_the_next_one(client: Client) -> None:
    found: list[str] = []

    def wait() -> None:
        lease = client.runner("r").claim(20)
        found.append("none" if lease is None else lease.job.spec.name)

    waiting = threading.Thread(target=wait)
    waiting.start()
    make(client, "late")
    waiting.join(30)
    assert found == ["late"]


@AT_ONCE
def test_a_process_works_with_its_lease_alone_and_only_at_its_job(server: Server, client: Client) -> None:
    job, other = make(client, "a"), make(client, "b")
    lease = client.runner("r").claim(0)
    assert lease is not None
    theirs = of(server, lease.token)
    theirs.working(job).report(ReportJob(run=None, progress=JobProgress(step=1, steps=4)))
    assert client.jobs.get(job).progress.step == 1
    with pytest.raises(Forbidden, match="only the process that has job `b`"):
        theirs.working(other).report(ReportJob())
    with pytest.raises(Forbidden, match="only the process"):
        client.working(job).report(ReportJob())
    with pytest.raises(Forbidden, match="lacks the scope"):
        theirs.runner("r").claim(0)
    with pytest.raises(Forbidden, match="lacks the scope"):
        theirs.keys.list()


def test_whoever_administers_the_server_follows_the_jobs_of_all_projects(server: Server, client: Client) -> None:
    admin = of(server, client.keys.create("lead", ["admin", "train", "read"], project="other").key)
    admin.datasets.create("rows")
    admin.datasets.add_version("rows", {"train": ROW})
    mine, theirs, follower = make(client, "a"), make(admin, "a"), client.runner("r")
    found = follower.changed(0)
    assert [(each.project, each.job.id) for each in found] == [("default", mine), ("other", theirs)]
    assert [each.job.id for each in follower.changed(found[1].job.updated_us)] == [theirs]
    lease = next(lease for lease in (follower.claim(0), follower.claim(0)) if lease is not None and lease.job.id == theirs)
    working = of(server, lease.token).working(theirs)
    working.report(ReportJob(points=[JobPoint(step=step, values={"loss": 1.0}) for step in (1, 2, 3)]))
    told = follower.points(theirs, since_us=0)
    assert [point.step for point in told] == [1, 2, 3]
    working.report(ReportJob(points=[JobPoint(step=2, values={"served/exact": 0.5, "loss": 1.0}), JobPoint(step=4, values={"loss": 2.0})]))
    more = follower.points(theirs, since_us=told[-1].created_us)
    assert [(point.step, point.values) for point in more] == [(2, {"served/exact": 0.5}), (4, {"loss": 2.0})]
    assert follower.points(theirs, since_us=more[-1].created_us) == []
    assert [each.job.id for each in follower.changed(found[1].job.updated_us + 1)][-1] == theirs
    with pytest.raises(NotFound):
        follower.points("job-1", since_us=0)
    for nobody in (admin, of(server, client.keys.create("reader", ["read"]).key)):
        with pytest.raises(Forbidden):
            nobody.runner("r").changed(0)
        with pytest.raises(Forbidden):
            nobody.runner("r").points(theirs, since_us=0)


def test_whoever_follows_jobs_misses_nothing_when_the_clock_is_set_back(server: Server, client: Client) -> None:
    job, other, follower = make(client, "a"), make(client, "b"), client.runner("r")
    lease = follower.claim(0)
    assert lease is not None
    working = of(server, lease.token).working(job)
    working.report(ReportJob(points=[JobPoint(step=1, values={"loss": 1.0})]))

    def an_hour_ahead(connection: Connection) -> None:
        for table, column in ((rows.job, "updated_us"), (rows.job_point, "created_us")):
            connection.execute(update(table).values({column: table.c[column] + 3_600_000_000}))

    server.call(server.services.leases._database.write(an_hour_ahead))
    since_us, until_us = follower.changed(0)[-1].job.updated_us, follower.points(job, since_us=0)[-1].created_us
    working.report(ReportJob(points=[JobPoint(step=2, values={"loss": 1.0})]))
    client.jobs.cancel(other)
    working.finish(FinishJob(state="failed", reason="no rows"))
    client.jobs.create(JobSpec(name="c", base_model="tiny", data=Data(dataset="rows")))
    assert {each.job.spec.name for each in follower.changed(since_us)} == {"a", "b", "c"}
    assert [point.step for point in follower.points(job, since_us=until_us)] == [2]
    # Whoever asks how long one took hears what the clock said.
    ended = client.jobs.get(job)
    assert ended.started_us is not None
    assert ended.finished_us is not None
    assert ended.started_us <= ended.finished_us < since_us < ended.updated_us


@AT_ONCE
def test_a_lease_ends_with_its_process_its_runner_its_time_and_its_job(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")

    def claimed() -> Client:
        lease = runner.claim(0)
        assert lease is not None
        return of(server, lease.token)

    def refused(theirs: Client) -> None:
        with pytest.raises(Unauthorized):
            theirs.working(job).report(ReportJob())

    theirs = claimed()
    assert runner.ended(job, 1, "was killed by SIGKILL").state is JobState.QUEUED
    refused(theirs)
    theirs = claimed()
    assert runner.ended(job, 1, "was killed by SIGKILL").state is JobState.RUNNING  # of a life before
    assert runner.release() == [job]
    refused(theirs)
    theirs = claimed()
    late = update(rows.job).values(lease_until_us=1)
    server.call(server.services.leases._database.write(lambda connection: connection.execute(late).rowcount))
    assert server.call(server.services.leases.expire()) == [job]
    refused(theirs)
    theirs = claimed()
    theirs.working(job).finish(FinishJob(state="failed", reason="no rows"))
    refused(theirs)
    assert (client.jobs.get(job).state, client.jobs.get(job).reason) == (JobState.FAILED, "no rows")


def test_a_lease_outlives_the_api(server: Server, client: Client) -> None:
    job = make(client, "a")
    lease = client.runner("r").claim(0)
    assert lease is not None
    server.stop()
    server.start()
    assert of(server, lease.token).working(job).report(ReportJob()).wanted == "run"


def test_a_job_that_was_given_out_as_the_api_died_is_given_to_the_same_runner_again(server: Server, client: Client) -> None:
    class Loses(httpx.BaseTransport):
        lost = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = server.transport.handle_request(request)
            if not self.lost:
                self.lost += 1
                server.stop()
                server.start()
                raise httpx.ReadError("the server died", request=request)
            return answer

    job, losing = make(client, "a"), Loses()
    lease = Client(URL, KEY, transport=losing, patience_s=30).runner("r").claim(0)
    assert losing.lost
    assert lease is not None
    assert (lease.job.id, lease.job.epoch) == (job, 1)
    of(server, lease.token).working(job).report(ReportJob(progress=JobProgress(step=1, steps=4)))
    assert client.jobs.get(job).progress.step == 1
    assert client.runner("r").claim(0) is None


def test_a_runner_that_started_again_is_not_given_what_the_one_before_waited_for(server: Server, client: Client) -> None:
    leases = server.services.leases

    async def story() -> list[object]:
        assert await leases.claim(ADMIN, "r", 0) is not None
        waiting = asyncio.create_task(leases.claim(ADMIN, "r", 20))
        while not server.services.jobs.queued.count:
            await asyncio.sleep(0)
        return [await leases.release(ADMIN, "r"), await waiting]

    job = make(client, "first")
    assert server.call(story()) == [[job], None]
    assert client.runner("r").claim(0) is not None


def test_whoever_waits_for_a_job_waits_no_longer_once_its_runner_gives_back_what_it_has(server: Server) -> None:
    leases = server.services.leases

    async def story() -> list[object]:
        waiting = asyncio.create_task(leases.claim(ADMIN, "r", 3600))
        while not server.services.jobs.queued.count:
            await asyncio.sleep(0)
        return [await leases.release(ADMIN, "r"), await asyncio.wait_for(waiting, 60)]

    assert server.call(story()) == [[], None]


@pytest.mark.parametrize(
    ("stopping", "field", "said"),
    [
        ({"patience": 0}, "patience", "greater than or equal to 1"),
        ({"patience": -1}, "patience", "greater than or equal to 1"),
        ({"patience": 1, "min_delta": -0.1}, "min_delta", "greater than or equal to 0"),
        ({"patience": 1, "min_delta": math.nan}, "min_delta", "finite"),
        ({"patience": 1, "min_delta": math.inf}, "min_delta", "finite"),
        # Of 10 steps the second, fourth, sixth and eighth are looked at before the last.
        ({"patience": 4}, "patience", "`patience` is 4, and before the last of 10 steps there are 4 evaluations"),
        ({"patience": 3}, None, ""),
    ],
)
def test_what_would_never_end_a_job_early_is_refused(server: Server, client: Client, stopping: dict[str, Any], field: str | None, said: str) -> None:
    client.datasets.create("prompts")
    client.datasets.add_version("prompts", {"train": '{"prompt": "a"}', "eval": '{"prompt": "b"}'})
    method = {"kind": "distill", "teacher": "tiny", "max_tokens": 8, "steps": 10, "early_stopping": stopping}
    asked = {"name": "a", "base_model": "tiny", "data": {"dataset": "prompts"}, "method": method, "evaluation": {"every": 2}}
    # By hand: no client of ours writes what is no number.
    answer = server.http.post("/api/v1/jobs/resolve", content=json.dumps(asked), headers={"content-type": "application/json"})
    if field is None:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (400, f"method.early_stopping.{field}")
    assert said in error["message"]


def test_a_job_that_arrives_in_the_last_moment_is_not_lost(server: Server, client: Client) -> None:
    services, wait_s = server.services, 0.2

    class Late(NamedTuple):
        """The database, whose answer to whoever takes a job comes once that is let go; `looked` is set where there was none to take."""

        database: Database
        looked: asyncio.Event
        let_go: asyncio.Event

        async def read(self, look: Callable[[Connection], Any]) -> Any:
            return await self.database.read(look)

        async def write(self, change: Callable[[Connection], Any]) -> Any:
            answer = await self.database.write(change)
            if "_claim_now" in change.__qualname__:
                self.looked.set()
                await (asyncio.sleep(0) if answer is None else self.let_go.wait())
            return answer

    async def story() -> Lease | None:
        loop, late = asyncio.get_running_loop(), Late(services.leases._database, asyncio.Event(), asyncio.Event())
        waiting = asyncio.create_task(Leases(late, services.auth, services.jobs).claim(ADMIN, "r", wait_s))  # type: ignore[arg-type]
        await late.looked.wait()
        over_s = loop.time() + 2 * wait_s
        await services.jobs.create(ADMIN, JobSpec(name="a", base_model="tiny", data=Data(dataset="rows")))
        while loop.time() < over_s:
            await asyncio.sleep(0)
        late.let_go.set()
        return await waiting

    lease, job = server.call(story()), client.jobs.get("a")
    assert lease is not None
    assert job.state is JobState.RUNNING


@AT_ONCE
def test_a_job_whose_processes_die_without_a_step_fails(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")
    for life in range(1, MAX_DEATHS + 3):
        lease = runner.claim(0)
        assert lease is not None
        if life == 2:
            of(server, lease.token).working(job).report(ReportJob(progress=JobProgress(step=1, steps=4)))
        runner.ended(job, life, "ended with status 3")
        if client.jobs.get(job).state is JobState.FAILED:
            break
    # The step began the count anew.
    assert life == 1 + MAX_DEATHS
    assert client.jobs.get(job).reason == f"its process ended with status 3, {MAX_DEATHS} times in a row without a step between"


def test_a_pause_grows_with_each_death_in_a_row_and_there_is_none_behind_the_first() -> None:
    assert [pause_s(deaths) for deaths in range(1, MAX_DEATHS)] == [0, 2, 8, 32]


@pytest.mark.parametrize("first_pause_s", [50.0])
def test_a_job_whose_processes_die_one_behind_the_other_gets_the_next_after_a_pause(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")

    def dies() -> str | None:
        """Whether a process had it; its token then."""
        if (lease := runner.claim(0)) is None:
            return None
        runner.ended(job, lease.job.epoch, "ended with status 3")
        return lease.token

    def pauses() -> list[str]:
        return [event.message for event in client.jobs.events(job) if "gets a process in" in event.message]

    # At once behind the first.
    assert [dies() is not None for _ in range(3)] == [True, True, False]
    assert pauses() == ["is queued, and gets a process in 50 s"]
    # Others go first, and who does not want to wait has it at once.
    make(client, "b")
    other = runner.claim(0)
    assert other is not None
    assert other.job.spec.name == "b"
    client.jobs.pause(job)
    client.jobs.resume(job)
    assert [dies() is not None for _ in range(3)] == [True, True, False]
    # Whoever waits for a job has it when the pause is over, and a restart of the api changes nothing of that.
    server.stop()
    server.start()
    assert runner.claim(0) is None
    server.call(due_now(server, job))
    lease = runner.claim(20)
    assert lease is not None
    assert (lease.job.id, len(pauses())) == (job, 2)
    # A step begins the count anew.
    of(server, lease.token).working(job).report(ReportJob(progress=JobProgress(step=1, steps=4)))
    runner.ended(job, lease.job.epoch, "was killed by SIGKILL")
    assert runner.claim(0) is not None


async def due_now(server: Server, job: str) -> None:
    """The pause of a job is over in an instant, while somebody waits."""
    soon = update(rows.job).where(rows.job.c.id == job).values(due_us=now_us() + 200_000)
    await server.services.leases._database.write(lambda connection: connection.execute(soon))


def test_a_pause_that_is_longer_than_any_is_of_a_clock_that_was_set_back(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")
    later = update(rows.job).where(rows.job.c.id == job).values(due_us=now_us() + 3_600_000_000)

    async def set_back() -> None:
        await server.services.leases._database.write(lambda connection: connection.execute(later))

    server.call(set_back())
    assert runner.claim(0) is not None


@AT_ONCE
def test_a_job_whose_processes_say_what_they_die_of_fails_with_that(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")
    for life in range(1, MAX_DEATHS + 1):
        lease = runner.claim(0)
        assert lease is not None
        of(server, lease.token).working(job).report(ReportJob(events=[NewJobEvent(level="error", message=f"no space left, time {life}")]))
        runner.ended(job, life, "ended with status 3")
    reason = f"its process ended with status 3, {MAX_DEATHS} times in a row without a step between: no space left, time {MAX_DEATHS}"
    assert (client.jobs.get(job).state, client.jobs.get(job).reason) == (JobState.FAILED, reason)


def test_a_job_is_paused_resumed_and_cancelled_at_rest_and_at_work(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")
    assert client.jobs.pause(job).state is JobState.PAUSED
    assert runner.claim(0) is None
    assert client.jobs.resume(job).state is JobState.QUEUED
    lease = runner.claim(0)
    assert lease is not None
    working = of(server, lease.token).working(job)
    assert client.jobs.pause(job).state is JobState.RUNNING
    assert working.report(ReportJob()).wanted == "pause"
    assert client.jobs.resume(job).state is JobState.RUNNING
    assert working.report(ReportJob()).wanted == "run"
    client.jobs.pause(job)
    working.finish(FinishJob(state="paused"))
    with pytest.raises(Conflict, match="is paused, and cannot be paused"):
        client.jobs.pause(job)
    client.jobs.resume(job)
    lease = runner.claim(0)
    assert lease is not None
    client.jobs.cancel(job)
    # A process that dies before it hears of it changes nothing about that.
    assert runner.ended(job, lease.job.epoch, "was killed by SIGKILL").state is JobState.CANCELLED
    with pytest.raises(Conflict, match="is cancelled, and cannot be resumed"):
        client.jobs.resume(job)


def test_a_reason_as_long_as_is_taken_ends_a_job(server: Server, client: Client) -> None:
    job, runner, why = make(client, "a"), client.runner("r"), "a" * MAX_REASON
    lease = runner.claim(0)
    assert lease is not None
    assert runner.ended(job, lease.job.epoch, why).state is JobState.QUEUED
    lease = runner.claim(0)
    assert lease is not None
    of(server, lease.token).working(job).finish(FinishJob(state="failed", reason=why))
    assert (client.jobs.get(job).state, client.jobs.get(job).reason) == (JobState.FAILED, why)
    assert max(len(event.message) for event in client.jobs.events(job)) == MAX_REASON


def test_a_job_that_runs_is_not_resumed_away_from_its_process(server: Server, client: Client) -> None:
    job, runner = make(client, "a"), client.runner("r")
    lease = runner.claim(0)
    assert lease is not None
    with pytest.raises(Conflict, match="is running, and cannot be resumed"):
        client.jobs.resume(job)
    assert runner.claim(0) is None
    client.jobs.cancel(job)
    with pytest.raises(Conflict, match="is asked to cancel, and cannot be resumed"):
        client.jobs.resume(job)
    assert of(server, lease.token).working(job).report(ReportJob()).wanted == "cancel"


@pytest.mark.parametrize(
    ("steer", "reason", "state"),
    [
        ("resume", None, JobState.QUEUED),
        ("cancel", None, JobState.CANCELLED),
        ("cancel", "diverged", JobState.CANCELLED),
        (None, None, JobState.PAUSED),
    ],
)
def test_what_is_asked_of_a_job_that_is_about_to_pause_is_obeyed(
    server: Server, client: Client, steer: str | None, reason: str | None, state: JobState
) -> None:
    job, runner = make(client, "a"), client.runner("r")
    lease = runner.claim(0)
    assert lease is not None
    working = of(server, lease.token).working(job)
    client.jobs.pause(job)
    assert working.report(ReportJob()).wanted == "pause"
    # Too late for the process to hear of it.
    if steer is not None:
        getattr(client.jobs, steer)(job)
    working.finish(FinishJob(state="paused", reason=reason))
    assert client.jobs.get(job).state is state
    assert (runner.claim(0) is not None) == (state is JobState.QUEUED)


def test_what_counts_for_nothing_in_the_spec_of_an_earlier_release_is_in_no_clone_of_it(server: Server, client: Client) -> None:
    client.datasets.create("prompts")
    client.datasets.add_version("prompts", {"train": '{"messages": [{"role": "user", "content": "a"}]}'}, kind="prompt")
    client.graders.create("fixed", {"type": "string_check", "name": "fixed", "input": "{{sample.output_text}}", "reference": "a", "operation": "eq"})
    checked = client.jobs.resolve(
        JobSpec(name="old", base_model="tiny", data=Data(dataset="prompts"), method=Reinforcement(grader="fixed", max_tokens=4))
    )
    stored = checked.model_copy(update={"method": checked.method.model_copy(update={"max_staleness": 1, "held_out_share": 0.25})})
    server.call(server.services.jobs._database.write(lambda connection: add_job(connection, "default", "job-old", stored)))
    assert client.jobs.get("old").spec == checked
    clone = client.jobs.create(client.jobs.get("old").spec.model_copy(update={"name": "clone"})).spec
    assert clone.method == checked.method
    for method in (checked.method, Supervised(optimizer=Optimizer(learning_rate=1e-3, schedule=Schedule(kind="constant")))):
        optimizer = method.optimizer.model_copy(update={"schedule": method.optimizer.schedule.model_copy(update={"floor": 0.25})})
        floored = checked.model_copy(update={"name": f"floored-{method.kind}", "method": method.model_copy(update={"optimizer": optimizer})})
        server.call(server.services.jobs._database.write(lambda connection, spec=floored: add_job(connection, "default", f"job-{spec.name}", spec)))
        assert client.jobs.get(floored.name).spec.method == method
    client.jobs.create(client.jobs.get("floored-rft").spec.model_copy(update={"name": "floored-clone"}))
    both = {"asynchronous": True, "held_out_grader": "other", "max_staleness": 2, "held_out_share": 0.5}
    used = stored.model_copy(update={"name": "used", "method": checked.method.model_copy(update=both)})
    server.call(server.services.jobs._database.write(lambda connection: add_job(connection, "default", "job-used", used)))
    assert client.jobs.get("used").spec == used


def test_a_job_keeps_the_defaults_that_it_was_made_with_and_so_do_its_clones(server: Server, client: Client) -> None:
    client.datasets.create("pairs")
    client.datasets.add_version("pairs", {"train": '{"prompt": "a", "chosen": "b", "rejected": "c"}'}, kind="preference")
    checked = client.jobs.resolve(JobSpec(name="earlier", base_model="tiny", data=Data(dataset="pairs"), method=DirectPreference()))
    # What is stored has every field, whatever was left open: 0.1 was the default once.
    stored = checked.model_copy(update={"method": checked.method.model_copy(update={"beta": 0.1})})
    assert '"beta":0.1' in stored.model_dump_json()
    server.call(server.services.jobs._database.write(lambda connection: add_job(connection, "default", "job-earlier", stored)))
    assert client.jobs.get("earlier").spec == stored
    assert client.jobs.create(stored.model_copy(update={"name": "clone"})).spec.method == stored.method
    assert checked.method.beta == 1.0


def test_a_job_that_stands_still_by_itself_is_paused_though_nobody_asked(server: Server, client: Client) -> None:
    job = make(client, "a")
    lease = client.runner("r").claim(0)
    assert lease is not None
    of(server, lease.token).working(job).finish(FinishJob(state="paused", reason="diverged"))
    assert client.jobs.get(job).state is JobState.PAUSED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rank": 129}, "rank"),
        ({"alpha": 0}, "alpha"),
        ({"seed": -1}, "seed"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": 65}, "max_context"),
        ({"checkpoint_every": -1}, "checkpoint_every"),
        ({"evaluation": {"every": -1}}, "evaluation.every"),
        ({"evaluation": {"split": "train"}}, "evaluation.split"),
        ({"method": {"kind": "sft", "optimizer": {"learning_rate": 0}}}, "method.optimizer.learning_rate"),
        ({"method": {"kind": "sft", "optimizer": {"learning_rate": "high"}}}, "method.optimizer.learning_rate"),
        ({"method": {"kind": "sft", "optimizer": {"learning_rate": 1e-3, "beta2": 1}}}, "method.optimizer.beta2"),
        ({"method": {"kind": "sft", "batches": {"epochs": 0}}}, "method.batches.epochs"),
        ({"method": {"kind": "sft", "batches": {"rows": 4, "tokens": 4}}}, "method.batches"),
        ({"method": {"kind": "dpo", "beta": 0}}, "method.beta"),
        ({"method": {"kind": "dpo", "label_smoothing": 0.5}}, "method.label_smoothing"),
        ({"method": {"kind": "orpo", "odds_weight": -1}}, "method.odds_weight"),
        ({"method": {"kind": "rft", "grader": "g", "group_size": 1}}, "method.group_size"),
        ({"method": {"kind": "rft", "grader": "g", "clip": {"low": 1.5}}}, "method.clip.low"),
        ({"method": {"kind": "rft"}}, "method"),
        ({"method": {"kind": "rft", "agent": "a", "grader_version": 1}}, "method"),
        ({"method": {"kind": "rft", "agent": "a", "held_out_grader": "g"}}, "method"),
        ({"method": {"kind": "rft", "grader": "g", "batches": {"epochs": 1}}}, "method.batches"),
        ({"method": {"kind": "rft", "grader": "g", "held_out_grader_version": 1}}, "method"),
        ({"method": {"kind": "rft", "grader": "g", "max_staleness": 2}}, "method.max_staleness"),
        ({"method": {"kind": "rft", "grader": "g", "max_staleness": 1, "asynchronous": False}}, "method.max_staleness"),
        ({"method": {"kind": "rft", "grader": "g", "held_out_share": 0.25}}, "method.held_out_share"),
        ({"method": {"kind": "sft", "optimizer": {"schedule": {"kind": "constant", "floor": 0.1}}}}, "method.optimizer.schedule.floor"),
        ({"method": {"kind": "sft", "optimizer": {"learning_rate": 101}}}, "method.optimizer.learning_rate"),
        ({"method": {"kind": "rft", "grader": "g", "optimizer": {"learning_rate": 1, "weight_decay": 2}}}, "method.optimizer.weight_decay"),
        ({"method": {"kind": "magic"}}, "method"),
        ({"colour": "red"}, "colour"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_training_can_have_is_refused_by_its_name(server: Server, client: Client, changes: dict[str, Any], field: str) -> None:
    asked = {"name": "x", "base_model": "tiny", "data": {"dataset": "rows"}} | changes
    for path, body, place in (("/api/v1/jobs", asked, ""), ("/api/v1/chains", {"stages": [asked]}, "stages.0.")):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["field"] == f"{place}{field}", answer.text
    assert client.jobs.list() == []


@pytest.mark.parametrize(("begin", "field"), [({"job": "nobody"}, "begin.job"), ({"run": "none", "checkpoint": "final"}, "begin.checkpoint")])
def test_what_there_is_not_to_begin_with_is_refused_by_its_name(server: Server, client: Client, begin: dict[str, str], field: str) -> None:
    answer = server.http.post("/api/v1/jobs", json={"name": "x", "base_model": "tiny", "data": {"dataset": "rows"}, "begin": begin})
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, field), answer.text
    assert client.jobs.list() == []


def test_of_those_who_make_a_job_of_one_name_at_once_one_has_it(client: Client) -> None:
    def attempt(seed: int) -> int | str:
        try:
            client.jobs.create(JobSpec(name="contended", base_model="tiny", data=Data(dataset="rows"), seed=seed))
        except Conflict as refused:
            return refused.message
        return seed

    with ThreadPoolExecutor(8) as pool:
        came_of_it = list(pool.map(attempt, range(8)))
    made = [each for each in came_of_it if isinstance(each, int)]
    assert made == [client.jobs.get("contended").spec.seed]
    assert {each for each in came_of_it if isinstance(each, str)} == {"there is a job `contended` already: choose another name"}


def test_of_those_who_steer_a_job_at_once_each_is_obeyed_or_told_why_not(server: Server, client: Client) -> None:
    job, verbs = make(client, "a"), (client.jobs.pause, client.jobs.resume, client.jobs.cancel)

    def attempt(number: int) -> JobState | str:
        try:
            return verbs[number % len(verbs)](job).state
        except Conflict as refused:
            return refused.message

    with ThreadPoolExecutor(8) as pool:
        came_of_it = list(pool.map(attempt, range(24)))
    assert client.jobs.get(job).state is JobState.CANCELLED
    assert came_of_it.count(JobState.CANCELLED) == 1
    refusals = {said for said in came_of_it if not isinstance(said, JobState)}
    assert all(said.startswith("job `a` is ") and ", and cannot be " in said for said in refusals), refusals
    # Whatever was answered happened: the events have every change of state, in an order that the table of transitions allows.
    changes = [event.message.removeprefix("is ") for event in client.jobs.events(job)][1:]
    assert len(changes) == sum(isinstance(said, JobState) for said in came_of_it)
    before = JobState.QUEUED
    for after in map(JobState, changes):
        assert after in JOB_NEXT[before]
        before = after


def test_what_is_told_twice_is_there_once(server: Server, client: Client) -> None:
    job = make(client, "a")
    lease = client.runner("r").claim(0)
    assert lease is not None
    working = of(server, lease.token).working(job)
    before = len(client.jobs.events(job))
    for loss in (2.0, 1.0):
        points = [JobPoint(step=1, values={"loss": loss}), JobPoint(step=1, values={"evaluation/loss": None}), JobPoint(step=2, values={"loss": 0.5})]
        working.report(ReportJob(points=points, events=[NewJobEvent(message="kept", key="step 1"), NewJobEvent(message="again")]))
    told = client.jobs.points(job)
    assert [(point.step, point.values) for point in told] == [(1, {"evaluation/loss": None, "loss": 1.0}), (2, {"loss": 0.5})]
    assert client.jobs.points(job, after=1) == told[1:]
    assert [event.message for event in client.jobs.events(job)][before:] == ["kept", "again", "again"]


def test_jobs_of_another_project_are_not_there(server: Server, client: Client) -> None:
    job = make(client, "a")
    theirs = of(server, client.keys.create("other", ["train", "read"], project="other").key)
    assert theirs.jobs.list() == []
    for verb in (theirs.jobs.get, theirs.jobs.points, theirs.jobs.events, theirs.jobs.pause, theirs.jobs.resume, theirs.jobs.cancel):
        with pytest.raises(Exception, match="no job"):
            verb(job)


def test_what_a_job_takes_is_told_before_it_is_made(server: Server, client: Client) -> None:
    asked = JobSpec(name="x", base_model="tiny", data=Data(dataset="rows"))
    first = client.jobs.estimate(asked)
    assert (first.rows, first.steps, first.seconds, first.jobs, first.too_long, first.refused) == (1, 1, None, 0, 0, 0)
    assert first.tokens > 0
    # Nothing has ended here yet, so time is what the caller knows, and has no price without it.
    priced = client.jobs.estimate(asked, price_per_million=2e6, price_per_hour=3600.0)
    assert (priced.seconds, priced.cost) == (None, None)
    assert client.jobs.estimate(asked, price_per_million=2e6).cost == pytest.approx(2 * first.tokens)
    known = client.jobs.estimate(asked, tokens_per_s=first.tokens / 4, price_per_million=2e6, price_per_hour=3600.0)
    assert (known.seconds, known.cost) == (4.0, pytest.approx(2 * first.tokens + 4))
    refused = server.http.post("/api/v1/jobs/estimate", json=asked.model_dump(mode="json"), params={"price_per_hour": -1})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "price_per_hour")
    job = make(client, "before")
    lease = client.runner("r").claim(0)
    assert lease is not None
    working = of(server, lease.token).working(job)
    working.report(ReportJob(progress=JobProgress(step=1, steps=1, tokens=2 * first.tokens, seconds=3.0)))
    result = JobResult(run="run-1", version="v", checkpoint="final", step=1, digest="d", compared=[], base_version="tiny")
    working.finish(FinishJob(state="succeeded", result=result))
    again = client.jobs.estimate(asked)
    assert (again.seconds, again.jobs, again.cost) == (1.5, 1, None)
    assert client.jobs.estimate(asked, price_per_hour=7200.0).cost == pytest.approx(3.0)
    assert client.jobs.list()[0].state is JobState.SUCCEEDED


def test_how_many_rows_are_held_out_is_told_before_a_job_is_made(client: Client) -> None:
    asked = JobSpec(name="x", base_model="tiny", data=Data(dataset="rows"))
    assert client.jobs.estimate(asked).held_out == 0
    held_out = "\n".join(json.dumps({"text": word, "label": "b"}) for word in ("one", "other", "another"))
    client.datasets.add_version("rows", {"train": ROW, "eval": held_out})
    assert client.jobs.estimate(asked).held_out == 3
    assert client.jobs.estimate(asked.model_copy(update={"evaluation": Evaluation(rows=2)})).held_out == 2


def test_prompts_that_leave_no_room_for_an_answer_are_too_long(client: Client) -> None:
    client.datasets.create("prompts")
    rows = "\n".join(json.dumps({"prompt": "ab" * length, "x": 1}) for length in (1, 2, 20))
    client.datasets.add_version("prompts", {"train": rows})
    lengths = sorted(len(row.examples[0].tokens) for row in client.datasets.preview("prompts", version_of(client, "prompts"), model="tiny"))

    def too_long(room: int) -> int:
        method = Distillation(teacher="tiny", max_tokens=CONTEXT - room)
        return client.jobs.estimate(JobSpec(name="student", base_model="tiny", data=Data(dataset="prompts"), method=method)).too_long

    assert [too_long(length) for length in lengths] == [2, 1, 0]
    assert too_long(lengths[-1] - 1) == 1


def test_an_answer_that_takes_all_of_the_context_is_refused(client: Client) -> None:
    client.datasets.create("prompts")
    client.datasets.add_version("prompts", {"train": '{"prompt": "a", "x": 1}'})
    method = Distillation(teacher="tiny", max_tokens=8)
    with pytest.raises(InvalidInput, match="`max_tokens` is 8, and `tiny` takes 8 tokens, prompts included") as refused:
        client.jobs.resolve(JobSpec(name="student", base_model="tiny", data=Data(dataset="prompts"), method=method, max_context=8))
    assert refused.value.field == "method.max_tokens"


def version_of(client: Client, dataset: str) -> str:
    return client.datasets.get(dataset).versions[-1].id


def test_a_teacher_has_the_tokenizer_of_its_student(tmp_path: Path) -> None:
    server = Server(tmp_path, "full")
    written = byte_level().get_vocab()
    others = {"same": byte_level(), "other": byte_level(("<|im_start|>", "<|im_end|>", "<|more|>"))}
    assert others["same"].get_vocab() == written != others["other"].get_vocab()
    models = [
        ModelConfig(
            alias=name,
            path=str(write(tmp_path / name, tokenizer, config=small_config(VOCABULARY, CONTEXT // 2), tokenizer_config={"eos_token": "<|im_end|>"})),
            base_hash=name,
            dtype="float32",
            threads=1,
            socket=str(tmp_path / f"nobody-{name}"),
        )
        for name, tokenizer in others.items()
    ]
    server.config = replace(server.config, models=(*server.config.models, *models))
    with server.running():
        client = server.client()
        client.datasets.create("rows")
        client.datasets.add_version("rows", {"train": '{"prompt": "a", "x": 1}'})

        def spec(teacher: str) -> JobSpec:
            return JobSpec(name="student", base_model="tiny", data=Data(dataset="rows"), method=Distillation(teacher=teacher, max_tokens=8))

        with pytest.raises(InvalidInput, match="`other` is of base model `other`, whose tokenizer is another than that of `tiny`") as refused:
            client.jobs.resolve(spec("other"))
        assert refused.value.field == "method.teacher"
        resolved = client.jobs.resolve(spec("same"))
        assert isinstance(resolved.method, Distillation)
        # The teacher reads no more than it can.
        assert (resolved.method.teacher_version, resolved.max_context) == ("same", CONTEXT // 2)
        assert client.jobs.estimate(spec("same")).steps == 50


def test_a_data_set_goes_when_no_job_needs_it_and_what_names_it_afterwards_is_refused(server: Server, client: Client) -> None:
    ended, going_on = make(client, "ended"), make(client, "going-on")
    client.jobs.cancel(ended)
    with pytest.raises(Conflict, match=r"is what job `going-on` \(queued\) trains on: cancel the job, or wait"):
        client.datasets.delete("rows")
    client.jobs.pause(going_on)
    with pytest.raises(Conflict, match=r"job `going-on` \(paused\)"):
        client.datasets.delete("rows")
    client.jobs.cancel(going_on)
    version = client.jobs.get(ended).spec.data.version
    assert version is not None
    client.datasets.delete("rows")
    with pytest.raises(NotFound, match="no data set `rows`"):
        client.datasets.delete("rows")
    with pytest.raises(NotFound) as refused:
        make(client, "late")
    assert refused.value.field == "data.dataset"
    # Another one of that name is not what was meant.
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": ROW})
    with pytest.raises(NotFound, match=f"has no version `{version}`"):
        client.jobs.create(client.jobs.get(ended).spec.model_copy(update={"name": "again"}))
    assert len(client.datasets.get("rows").versions) == 1


def test_a_data_set_that_goes_while_a_job_is_checked_leaves_none_behind(server: Server, client: Client) -> None:
    async def race() -> None:
        services = server.services
        checked = await services.jobs.resolve(ADMIN, JobSpec(name="late", base_model="tiny", data=Data(dataset="rows")))
        await services.datasets.delete(ADMIN, "rows")
        with pytest.raises(NotFound) as refused:
            await services.jobs._database.write(lambda connection: add_job(connection, "default", "job-late", checked))
        assert refused.value.field == "data.dataset"

    server.call(race())
    assert client.jobs.list() == []


def test_texts_of_rows_are_told_of_a_job_and_in_no_list(server: Server, client: Client) -> None:
    job = make(client, "sampled")
    lease = client.runner("r").claim(0)
    assert lease is not None
    sample = JobSample(row=0, asked="a", reference="b", before="c", after="b", cut=["asked"])
    result = JobResult(run="run-1", version="v", checkpoint="final", step=1, digest="d", compared=[], base_version="tiny", samples=[sample])
    of(server, lease.token).working(job).finish(FinishJob(state="succeeded", result=result))
    assert client.jobs.get(job).result == result
    without = result.model_copy(update={"samples": None})
    assert [each.result for each in client.jobs.list()] == [without]
    runner = client.runner("r")
    assert [each.job.result for each in runner.changed(0)] == [without]
    assert runner.ended(job, lease.job.epoch, "ended with status 0").result == without


def test_a_result_that_an_earlier_release_kept_is_read_without_samples(server: Server, client: Client) -> None:
    job = make(client, "before")
    lease = client.runner("r").claim(0)
    assert lease is not None
    result = JobResult(run="run-1", version="v", checkpoint="final", step=1, digest="d", compared=[], base_version="tiny", samples=[])
    of(server, lease.token).working(job).finish(FinishJob(state="succeeded", result=result))
    kept = result.model_dump_json(exclude={"samples"})
    server.call(server.services.leases._database.write(lambda connection: connection.execute(update(rows.job).values(result=kept)).rowcount))
    assert client.jobs.get(job).result == result.model_copy(update={"samples": None})

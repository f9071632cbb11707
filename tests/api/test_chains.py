"""Jobs that begin where others end: they wait, begin or fail in the moment in which those end, and a chain of them is made whole or not at all."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.cli.chain import stages_of
from bloomery.cli.eject import script
from bloomery.client import Client
from bloomery.services.jobs.gates import obstacle
from bloomery.services.jobs.job_rows import add_job
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.jobs import Begin, Compared, CreateChain, Data, Evaluation, Gate, Job, JobResult, JobSpec, JobState
from bloomery.types.leases import FinishJob, ReportJob
from bloomery.types.methods import DirectPreference, Distillation, Measure, Reinforcement
from tests.api.server import URL, Server, serving

CHAT = '{"text": "a", "label": "b"}'
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
PROMPT = '{"messages": [{"role": "user", "content": "a"}], "right": "b"}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        client = server.client()
        for name, row in (("chats", CHAT), ("pairs", PAIR), ("prompts", PROMPT)):
            client.datasets.create(name)
            held_out = [row.replace('"a"', f'"held {which}"') for which in ("out", "back")]
            client.datasets.add_version(name, {"train": row, "eval": "\n".join(held_out)})
        client.graders.create("right", {"type": "string_check", "name": "c", "input": "{{sample.output_text}}", "reference": "a", "operation": "eq"})
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


def sft(name: str, **changes: Any) -> JobSpec:
    return JobSpec(name=name, base_model="tiny", data=Data(dataset="chats"), **changes)


def dpo(name: str, before: str, gate: Gate | None = None, **changes: Any) -> JobSpec:
    known = {"data": Data(dataset="pairs"), "method": DirectPreference(), "begin": Begin(job=before, gate=gate)}
    return JobSpec(name=name, base_model="tiny", **known | changes)


def rft(name: str, before: str, **changes: Any) -> JobSpec:
    method = Reinforcement(grader="right", max_tokens=8)
    return JobSpec(name=name, base_model="tiny", data=Data(dataset="prompts"), method=method, begin=Begin(job=before), **changes)


def measured(name: Measure, before: float, after: float, interval: tuple[float, float] | None = None) -> Compared:
    return Compared(
        name=name,
        rows=8,
        before=before,
        after=after,
        before_interval=None,
        after_interval=None,
        difference=after - before,
        difference_interval=interval,
        higher_is_better=name != "loss",
    )


def end(server: Server, name: str, *compared: Compared, state: Any = "succeeded", reason: str | None = None) -> JobResult | None:
    """Be the process of a job, which is the next to be given out, and end it."""
    client = server.client()
    lease = client.runner("r").claim(0)
    assert lease is not None
    assert lease.job.spec.name == name
    theirs = Client(URL, lease.token, transport=server.transport)
    run = theirs.create_run("tiny", 16, seed=1)
    kept, published = run.save_checkpoint("final").result(), run.save_snapshot("final").result()
    working = theirs.working(lease.job.id)
    working.report(ReportJob(run=run.id))
    result = JobResult(
        run=run.id, version=published.version, checkpoint="final", step=0, digest=kept.digest, compared=list(compared), base_version="tiny"
    )
    working.finish(FinishJob(state=state, reason=reason, result=result if state == "succeeded" else None))
    return result if state == "succeeded" else None


def states(client: Client, *names: str) -> list[JobState]:
    return [client.jobs.get(name).state for name in names]


def test_a_job_waits_for_the_one_that_it_begins_with_and_begins_where_that_ended(server: Server, client: Client) -> None:
    client.jobs.create(sft("first"))
    waits = client.jobs.create(dpo("second", "first"))
    assert (waits.state, waits.spec.begin) == (JobState.WAITING, Begin(job="first"))
    assert [job.spec.name for job in client.jobs.list(after="first")] == ["second"]
    assert [job.spec.name for job in client.jobs.list(state=JobState.WAITING)] == ["second"]
    result = end(server, "first")
    assert result is not None
    ready = client.jobs.get("second")
    assert ready.state is JobState.QUEUED
    assert ready.spec.begin == Begin(job="first", run=result.run, checkpoint="final")
    lease = client.runner("r").claim(0)
    assert lease is not None
    assert lease.job.spec == ready.spec


def test_what_an_unended_job_needs_is_neither_deleted_nor_let_expire(server: Server, client: Client) -> None:
    client.jobs.create(sft("first"))
    lease = client.runner("r").claim(0)
    assert lease is not None
    # Its own, which it has saved so far.
    theirs = Client(URL, lease.token, transport=server.transport)
    run = theirs.create_run("tiny", 16, seed=1)
    run.save_snapshot("begin").result()
    theirs.working(lease.job.id).report(ReportJob(run=run.id))
    refused(server, run.id, "sampler_weights/begin", "job `first` (running) has saved, and goes on with")
    client.jobs.cancel("first")
    theirs.working(lease.job.id).finish(FinishJob(state="cancelled"))
    assert forget(server, run.id, "sampler_weights/begin").status_code == 200
    # Where another job begins: one that was paused while it waited is not told yet.
    client.jobs.create(sft("before"))
    client.jobs.create(dpo("after", "before"))
    client.jobs.pause("after")
    result = end(server, "before")
    assert result is not None
    refused(server, result.run, "weights/final", "job `after` (paused) begins at")
    client.jobs.resume("after")
    refused(server, result.run, "weights/final", "job `after` (queued) begins at")
    # Nor does another take its name.
    again = server.http.post("/api/v1/save_weights", json={"model_id": result.run, "path": "final", "seq_id": 3, "overwrite": True})
    found = server.http.post("/api/v1/retrieve_future", json={"request_id": again.json()["request_id"]}).json()
    assert (found["category"], f"weights `final` of run `{result.run}` is what job `after` (queued) begins at" in found["error"]) == ("user", True)
    # A teacher.
    learns = Distillation(teacher=result.version, max_tokens=8)
    client.jobs.create(JobSpec(name="student", base_model="tiny", data=Data(dataset="prompts"), method=learns))
    refused(server, result.run, "sampler_weights/final", "job `student` (queued) learns from")
    # Who keeps it changes nothing for them, and once they have ended it goes.
    assert expire(server, result.run, "weights/final", None).status_code == 200
    for job in ("after", "student"):
        client.jobs.cancel(job)
    assert [forget(server, result.run, path).status_code for path in ("weights/final", "sampler_weights/final")] == [200, 200]


def test_a_job_begins_at_nothing_that_expires_and_learns_from_nothing_that_does(server: Server, client: Client) -> None:
    client.jobs.create(sft("first"))
    result = end(server, "first")
    assert result is not None
    learns = Distillation(teacher=result.version, max_tokens=8)
    student = JobSpec(name="student", base_model="tiny", data=Data(dataset="prompts"), method=learns)
    for path in ("weights/final", "sampler_weights/final"):
        assert expire(server, result.run, path).status_code == 200
    with pytest.raises(InvalidInput, match=f"`tinker://{result.run}/weights/final` expires, .* take its end away first") as began:
        client.jobs.create(dpo("after", "first"))
    with pytest.raises(InvalidInput, match=f"the weights of `{result.version}` expire, or have no name") as taught:
        client.jobs.create(student)
    assert (began.value.field, taught.value.field) == ("begin.checkpoint", "method.teacher")
    for path in ("weights/final", "sampler_weights/final"):
        assert expire(server, result.run, path, None).status_code == 200
    assert {client.jobs.create(spec).state for spec in (dpo("after", "first"), student)} == {JobState.QUEUED}


def refused(server: Server, run: str, path: str, needs: str) -> None:
    """Its end is, however it is asked for."""
    for answer in (forget(server, run, path), expire(server, run, path)):
        # This contract's word for a conflict: its SDK would ask again upon another.
        assert answer.status_code == 400
        assert f"`tinker://{run}/{path}` is what {needs}: cancel the job, or wait for its end" in answer.text


def forget(server: Server, run: str, path: str) -> httpx.Response:
    return server.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{path}")


def expire(server: Server, run: str, path: str, ttl_s: int | None = 60) -> httpx.Response:
    return server.http.put(f"/api/v1/training_runs/{run}/checkpoints/{path}/ttl", json={"ttl_seconds": ttl_s})


@pytest.mark.parametrize("gone", [forget, expire])
def test_weights_that_go_while_a_job_is_checked_leave_none_behind(server: Server, client: Client, gone: Callable[..., httpx.Response]) -> None:
    client.jobs.create(sft("first"))
    result = end(server, "first")
    assert result is not None
    learns = Distillation(teacher=result.version, max_tokens=8)
    student = JobSpec(name="student", base_model="tiny", data=Data(dataset="prompts"), method=learns)
    checked = [client.jobs.resolve(spec) for spec in (dpo("after", "first"), student)]
    for path in ("weights/final", "sampler_weights/final"):
        assert gone(server, result.run, path).status_code == 200
    for spec, field in zip(checked, ("begin.checkpoint", "method.teacher"), strict=True):
        with pytest.raises(NotFound, match="meanwhile, or expire") as refused:
            server.call(server.services.jobs._database.write(lambda connection, spec=spec: add_job(connection, "default", "job-late", spec)))
        assert refused.value.field == field
    assert [job.spec.name for job in client.jobs.list()] == ["first"]


def test_a_teacher_has_a_name_or_is_deployed(server: Server, client: Client) -> None:
    version = client.create_run("tiny", 16, seed=1).save_snapshot().result().version
    method = Distillation(teacher=version, max_tokens=8)
    student = JobSpec(name="student", base_model="tiny", data=Data(dataset="prompts"), method=method)
    with pytest.raises(InvalidInput, match="have no name and go after a while"):
        client.jobs.create(student)
    client.deployments.create("smith", version)
    assert client.jobs.create(student).state is JobState.QUEUED


def test_whoever_asks_for_a_job_hears_of_the_next_stage_when_the_one_before_ends(server: Server, client: Client) -> None:
    client.jobs.create(sft("first"))
    client.jobs.create(dpo("second", "first"))
    told: list[None] = []
    with server.services.jobs.queued.calling(lambda: told.append(None)):
        end(server, "first")
    assert told
    assert states(client, "second") == [JobState.QUEUED]


@pytest.mark.parametrize(
    ("gate", "measure", "why"),
    [
        (Gate(measure="exact", bound=0.5), measured("exact", 0.0, 0.5), None),
        (Gate(measure="exact", bound=0.5), measured("exact", 0.0, 0.25), "`exact` of job `first` is 0.25, and at least 0.5 is asked for"),
        (Gate(measure="loss", bound=1.0), measured("loss", 3.0, 1.0), None),
        (Gate(measure="loss", bound=1.0), measured("loss", 3.0, 1.5), "`loss` of job `first` is 1.5, and at most 1 is asked for"),
        (Gate(measure="exact"), measured("exact", 0.0, 0.5, (0.25, 0.75)), None),
        (Gate(measure="exact"), measured("exact", 0.0, 0.5, (0.0, 1.0)), "the difference is +0.5 [+0, +1]"),
        (Gate(measure="loss"), measured("loss", 3.0, 1.0, (-2.5, -1.5)), None),
        (Gate(measure="loss"), measured("loss", 1.0, 3.0, (1.5, 2.5)), "`loss` of job `first` is not better than what it began with"),
        (Gate(measure="exact"), measured("exact", 0.0, 1.0), "the difference is +1 of a single row"),
        (Gate(measure="exact"), measured("loss", 3.0, 1.0), "its gate asks for `exact`, which was not measured of job `first`"),
    ],
)
def test_a_gate_opens_for_what_it_asks_for_alone(server: Server, client: Client, gate: Gate, measure: Compared, why: str | None) -> None:
    client.jobs.create(sft("first"))
    client.jobs.create(dpo("second", "first", gate))
    end(server, "first", measure)
    job = client.jobs.get("second")
    if why is None:
        assert (job.state, job.reason) == (JobState.QUEUED, None)
        return
    assert job.state is JobState.FAILED
    assert why in str(job.reason)
    # Who comes later is told the same at the door.
    with pytest.raises(Conflict) as refused:
        client.jobs.create(dpo("later", "first", gate))
    assert (refused.value.message, refused.value.field) == (job.reason, "begin.gate")


@pytest.mark.parametrize(("state", "said"), [("failed", "has failed: no rows"), ("cancelled", "is cancelled")])
def test_what_waited_fails_with_the_reason_when_there_is_nothing_to_begin_with(server: Server, client: Client, state: str, said: str) -> None:
    client.jobs.create_chain([sft("first"), dpo("second", "first"), rft("third", "second")])
    end(server, "first", state=state, reason="no rows" if state == "failed" else None)
    second, third = client.jobs.get("second"), client.jobs.get("third")
    assert (second.state, third.state) == (JobState.FAILED, JobState.FAILED)
    assert second.reason == f"job `first`, where it begins, {said}"
    assert third.reason == f"job `second`, where it begins, has failed: {second.reason}"
    with pytest.raises(Conflict, match=f"job `first` {said.partition(':')[0]}, and has come to nothing to begin with"):
        client.jobs.create(dpo("later", "first"))


def test_a_job_that_is_cancelled_while_it_waits_ends_those_behind_it_and_not_the_one_before(client: Client) -> None:
    client.jobs.create_chain([sft("first"), dpo("second", "first"), rft("third", "second")])
    assert client.jobs.cancel("second").state is JobState.CANCELLED
    assert states(client, "first", "third") == [JobState.QUEUED, JobState.FAILED]


def test_a_paused_job_keeps_those_behind_it_waiting_and_goes_back_to_what_it_waited_for(server: Server, client: Client) -> None:
    client.jobs.create_chain([sft("first"), dpo("second", "first"), rft("third", "second")])
    client.jobs.pause("first")
    assert states(client, "second", "third") == [JobState.WAITING] * 2
    client.jobs.resume("first")
    assert client.jobs.pause("second").state is JobState.PAUSED
    assert client.jobs.resume("second").state is JobState.WAITING
    client.jobs.pause("second")
    end(server, "first")
    # Who paused it is not overruled.
    assert states(client, "second", "third") == [JobState.PAUSED, JobState.WAITING]
    resumed = client.jobs.resume("second")
    assert resumed.state is JobState.QUEUED
    assert resumed.spec.begin is not None
    assert resumed.spec.begin.checkpoint == "final"


def test_a_paused_job_whose_gate_closed_meanwhile_fails_when_it_is_resumed(server: Server, client: Client) -> None:
    client.jobs.create_chain([sft("first"), dpo("second", "first", Gate(measure="exact", bound=1.0))])
    client.jobs.pause("second")
    end(server, "first", measured("exact", 0.0, 0.5))
    resumed = client.jobs.resume("second")
    assert resumed.state is JobState.FAILED
    assert "at least 1 is asked for" in str(resumed.reason)


def test_an_api_that_starts_again_knows_who_waits(server: Server, client: Client) -> None:
    client.jobs.create_chain([sft("first"), dpo("second", "first")])
    server.stop()
    server.start()
    assert states(client, "first", "second") == [JobState.QUEUED, JobState.WAITING]
    end(server, "first")
    server.stop()
    server.start()
    assert states(client, "second") == [JobState.QUEUED]


def test_a_clone_of_a_stage_begins_where_the_stage_did(server: Server, client: Client) -> None:
    client.jobs.create_chain([sft("first"), dpo("second", "first")])

    def clone(name: str) -> Job:
        return client.jobs.create(client.jobs.get("second").spec.model_copy(update={"name": name}))

    assert clone("early").state is JobState.WAITING
    result = end(server, "first")
    assert result is not None
    late = clone("late")
    assert late.state is JobState.QUEUED
    assert late.spec.begin == client.jobs.get("early").spec.begin == Begin(job="first", run=result.run, checkpoint="final")


def test_a_stage_that_waits_is_not_ejected_yet(client: Client) -> None:
    _, second = client.jobs.create_chain([sft("first"), dpo("second", "first")])
    with pytest.raises(Conflict, match="job `second` waits for job `first`, where it begins: eject it once that has ended"):
        script(second.spec)


def test_a_chain_that_is_asked_for_twice_is_made_once(server: Server, client: Client) -> None:
    body = CreateChain(stages=[sft("first"), dpo("second", "first")]).model_dump(mode="json")
    answers = [server.http.post("/api/v1/chains", json=body, headers={"idempotency-key": "once"}).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(client.jobs.list()) == 2


@pytest.mark.parametrize(
    ("stages", "kind", "field", "said"),
    [
        ([sft("a"), dpo("b", "a", rank=8)], InvalidInput, "rank", "`rank` is 8, and 16 of job `a`"),
        ([sft("a"), dpo("b", "a", alpha=8.0)], InvalidInput, "alpha", "`alpha` is 8.0, and 32.0 of job `a`"),
        ([sft("a"), dpo("b", "a", data=Data(dataset="chats"))], InvalidInput, "data.dataset", "rows of `chat`, and `dpo` takes `preference`"),
        ([sft("a"), dpo("b", "a"), rft("c", "b", max_context=9)], InvalidInput, "max_context", "tokens, and 1 are taken"),
        ([sft("a"), dpo("b", "a"), rft("c", "b", max_context=1 << 20)], InvalidInput, "max_context", "takes 64 tokens at most"),
        ([sft("a"), dpo("b", "a", Gate(measure="reward"))], InvalidInput, "begin.gate", "job `a` (sft) measures `loss` and `exact`"),
        ([sft("a", evaluation=Evaluation(answers=0)), dpo("b", "a", Gate(measure="exact"))], InvalidInput, "begin.gate", "no rows are answered"),
        ([sft("a", evaluation=Evaluation(split="validation")), dpo("b", "a", Gate(measure="loss"))], InvalidInput, "begin.gate", "no rows in `valid"),
        ([sft("a"), dpo("b", "nobody")], InvalidInput, "begin.job", "begins at no stage before it"),
        ([dpo("b", "a"), sft("a")], InvalidInput, "begin.job", "begins at stage `a`, which does not stand before it"),
        ([dpo("b", "a", Gate(measure="loss")), dpo("a", "b", Gate(measure="loss"))], InvalidInput, "begin.job", "begins at stage `a`, which does"),
        ([dpo("a", "a")], InvalidInput, "begin.job", "begins at stage `a`, which does not stand before it"),
        ([dpo("b", "gone")], NotFound, "begin.job", "no job `gone`"),
        ([sft("a"), dpo("b", "a", Gate(measure="loss", bound=-0.1))], InvalidInput, "begin.gate", "`loss` of at most -0.1, which it never is"),
        ([sft("a"), dpo("b", "a", Gate(measure="exact", bound=1.01))], InvalidInput, "begin.gate", "`exact` of at least 1.01, which it never is"),
        (
            [sft("a", evaluation=Evaluation(rows=1)), dpo("b", "a", Gate(measure="loss"))],
            InvalidInput,
            "begin.gate",
            "hold more out, or give a `bound`",
        ),
        ([sft("a", evaluation=Evaluation(answers=1)), dpo("b", "a", Gate(measure="exact"))], InvalidInput, "begin.gate", "hold more out, or give"),
        ([sft("a"), dpo("a", "a")], InvalidInput, "name", "has the name of a stage before it"),
        ([sft("a"), dpo("b", "a", data=Data(dataset="gone"))], NotFound, "data.dataset", "no data set `gone`"),
    ],
    ids=[
        *("rank", "alpha", "kind", "rows", "context", "measure", "answers", "held out", "begin", "order", "both", "itself", "gone"),
        *("loss", "exact", "one row", "one answer", "name", "data"),
    ],
)
def test_what_is_wrong_with_one_stage_keeps_all_of_them_from_being_made(
    client: Client, stages: Sequence[JobSpec], kind: type[Exception], field: str, said: str
) -> None:
    for ask in (client.jobs.create_chain, client.jobs.resolve_chain):
        with pytest.raises(kind) as refused:
            ask(stages)
        assert said in str(refused.value)
        assert str(refused.value).startswith("stage ")
        assert refused.value.field.endswith(field)  # type: ignore[attr-defined]
    assert client.jobs.list() == []


def test_a_name_that_is_taken_meanwhile_keeps_the_whole_chain_from_being_made(client: Client) -> None:
    client.jobs.create(sft("second"))
    with pytest.raises(Conflict, match="there is a job `second` already"):
        client.jobs.create_chain([sft("first"), dpo("second", "first")])
    assert [job.spec.name for job in client.jobs.list()] == ["second"]


def test_a_resolved_chain_is_what_its_jobs_have(client: Client) -> None:
    resolved = client.jobs.resolve_chain([sft("first", seed=1), dpo("second", "first", seed=2)])
    assert [job.spec for job in client.jobs.create_chain(resolved)] == resolved


def test_a_gate_belongs_to_a_job() -> None:
    with pytest.raises(ValueError, match="a `gate` is of a `job`"):
        Begin(run="run", checkpoint="final", gate=Gate(measure="loss"))


def test_a_file_of_stages_says_once_what_holds_for_all_of_them() -> None:
    gate = {"gate": {"measure": "exact"}}
    given = {"name": "furnace", "base_model": "tiny", "rank": 8, "begin": {"job": "old"}}
    stages = stages_of(given | {"stages": [{"data": {"dataset": "chats"}}, {"name": "mine", "begin": gate, "rank": 16}, {"name": "last"}]})
    assert stages == [
        {"base_model": "tiny", "rank": 8, "data": {"dataset": "chats"}, "name": "furnace-1", "begin": {"job": "old"}},
        {"base_model": "tiny", "rank": 16, "name": "mine", "begin": {"job": "furnace-1"} | gate},
        {"base_model": "tiny", "rank": 8, "name": "last", "begin": {"job": "mine"}},
    ]
    with pytest.raises(InvalidInput, match="stage 1 has no `name`"):
        stages_of({"stages": [{}]})
    with pytest.raises(InvalidInput, match="`stages` is a list of specs"):
        stages_of({"stages": {"one": {}}})
    with pytest.raises(InvalidInput, match="stage 2: `begin` has fields") as refused:
        stages_of({"name": "x", "stages": [{}, {"begin": "other"}]})
    assert refused.value.field == "stages.1.begin"


def test_what_stands_beside_stages_and_would_hold_for_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="every stage has a `name`") as refused:
        stages_of({"name": "furnace", "stages": [{"name": "one"}, {"name": "two"}]})
    assert refused.value.field == "name"
    with pytest.raises(InvalidInput, match="the first stage says itself where it begins") as refused:
        stages_of({"name": "furnace", "begin": {"job": "old"}, "stages": [{"begin": {"job": "other"}}, {}]})
    assert refused.value.field == "begin"


def test_nothing_keeps_a_job_without_a_gate_from_what_succeeded(server: Server, client: Client) -> None:
    client.jobs.create(sft("first"))
    end(server, "first")
    assert obstacle(client.jobs.get("first"), None) is None


def test_a_gate_takes_no_reward_of_judges_that_nobody_measured(client: Client) -> None:
    judge = {"type": "score_model", "name": "j", "model": "tiny", "input": [{"role": "user", "content": "{{ sample.output_text }}"}]}
    client.graders.create("judge", judge)
    for name, method in (
        ("by-judge", Reinforcement(grader="judge", held_out_grader="right", max_tokens=8)),
        ("by-rule", Reinforcement(grader="right", held_out_grader="judge", max_tokens=8)),
        ("by-rule-alone", Reinforcement(grader="right", max_tokens=8)),
    ):
        client.jobs.create(JobSpec(name=name, base_model="tiny", data=Data(dataset="prompts"), method=method))
    measures: tuple[Measure, Measure] = ("reward", "held_out_reward")
    for before, taken in (("by-judge", "held_out_reward"), ("by-rule", "reward")):
        for measure in measures:
            asked = dpo(f"after-{before}-{measure}".replace("_", "-"), before, Gate(measure=measure))
            if measure == taken:
                assert client.jobs.create(asked).state is JobState.WAITING
                continue
            with pytest.raises(Conflict, match="grader `judge` version 1 may score and cannot gate") as refused:
                client.jobs.create(asked)
            assert refused.value.field == "begin.gate"
    with pytest.raises(InvalidInput, match="has no `held_out_grader`"):
        client.jobs.create(dpo("after-nobody", "by-rule-alone", Gate(measure="held_out_reward")))

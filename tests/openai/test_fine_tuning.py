"""Fine-tuning jobs over the unmodified `openai` SDK, without a runner: what is asked for, what becomes of it, and what is refused by its name."""

import csv
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from bloomery.client import Client
from bloomery.types.ids import new_id
from bloomery.types.jobs import Job, JobPoint, JobProgress, JobResult
from bloomery.types.leases import FinishJob, NewJobEvent, ReportJob
from bloomery.types.methods import DirectPreference, Reinforcement, Supervised
from tests.api.server import URL
from tests.openai.server import ScriptedServer
from tests.openai.test_files import ROW, lines, upload

PROMPT = {"messages": [{"role": "user", "content": "What is red?"}], "answer": "a colour"}
PAIR = {"prompt": ROW["messages"][:1], "chosen": ROW["messages"][1:], "rejected": [{"role": "assistant", "content": "No idea."}]}
RIGHT = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}


def chats(count: int) -> bytes:
    return lines(
        *({"messages": [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": str(number)}]} for number in range(count))
    )


@pytest.fixture
def key(server: ScriptedServer) -> str:
    """Of a project of its own."""
    project = new_id("project")
    with server.client() as admin:
        return admin.keys.create(project, ["read", "train", "infer"], project=project).key


@pytest.fixture
def client(server: ScriptedServer, key: str) -> Iterator[Client]:
    """The project as Bloomery's own contract shows it."""
    with Client(URL, key, transport=server.transport) as client:
        yield client


@pytest.fixture
def sdk(server: ScriptedServer, key: str) -> Iterator[OpenAI]:
    with server.sdk(api_key=key) as sdk:
        yield sdk


def supervised(**hyperparameters: Any) -> Any:
    return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}


def begun(server: ScriptedServer, job: str) -> Client:
    """The client of a process that has the job; those that other tests left waiting are ended on the way."""
    with server.client() as admin:
        while (lease := admin.runner("r").claim(0)) is not None:
            worker = Client(URL, lease.token, transport=server.transport)
            if lease.job.id == job:
                return worker
            worker.working(lease.job.id).finish(FinishJob(state="cancelled"))
    raise AssertionError(f"{job} does not wait")


def refused(sdk: OpenAI, error: type[openai.APIStatusError] = openai.BadRequestError, **asked: Any) -> tuple[str, str | None]:
    with pytest.raises(error) as refusal:
        sdk.fine_tuning.jobs.create(**{"model": "tiny"} | asked)
    assert isinstance(refusal.value.body, dict)
    return refusal.value.body["message"], refusal.value.param


def own(client: Client, job: str) -> Job:
    return client.jobs.get(job)


def test_a_file_becomes_a_job_whose_auto_is_what_a_job_does_by_itself(sdk: OpenAI, client: Client) -> None:
    file = upload(sdk, chats(100))
    made = sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id, suffix="my model", seed=7, metadata={"team": "a"})
    assert (made.status, made.training_file, made.validation_file, made.seed, made.metadata) == ("queued", file.id, None, 7, {"team": "a"})
    assert (made.fine_tuned_model, made.finished_at, made.error, made.trained_tokens, made.result_files) == (None, None, None, None, [])
    usual, spec = Supervised().resolved(), own(client, made.id).spec
    assert spec.method == usual
    assert made.hyperparameters.model_dump() == {"n_epochs": 3, "batch_size": 32, "learning_rate_multiplier": 1.0}
    assert made.method is not None
    assert made.method.supervised is not None
    assert made.method.supervised.hyperparameters.model_dump() == made.hyperparameters.model_dump()
    assert spec.name.startswith("ft-my-model-")
    assert (spec.checkpoint_every, spec.evaluation.every) == (3, 0), "of 100 rows in steps of 32, none of them held out"
    assert sdk.fine_tuning.jobs.retrieve(made.id) == made


def test_hyperparameters_are_those_of_the_job(sdk: OpenAI, client: Client) -> None:
    file, held_out = upload(sdk, chats(20)), upload(sdk, lines(ROW))
    made = sdk.fine_tuning.jobs.create(
        model="tiny",
        training_file=file.id,
        validation_file=held_out.id,
        method=supervised(n_epochs=2, batch_size=4, learning_rate_multiplier=0.5),
    )
    method = own(client, made.id).spec.method
    assert isinstance(method, Supervised)
    assert (method.batches.epochs, method.batches.rows, method.optimizer.learning_rate) == (2, 4, Supervised().optimizer.learning_rate / 2)
    data = own(client, made.id).spec.data
    rows = [client.datasets.rows(data.dataset, data.version or "", split) for split in ("train", "eval")]
    assert list(map(len, rows)) == [20, 1]
    assert own(client, made.id).spec.evaluation.every == 5
    older = sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id, hyperparameters={"n_epochs": 1, "batch_size": "auto"})
    assert older.hyperparameters.n_epochs == 1
    assert own(client, older.id).spec.checkpoint_every == 0
    once = sdk.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, validation_file=held_out.id, method=supervised(n_epochs=1, batch_size=4), suffix="once"
    )
    assert (own(client, once.id).spec.checkpoint_every, own(client, once.id).spec.evaluation.every) == (0, 5)


def test_jobs_of_the_same_files_share_a_version_that_outlives_them(sdk: OpenAI, client: Client) -> None:
    made = []
    for _ in range(2):
        file = upload(sdk, chats(3))
        made.append(own(client, sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id).id).spec.data)
        sdk.files.delete(file.id)
    assert made[0] == made[1]
    assert len(client.datasets.rows(made[0].dataset, made[0].version or "")) == 3


def test_preferences_are_trained_on_with_their_beta(sdk: OpenAI, client: Client) -> None:
    file = upload(sdk, lines(PAIR))
    made = sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id, method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3}}})
    assert own(client, made.id).spec.method.beta == 0.3
    assert made.method is not None
    assert made.method.dpo is not None
    assert made.method.dpo.hyperparameters.model_dump() == {"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 1.0, "beta": 0.3}
    by_default = sdk.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, method={"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto"}}}
    )
    assert own(client, by_default.id).spec.method.beta == DirectPreference().beta == 1.0
    message, param = refused(sdk, training_file=file.id)
    assert (param, "`preference`" in message) == ("training_file", True)


def test_reinforcement_has_its_grader_as_a_version(sdk: OpenAI, client: Client) -> None:
    file = upload(sdk, lines(PROMPT, PROMPT | {"answer": "b"}))
    options = {"n_epochs": 4, "batch_size": 2, "compute_multiplier": 2, "eval_samples": "auto", "reasoning_effort": "default"}
    method = {"type": "reinforcement", "reinforcement": {"grader": RIGHT, "hyperparameters": options}}
    made = sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id, method=method)
    asked = own(client, made.id).spec.method
    assert isinstance(asked, Reinforcement)
    assert (asked.steps, asked.groups_per_step, asked.group_size, asked.grader_version) == (4, 2, 16, 1)
    assert client.graders.get(asked.grader).spec["reference"] == RIGHT["reference"]
    assert made.method is not None
    assert made.method.reinforcement is not None
    assert made.method.reinforcement.grader.model_dump(exclude_none=True) == RIGHT
    for wrong in ({"eval_interval": 5}, {"eval_interval": 0}, {"eval_samples": 5}, {"reasoning_effort": "high"}):
        (name,) = wrong
        where = f"method.reinforcement.hyperparameters.{name}"
        how = {"type": "reinforcement", "reinforcement": {"grader": RIGHT, "hyperparameters": wrong}}
        assert refused(sdk, training_file=file.id, method=how)[1] == where
    spec = own(client, made.id).spec
    assert (spec.checkpoint_every, spec.evaluation.every) == (1, 0), "an epoch is one step, and nothing is held out"
    held_out = upload(sdk, lines({"messages": [{"role": "user", "content": "another question altogether"}], "answer": "c"}))
    asked_often = {"type": "reinforcement", "reinforcement": {"grader": RIGHT, "hyperparameters": options | {"eval_interval": 3}}}
    often = sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id, validation_file=held_out.id, method=asked_often)
    assert (own(client, often.id).spec.checkpoint_every, own(client, often.id).spec.evaluation.every) == (1, 3)
    assert often.method is not None
    assert often.method.reinforcement is not None
    assert often.method.reinforcement.hyperparameters.eval_interval == 3
    by_epoch = sdk.fine_tuning.jobs.create(model="tiny", training_file=file.id, validation_file=held_out.id, method=method)
    assert own(client, by_epoch.id).spec.evaluation.every == 1
    broken = {"type": "reinforcement", "reinforcement": {"grader": RIGHT | {"operation": "about"}}}
    message, param = refused(sdk, training_file=file.id, method=broken)
    assert (param or "").startswith("method.reinforcement.grader"), message


def test_a_grader_that_pays_without_competence_is_refused_under_the_contract_until_it_is_waived(sdk: OpenAI, client: Client) -> None:
    file = upload(sdk, lines(*(PROMPT | {"answer": answer} for answer in "abcd")))
    anything = RIGHT | {"operation": "ne"}
    asked: dict[str, Any] = {"training_file": file.id, "method": {"type": "reinforcement", "reinforcement": {"grader": anything}}}
    made = own(client, sdk.fine_tuning.jobs.create(model="tiny", **asked).id).spec
    assert isinstance(made.method, Reinforcement)
    client.graders.attack(made.method.grader, dataset=made.data.dataset)
    message, param = refused(sdk, openai.ConflictError, **asked)
    assert (param, f"bloomery grader waive {made.method.grader} --version 1" in message) == ("method.reinforcement.grader", True)
    client.graders.waive(made.method.grader, "for a test")
    assert sdk.fine_tuning.jobs.create(model="tiny", **asked).status == "queued"


def test_a_job_is_told_of_until_it_succeeded(sdk: OpenAI, server: ScriptedServer) -> None:
    job = sdk.fine_tuning.jobs.create(model="tiny", training_file=upload(sdk, chats(8)).id, method=supervised(batch_size=4, n_epochs=2)).id
    with begun(server, job) as worker:
        run = worker.create_run("tiny", 16)
        version, kept = run.save_snapshot("step-2").result().version, run.save_checkpoint("step-2").result()
        points = [JobPoint(step=1, values={"loss": 2.0}), JobPoint(step=2, values={"loss": 1.5, "evaluation/loss": 1.75})]
        progress = JobProgress(step=2, steps=4, tokens=640, seconds=2.0, remaining_s=50.0)
        event = NewJobEvent(level="warning", message="look", data={"rows": 2})
        worker.working(job).report(ReportJob(run=run.id, points=points, events=[event], progress=progress))
        running = sdk.fine_tuning.jobs.retrieve(job)
        assert (running.status, running.trained_tokens, running.result_files) == ("running", None, [])
        assert running.estimated_finish is not None
        assert 0 < running.estimated_finish - running.created_at < 600
        final = run.save_snapshot("final").result().version
        result = JobResult(run=run.id, version=final, checkpoint="final", step=4, digest=kept.digest, compared=[], base_version="tiny")
        worker.working(job).finish(FinishJob(state="succeeded", result=result))
    done = sdk.fine_tuning.jobs.retrieve(job)
    assert (done.status, done.fine_tuned_model, done.trained_tokens, done.estimated_finish) == ("succeeded", final, 640, None)
    assert done.finished_at is not None
    assert sdk.fine_tuning.jobs.retrieve(job) == done
    (results,) = done.result_files
    assert sdk.files.retrieve(results).purpose == "fine-tune-results"
    table = list(csv.DictReader(io.StringIO(sdk.files.content(results).text)))
    assert table == [{"step": "1", "train_loss": "2.0", "valid_loss": ""}, {"step": "2", "train_loss": "1.5", "valid_loss": "1.75"}]
    checkpoints = list(sdk.fine_tuning.jobs.checkpoints.list(job, limit=1))
    assert {each.fine_tuned_model_checkpoint for each in checkpoints} == {version, final}
    metrics = {each.fine_tuned_model_checkpoint: each.metrics for each in checkpoints}
    assert all(each.fine_tuning_job_id == job for each in checkpoints)
    assert len(metrics) == len({version, final})
    events = list(sdk.fine_tuning.jobs.list_events(job, limit=2))
    assert sdk.fine_tuning.jobs.list_events(job, limit=100).data == events
    assert (events[0].message, events[-1].message) == ("has succeeded", "waits for a process")
    assert [each.data for each in events if each.type == "metrics"] == [
        {"step": 2, "train_loss": 1.5, "valid_loss": 1.75},
        {"step": 1, "train_loss": 2.0},
    ]
    assert [(each.level, each.data) for each in events if each.message == "look"] == [("warn", {"rows": 2})]


def test_a_job_that_failed_says_why(sdk: OpenAI, server: ScriptedServer) -> None:
    job = sdk.fine_tuning.jobs.create(model="tiny", training_file=upload(sdk, chats(2)).id).id
    with begun(server, job) as worker:
        worker.working(job).finish(FinishJob(state="failed", reason="row 1 has 600 tokens"))
    failed = sdk.fine_tuning.jobs.retrieve(job)
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message, failed.error.param) == ("job_failed", "row 1 has 600 tokens", None)
    assert failed.result_files == []


def test_jobs_are_paused_resumed_and_cancelled(sdk: OpenAI) -> None:
    jobs = sdk.fine_tuning.jobs
    job = jobs.create(model="tiny", training_file=upload(sdk, chats(2)).id).id
    assert [steer(job).status for steer in (jobs.pause, jobs.resume, jobs.cancel)] == ["paused", "queued", "cancelled"]
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        jobs.resume(job)


def test_jobs_are_listed_newest_first_and_by_what_was_noted_with_them(sdk: OpenAI, client: Client) -> None:
    file = upload(sdk, chats(2)).id
    made = [sdk.fine_tuning.jobs.create(model="tiny", training_file=file, metadata={"n": str(n % 2), "all": "x"}).id for n in range(3)]
    assert [each.id for each in sdk.fine_tuning.jobs.list(limit=1)] == sorted(made, reverse=True)
    assert {each.id for each in sdk.fine_tuning.jobs.list(limit=1, metadata={"n": "0"})} == {made[0], made[2]}
    assert list(sdk.fine_tuning.jobs.list(metadata={"n": "2"})) == []
    for ask in (sdk.fine_tuning.jobs.list, lambda after: sdk.fine_tuning.jobs.list_events(made[0], after=after)):
        with pytest.raises(openai.APIStatusError) as unknown:
            ask(after="nonsense")
        assert unknown.value.param == "after"
    assert {job.id for job in client.jobs.list()} == set(made)


def test_what_was_trained_is_trained_further(sdk: OpenAI, client: Client) -> None:
    run = client.create_run("tiny", 8, alpha=16.0)
    run.save_checkpoint("final").result()
    version = run.save_snapshot("final").result().version
    made = sdk.fine_tuning.jobs.create(model=version, training_file=upload(sdk, chats(2)).id)
    spec = own(client, made.id).spec
    assert (made.model, spec.base_model, spec.rank, spec.alpha) == (version, "tiny", 8, 16.0)
    assert spec.begin is not None
    assert (spec.begin.run, spec.begin.checkpoint) == (run.id, "final")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"suffix": ""}, "suffix"),
        ({"suffix": "x" * 65}, "suffix"),
        ({"seed": -1}, "seed"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
        ({"method": supervised(n_epochs=0)}, "method.supervised.hyperparameters.n_epochs"),
        ({"method": supervised(batch_size=5000)}, "method.supervised.hyperparameters.batch_size"),
        ({"method": supervised(learning_rate_multiplier=-1)}, "method.supervised.hyperparameters.learning_rate_multiplier"),
        ({"method": supervised(learning_rate_multiplier=1e5 + 1)}, "method.supervised.hyperparameters.learning_rate_multiplier"),
        ({"method": supervised(learning_rate_multiplier=5e-324)}, "method.supervised.hyperparameters.learning_rate_multiplier"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"n_epochs": 1}, "method": supervised()}, "hyperparameters"),
        ({"method": {"type": "reinforcement"}}, "method.reinforcement.grader"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised"),
        ({"method": {"type": "magic"}}, "method.type"),
        ({"color": "red"}, "color"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(sdk: OpenAI, client: Client, asked: dict[str, Any], param: str) -> None:
    file = upload(sdk, chats(2)).id
    extra = {name: asked.pop(name) for name in list(asked) if name == "color"}
    assert refused(sdk, training_file=file, extra_body=extra, **asked)[1] == param
    assert client.jobs.list() == []
    assert client.datasets.list() == []


def test_weights_of_which_not_all_layers_were_trained_are_no_model_to_begin_at(sdk: OpenAI, client: Client) -> None:
    run = client.create_run("tiny", 8, seed=1, train_mlp=False)
    run.save_checkpoint("final").result()
    version = run.save_snapshot("final").result().version
    message, param = refused(sdk, model=version, training_file=upload(sdk, chats(2)).id)
    assert (param, "`train_mlp` of run" in message) == ("model", True)


def test_what_is_not_there_is_not_found_under_its_name(sdk: OpenAI, server: ScriptedServer) -> None:
    file = upload(sdk, chats(2)).id
    assert refused(sdk, openai.NotFoundError, model="gpt-4o", training_file=file)[1] == "model"
    assert refused(sdk, openai.NotFoundError, training_file="file-1")[1] == "training_file"
    assert refused(sdk, openai.NotFoundError, training_file=file, validation_file="file-1")[1] == "validation_file"
    job = sdk.fine_tuning.jobs.create(model="tiny", training_file=file).id
    with server.sdk() as stranger:
        for ask in ("retrieve", "cancel", "pause", "resume", "list_events"):
            with pytest.raises(openai.NotFoundError):
                getattr(stranger.fine_tuning.jobs, ask)(job)
        with pytest.raises(openai.NotFoundError):
            stranger.fine_tuning.jobs.checkpoints.list(job)
        assert refused(stranger, openai.NotFoundError, training_file=file)[1] == "training_file"


def test_a_file_that_was_deleted_is_not_found_and_what_began_with_it_goes_on(sdk: OpenAI, client: Client) -> None:
    kept, gone = upload(sdk, chats(2)).id, upload(sdk, chats(3)).id
    job = sdk.fine_tuning.jobs.create(model="tiny", training_file=gone)
    sdk.files.delete(gone)
    assert refused(sdk, openai.NotFoundError, training_file=gone)[1] == "training_file"
    message, param = refused(sdk, openai.NotFoundError, training_file=kept, validation_file=gone)
    assert (gone in message, param) == (True, "validation_file")
    data = own(client, job.id).spec.data
    assert len(client.datasets.rows(data.dataset, data.version or "")) == 3
    assert sdk.fine_tuning.jobs.retrieve(job.id).training_file == gone


def test_of_those_who_cancel_a_job_at_once_one_is_obeyed_and_the_others_are_told_that_it_is_over(sdk: OpenAI) -> None:
    job = sdk.fine_tuning.jobs.create(model="tiny", training_file=upload(sdk, chats(2)).id).id

    def attempt(_: int) -> str:
        try:
            return sdk.fine_tuning.jobs.cancel(job).status
        except openai.ConflictError as told:
            return str(told)

    with ThreadPoolExecutor(6) as pool:
        came_of_it = list(pool.map(attempt, range(6)))
    assert came_of_it.count("cancelled") == 1
    assert sum("is cancelled, and cannot be cancelled after that" in said for said in came_of_it) == 5


def test_a_file_whose_rows_are_all_held_out_trains_nothing(sdk: OpenAI, client: Client) -> None:
    file = upload(sdk, chats(2)).id
    assert refused(sdk, training_file=file, validation_file=file)[1] == "training_file"

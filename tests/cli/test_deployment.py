"""`bloomery deployment create` and `promote` with `--evidence`: what is kept of evaluations and jobs, and which are refused."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from bloomery.cli.evidence import compared, evidence_words, with_evidence
from bloomery.cli.main import app
from bloomery.client import Client
from bloomery.types.errors import Conflict
from bloomery.types.evaluations import Evaluation, EvaluationSpec
from bloomery.types.jobs import Compared, Data, Job, JobProgress, JobResult, JobSpec, JobState
from tests.cli.test_complete import completed
from tests.cli.test_evaluation import CHECK
from tests.live import LiveServer

BASE = "bloomery-tiny"
LOSS = Compared(
    name="loss",
    rows=8,
    before=3.0,
    after=0.5,
    before_interval=(2.5, 3.5),
    after_interval=None,
    difference=-2.5,
    difference_interval=(-3.0, -2.0),
    higher_is_better=False,
)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Any:
    with Client(live_server.url, live_server.key) as client:
        rows = [{"messages": [{"role": "user", "content": f"Say {place}."}], "answer": "never"} for place in range(2)]
        client.datasets.create("evidence-asked")
        client.datasets.add_version("evidence-asked", {"eval": "\n".join(map(json.dumps, rows))})
        client.graders.create("evidence-other", CHECK)
        yield client


def evaluated(client: Client, name: str, *models: str) -> Evaluation:
    data = {"dataset": "evidence-asked"}
    spec = {"name": name, "data": data, "models": [*models], "graders": ["evidence-other"], "params": {"max_tokens": 4}}
    return client.evaluations.wait(client.evaluations.create(EvaluationSpec.model_validate(spec)).id, 300)


def run(server: LiveServer, *arguments: str, expect: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["deployment", *arguments, "--data-dir", str(server.data_dir)])
    assert done.exit_code == expect, done.output
    return done.output


def cited(evaluation: Evaluation, model: str) -> dict[str, Any]:
    assert evaluation.result is not None
    (summary,) = [each for each in evaluation.result.models if each.model == model]
    mean = summary.graders[0].mean
    assert mean is not None
    scores = [{"grader": "evidence-other@1", "rows": 2, "mean": mean.model_dump(mode="json")}]
    return {"evaluation": evaluation.id, "name": evaluation.spec.name, "model": model, "scores": scores}


def test_evaluations_that_are_named_are_kept_as_evidence_with_their_figures(live_server: LiveServer, client: Client) -> None:
    snapshot = client.create_run(BASE, 4, seed=5).save_snapshot("evidenced").result()
    both = evaluated(client, "evidence-both", BASE, snapshot.version)
    again = evaluated(client, "evidence-again", snapshot.version)
    given = ("--evidence", "evidence-both", "--evidence", again.id, "--evidence", both.id)
    made = json.loads(run(live_server, "create", "evidenced", snapshot.version, *given, "--json"))
    assert made["live"]["evidence"] == {"evaluations": [cited(both, snapshot.version), cited(again, snapshot.version)]}
    # Of a base model by its alias the weights are those of its files, and of a path those that it names.
    assert "revision 2" in run(live_server, "promote", "evidenced", BASE, "--evidence", "evidence-both")
    (saved,) = [each for each in client.snapshots() if each.version == snapshot.version]
    assert "revision 3" in run(live_server, "promote", "evidenced", f"tinker://{saved.run_id}/sampler_weights/evidenced", "--evidence", both.id)
    _, second, third = client.deployments.get("evidenced").revisions
    assert second.evidence == {"evaluations": [cited(both, BASE)]}
    assert third.evidence == {"evaluations": [cited(both, snapshot.version)]}
    said = [line.split(maxsplit=5)[-1].strip() for line in run(live_server, "show", "evidenced").splitlines()[2:]]
    assert said == ["evidence-both, evidence-again", "evidence-both", "evidence-both"]
    assert completed(f"bloomery deployment promote --data-dir {live_server.data_dir} evidenced --evidence evidence-b") == ["evidence-both"]
    run(live_server, "promote", "evidenced", snapshot.version)
    assert client.deployments.get("evidenced").live.evidence == {}


def test_what_is_no_evidence_of_the_version_is_refused_with_what_would_be_and_nothing_is_deployed(live_server: LiveServer, client: Client) -> None:
    evaluated(client, "evidence-of-base", BASE)
    other = client.create_run(BASE, 4, seed=6).save_snapshot("unproved").result().version
    said = run(live_server, "create", "unproved", other, "--evidence", "evidence-of-base", expect=2)
    assert f"evaluation `evidence-of-base` did not ask the weights {other[:12]} that are to be live, but `{BASE}`" in said
    assert f"`bloomery eval create NAME --dataset evidence-asked --model {other} --grader evidence-other@1`" in said
    said = run(live_server, "create", "unproved", other, "--evidence", "nothing-so-named", expect=2)
    assert "there is no evaluation and no job `nothing-so-named`: `bloomery eval list` and `bloomery job list` show those that there are" in said
    params = {"max_tokens": 400, "samples": 64}
    spec = {"name": "evidence-long", "data": {"dataset": "evidence-asked"}, "models": [BASE], "graders": ["evidence-other"], "params": params}
    client.evaluations.create(EvaluationSpec.model_validate(spec))
    said = run(live_server, "create", "unproved", BASE, "--evidence", "evidence-long", expect=2)
    assert "and has no result: wait for it with `bloomery eval show evidence-long --watch`" in said
    client.evaluations.cancel("evidence-long")
    said = run(live_server, "create", "unproved", BASE, "--evidence", "evidence-long", expect=2)
    assert "evaluation `evidence-long` is cancelled, and has no result: name one that has succeeded" in said
    assert "unproved" not in {each.name for each in client.deployments.list()}


def test_a_name_of_an_evaluation_and_of_a_job_is_no_evidence_before_it_is_said_which(live_server: LiveServer, client: Client) -> None:
    evaluation = evaluated(client, "evidence-named-twice", BASE)
    client.datasets.create("evidence-taught")
    client.datasets.add_version("evidence-taught", {"train": json.dumps({"prompt": "red", "completion": "moon"})})
    job = client.jobs.create(JobSpec(name="evidence-named-twice", base_model=BASE, data=Data(dataset="evidence-taught")))
    client.jobs.cancel(job.id)
    said = run(live_server, "create", "named-twice", BASE, "--evidence", "evidence-named-twice", expect=2)
    assert f"`evidence-named-twice` is an evaluation and a job: give the id, `{evaluation.id}` or `{job.id}`" in said
    run(live_server, "create", "named-twice", BASE, "--evidence", evaluation.id)
    assert client.deployments.get("named-twice").live.evidence == {"evaluations": [cited(evaluation, BASE)]}


def test_a_path_that_is_written_anew_meanwhile_carries_no_evidence_of_other_weights(client: Client) -> None:
    trained = client.create_run(BASE, 4, seed=7)
    snapshot = trained.save_snapshot("rewritten").result()
    measured = evaluated(client, "evidence-of-the-first", snapshot.version)
    path = f"tinker://{trained.id}/sampler_weights/rewritten"
    weights, evidence = with_evidence(client, [measured.id], path)
    assert (weights, evidence) == (snapshot.version, {"evaluations": [cited(measured, snapshot.version)]})
    assert with_evidence(client, [], path) == (path, {})


def test_of_a_job_what_it_measured_before_and_after_is_evidence_of_what_it_ended_with_and_of_nothing_else() -> None:
    measured = {"name": "taught", "base_version": "b" * 64, "compared": [LOSS.model_dump(mode="json")]}
    assert compared(ended(LOSS), "a" * 64) == {"job": "job_1", **measured}
    for job, weights, why in (
        (ended(LOSS), "c" * 64, "compared the weights aaaaaaaaaaaa that it ended with, and not cccccccccccc"),
        (ended(), "a" * 64, "`bloomery dataset split chats --eval 0.1`"),
        (ended(LOSS).model_copy(update={"state": JobState.RUNNING, "result": None}), "a" * 64, "is running, and has compared nothing"),
    ):
        with pytest.raises(Conflict, match=why):
            compared(job, weights)


def test_evidence_is_told_in_names_and_of_another_shape_by_what_it_is_called() -> None:
    assert evidence_words({}) == "-"
    assert evidence_words({"jobs": [{"name": "taught"}], "mcnemar": {"gained": 1}, "evaluations": ["mine"]}) == "taught, mcnemar, evaluations"
    assert evidence_words({"evaluations": [{"name": "\x1b[2Jgone"}]}) == "\\x1b[2Jgone"


def ended(*measures: Compared) -> Job:
    """A job that ended with the weights `aaa...`."""
    result = JobResult(run="run_1", version="a" * 64, checkpoint="final", step=4, digest="d" * 64, compared=[*measures], base_version="b" * 64)
    return Job(
        id="job_1",
        spec=JobSpec(name="taught", base_model=BASE, data=Data(dataset="chats")),
        state=JobState.SUCCEEDED,
        reason=None,
        run="run_1",
        progress=JobProgress(),
        result=result,
        epoch=1,
        created_us=1,
        updated_us=1,
        started_us=1,
        finished_us=1,
    )

"""Files, graders, fine-tuning jobs and evals of OpenAI's contract under `/oai/api/v1`, over the unmodified `openai` SDK."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.live import wait_until
from tests.tinker.over_fake_engine import KEY, MODEL, Served

ROWS = b"".join(
    json.dumps({"messages": [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": str(number)}]}).encode() + b"\n"
    for number in range(20)
)
RIGHT: Any = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}


@pytest.fixture
def sdk(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=KEY, max_retries=0) as client:
        yield client


def uploaded(sdk: OpenAI, **options: Any) -> str:
    return sdk.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune", **options).id


@pytest.mark.contract("POST /oai/api/v1/fine_tuning/alpha/graders/run")
@pytest.mark.contract("POST /oai/api/v1/fine_tuning/alpha/graders/validate")
def test_graders_are_validated_and_run(sdk: OpenAI) -> None:
    assert sdk.fine_tuning.alpha.graders.validate(grader=RIGHT).grader is not None
    assert sdk.fine_tuning.alpha.graders.run(grader=RIGHT, model_sample="4", item={"answer": "4"}).reward == 1


@pytest.mark.contract("POST /oai/api/v1/files")
@pytest.mark.contract("POST /oai/api/v1/files", "idempotency-key")
@pytest.mark.contract("GET /oai/api/v1/files", "purpose")
@pytest.mark.contract("GET /oai/api/v1/files", "after")
@pytest.mark.contract("GET /oai/api/v1/files", "limit")
@pytest.mark.contract("GET /oai/api/v1/files", "order")
@pytest.mark.contract("GET /oai/api/v1/files")
@pytest.mark.contract("GET /oai/api/v1/files/{file}")
@pytest.mark.contract("GET /oai/api/v1/files/{file}/content")
@pytest.mark.contract("DELETE /oai/api/v1/files/{file}")
def test_files_are_kept_shown_and_deleted(sdk: OpenAI) -> None:
    again = {"extra_headers": {"idempotency-key": "files-of-this-test"}}
    file = uploaded(sdk, **again)
    assert uploaded(sdk, **again) == file
    other = uploaded(sdk)
    assert sdk.files.retrieve(file).bytes == len(ROWS)
    assert sdk.files.content(file).read() == ROWS
    assert {file, other} <= {each.id for each in sdk.files.list()}
    assert [each.id for each in sdk.files.list(purpose="fine-tune", order="asc", limit=1, after=file).data] == [other]
    for each in (file, other):
        assert sdk.files.delete(each).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(each)


@pytest.mark.contract("POST /oai/api/v1/uploads")
@pytest.mark.contract("POST /oai/api/v1/uploads/{upload}/parts")
@pytest.mark.contract("POST /oai/api/v1/uploads/{upload}/parts", "idempotency-key")
@pytest.mark.contract("POST /oai/api/v1/uploads/{upload}/complete")
@pytest.mark.contract("POST /oai/api/v1/uploads/{upload}/cancel")
def test_files_come_in_parts(sdk: OpenAI) -> None:
    upload = sdk.uploads.create(bytes=len(ROWS), filename="rows.jsonl", mime_type="text/jsonl", purpose="fine-tune").id
    first = sdk.uploads.parts.create(upload, data=ROWS[:100], extra_headers={"idempotency-key": "part-of-this-test"}).id
    second = sdk.uploads.parts.create(upload, data=ROWS[100:]).id
    done = sdk.uploads.complete(upload, part_ids=[first, second]).file
    assert done is not None
    assert sdk.files.content(done.id).read() == ROWS
    left = sdk.uploads.create(bytes=10, filename="rows.jsonl", mime_type="text/jsonl", purpose="fine-tune").id
    assert sdk.uploads.cancel(left).status == "cancelled"


@pytest.mark.contract("POST /oai/api/v1/batches")
@pytest.mark.contract("GET /oai/api/v1/batches")
@pytest.mark.contract("GET /oai/api/v1/batches", "after")
@pytest.mark.contract("GET /oai/api/v1/batches", "limit")
@pytest.mark.contract("GET /oai/api/v1/batches/{batch}")
@pytest.mark.contract("POST /oai/api/v1/batches/{batch}/cancel")
def test_files_of_requests_are_answered(sdk: OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # To come again is what each request is told, so none is answered before its batch is cancelled.
    monkeypatch.setattr(server.engine, "refuse_to_sample", ("server", "unavailable"))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    asked = sdk.files.create(file=("requests.jsonl", json.dumps(line).encode()), purpose="batch").id
    older, newer = (sdk.batches.create(input_file_id=asked, endpoint="/v1/completions", completion_window="24h").id for _ in range(2))
    assert [batch.id for batch in sdk.batches.list(limit=1).data] == [newer]
    assert [batch.id for batch in sdk.batches.list(after=newer, limit=1).data] == [older]
    for batch in (older, newer):
        assert sdk.batches.cancel(batch).status in ("cancelling", "cancelled")
    assert sdk.batches.retrieve(older).input_file_id == asked


@pytest.mark.contract("POST /oai/api/v1/fine_tuning/jobs")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs", "after")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs", "limit")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}")
@pytest.mark.contract("POST /oai/api/v1/fine_tuning/jobs/{job}/pause")
@pytest.mark.contract("POST /oai/api/v1/fine_tuning/jobs/{job}/resume")
@pytest.mark.contract("POST /oai/api/v1/fine_tuning/jobs/{job}/cancel")
def test_jobs_are_made_shown_and_steered(sdk: OpenAI) -> None:
    older, newer = (sdk.fine_tuning.jobs.create(model=MODEL, training_file=uploaded(sdk), suffix=suffix).id for suffix in ("older", "newer"))
    assert [job.id for job in sdk.fine_tuning.jobs.list(limit=1).data] == [newer]
    assert [job.id for job in sdk.fine_tuning.jobs.list(after=newer, limit=1).data] == [older]
    assert sdk.fine_tuning.jobs.pause(newer).status == "paused"
    assert sdk.fine_tuning.jobs.resume(newer).status == "queued"
    for job in (older, newer):
        assert sdk.fine_tuning.jobs.cancel(job).status == sdk.fine_tuning.jobs.retrieve(job).status == "cancelled"


@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}/events")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}/events", "after")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}/events", "limit")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}/checkpoints")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}/checkpoints", "limit")
@pytest.mark.contract("GET /oai/api/v1/fine_tuning/jobs/{job}/checkpoints", "after", refused="a checkpoint that the job does not have")
def test_what_happened_to_a_job_is_told(sdk: OpenAI) -> None:
    job = sdk.fine_tuning.jobs.create(model=MODEL, training_file=uploaded(sdk)).id
    sdk.fine_tuning.jobs.cancel(job)
    events = [event.id for event in sdk.fine_tuning.jobs.list_events(job)]
    assert [event.id for event in sdk.fine_tuning.jobs.list_events(job, limit=1).data] == events[:1]
    assert [event.id for event in sdk.fine_tuning.jobs.list_events(job, after=events[0], limit=5).data] == events[1:6]
    assert sdk.fine_tuning.jobs.checkpoints.list(job, limit=5).data == []
    with pytest.raises(openai.APIStatusError):
        sdk.fine_tuning.jobs.checkpoints.list(job, after="ftckpt-none")


def an_eval(sdk: OpenAI) -> str:
    config: Any = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
    return sdk.evals.create(name="answers", data_source_config=config, testing_criteria=[RIGHT]).id


@pytest.mark.contract("POST /oai/api/v1/evals")
@pytest.mark.contract("GET /oai/api/v1/evals")
@pytest.mark.contract("GET /oai/api/v1/evals", "after")
@pytest.mark.contract("GET /oai/api/v1/evals", "limit")
@pytest.mark.contract("GET /oai/api/v1/evals", "order")
@pytest.mark.contract("GET /oai/api/v1/evals", "order_by")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}")
@pytest.mark.contract("POST /oai/api/v1/evals/{eval_id}")
@pytest.mark.contract("DELETE /oai/api/v1/evals/{eval_id}")
def test_evals_are_made_changed_shown_and_deleted(sdk: OpenAI) -> None:
    older, newer = an_eval(sdk), an_eval(sdk)
    assert sdk.evals.update(older, name="renamed").name == sdk.evals.retrieve(older).name == "renamed"
    assert [each.id for each in sdk.evals.list(after=older, limit=1).data] == [newer]
    assert [each.id for each in sdk.evals.list(order="desc", order_by="updated_at", limit=1).data] == [older]
    for each in (older, newer):
        assert sdk.evals.delete(each).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.evals.retrieve(each)


@pytest.mark.contract("POST /oai/api/v1/evals/{eval_id}/runs")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs", "after")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs", "limit")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs", "order")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs", "status")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}")
@pytest.mark.contract("DELETE /oai/api/v1/evals/{eval_id}/runs/{run_id}")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}/output_items")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}/output_items", "after")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}/output_items", "limit")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}/output_items", "order")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}/output_items", "status")
@pytest.mark.contract("GET /oai/api/v1/evals/{eval_id}/runs/{run_id}/output_items/{output_item_id}")
def test_runs_of_evals_grade_samples_item_by_item(sdk: OpenAI) -> None:
    found, runs = an_eval(sdk), sdk.evals.runs
    content: Any = [{"item": {"answer": "4"}, "sample": {"output_text": said}} for said in ("4", "5")]
    source: Any = {"type": "jsonl", "source": {"type": "file_content", "content": content}}
    older, newer = (runs.create(found, data_source=source).id for _ in range(2))
    wait_until(lambda: {runs.retrieve(each, eval_id=found).status for each in (older, newer)} == {"completed"})
    assert [each.id for each in runs.list(found, after=older, limit=1).data] == [newer]
    assert [each.id for each in runs.list(found, order="desc", status="completed", limit=1).data] == [newer]
    first, second = runs.output_items.list(older, eval_id=found)
    assert [each.id for each in runs.output_items.list(older, eval_id=found, after=first.id, limit=1).data] == [second.id]
    assert [each.id for each in runs.output_items.list(older, eval_id=found, order="desc", status="pass")] == [first.id]
    assert runs.output_items.retrieve(second.id, eval_id=found, run_id=older).results[0].score == 0
    assert runs.delete(older, eval_id=found).deleted
    sdk.evals.delete(found)


@pytest.mark.contract("POST /oai/api/v1/evals/{eval_id}/runs/{run_id}")
@pytest.mark.contract("POST /oai/api/v1/evals/{eval_id}/runs/{run_id}/cancel")
def test_runs_of_evals_are_cancelled_by_either_path(sdk: OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # To come again is what each question is told, so no run has ended before it is cancelled.
    monkeypatch.setattr(server.engine, "refuse_to_sample", ("server", "unavailable"))
    found, runs = an_eval(sdk), sdk.evals.runs
    source: Any = {"type": "completions", "model": MODEL, "source": {"type": "file_content", "content": [{"item": {"answer": "4"}}]}}
    source["input_messages"] = {"type": "template", "template": [{"role": "user", "content": "?"}]}
    older, newer = (runs.create(found, data_source=source).id for _ in range(2))
    assert runs.cancel(older, eval_id=found).status == "canceled"
    sdk.post(f"/evals/{found}/runs/{newer}", cast_to=object)
    assert runs.retrieve(newer, eval_id=found).status == "canceled"

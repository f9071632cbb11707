"""Evals over the unmodified `openai` SDK, with an engine that says what a test wants to hear."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import openai
import pytest
from openai import OpenAI
from openai.types import EvalCreateResponse
from openai.types.evals import RunCreateResponse
from openai.types.evals.runs import OutputItemListResponse
from sqlalchemy import Engine, event

from bloomery.client import Client
from bloomery.services.evaluations.counts import uncounted
from bloomery.types.ids import new_id
from tests.api.server import URL
from tests.live import wait_until
from tests.openai.server import Script, ScriptedServer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "country": {"type": "string"}}, "required": ["city"]}
RIGHT = {"type": "string_check", "name": "right", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "{{ item.city }}"}
LENGTH = {"type": "python", "name": "length", "source": "def grade(sample, item):\n    return len(sample['output_text']) / 10"}
ROWS = [{"item": {"city": city, "country": country}} for city, country in (("Paris", "France"), ("Rome", "Italy"), ("Oslo", "Norway"))]
ASK = {"type": "template", "template": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Of {{item.country}}?"}]}


@pytest.fixture
def key(server: ScriptedServer) -> str:
    """Of a project of its own."""
    server.scripted.script = Script(says=("Paris",))
    project = new_id("project")
    with server.client() as admin:
        return admin.keys.create(project, ["read", "train", "infer"], project=project).key


@pytest.fixture
def sdk(server: ScriptedServer, key: str) -> Iterator[OpenAI]:
    with server.sdk(api_key=key) as sdk:
        yield sdk


def made(sdk: OpenAI, *criteria: Any, schema: Any = SCHEMA, samples: bool = True, **options: Any) -> EvalCreateResponse:
    config: Any = {"type": "custom", "item_schema": schema, "include_sample_schema": samples}
    return sdk.evals.create(name="capitals", data_source_config=config, testing_criteria=list(criteria or (RIGHT,)), **options)


def source(rows: Any = None, **changes: Any) -> Any:
    content = {"type": "file_content", "content": ROWS if rows is None else rows}
    return {"type": "completions", "model": "tiny", "source": content, "input_messages": ASK} | changes


def done(sdk: OpenAI, eval_id: str, data_source: Any, status: str = "completed", **options: Any) -> RunCreateResponse:
    run = sdk.evals.runs.create(eval_id, data_source=data_source, **options)
    wait_until(lambda: sdk.evals.runs.retrieve(run.id, eval_id=eval_id).status in ("completed", "failed", "canceled"))
    ended = cast(RunCreateResponse, sdk.evals.runs.retrieve(run.id, eval_id=eval_id))
    assert ended.status == status, ended.error
    return ended


def items(sdk: OpenAI, run: RunCreateResponse, **options: Any) -> list[OutputItemListResponse]:
    return list(sdk.evals.runs.output_items.list(run.id, eval_id=run.eval_id, **options))


def test_an_eval_is_kept_changed_listed_and_deleted(sdk: OpenAI) -> None:
    first, second = made(sdk, metadata={"a": "b"}), made(sdk, LENGTH)
    assert (first.object, first.name, first.metadata) == ("eval", "capitals", {"a": "b"})
    assert first.testing_criteria[0].model_dump(exclude_none=True)["reference"] == "{{ item.city }}"
    schema = first.data_source_config.model_dump(by_alias=True)["schema"]
    assert (schema["properties"]["item"], set(schema["properties"])) == (SCHEMA, {"item", "sample"})
    changed = sdk.evals.update(first.id, name="renamed", metadata={"c": "d"})
    assert (changed.name, changed.metadata) == ("renamed", {"c": "d"})
    assert sdk.evals.retrieve(first.id).model_dump() == changed.model_dump()
    assert [each.id for each in sdk.evals.list(limit=1)] == [first.id, second.id]
    assert [each.id for each in sdk.evals.list(order="desc", limit=1)] == [second.id, first.id]
    assert [each.id for each in sdk.evals.list(order_by="updated_at", limit=1)] == [second.id, first.id]
    gone = sdk.evals.delete(first.id)
    assert (gone.deleted, gone.eval_id, gone.object) == (True, first.id, "eval.deleted")
    with pytest.raises(openai.NotFoundError, match="no eval"):
        sdk.evals.retrieve(first.id)


def test_a_model_is_asked_for_each_item_and_every_criterion_counts(sdk: OpenAI, server: ScriptedServer, key: str) -> None:
    found = made(sdk, RIGHT, {**LENGTH, "pass_threshold": 0.45})
    params = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_completion_tokens": 20}
    run = done(sdk, found.id, source(sampling_params=params), name="first", metadata={"a": "b"})
    assert (run.name, run.model, run.object, run.metadata, run.error) == ("first", "tiny", "eval.run", {"a": "b"}, None)
    assert run.result_counts.model_dump() == {"total": 3, "passed": 1, "failed": 2, "errored": 0}
    counted = [(each.testing_criteria, each.passed, each.failed) for each in run.per_testing_criteria_results]
    assert counted == [("right", 1, 2), ("length", 3, 0)]
    (usage,) = run.per_model_usage
    assert (usage.run_model_name, usage.invocation_count) == ("tiny", 3)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    assert [each.model_dump() for each in sdk.evals.runs.list(found.id)] == [run.model_dump()]
    shown = run.data_source.model_dump(exclude_none=True)
    assert (shown["source"]["content"], shown["input_messages"], shown["model"]) == (ROWS, ASK, "tiny")
    first = items(sdk, run)[0]
    assert (first.status, first.datasource_item_id, first.datasource_item) == ("pass", 0, ROWS[0]["item"])
    assert [(each.name, each.score, each.passed) for each in first.results] == [("right", 1.0, True), ("length", 0.5, True)]
    assert [(each.role, each.content) for each in first.sample.input] == [("system", "Be short."), ("user", "Of France?")]
    assert [(each.role, each.content) for each in first.sample.output] == [("assistant", "Paris")]
    sampled = first.sample
    assert (sampled.finish_reason, sampled.seed, sampled.temperature, sampled.top_p, sampled.max_completion_tokens) == ("stop", 3, 0.5, 0.9, 20)
    assert [each.status for each in items(sdk, run, limit=1)] == ["pass", "fail", "fail"]
    assert [each.datasource_item_id for each in items(sdk, run, limit=2, order="desc")] == [2, 1, 0]
    assert [each.datasource_item_id for each in items(sdk, run, status="fail")] == [1, 2]
    again = sdk.evals.runs.output_items.retrieve(first.id, eval_id=found.id, run_id=run.id)
    assert again.model_dump() == first.model_dump()
    with Client(URL, key, transport=server.transport) as client:
        evaluation = client.evaluations.get(run.id)
    assert evaluation.result is not None
    assert (evaluation.spec.data.dataset, evaluation.result.models[0].graders[0].passed is None) == (found.id, False)


@contextmanager
def reads() -> Iterator[list[str]]:
    """Statements that read answers or scores, within its `with`."""
    found: list[str] = []

    def note(_1: Any, _2: Any, statement: str, *_: Any) -> None:
        if "FROM evaluation_answer" in statement or "FROM evaluation_score" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_who_shows_runs_that_have_ended_reads_none_of_their_answers(sdk: OpenAI, server: ScriptedServer, key: str) -> None:
    found = made(sdk)
    for _ in range(3):
        done(sdk, found.id, source())
    database = server.services.files._database
    wait_until(lambda: server.call(database.read(uncounted)) is None)
    with reads() as read, Client(URL, key, transport=server.transport) as client:
        runs = sdk.evals.runs.list(found.id).data
        assert [run.result_counts.model_dump() for run in runs] == [{"errored": 0, "failed": 2, "passed": 1, "total": 3}] * 3
        assert {each.progress.scored for each in client.evaluations.list() if each.spec.name in {run.id for run in runs}} == {3}
    assert read == []


def test_a_page_of_items_counts_nothing_of_the_others(sdk: OpenAI) -> None:
    run = done(sdk, made(sdk).id, source())
    with reads() as read:
        first, *_ = items(sdk, run, limit=1)
        sdk.evals.runs.output_items.retrieve(first.id, eval_id=run.eval_id, run_id=run.id)
    assert len(read) == 2 * (len(ROWS) + 1)
    assert not [statement for statement in read if "sum(" in statement or "count(" in statement]


def test_responses_are_asked_in_messages_that_items_have(sdk: OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "input": {}}}
    rows = [{"item": {"city": "Paris", "input": [{"role": "user", "content": "?"}]}}, {"item": {"city": "Paris", "input": "?"}}]
    data = source(rows, type="responses", input_messages={"type": "item_reference", "item_reference": "item.input"})
    run = done(sdk, made(sdk, schema=schema).id, data | {"sampling_params": {"text": {"format": {"type": "text"}}}})
    passed, broken = items(sdk, run)
    assert (passed.status, broken.status, run.result_counts.errored) == ("pass", "error", 1)
    assert (broken.sample.error.code, broken.results) == ("template", [])
    assert "holds no messages" in broken.sample.error.message


def test_samples_that_are_there_are_graded_and_nobody_is_asked(sdk: OpenAI, server: ScriptedServer) -> None:
    asked = len(server.scripted.requests)
    rows = [{**ROWS[0], "sample": {"output_text": "Paris"}}, {**ROWS[1], "sample": {"output_text": "Paris"}}]
    file = sdk.files.create(file=("rows.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="evals")
    assert (file.purpose, file.status) == ("evals", "processed")
    found = made(sdk)
    run = done(sdk, found.id, {"type": "jsonl", "source": {"type": "file_id", "id": file.id}})
    sdk.files.delete(file.id)
    assert (run.result_counts.passed, run.result_counts.failed, run.model, run.per_model_usage) == (1, 1, "", [])
    assert run.data_source.model_dump(exclude_none=True) == {"type": "jsonl", "source": {"type": "file_id", "id": file.id}}
    assert [each.sample.output[0].content for each in items(sdk, run)] == ["Paris", "Paris"]
    columns = {"type": "string_check", "name": "same", "operation": "ne", "input": "{{item.city}}", "reference": "{{item.country}}"}
    compared = done(sdk, made(sdk, columns, samples=False).id, {"type": "jsonl", "source": {"type": "file_content", "content": ROWS}})
    assert compared.result_counts.passed == 3
    assert len(server.scripted.requests) == asked


def test_a_criterion_that_comes_to_nothing_is_an_error_and_no_zero(sdk: OpenAI) -> None:
    raising = {"type": "python", "name": "raising", "source": "def grade(sample, item):\n    raise ValueError('cannot')"}
    run = done(sdk, made(sdk, RIGHT, raising).id, source(ROWS[:1]))
    assert run.result_counts.model_dump() == {"total": 1, "passed": 0, "failed": 0, "errored": 1}
    (item,) = items(sdk, run)
    assert (item.status, [each.name for each in item.results], item.sample.error.code) == ("error", ["right"], "raised")
    assert "`raising`: " in item.sample.error.message


def test_a_run_is_cancelled_listed_by_its_status_and_deleted(sdk: OpenAI, server: ScriptedServer) -> None:
    found = made(sdk)
    server.scripted.script = Script(says=("Paris",), stall_after=1)
    stuck = sdk.evals.runs.create(found.id, data_source=source())
    wait_until(lambda: sdk.evals.runs.retrieve(stuck.id, eval_id=found.id).status == "in_progress")
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        sdk.evals.delete(found.id)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        sdk.evals.runs.delete(stuck.id, eval_id=found.id)
    assert sdk.evals.runs.cancel(stuck.id, eval_id=found.id).status == "canceled"
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        sdk.evals.runs.cancel(stuck.id, eval_id=found.id)
    server.scripted.script = Script(says=("Paris",))
    whole = done(sdk, found.id, source())
    runs = sdk.evals.runs
    assert [each.id for each in runs.list(found.id, limit=1)] == [stuck.id, whole.id]
    assert [each.id for each in runs.list(found.id, limit=1, order="desc")] == [whole.id, stuck.id]
    assert [each.id for each in runs.list(found.id, status="canceled")] == [stuck.id]
    gone = runs.delete(stuck.id, eval_id=found.id)
    assert (gone.deleted, gone.run_id) == (True, stuck.id)
    sdk.evals.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        runs.retrieve(whole.id, eval_id=found.id)


def test_a_run_in_which_nobody_answers_has_failed_and_says_why(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script = Script(refuses="prompt")
    run = done(sdk, made(sdk).id, source(), status="failed")
    assert run.error.message == "no model gave any answer: refused: `prompt` is too much"


@pytest.mark.parametrize(
    ("criterion", "options", "param", "message"),
    [
        ({**RIGHT, "reference": "{{ item.town }}"}, {}, "testing_criteria.0", "is no column of the item schema, which has `city`, `country`"),
        (RIGHT, {"samples": False}, "testing_criteria.0", "there is no `sample` in this eval"),
        ({**RIGHT, "name": None}, {}, "testing_criteria.0.name", "is missing"),
        ({**RIGHT, "operation": "is"}, {}, "testing_criteria.0.operation", "'eq'"),
        ({"type": "vibes", "name": "x"}, {}, "testing_criteria.0.type", "graders are string_check"),
    ],
)
def test_criteria_that_could_score_nothing_are_refused(sdk: OpenAI, criterion: Any, options: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        made(sdk, criterion, **options)
    assert refused.value.param == param


@pytest.mark.parametrize("kind", ["logs", "stored_completions"])
def test_recorded_traffic_is_refused_by_its_name(sdk: OpenAI, kind: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=f"`{kind}` is not offered: .*curate recorded traffic") as refused:
        sdk.evals.create(data_source_config={"type": kind}, testing_criteria=cast(Any, [RIGHT]))
    assert refused.value.param == "data_source_config.type"


@pytest.mark.parametrize(
    ("changes", "status", "param", "message"),
    [
        ({"model": "gone"}, 404, "data_source.model", "no model `gone`"),
        ({"model": None}, 400, "data_source.model", "is missing"),
        ({"source": {"type": "file_id", "id": "file-gone"}}, 404, "data_source.source.id", "no file `file-gone`"),
        ({"source": {"type": "stored_completions"}}, 400, "data_source.source.type", "`stored_completions` is not offered"),
        ({"source": {"type": "file_content", "content": []}}, 400, "data_source.source.content", "has no items"),
        (
            {"source": {"type": "file_content", "content": [{"item": {"country": "x"}}]}},
            400,
            "data_source.source.content.0.item",
            "has no `city`, which the item schema requires",
        ),
        (
            {"source": {"type": "file_content", "content": [{"item": {"city": 1}}]}},
            400,
            "data_source.source.content.0.item.city",
            "is no string, as the item schema has it",
        ),
        (
            {"input_messages": {"type": "template", "template": [{"role": "user", "content": "{{ item.town }}"}]}},
            400,
            "data_source.input_messages.template.0.content",
            "is no column of the item schema",
        ),
        (
            {"input_messages": {"type": "template", "template": [{"role": "user", "content": "{{ sample.output_text }}"}]}},
            400,
            "data_source.input_messages.template.0.content",
            "there is no `sample` yet",
        ),
        (
            {"input_messages": {"type": "item_reference", "item_reference": "the input"}},
            400,
            "data_source.input_messages.item_reference",
            "is no reference",
        ),
        (
            {"input_messages": {"type": "template", "template": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}},
            400,
            "data_source.input_messages.template.0",
            "`input_image` are not offered",
        ),
        (
            {"sampling_params": {"response_format": {"type": "json_object"}}},
            400,
            "data_source.sampling_params.response_format",
            "is not offered",
        ),
        ({"sampling_params": {"tools": [{"type": "web_search"}]}}, 400, "data_source.sampling_params.tools.0.type", "only functions"),
        (
            {"sampling_params": {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}},
            400,
            "data_source.sampling_params.tools.0.function.strict",
            "is not offered",
        ),
        (
            {"sampling_params": {"tools": [{"type": "function", "name": "f", "paramters": {}}]}},
            400,
            "data_source.sampling_params.tools.0.paramters",
            "unknown field",
        ),
        ({"sampling_params": {"temperature": 9}}, 400, "data_source.sampling_params.temperature", "less than or equal to 2"),
        ({"type": "jsonl"}, 400, "data_source.model", "nobody is asked"),
    ],
)
def test_runs_that_cannot_be_are_refused_by_the_field(sdk: OpenAI, changes: Any, status: int, param: str, message: str) -> None:
    found = made(sdk)
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        sdk.evals.runs.create(found.id, data_source=source(**changes))
    body = cast(Any, refused.value.body)
    assert (refused.value.status_code, body["param"]) == (status, param)
    assert list(sdk.evals.runs.list(found.id)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"item": {"city": "a"}}\nnot json', "line 2 of the file is not JSON"),
        (b'{"city": "a"}', "line 1 of the file is no"),
        (b'{"item": {"city": "a"}, "more": 1}', "line 1 of the file `more`"),
        (b"\n\n", "has no items"),
        (b'{"item": {"city": "a", "n": [NaN]}}', "line 1 of the file is not JSON"),
        (b'\xef\xbb\xbf{"item": {"city": "a"}}\n{"item": {"city": "a", "half": "\\ud800"}}', "line 2 of the file is not JSON"),
        (b'{"item": {"city": "' + b"x" * (9 << 20), "line 1 of the file is longer than 8 MiB"),
    ],
)
def test_lines_of_a_file_that_are_no_items_are_told_by_their_number(sdk: OpenAI, content: bytes, message: str) -> None:
    file = sdk.files.create(file=("rows.jsonl", content), purpose="evals").id
    with pytest.raises(openai.BadRequestError, match=message):
        sdk.evals.runs.create(made(sdk).id, data_source=source(source={"type": "file_id", "id": file}))
    with pytest.raises(openai.BadRequestError, match="the file is empty"):
        sdk.files.create(file=("rows.jsonl", b""), purpose="evals")


def test_runs_and_items_of_others_are_not_found(sdk: OpenAI, server: ScriptedServer) -> None:
    found = made(sdk)
    run = done(sdk, found.id, source(ROWS[:1]))
    other = made(sdk)
    with pytest.raises(openai.NotFoundError, match="no run"):
        sdk.evals.runs.retrieve(run.id, eval_id=other.id)
    with pytest.raises(openai.NotFoundError, match="no output item"):
        sdk.evals.runs.output_items.retrieve(f"{run.id}-item-7", eval_id=found.id, run_id=run.id)
    with pytest.raises(openai.NotFoundError, match="no output item"):
        items(sdk, run, after="x")
    with server.sdk() as stranger, pytest.raises(openai.NotFoundError, match="no eval"):
        stranger.evals.retrieve(found.id)

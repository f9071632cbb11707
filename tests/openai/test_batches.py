"""Batches over the unmodified `openai` SDK: a file of requests in, files of answers and errors out."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from sqlalchemy import select, update

from bloomery.api.routes.openai.batches import ENDPOINTS
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.batches import batches, requests
from bloomery.services.batches.requests import Requests
from bloomery.store import rows
from bloomery.types.arrays import Array
from bloomery.types.errors import RateLimited, Unavailable
from bloomery.types.generation import Generate, SampleFinished, SamplingParams, Weights
from tests.live import wait_until
from tests.openai.server import Script, ScriptedServer
from tests.openai.test_contract import USER
from tests.services.fake_engine import BASE

CHAT = "/v1/chat/completions"
ADMIN = Principal("default", "key", SCOPES)
PROMPT = Array.of(np.asarray([1], np.int32))
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, body: Any = None, **others: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": USER} if body is None else body
    return {"custom_id": f"ask-{number}", "method": "POST", "url": CHAT, "body": asked} | others


def lines(*requests: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in requests)


def uploaded(sdk: OpenAI, *requests: Any) -> str:
    return sdk.files.create(file=("requests.jsonl", lines(*requests)), purpose="batch").id


def begun(sdk: OpenAI, *requests: Any, endpoint: Any = CHAT, **options: Any) -> str:
    return sdk.batches.create(input_file_id=uploaded(sdk, *requests), endpoint=endpoint, completion_window="24h", **options).id


def ended(sdk: OpenAI, batch: str) -> Batch:
    wait_until(lambda: sdk.batches.retrieve(batch).status in ENDED)
    return sdk.batches.retrieve(batch)


def told(sdk: OpenAI, file: str | None) -> list[dict[str, Any]]:
    """What a file says, line by line."""
    assert file is not None
    return [json.loads(each) for each in sdk.files.content(file).text.splitlines()]


def problems(sdk: OpenAI, *requests: Any) -> list[tuple[str | None, int | None]]:
    failed = ended(sdk, begun(sdk, *requests))
    assert (failed.status, failed.output_file_id, failed.error_file_id) == ("failed", None, None)
    assert failed.failed_at
    assert failed.errors
    assert failed.errors.data
    return [(each.code, each.line) for each in failed.errors.data]


@pytest.fixture
def alone(server: ScriptedServer, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """A project of its own, whose key asks models and no more."""
    with server.client() as admin:
        key = admin.keys.create(request.node.name, ["infer"], project=request.node.name).key
    with server.sdk(api_key=key) as sdk:
        yield sdk


def test_a_batch_is_answered_line_by_line_in_their_order(alone: OpenAI, server: ScriptedServer) -> None:
    batch = ended(alone, begun(alone, *(line(number) for number in range(50)), metadata={"why": "test"}))
    assert (batch.object, batch.status, batch.endpoint, batch.completion_window, batch.metadata) == (
        "batch",
        "completed",
        CHAT,
        "24h",
        {"why": "test"},
    )
    assert batch.request_counts
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (50, 50, 0)
    assert (batch.errors, batch.error_file_id) == (None, None)
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    assert batch.expires_at == batch.created_at + 86400
    assert batch.output_file_id
    file = alone.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename, file.expires_at) == ("batch_output", f"{batch.id}_output.jsonl", None)
    answers = told(alone, file.id)
    assert [each["custom_id"] for each in answers] == [f"ask-{number}" for number in range(50)]
    assert len({each["id"] for each in answers}) == len({each["response"]["request_id"] for each in answers}) == 50
    assert all(each["error"] is None and each["response"]["status_code"] == 200 for each in answers)
    assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers} == {"It is 36."}
    assert {request.priority for request in server.scripted.requests} == {"evaluation"}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_route_answers_its_lines_as_it_answers_alone(sdk: OpenAI, server: ScriptedServer, endpoint: str) -> None:
    given = {CHAT: {"messages": USER}, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}, "/v1/embeddings": {"input": "x"}}
    bodies = [
        {"model": "tiny", "seed": 1, **given[endpoint]},
        {"model": "tiny", "color": "red"},
        {"model": "tiny", "temperature": 9, **given[endpoint]},
    ]
    if endpoint == "/v1/embeddings":
        bodies[0].pop("seed")
    batch = ended(sdk, begun(sdk, *(line(number, body, url=endpoint) for number, body in enumerate(bodies)), endpoint=endpoint))
    assert batch.status == "completed"
    answers = told(sdk, batch.output_file_id) + told(sdk, batch.error_file_id)
    assert [each["custom_id"] for each in answers] == ["ask-0", "ask-1", "ask-2"]
    for body, each in zip(bodies, answers, strict=True):
        alone = server.http.post(endpoint, json=body)
        assert each["response"]["status_code"] == alone.status_code
        assert timeless(each["response"]["body"]) == timeless(alone.json())


def timeless(answer: Any) -> Any:
    """Without what is new every time."""
    if isinstance(answer, list):
        return list(map(timeless, answer))
    if not isinstance(answer, dict):
        return answer
    return {name: timeless(value) for name, value in answer.items() if name not in ("id", "created", "created_at", "completed_at")}


def test_lines_that_are_refused_are_errors_and_the_others_are_answered(sdk: OpenAI) -> None:
    batch = ended(sdk, begun(sdk, line(1, {"model": "tiny", "messages": []}), line(2), line(3, {"model": "tiny", "messages": USER, "n": 500})))
    assert batch.status == "completed"
    assert batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    assert [each["custom_id"] for each in told(sdk, batch.output_file_id)] == ["ask-2"]
    refused = told(sdk, batch.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"], each["response"]["body"]["error"]["param"]) for each in refused] == [
        ("ask-1", 400, "messages"),
        ("ask-3", 400, "n"),
    ]


def test_what_is_wrong_with_a_file_is_told_with_the_numbers_of_its_lines(sdk: OpenAI) -> None:
    other = {"model": "other", "messages": USER}
    assert problems(
        sdk,
        line(1),
        b"{",
        b"\xff",
        line(1),
        b"",
        line(6, url="/v1/completions"),
        line(7, other),
        line(8, {"model": "tiny", "messages": USER, "stream": True}),
        line(9, method="GET"),
        line(10, color="red"),
        line(11, body="x"),
        line(12, {"messages": USER}),
        {"custom_id": "no-body", "method": "POST", "url": CHAT},
        line(14, custom_id=""),
        b"[]",
        line(16),
    ) == [
        ("invalid_json_line", 2),
        ("invalid_json_line", 3),
        ("duplicate_custom_id", 4),
        ("url_mismatch", 6),
        ("model_mismatch", 7),
        ("invalid_request", 8),
        ("invalid_request", 9),
        ("invalid_request", 10),
        ("invalid_request", 11),
        ("invalid_request", 12),
        ("invalid_request", 13),
        ("invalid_request", 14),
        ("invalid_request", 15),
    ]


def test_a_model_that_is_not_there_fails_the_batch_before_anything_is_asked(sdk: OpenAI, server: ScriptedServer) -> None:
    assert problems(sdk, line(1, {"model": "nobody", "messages": USER})) == [("model_not_found", None)]
    assert server.scripted.requests == []


def test_a_file_without_requests_and_an_empty_one_are_refused(sdk: OpenAI) -> None:
    assert problems(sdk, b"", b"  ") == [("empty_file", None)]
    with pytest.raises(openai.BadRequestError, match="the file is empty"):
        sdk.files.create(file=("requests.jsonl", b""), purpose="batch")


def test_too_many_lines_and_too_long_ones_are_refused(sdk: OpenAI, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_LINES", 2)
    monkeypatch.setattr(requests, "MAX_LINE_BYTES", 300)
    assert problems(sdk, line(1), line(2), line(3), line(4)) == [("too_many_tasks", 3)]
    assert problems(sdk, line(1), line(2, {"model": "tiny", "messages": [{"role": "user", "content": "x" * 300}]})) == [("invalid_request", 2)]


def test_lines_are_found_wherever_pieces_of_the_file_end(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"\r\n".join(json.dumps(line(number)).encode() for number in range(7))
    blobs = server.services.files._blobs.blobs
    blobs.put("files/pieces", content)
    for piece in (1, 7, 100, 1000):
        monkeypatch.setattr(requests, "PIECE_BYTES", piece)
        found = Requests.read(blobs, "files/pieces", len(content), CHAT)
        assert found.problems == []
        assert [found[number].custom_id for number in range(len(found))] == [f"ask-{number}" for number in range(7)]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"input_file_id": "file-1"}, "input_file_id"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"color": "red"}, "color"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_its_field(sdk: OpenAI, server: ScriptedServer, changed: dict[str, Any], param: str) -> None:
    asked = {"input_file_id": uploaded(sdk, line(1)), "endpoint": CHAT, "completion_window": "24h"} | changed
    answer = server.http.post("/v1/batches", json=asked)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(param)


def test_a_file_to_train_on_is_no_batch_and_the_other_way_round(sdk: OpenAI) -> None:
    rows = sdk.files.create(file=("rows.jsonl", b'{"text": "a", "label": "b"}'), purpose="fine-tune").id
    with pytest.raises(openai.BadRequestError, match="upload one for `batch`"):
        sdk.batches.create(input_file_id=rows, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="upload one for `fine-tune`"):
        sdk.fine_tuning.jobs.create(model="tiny", training_file=uploaded(sdk, line(1)))


def test_a_cancelled_batch_keeps_what_was_answered(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script = Script(silent_about=6)
    asked = [line(number, {"model": "tiny", "prompt": [5 + number % 2]}, url="/v1/completions") for number in range(10)]
    batch = begun(sdk, *asked, endpoint="/v1/completions")
    wait_until(lambda: counts(sdk, batch) == (10, 5, 0))
    assert sdk.batches.cancel(batch).status in ("cancelling", "cancelled")
    cancelled = ended(sdk, batch)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelling_at
    assert cancelled.cancelled_at
    assert [each["custom_id"] for each in told(sdk, cancelled.output_file_id)] == [f"ask-{number}" for number in range(0, 10, 2)]
    left = told(sdk, cancelled.error_file_id)
    assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in left] == [
        (f"ask-{number}", None, "batch_cancelled") for number in range(1, 10, 2)
    ]
    assert sdk.batches.cancel(batch).status == "cancelled"
    wait_until(lambda: len(server.scripted.aborted) == 5)


def counts(sdk: OpenAI, batch: str) -> tuple[int, int, int]:
    found = sdk.batches.retrieve(batch).request_counts
    assert found
    return found.total, found.completed, found.failed


def test_what_is_not_answered_when_the_time_is_over_is_told(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script = Script(silent_about=6)
    asked = [line(number, {"model": "tiny", "prompt": [5 + number]}, url="/v1/completions") for number in range(2)]
    database = server.services.files._database

    def hurry(batch: str, expires_us: int) -> None:
        passed = update(rows.batch).where(rows.batch.c.id == batch).values(expires_us=expires_us)
        server.call(database.write(lambda connection: connection.execute(passed)))

    busy = [begun(sdk, *asked, endpoint="/v1/completions") for _ in range(4)]
    for batch in busy:
        wait_until(lambda batch=batch: counts(sdk, batch) == (2, 1, 0))
    late = begun(sdk, line(1))
    hurry(late, 1)
    for batch in busy[1:]:
        sdk.batches.cancel(batch)
    never_begun = ended(sdk, late)
    assert (never_begun.status, never_begun.output_file_id, never_begun.error_file_id) == ("expired", None, None)
    hurry(busy[0], 1)
    server.call(taken_up_again(server))
    expired = ended(sdk, busy[0])
    assert expired.status == "expired"
    assert expired.expired_at
    assert [each["custom_id"] for each in told(sdk, expired.output_file_id)] == ["ask-0"]
    assert [each["error"]["code"] for each in told(sdk, expired.error_file_id)] == ["batch_expired"]


def test_a_key_without_the_scope_and_other_projects_have_no_batches(sdk: OpenAI, alone: OpenAI, server: ScriptedServer) -> None:
    batch = begun(sdk, line(1))
    with pytest.raises(openai.NotFoundError):
        alone.batches.retrieve(batch)
    with pytest.raises(openai.NotFoundError):
        alone.batches.cancel(batch)
    assert list(alone.batches.list()) == []
    with pytest.raises(openai.NotFoundError):
        alone.batches.create(input_file_id=sdk.batches.retrieve(batch).input_file_id, endpoint=CHAT, completion_window="24h")
    with server.client() as admin:
        reader = admin.keys.create("batch-reader", ["read", "train"]).key
    with server.sdk(api_key=reader) as only, pytest.raises(openai.PermissionDeniedError):
        begun(only, line(1))


def test_a_key_that_asks_models_has_files_of_batches_alone(sdk: OpenAI, server: ScriptedServer) -> None:
    rows = sdk.files.create(file=("rows.jsonl", b'{"text": "a", "label": "b"}'), purpose="fine-tune").id
    with server.client() as admin:
        key = admin.keys.create("asks-alone", ["infer"]).key
    with server.sdk(api_key=key) as only:
        mine = uploaded(only, line(1))
        assert {each.purpose for each in only.files.list()} <= {"batch", "batch_output"}
        for ask in (only.files.retrieve, only.files.content, only.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(rows)
        with pytest.raises(openai.PermissionDeniedError):
            only.files.create(file=("rows.jsonl", b'{"text": "a", "label": "b"}'), purpose="fine-tune")
        assert only.files.delete(mine).deleted


def test_a_batch_is_answered_for_its_key_and_no_longer_than_that_is_good(server: ScriptedServer) -> None:
    server.scripted.script = Script(silent_about=6)
    with server.client() as admin:
        key = admin.keys.create("revoked-soon", ["infer"], project="revoked").key
        with server.sdk(api_key=key) as sdk:
            asked = [line(number, {"model": "tiny", "prompt": [6 if number < 32 else 5]}, url="/v1/completions") for number in range(40)]
            batch = begun(sdk, *asked, endpoint="/v1/completions")
            wait_until(lambda: len(server.scripted.requests) == 32)
        admin.keys.revoke("revoked-soon", project="revoked")
        again = admin.keys.create("another", ["infer"], project="revoked").key
    for request in list(server.scripted.requests):
        server.call(finished(server, request.request_id))
    with server.sdk(api_key=again) as sdk:
        done = ended(sdk, batch)
        assert done.status == "completed"
        refused = told(sdk, done.error_file_id)
        assert [each["custom_id"] for each in refused] == [f"ask-{number}" for number in range(32, 40)]
        assert {(each["response"]["status_code"], each["response"]["body"]["error"]["code"]) for each in refused} == {(401, "invalid_api_key")}
        assert len(told(sdk, done.output_file_id)) == 32


def test_a_batch_waits_for_the_limits_of_its_key(server: ScriptedServer) -> None:
    with server.client() as admin:
        key = admin.keys.create("limited-batch", ["infer"], requests_per_minute=600).key
    with server.sdk(api_key=key) as sdk:
        who = server.call(server.services.identity.check(key))
        with suppress(RateLimited):
            while True:
                server.services.limits.request(who)
        batch = begun(sdk, *(line(number) for number in range(3)))
        assert ended(sdk, batch).status == "completed"
        assert counts(sdk, batch) == (3, 3, 0)


def test_long_batches_of_one_project_keep_no_other_project_waiting(sdk: OpenAI, alone: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script = Script(silent_about=6)
    silent = line(0, {"model": "tiny", "prompt": [6]}, url="/v1/completions")
    long = [begun(sdk, silent, endpoint="/v1/completions") for _ in range(5)]
    wait_until(lambda: len(server.scripted.requests) == 4)
    said = line(0, {"model": "tiny", "prompt": [5]}, url="/v1/completions")
    assert ended(alone, begun(alone, said, endpoint="/v1/completions")).status == "completed"
    assert sdk.batches.retrieve(long[-1]).status == "validating"
    for batch in long:
        sdk.batches.cancel(batch)
    for batch in long:
        ended(sdk, batch)


def test_a_request_that_comes_again_under_its_key_makes_one_batch(alone: OpenAI) -> None:
    file = uploaded(alone, line(1))
    asked: Any = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", "extra_headers": {"idempotency-key": "once"}}
    assert alone.batches.create(**asked).id == alone.batches.create(**asked).id
    assert len(list(alone.batches.list())) == 1
    with pytest.raises(openai.ConflictError):
        alone.batches.create(**asked | {"completion_window": "1h"})


def test_batches_are_listed_newest_first_page_by_page(alone: OpenAI) -> None:
    made = [begun(alone, line(1)) for _ in range(3)]
    page = alone.batches.list(limit=2)
    assert [each.id for each in page.data] == made[:0:-1]
    assert page.has_more
    assert [each.id for each in alone.batches.list(limit=1)] == made[::-1]
    with pytest.raises(openai.NotFoundError) as unknown:
        alone.batches.list(after="batch-1")
    assert unknown.value.param == "after"


def test_a_project_has_so_many_batches_that_have_not_ended(alone: OpenAI, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_OPEN", 1)
    server.scripted.script = Script(stall_after=0)
    open_one = begun(alone, line(1))
    with pytest.raises(openai.ConflictError, match="have not ended yet"):
        begun(alone, line(1))
    alone.batches.cancel(open_one)
    ended(alone, open_one)
    cancelled = begun(alone, line(1))
    alone.batches.cancel(cancelled)
    ended(alone, cancelled)


def test_files_of_a_batch_may_have_an_end_and_nothing_else_of_it_stays(alone: OpenAI, server: ScriptedServer) -> None:
    batch = ended(
        alone, begun(alone, line(1), line(2, {"model": "tiny", "color": 1}), output_expires_after={"anchor": "created_at", "seconds": 3600})
    )
    for file in (batch.output_file_id, batch.error_file_id):
        assert file
        found = alone.files.retrieve(file)
        assert found.expires_at == found.created_at + 3600
    database, blobs = server.services.files._database, server.services.files._blobs.blobs
    lines = server.call(
        database.read(lambda connection: list(connection.execute(select(rows.batch_line).where(rows.batch_line.c.batch_id == batch.id))))
    )
    assert lines == []
    assert blobs.list(f"batches/{batch.id}") == []
    assert alone.files.delete(batch.input_file_id).deleted
    server.call(server.services.garbage.collect(ADMIN, grace_us=0))
    assert len(told(alone, batch.output_file_id)) == 1


def test_the_file_of_a_batch_may_be_deleted_while_it_is_answered(alone: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script = Script(silent_about=6)
    batch = begun(alone, line(0, {"model": "tiny", "prompt": [6]}, url="/v1/completions"), endpoint="/v1/completions")
    wait_until(lambda: len(server.scripted.requests) == 1)
    alone.files.delete(alone.batches.retrieve(batch).input_file_id)
    server.call(server.services.garbage.collect(ADMIN, grace_us=0))
    server.scripted.script = Script()
    server.call(taken_up_again(server))
    server.call(finished(server, server.scripted.requests[0].request_id))
    assert ended(alone, batch).status == "completed"


def test_what_nobody_waits_for_leaves_half_of_the_queue(server: ScriptedServer) -> None:
    meters = server.services.meters
    patient, urgent = (
        Generate(request_id="", weights=Weights(version=BASE), prompt=PROMPT, params=SamplingParams(max_tokens=1, seed=1), priority=priority)
        for priority in ("evaluation", "production")
    )
    held = [meters.request(BASE, patient, bounded=True) for _ in range(meters.max_waiting // 2)]
    with pytest.raises(Unavailable, match=f"at most {meters.max_waiting // 2} may"):
        meters.request(BASE, patient, bounded=True)
    held.append(meters.request(BASE, urgent, bounded=True))
    for meter in held:
        meter.close(0)


async def taken_up_again(server: ScriptedServer) -> None:
    """Whoever works at batches goes away, and somebody else takes them up."""
    for _, task in list(server.services.batch_runner._busy.values()):
        task.cancel()


async def finished(server: ScriptedServer, request_id: str) -> None:
    """The engine has no more to say to a request."""
    server.scripted._tell(SampleFinished(request_id=request_id, sample=0, reason="length"))

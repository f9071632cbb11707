"""Files over the unmodified `openai` SDK: kept as they are, read whole before they are there, and shown to nobody else."""

import io
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from sqlalchemy import select, update

from bloomery.api.forms import MAX_FIELDS
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.store import rows
from tests.openai.server import ScriptedServer

ADMIN = Principal("default", "key", SCOPES)
ROW = {"messages": [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": "A colour, é."}]}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def upload(sdk: OpenAI, content: bytes, name: str = "rows.jsonl", **options: Any) -> openai.types.FileObject:
    return sdk.files.create(file=(name, content), purpose="fine-tune", **options)


@pytest.fixture
def alone(server: ScriptedServer, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """A project of its own."""
    with server.client() as admin:
        key = admin.keys.create(request.node.name, ["read", "train"], project=request.node.name).key
    with server.sdk(api_key=key) as sdk:
        yield sdk


def refused(sdk: OpenAI, content: bytes, **options: Any) -> tuple[str, str | None]:
    with pytest.raises(openai.BadRequestError) as error:
        sdk.files.create(file=("rows.jsonl", content), **{"purpose": "fine-tune"} | options)
    assert isinstance(error.value.body, dict)
    return error.value.body["message"], error.value.param


def test_a_file_is_given_back_as_it_was_sent(sdk: OpenAI) -> None:
    content = lines(ROW, ROW)
    made = upload(sdk, content, "règles 1.jsonl")
    assert (made.object, made.purpose, made.bytes, made.filename, made.status) == ("file", "fine-tune", len(content), "règles 1.jsonl", "processed")
    assert sdk.files.retrieve(made.id) == made
    assert sdk.files.content(made.id).read() == content
    assert made.expires_at is None


def test_what_looks_like_a_boundary_within_a_file_is_content(sdk: OpenAI) -> None:
    said = {"messages": [{"role": "user", "content": "--\r\n--a"}, {"role": "assistant", "content": "x" * 300_000}]}
    content = lines(said).replace(b"\n", b"\r\n") + b"\r\n\r\n--\r\n"[:4]
    assert sdk.files.content(upload(sdk, content).id).read() == content


def test_files_are_listed_page_by_page_newest_first(alone: OpenAI) -> None:
    made = [upload(alone, lines(ROW), f"{number}.jsonl").id for number in range(3)]
    assert {each.id for each in alone.files.list()} == set(made)
    page = alone.files.list(limit=2)
    assert page.has_more
    assert [each.id for each in page] == sorted(made, reverse=True)
    assert [each.id for each in alone.files.list(order="asc", limit=1)] == sorted(made)
    assert list(alone.files.list(purpose="batch")) == []
    with pytest.raises(openai.NotFoundError) as unknown:
        alone.files.list(after="file-1")
    assert unknown.value.param == "after"


def test_a_deleted_file_is_gone(sdk: OpenAI) -> None:
    made = upload(sdk, lines(ROW))
    assert sdk.files.delete(made.id).deleted
    for ask in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_a_file_may_have_an_end(sdk: OpenAI) -> None:
    made = upload(sdk, lines(ROW), expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    assert refused(sdk, lines(ROW), expires_after={"anchor": "created_at", "seconds": 1})[1] == "expires_after"


def test_a_file_that_is_sent_again_under_its_key_is_the_same_file(alone: OpenAI) -> None:
    headers = {"idempotency-key": "once"}
    made = [upload(alone, lines(ROW), extra_headers=headers) for _ in range(2)]
    assert made[0] == made[1]
    assert len(list(alone.files.list())) == 1
    with pytest.raises(openai.ConflictError):
        upload(alone, lines(ROW, ROW), extra_headers=headers)


def test_a_file_lies_on_disk_until_it_is_deleted_or_its_time_is_over(sdk: OpenAI, server: ScriptedServer) -> None:
    kept, deleted, expired = (upload(sdk, lines(ROW, {**ROW, "id": name})) for name in ("kept", "deleted", "expired"))
    sdk.files.delete(deleted.id)
    database, garbage = server.services.files._database, server.services.garbage
    passed = update(rows.file).where(rows.file.c.id == expired.id).values(expires_us=1)
    server.call(database.write(lambda connection: connection.execute(passed)))
    with pytest.raises(openai.NotFoundError):
        sdk.files.content(expired.id)
    assert server.call(garbage.collect(ADMIN, grace_us=0)).blobs >= 2
    assert sdk.files.content(kept.id).read() == lines(ROW, {**ROW, "id": "kept"})
    left = server.call(database.read(lambda connection: {row.id for row in connection.execute(select(rows.file.c.id))}))
    assert not {deleted.id, expired.id} & left


def test_every_row_that_is_none_is_named_and_nothing_is_kept(alone: OpenAI) -> None:
    message, param = refused(alone, lines(ROW, {"messages": []}, ROW, {"messages": [{"role": "user", "content": 1}]}) + b"{")
    assert param == "file"
    assert all(said in message for said in ("row 2:", "row 4:", "row 5:"))
    assert list(alone.files.list()) == []
    assert "no rows" in refused(alone, b"")[0]
    assert "\\x" not in refused(alone, b"\xff\xfe\x00")[0]


def test_prompts_for_reinforcement_need_no_fields_for_graders(sdk: OpenAI) -> None:
    assert upload(sdk, lines({"messages": ROW["messages"][:1]})).id


@pytest.mark.parametrize("purpose", ["assistants", "user_data", "vision"])
def test_files_for_what_is_not_here_are_refused_by_their_purpose(sdk: OpenAI, purpose: Any) -> None:
    message, param = refused(sdk, lines(ROW), purpose=purpose)
    assert f"files for `{purpose}` are not offered: " in message
    assert param == "purpose"


def test_files_of_one_project_are_not_those_of_another(sdk: OpenAI, alone: OpenAI) -> None:
    made = upload(sdk, lines(ROW))
    with pytest.raises(openai.NotFoundError):
        alone.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        alone.files.content(made.id)
    assert made.id not in {each.id for each in alone.files.list()}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "breaks off"),
        (b"--b", "breaks off"),
        (b"--b\r\n", "breaks off"),
        (b"--bad\r\n", "is broken"),
        (b"--b\r\n\r\n\r\nx\r\n--b--\r\n", "has no `file`"),
        (b"--b--\r\n", "has no `file`"),
        (b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx', "breaks off"),
        (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 5000 + b"\r\n--b--", "more than 4096 bytes"),
        (b"--b\r\n" + b"x" * 5000, "more than 4096 bytes"),
        (b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n' * 2 + b"--b--", "is there twice"),
        (b"".join(b'--b\r\ncontent-disposition: form-data; name="%d"\r\n\r\nx\r\n' % n for n in range(MAX_FIELDS + 1)) + b"--b--", "16 fields"),
    ],
)
def test_a_broken_form_is_refused(server: ScriptedServer, body: bytes, said: str) -> None:
    answer = server.http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", ""])
def test_what_is_no_form_is_refused(server: ScriptedServer, kind: str) -> None:
    answer = server.http.post("/v1/files", content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")


def test_an_unknown_field_and_a_missing_purpose_are_named(server: ScriptedServer) -> None:
    file = {"file": ("a.jsonl", io.BytesIO(lines(ROW)))}
    for data, param in (({"purpose": "fine-tune", "color": "red"}, "color"), ({}, "purpose"), ({"purpose": "x"}, "purpose")):
        answer = server.http.post("/v1/files", data=data, files=file)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

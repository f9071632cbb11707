"""Files in parts over the unmodified `openai` SDK."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from bloomery.types.files import MAX_UPLOAD_BYTES
from tests.openai.server import ScriptedServer
from tests.openai.test_files import ROW, lines

CONTENT = lines(*({**ROW, "id": str(number)} for number in range(50)))


def begun(sdk: OpenAI, size: int = len(CONTENT), **options: Any) -> str:
    asked: dict[str, Any] = {"bytes": size, "filename": "rows.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune"}
    return sdk.uploads.create(**asked | options).id


def part(sdk: OpenAI, upload: str, content: bytes) -> str:
    return sdk.uploads.parts.create(upload, data=content).id


def test_parts_become_one_file_in_the_order_that_is_named(sdk: OpenAI) -> None:
    upload = begun(sdk)
    second, first = part(sdk, upload, CONTENT[700:]), part(sdk, upload, CONTENT[:700])
    done = sdk.uploads.complete(upload, part_ids=[first, second], md5=hashlib.md5(CONTENT, usedforsecurity=False).hexdigest())
    assert (done.status, done.bytes, done.object) == ("completed", len(CONTENT), "upload")
    assert done.file is not None
    assert sdk.files.retrieve(done.file.id) == done.file
    assert sdk.files.content(done.file.id).read() == CONTENT


def test_the_sdk_sends_a_file_in_parts_by_itself(sdk: OpenAI, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(CONTENT)
    done = sdk.uploads.upload_file_chunked(file=tmp_path / "rows.jsonl", mime_type="text/jsonl", purpose="fine-tune", part_size=999)
    assert done.file is not None
    assert (done.file.filename, sdk.files.content(done.file.id).read()) == ("rows.jsonl", CONTENT)


def test_what_is_completed_twice_at_once_is_one_file(sdk: OpenAI) -> None:
    upload = begun(sdk)
    only = part(sdk, upload, CONTENT)
    before = {each.id for each in sdk.files.list()}

    def complete(_: int) -> bool:
        try:
            return sdk.uploads.complete(upload, part_ids=[only]).status == "completed"
        except openai.ConflictError:
            return False

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(complete, range(4))) == 1
    assert len({each.id for each in sdk.files.list()} - before) == 1


def test_a_cancelled_upload_takes_nothing_more(sdk: OpenAI) -> None:
    upload = begun(sdk)
    only = part(sdk, upload, CONTENT)
    assert sdk.uploads.cancel(upload).status == "cancelled"
    for ask in (lambda: part(sdk, upload, b"x"), lambda: sdk.uploads.complete(upload, part_ids=[only]), lambda: sdk.uploads.cancel(upload)):
        with pytest.raises(openai.ConflictError, match="is cancelled"):
            ask()


def test_what_does_not_fit_is_refused_and_the_upload_goes_on(sdk: OpenAI) -> None:
    upload = begun(sdk)
    only = part(sdk, upload, CONTENT)
    with pytest.raises(openai.BadRequestError, match="is too many"):
        part(sdk, upload, b"x")
    with pytest.raises(openai.BadRequestError) as short:
        sdk.uploads.complete(upload, part_ids=[])
    assert short.value.param == "part_ids"
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.uploads.complete(upload, part_ids=["part-1"])
    assert unknown.value.param == "part_ids"
    with pytest.raises(openai.BadRequestError) as damaged:
        sdk.uploads.complete(upload, part_ids=[only], md5="0" * 32)
    assert damaged.value.param == "md5"
    assert sdk.uploads.complete(upload, part_ids=[only]).status == "completed"


def test_a_part_that_is_named_twice_is_refused_where_the_sizes_add_up_too(sdk: OpenAI) -> None:
    line = lines(ROW)
    upload = begun(sdk, 2 * len(line))
    first, second = part(sdk, upload, line), part(sdk, upload, line)
    with pytest.raises(openai.BadRequestError, match=f"`{first}` of upload `{upload}` is named more than once") as twice:
        sdk.uploads.complete(upload, part_ids=[first, first])
    assert twice.value.param == "part_ids"
    # Two parts may say the same.
    assert sdk.uploads.complete(upload, part_ids=[first, second]).status == "completed"


def test_rows_that_are_none_are_named_when_an_upload_is_completed(sdk: OpenAI) -> None:
    content = lines(ROW, {"messages": []})
    upload = begun(sdk, len(content))
    with pytest.raises(openai.BadRequestError, match="row 2:"):
        sdk.uploads.complete(upload, part_ids=[part(sdk, upload, content)])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": MAX_UPLOAD_BYTES + 1}, "bytes"),
        ({"filename": ""}, "filename"),
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "x"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after"),
    ],
)
def test_what_cannot_be_announced_is_refused_by_its_name(sdk: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        begun(sdk, **asked)
    assert refused.value.param == param


def test_a_part_is_a_form_with_data_and_nothing_else(sdk: OpenAI, server: ScriptedServer) -> None:
    upload = begun(sdk)
    path = f"/v1/uploads/{upload}/parts"
    assert server.http.post(path, files={"data": b""}).json()["error"]["param"] == "data"
    assert server.http.post(path, files={"file": b"x"}).json()["error"]["param"] == "data"
    assert server.http.post(path, files={"data": b"x"}, data={"number": "1"}).json()["error"]["param"] == "number"

"""Data sets through the client: files of every format in, rows of every kind out, and what training on them takes."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest

from bloomery.render import ChatTokenizer
from bloomery.render.rows import row_examples, row_pair
from bloomery.types.datasets import ChatRow, CompletionRow, PreferenceRow, PromptRow, estimate
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from tests.api.server import KEY, Server, serving
from tests.render import builders

ASKS = {"role": "user", "content": "What is 12 times 3?"}
SAYS = {"role": "assistant", "content": "It is 36."}
CHAT = {"messages": [ASKS, SAYS]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    builders.chatml_directory(tmp_path)
    with serving(tmp_path) as running:
        yield running


def jsonl(*records: Any) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


def rows(count: int) -> list[dict[str, Any]]:
    return [{"text": f"question {number} of {number * 7919}", "label": "ab"[number % 2], "user": number // 2} for number in range(count)]


def test_files_of_every_format_are_uploaded_by_their_name(server: Server, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["q"], "label": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("text,label\nq,a\n")
    (tmp_path / "rows.jsonl").write_bytes(jsonl({"text": "q", "label": "a"}))
    with server.client() as client:
        client.datasets.create("data")
        versions = [client.datasets.upload("data", tmp_path / f"rows.{suffix}") for suffix in ("parquet", "csv", "jsonl")]
        assert len({version.id for version in versions}) == 1
        assert client.datasets.upload("data", jsonl({"text": "q", "label": "a"}), format="jsonl") == versions[0]
        with pytest.raises(InvalidInput, match="give the format"):
            client.datasets.upload("data", b"")
        with pytest.raises(NotFound):
            client.datasets.upload("other", b"", format="csv")


def test_rows_of_every_kind_are_read_as_what_they_are(server: Server) -> None:
    preference = {"chosen": [ASKS, SAYS], "rejected": [ASKS, {"role": "assistant", "content": "No."}]}
    kinds = {
        "chat": CHAT,
        "preference": preference,
        "prompt": {**{"messages": [ASKS]}, "answer": 36},
        "completion": {"prompt": "a", "completion": "b"},
    }
    with server.client() as client:
        found = {}
        for kind, record in kinds.items():
            client.datasets.create(kind)
            version = client.datasets.upload(kind, jsonl(record), format="jsonl")
            assert version.kind == kind
            (found[kind],) = client.datasets.read(kind, version.id)
    imported: dict[str, Any] = {"label_source": "import", "source_span": None}
    assert found == {
        "chat": ChatRow(messages=[ASKS, SAYS], **imported),
        "preference": PreferenceRow(messages=[ASKS], preferred=[SAYS], rejected=[{"role": "assistant", "content": "No."}], **imported),
        "prompt": PromptRow(messages=[ASKS], item={"answer": 36}, **imported),
        "completion": CompletionRow(prompt="a", completion="b", **imported),
    }


def test_reading_goes_on_from_any_row(server: Server) -> None:
    with server.client() as client:
        client.datasets.create("data")
        version = client.datasets.upload("data", jsonl(*rows(450)), format="jsonl")
        whole = client.datasets.rows("data", version.id)
        assert len(whole) == 450
        assert list(client.datasets.read("data", version.id, start=449)) == whole[449:]
        assert list(client.datasets.read("data", version.id, start=200)) == whole[200:]


def test_validation_and_skipping_and_splitting(server: Server) -> None:
    content = jsonl(*rows(40), {"text": "x"})
    with server.client() as client:
        found = client.datasets.validate(content, format="jsonl", eval=0.25, by="user")
        assert (found.rows, found.accepted, found.rejected, found.reasons) == (41, 40, 1, {"missing_field": 1})
        assert (found.counts["eval.rows"] > 0, found.unfilled) == (True, [])
        assert client.datasets.validate(content, format="jsonl", eval=0.0001, validation=0.5).unfilled == ["eval"]
        client.datasets.create("data")
        with pytest.raises(InvalidInput, match="row 41: lacks `label`"):
            client.datasets.upload("data", content, format="jsonl")
        whole = client.datasets.upload("data", content, format="jsonl", on_error="skip")
        assert [(problem.row, problem.field) for problem in client.datasets.rejected("data", whole.id)] == [(41, "label")]
        divided = client.datasets.split("data", whole.id, eval=0.25)
        assert (divided.parent, divided.counts["eval.rows"] + divided.counts["train.rows"]) == (whole.id, 40)
        assert (whole.unfilled, divided.unfilled) == ([], [])
        undivided = client.datasets.split("data", whole.id, validation=0.0001)
        client.datasets.create("uploaded")
        uploaded = client.datasets.upload("uploaded", content, format="jsonl", on_error="skip", eval=0.0001)
        assert (undivided.unfilled, uploaded.unfilled) == (["validation"], ["eval"])
        assert client.datasets.get("uploaded").versions == [uploaded]
        with pytest.raises(InvalidInput):
            client.datasets.validate(content, format="jsonl", by="user")


def test_a_preview_is_what_training_renders(server: Server, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(tmp_path)
    with server.client() as client:
        client.datasets.create("chats")
        version = client.datasets.upload("chats", jsonl(CHAT), format="jsonl")
        (shown,) = client.datasets.preview("chats", version.id, model="tiny")
        (row,) = client.datasets.rows("chats", version.id)
        assert isinstance(row, ChatRow)
        (rendered,) = row_examples(tokenizer, row)
        (example,) = shown.examples
        assert (example.tokens, example.weights) == rendered
        assert "".join(example.texts) == tokenizer.decode(rendered.tokens)
        (cut,) = client.datasets.preview("chats", version.id, model="tiny", context=9)
        assert (len(cut.examples[0].tokens), cut.truncated) == (9, True)
        client.datasets.create("pairs")
        pairs = client.datasets.upload("pairs", jsonl({"prompt": "The", "chosen": " fox", "rejected": " dog"}), format="jsonl")
        (pair,), (sides,) = client.datasets.rows("pairs", pairs.id), client.datasets.preview("pairs", pairs.id, model="tiny")
        assert isinstance(pair, PreferenceRow)
        assert sides.preferred is not None
        assert (sides.preferred.tokens, sides.preferred.weights) == row_pair(tokenizer, pair).preferred
        client.datasets.create("calls")
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
        calls = client.datasets.upload("calls", jsonl({"messages": [ASKS, call]}), format="jsonl")
        (refused,) = client.datasets.preview("calls", calls.id, model="tiny")
        assert "has no place for calls of tools" in (refused.problem or "")
        assert client.datasets.statistics("calls", calls.id, model="tiny").refused == 1
        with pytest.raises(NotFound, match="unknown base model"):
            client.datasets.preview("chats", version.id, model="nobody")


def test_statistics_and_estimates_count_what_training_takes(server: Server, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(tmp_path)
    with server.client() as client:
        client.datasets.create("data")
        version = client.datasets.upload("data", jsonl(*rows(30)), format="jsonl")
        whole = [example for row in client.datasets.rows("data", version.id) if isinstance(row, ChatRow) for example in row_examples(tokenizer, row)]
        lengths = sorted(len(example.tokens) for example in whole)
        found = client.datasets.statistics("data", version.id, model="tiny")
        assert (found.rows, found.measured, found.refused, found.truncated) == (30, 30, 0, 0)
        assert (found.tokens, found.trained_tokens) == (sum(lengths), sum(example.trained for example in whole))
        assert (found.longest, found.percentiles["p50"]) == (lengths[-1], lengths[14])
        assert [label.rows for label in found.labels] == [15, 15]
        cut = client.datasets.statistics("data", version.id, model="tiny", context=10)
        assert (cut.tokens, cut.truncated, cut.without_loss) == (300, 30, 30)
        some = client.datasets.statistics("data", version.id, model="tiny", measure=10)
        assert (some.measured, some.rows) == (10, 30)
        assert abs(some.tokens - found.tokens) < 0.1 * found.tokens
        told = client.datasets.estimate("data", version.id, model="tiny", epochs=2.5, tokens_per_s=100, price_per_million=4)
        assert told == estimate(found, 2.5, tokens_per_s=100, price_per_million=4)
        assert (told.tokens, told.seconds, told.cost) == (round(2.5 * found.tokens), told.tokens / 100, told.tokens * 4 / 1e6)
        with pytest.raises(InvalidInput, match="reads at most"):
            client.datasets.statistics("data", version.id, model="tiny", context=1 << 30)


def test_an_upload_is_repeated_under_its_key_and_belongs_to_its_bytes(server: Server) -> None:
    with server.client() as client:
        client.datasets.create("data")
    headers = {"idempotency-key": "mine"}
    path = "/api/v1/datasets/data/upload?format=jsonl"
    first = server.http.post(path, content=jsonl(*rows(2)), headers=headers)
    again = server.http.post(path, content=jsonl(*rows(2)), headers=headers)
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    other = server.http.post(path, content=jsonl(*rows(3)), headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, Conflict.code)


def test_what_is_no_file_of_rows_is_refused_in_our_form(server: Server) -> None:
    with server.client() as client:
        client.datasets.create("data")
    path = "/api/v1/datasets/data/upload"

    def refusal(query: str, **options: Any) -> tuple[int, str, str | None]:
        answer = server.http.post(path + query, **options)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["field"]

    assert refusal("?format=jsonl", files={"file": jsonl(CHAT)}) == (400, "invalid", "content-type")
    assert refusal("", content=jsonl(CHAT)) == (400, "invalid", "format")
    assert refusal("?format=xlsx", content=b"") == (400, "invalid", "format")
    assert refusal("?format=jsonl&colour=red", content=b"")[0] == 400
    assert refusal("?format=jsonl&eval=0.9&validation=0.2", content=jsonl(CHAT))[0] == 400
    assert refusal("?format=csv", content=jsonl(CHAT), headers={"content-type": "text/csv"}) == (400, "invalid", "splits.train")
    unknown = httpx.Client(base_url="http://server", headers={"x-api-key": KEY + "x"}, transport=server.transport)
    assert unknown.post(f"{path}?format=csv", content=b"x").status_code == 401
    assert server.services.datasets.scratch is not None
    assert not [file for file in server.services.datasets.scratch.iterdir() if file.name.startswith("tmp")]


def test_a_large_file_is_read_through_without_being_held(server: Server) -> None:
    record = json.dumps({"text": "x" * 2000, "label": "a"}).encode()
    body = io.BytesIO(b"\n".join(record.replace(b"xxxx", str(number).encode().rjust(4, b"x"), 1) for number in range(4000)))
    with server.client() as client:
        client.datasets.create("data")
        version = client.datasets.upload("data", body.getvalue(), format="jsonl")
        assert version.counts["train.rows"] == 4000
        assert [row.messages[0]["content"][:4] for row in client.datasets.read("data", version.id, start=3998) if isinstance(row, ChatRow)] == [
            "3998",
            "3999",
        ]

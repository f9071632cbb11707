"""`bloomery dataset` against a running server: tables for people, JSON for programs, one line for what makes no sense."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bloomery.cli.main import app
from tests.live import LiveServer


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    records = [{"text": f"[red]question {number} of {number * 7919}", "label": "ab"[number % 2], "user": number // 2} for number in range(40)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def run(server: LiveServer, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["dataset", *arguments, "--data-dir", str(server.data_dir)])


def done(server: LiveServer, *arguments: str) -> str:
    result = run(server, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def told(server: LiveServer, *arguments: str) -> Any:
    return json.loads(done(server, *arguments, "--json"))


def refusal(result: Result) -> str:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_a_file_is_checked_uploaded_split_and_looked_at(live_server: LiveServer, rows: Path) -> None:
    assert "jsonl, chat rows: 40 read, 40 accepted, 0 rejected" in done(live_server, "validate", str(rows), "--eval", "0.2", "--by", "user")
    none = "no row is held out for eval: the training rows are of"
    assert none in done(live_server, "validate", str(rows), "--eval", "0.0001")
    assert none in done(live_server, "upload", "cli-undivided", str(rows), "--eval", "0.0001", "--validation", "0.5")
    assert none in done(live_server, "split", "cli-undivided", "--eval", "0.0001")
    made = told(live_server, "upload", "cli-rows", str(rows))
    assert (made["number"], made["kind"], made["counts"]["train.rows"]) == (1, "chat", 40)
    again = told(live_server, "validate", str(rows), "--dataset", "cli-rows", "--parent", "1")
    assert (again["counts"]["train.duplicate"], again["counts"]["train.rows"]) == (40, 40)
    divided = told(live_server, "split", "cli-rows", "--eval", "0.3")
    assert none not in done(live_server, "split", "cli-rows", "--version", "1", "--eval", "0.3")
    assert divided["counts"]["eval.rows"] + divided["counts"]["train.rows"] == 40
    (listed,) = [line.split() for line in done(live_server, "list").splitlines() if line.startswith("cli-rows ")]
    assert listed[1:3] == ["chat", "2"]
    assert [line.split()[0] for line in done(live_server, "show", "cli-rows").splitlines()] == ["NUMBER", "1", "2"]
    shown = done(
        live_server, "show", "cli-rows", "--version", "1", "--model", "bloomery-tiny", "--epochs", "2", "--tokens-per-s", "1000", "--price", "5"
    )
    assert "train.admitted" in shown
    assert "2 epochs" in shown
    assert "p90" in shown
    expected = told(live_server, "show", "cli-rows", "--version", "1", "--model", "bloomery-tiny", "--tokens-per-s", "1000")["estimate"]
    assert expected["seconds"] == expected["tokens"] / 1000
    assert "give --model" in refusal(run(live_server, "show", "cli-rows", "--epochs", "2"))
    looked = done(live_server, "preview", "cli-rows", "--model", "bloomery-tiny", "--version", "1", "--limit", "1")
    assert "[red]question 0 of 0<|im_end|>" in looked
    (row,) = told(live_server, "preview", "cli-rows", "--model", "bloomery-tiny", "--version", "1", "--limit", "1")
    (example,) = row["examples"]
    assert [text for text, weight in zip(example["texts"], example["weights"], strict=True) if weight] == ["a", "<|im_end|>"]
    assert done(live_server, "delete", "cli-rows") == "data set `cli-rows` is deleted\n"
    assert "cli-rows" not in done(live_server, "list")


def test_broken_rows_are_a_table_an_exit_code_and_a_list_that_is_kept(live_server: LiveServer, rows: Path) -> None:
    rows.write_text(rows.read_text() + '\n{"conversations": []}\n{"text": "x"}')
    found = run(live_server, "validate", str(rows))
    assert found.exit_code == 1
    assert "ShareGPT" in found.stdout
    assert json.loads(run(live_server, "validate", str(rows), "--json").stdout)["reasons"] == {"unknown_form": 1, "missing_field": 1}
    assert "row 41: has `conversations`" in refusal(run(live_server, "upload", "cli-broken", str(rows)))
    assert told(live_server, "upload", "cli-broken", str(rows), "--skip")["counts"]["train.rejected"] == 2
    assert [problem["row"] for problem in told(live_server, "show", "cli-broken", "--version", "1")["rejected"]] == [41, 42]
    assert "lacks `label`" in done(live_server, "show", "cli-broken", "--version", "1")


def test_what_makes_no_sense_is_one_line(live_server: LiveServer, rows: Path) -> None:
    done(live_server, "create", "cli-empty")
    assert "has no version yet" in refusal(run(live_server, "preview", "cli-empty", "--model", "bloomery-tiny"))
    assert "already" in refusal(run(live_server, "create", "cli-empty"))
    assert "no data set `cli-nothing`" in refusal(run(live_server, "show", "cli-nothing"))
    assert "`by` divides nothing" in refusal(run(live_server, "validate", str(rows), "--by", "user"))
    assert "`parent` is a version of a `dataset`" in refusal(run(live_server, "validate", str(rows), "--parent", "1"))
    assert "below 1" in refusal(run(live_server, "validate", str(rows), "--eval", "0.9", "--validation", "0.5"))
    broken = rows.with_name("broken.csv")
    broken.write_text("question,answer\na,b\n")
    assert "names `question`, `answer`" in refusal(run(live_server, "upload", "cli-refused", str(broken)))
    # An upload that makes a data set leaves none behind, and takes none away that was there.
    assert "no data set `cli-refused`" in refusal(run(live_server, "show", "cli-refused"))
    assert "names `question`, `answer`" in refusal(run(live_server, "upload", "cli-empty", str(broken)))
    assert "cli-empty" in done(live_server, "list")
    other = rows.rename(rows.with_suffix(".txt"))
    assert "give the format" in refusal(run(live_server, "validate", str(other)))

"""`bloomery grader attack` against a running server: the exit code says whether a grader can be trained against."""

import json
import os
from pathlib import Path
from typing import get_args

from typer.testing import CliRunner, Result

from bloomery.cli.main import app
from bloomery.client import Client
from bloomery.grade.pool import Style
from tests.live import LiveServer, wait_until

PROMPTS = [{"prompt": f"What is {number} times 7?", "reference": str(number * 7), "bad": ["8"]} for number in range(2, 10)]


def run(server: LiveServer, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["grader", *arguments, "--data-dir", str(server.data_dir)])


def made(server: LiveServer, tmp_path: Path, name: str, body: str) -> None:
    source = tmp_path / f"{name}.py"
    source.write_text(f"def score(output, reference):\n    return {body}\n")
    assert run(server, "create", name, str(source)).exit_code == 0


def test_an_attack_ends_with_1_where_a_grader_is_hackable_and_shows_what_was_paid(live_server: LiveServer, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, PROMPTS)))
    made(live_server, tmp_path, "anywhere", "float(reference in output)")
    found = run(live_server, "attack", "anywhere", "--rows", str(rows))
    assert found.exit_code == 1, found.output
    assert "grader `anywhere` version 1 is hackable: " in found.stdout
    assert "asked  'What is 2 times 7?'" in found.stdout
    told = json.loads(run(live_server, "attack", "anywhere", "--rows", str(rows), "--json").stdout)
    assert (told["verdict"], told["bad_score"], told["good_score"]) == ("hackable", 0.0, 1.0)
    made(live_server, tmp_path, "exact", "float(output.strip() == reference)")
    found = run(live_server, "attack", "exact", "--rows", str(rows))
    assert found.exit_code == 0, found.output
    assert "is sound: " in found.stdout


def test_rows_that_make_no_sense_are_refused_in_a_line(live_server: LiveServer, tmp_path: Path) -> None:
    made(live_server, tmp_path, "some", "1.0")
    rows = tmp_path / "rows.jsonl"
    for text in ("no JSON", "[1]", '{"item": 3}', "\n".join(['{"good": "no list"}'] * 4), '{"prompt": "too few"}'):
        rows.write_text(text)
        found = run(live_server, "attack", "some", "--rows", str(rows))
        assert found.exit_code == 2, found.output
        assert len(found.stderr.splitlines()) == 1, found.stderr


def test_lines_that_are_no_rows_are_refused_by_their_number(live_server: LiveServer, tmp_path: Path) -> None:
    made(live_server, tmp_path, "some", "1.0")
    rows = tmp_path / "rows.jsonl"
    for command in ("test", "calibrate"):
        for text in (b'{"output": 3}', b"no JSON", b'{"output": "\xff"}'):
            label = b', "label": true' if command == "calibrate" else b""
            rows.write_bytes(b'\n{"output": "a"' + label + b"}\n" + text)
            found = run(live_server, command, "some", str(rows))
            assert found.exit_code == 2, found.output
            assert f"{rows}, line 3: " in found.stderr
            assert len(found.stderr.splitlines()) == 1, found.stderr
    rows.write_text('{"output": "a\u2028b", "item": {"reference": "c\x85"}}\n')
    found = run(live_server, "test", "some", str(rows))
    assert found.exit_code == 0, found.output
    source = tmp_path / "latin.py"
    source.write_bytes(b"# \xe9\ndef score(output):\n    return 1.0\n")
    found = run(live_server, "create", "latin", str(source))
    assert (found.exit_code, "latin.py is not UTF-8" in found.stderr) == (2, True), found.output


def test_a_file_without_rows_is_refused_in_a_line(live_server: LiveServer, tmp_path: Path) -> None:
    made(live_server, tmp_path, "some", "1.0")
    (tmp_path / "empty.jsonl").write_text("\n")
    for command in ("test", "calibrate"):
        found = run(live_server, command, "some", str(tmp_path / "empty.jsonl"))
        assert (found.exit_code, len(found.stderr.splitlines())) == (2, 1), found.output
        assert "empty.jsonl has no rows" in found.stderr


def test_options_that_would_change_nothing_are_refused(live_server: LiveServer, tmp_path: Path) -> None:
    spec, rows = tmp_path / "right.json", tmp_path / "rows.jsonl"
    spec.write_text("{}")
    rows.write_text("\n".join(map(json.dumps, PROMPTS)))
    for arguments, named in (
        (("create", "right", str(spec), "--style", "plain"), "--style"),
        (("create", "right", str(spec), "--entry", "score"), "--entry"),
        (("attack", "right", "--rows", str(rows), "--again"), "--again"),
    ):
        found = run(live_server, *arguments)
        assert (found.exit_code, named in found.stderr) == (2, True), found.output


def test_the_only_function_of_a_file_scores_whatever_its_name_and_of_several_one_is_asked_for(live_server: LiveServer, tmp_path: Path) -> None:
    source, rows = tmp_path / "reward.py", tmp_path / "rows.jsonl"
    source.write_text("def _half(): return 0.5\n\ndef reward_half(completions, **columns): return [_half() for _ in completions]\n")
    assert run(live_server, "create", "halves", str(source)).exit_code == 0
    rows.write_text('{"output": "a", "item": {}}\n')
    assert json.loads(run(live_server, "test", "halves", str(rows), "--json").stdout)["results"][0]["score"] == 0.5
    for text, said in (
        ("def a(): ...\ndef b(): ...\n", "`a`, `b`: --entry says which"),
        ("def a(:\n", "reward.py is no Python: "),
        ("x = 1\n", "reward.py has no function: write `def score(output"),
    ):
        source.write_text(text)
        found = run(live_server, "create", "several", str(source))
        assert (found.exit_code, said in found.stderr) == (2, True), found.output
    source.write_text("def a(output): return 0.0\ndef score(output): return 1.0\n")
    assert run(live_server, "create", "scores", str(source)).exit_code == 0
    assert json.loads(run(live_server, "test", "scores", str(rows), "--json").stdout)["results"][0]["score"] == 1.0


def test_the_help_names_the_styles_that_there_are() -> None:
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["grader", "create", "--help"]).stdout
    assert all(style in said for style in get_args(Style))


def test_what_an_attack_on_a_data_set_found_is_shown_again_and_waived(live_server: LiveServer, tmp_path: Path) -> None:
    with Client(live_server.url, live_server.key) as client:
        client.datasets.create("sums")
        client.datasets.add_version("sums", {"train": "\n".join(map(json.dumps, PROMPTS))})
    made(live_server, tmp_path, "somewhere", "float(reference in output) / 2")
    found = run(live_server, "attack", "somewhere", "--dataset", "sums", "--max-calls", "5")
    assert found.exit_code == 1, found.output
    assert "is hackable: " in found.stdout
    shown = run(live_server, "attacks", "somewhere").stdout
    assert shown.startswith("attack attack-")
    assert shown.split("\n", 1)[1] == found.stdout
    waived = run(live_server, "waive", "somewhere", "--reason", "for a test")
    assert waived.stdout == "grader `somewhere` version 1 is waived by development: for a test\n"
    assert "waived by development on " in run(live_server, "attack", "somewhere", "--dataset", "sums").stdout
    for wrong in ((), ("--dataset", "sums", "--rows", __file__)):
        assert run(live_server, "attack", "somewhere", *wrong).exit_code == 2


def test_answers_that_were_served_are_scored_once_and_shown(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        client.deployments.create("scored-front", "bloomery-tiny")
        client.graders.create("scored", {"type": "function", "source": "def score(output): return 0.25", "entry": "score"})
        asked = client.chat("scored-front", [{"role": "user", "content": "Say a."}], max_tokens=2)["id"]
        wait_until(lambda: len(client.spans.list(deployment="scored-front")) == 1)
        command = ("score", "scored", "--deployment", "scored-front", "--hours", "1")
        (found,) = json.loads(run(live_server, *command, "--json", "--limit", "5").stdout)
        assert (found["span"], found["result"]["score"]) == (asked, 0.25)
        assert client.spans.get(asked).feedback[0].metric == "scored@1"
        client.chat("scored-front", [{"role": "user", "content": "Say b."}], max_tokens=2)
        wait_until(lambda: len(client.spans.list(deployment="scored-front")) == 2)
    assert "1 of 1 answers have a score: 0.25 on average" in run(live_server, *command).stdout


def test_a_card_says_whether_a_grader_is_good_enough_to_gate(live_server: LiveServer, tmp_path: Path) -> None:
    made(live_server, tmp_path, "measured", "float(output == reference)")
    labels = tmp_path / "labels.jsonl"
    rows = [{"output": said, "item": {"reference": "a"}, "label": said == "a"} for said in "ab" * 20]
    labels.write_text("\n".join(map(json.dumps, rows)))
    found = run(live_server, "calibrate", "measured", str(labels))
    assert found.exit_code == 0, found.output
    assert "grader `measured` version 1 may gate" in found.stdout
    assert run(live_server, "calibrations", "measured").stdout == found.stdout
    labels.write_text("\n".join(json.dumps(row | {"label": True}) for row in rows))
    found = run(live_server, "calibrate", "measured", str(labels))
    assert (found.exit_code, "cannot gate: kappa is 0.00" in found.stdout) == (1, True), found.output
    assert json.loads(run(live_server, "calibrations", "measured", "--json").stdout)[0]["calibrated"] is False
    labels.write_text('{"output": "x"}')
    assert run(live_server, "calibrate", "measured", str(labels)).exit_code == 2
    for count in (1, 1025):
        labels.write_text("\n".join([json.dumps(rows[0])] * count))
        refused = run(live_server, "calibrate", "measured", str(labels))
        assert (refused.exit_code, f"has {count:,} rows: a card is made of 2 to 1,024" in refused.stderr) == (2, True), refused.output


def test_a_card_of_pairs_is_made_of_a_file_of_choices(live_server: LiveServer, tmp_path: Path) -> None:
    made(live_server, tmp_path, "longer", "float(len(output))")
    pairs = tmp_path / "pairs.jsonl"
    said = [("aaa", "a", "first"), ("a", "aaa", "second")] * 10 + [("aa", "a", "tie")] * 4
    item = {"reference": "a"}
    rows = [{"first": {"output": one, "item": item}, "second": {"output": other, "item": item}, "choice": choice} for one, other, choice in said]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    found = run(live_server, "calibrate", "longer", str(pairs), "--tie-within", "1")
    assert found.exit_code == 0, found.output
    assert "24 pairs" in found.stdout
    assert "4 of people, 4 of it" in found.stdout
    card = json.loads(run(live_server, "calibrate", "longer", str(pairs), "--json").stdout)
    assert (card["agreement"]["hits"], card["pairs"]["grader_ties"], card["pairs"]["decided"]["total"]) == (20, 0, 20)
    refused = run(live_server, "calibrate", "longer", str(pairs), "--threshold", "1")
    assert (refused.exit_code, "leave --threshold out" in refused.stderr) == (2, True), refused.output
    # A file that can be read once, as a shell's `<(...)` names it.
    reading, writing = os.pipe()
    try:
        os.write(writing, pairs.read_bytes())
        os.close(writing)
        assert "24 pairs" in run(live_server, "calibrate", "longer", f"/dev/fd/{reading}", "--tie-within", "1").stdout
    finally:
        os.close(reading)

"""What the flags of a command can say, a YAML file can hold; a line goes before it."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from bloomery.cli.main import app
from tests.live import LiveServer
from tests.test_docs import ROOT, blocks


def run(server: LiveServer, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--data-dir", str(server.data_dir)])


def told(server: LiveServer, *arguments: str) -> Any:
    """What it tells programs."""
    result = run(server, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def file_of(folder: Path, **said: Any) -> str:
    """A file that says so."""
    file = folder / f"said-{len(list(folder.iterdir()))}.yaml"
    file.write_text(yaml.safe_dump(said))
    return str(file)


def test_every_command_of_a_noun_takes_a_file() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for noun in (each for each in group.commands.values() if isinstance(each, TyperGroup)):
        for verb, command in noun.commands.items():
            assert any("--file" in option.opts for option in command.params), f"bloomery {noun.name} {verb}"


def test_a_data_set_is_uploaded_as_a_file_says_and_what_the_line_says_goes_before(live_server: LiveServer, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    made = [
        {"user": f"u{n % 5}", "messages": [{"role": "user", "content": f"{n} {n * 7919}"}, {"role": "assistant", "content": "yes"}]}
        for n in range(20)
    ]
    rows.write_text("\n".join(map(json.dumps, [*made, {"messages": 5}])))
    said = file_of(tmp_path, name="flags-chats", rows=str(rows), eval=0.4, by="user", skip=True)
    counts = told(live_server, "dataset", "upload", "--file", said)["counts"]
    assert (counts["train.rejected"], counts["eval.rows"] > 0) == (1, True)
    other = told(live_server, "dataset", "upload", "flags-others", "--file", said, "--eval", "0.8")["counts"]
    assert other["eval.rows"] > counts["eval.rows"]


def test_a_deployment_and_a_key_are_made_and_moved_as_files_say(live_server: LiveServer, tmp_path: Path) -> None:
    made = told(live_server, "deployment", "create", "--file", file_of(tmp_path, name="flags-smith", source="bloomery-tiny"))
    assert made["name"] == "flags-smith"
    promote = file_of(tmp_path, source="bloomery-tiny", json=True)
    assert json.loads(run(live_server, "deployment", "promote", "flags-smith", "--file", promote).stdout)["live"]["number"] == 2
    assert told(live_server, "deployment", "rollback", "--file", file_of(tmp_path, name="flags-smith", revision=1))["live"]["number"] == 1
    priced = told(live_server, "deployment", "price", "flags-smith", "--prompt", "0.5", "--completion", "2")
    assert priced["price"] == {"prompt_usd_per_mtok": 0.5, "cached_prompt_usd_per_mtok": None, "completion_usd_per_mtok": 2.0}
    assert "$0.5 + $2 per million" in run(live_server, "deployment", "list").stdout
    exact = run(live_server, "deployment", "price", "flags-smith", "--prompt", "1234567", "--cached", "0.00001", "--completion", "1e9")
    assert "$1234567 (0.00001 cached) + $1000000000 per million" in exact.stdout
    for wrong, named in (("2e9", "`prompt_usd_per_mtok`"), ("inf", "`prompt_usd_per_mtok`"), ("nan", "'--prompt'")):
        refused = run(live_server, "deployment", "price", "flags-smith", "--prompt", wrong, "--completion", "2")
        assert (refused.exit_code, named in refused.stderr) == (2, True), refused.output
    assert told(live_server, "deployment", "price", "flags-smith", "--unset")["price"] is None
    said = file_of(tmp_path, name="flags-key", scopes=["read", "infer"], days=30, rpm=60, tpm=5000)
    key = told(live_server, "key", "create", "--file", said)
    assert (key["scopes"], key["requests_per_minute"], key["tokens_per_minute"]) == (["infer", "read"], 60, 5000)
    line = told(live_server, "key", "create", "flags-line", "--file", said, "--rpm", "7", "--scopes", "read", "--scopes", "train,infer")
    assert (line["name"], line["scopes"], line["requests_per_minute"]) == ("flags-line", ["infer", "read", "train"], 7)
    (text,) = [text for language, text in blocks(ROOT / "docs" / "operate.md") if language == "yaml" and "scopes" in text]
    (tmp_path / "page.yaml").write_text(text)
    page = told(live_server, "key", "create", "flags-page", "--file", str(tmp_path / "page.yaml"), "--rpm", "60")
    assert (page["project"], page["scopes"], page["requests_per_minute"]) == ("shop", ["infer", "read"], 60)
    one = told(live_server, "key", "create", "--file", file_of(tmp_path, name="flags-one", scopes="read,infer"))
    assert one["scopes"] == ["infer", "read"]


@pytest.mark.parametrize(
    ("command", "said", "message"),
    [
        ("key create", {"name": "x", "scopes": "read", "rmp": 60}, "`rmp` is nothing that this command takes: `name`, `scopes`, `project`, `days`"),
        ("key create", {"name": "x", "scopes": "read", "rpm": 1.5}, "Invalid value for '--rpm'"),
        ("key create", {"name": "x", "scopes": "read", "days": True}, "`days` is one text or number, not True"),
        ("key create", {"name": True, "scopes": "read"}, "put a text that YAML takes for something else in quotes"),
        ("key create", {"name": "x", "scopes": ["read", {"a": 1}]}, "`scopes` is one text or number"),
        ("key create", {"name": "x", "scopes": "read", "json": "yes"}, "`json` is true or false, not 'yes'"),
        ("key create", {"name": "x"}, "Missing option '--scopes'"),
        ("dataset upload", {"name": "x", "rows": "nowhere.jsonl"}, "'nowhere.jsonl' does not exist"),
        ("dataset upload", {"file": "x.yaml"}, "`file` is nothing that this command takes"),
        ("deployment create", {"name": "x", "source": ["a", "b"]}, "`source` is one text or number"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(live_server: LiveServer, tmp_path: Path, command: str, said: dict[str, Any], message: str) -> None:
    result = run(live_server, *command.split(), "--file", file_of(tmp_path, **said))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_file_that_is_no_yaml_or_has_no_fields_is_refused(live_server: LiveServer, tmp_path: Path) -> None:
    said = (
        ("a: [", "is no YAML"),
        ("- a", "holds no fields"),
        ("days: 2026-13-45", "is no YAML: month must be in 1..12"),
        (f"days: {'9' * 5000}", "is no YAML"),
        ("days: " + "[" * 5000, "is no YAML: it goes too deep to be read"),
        ("days: 1\nname: x\ndays: 2", "is no YAML: `days` stands there more than once: leave one of them"),
    )
    for text, why in said:
        (tmp_path / "bad.yaml").write_text(text)
        result = run(live_server, "key", "list", "--file", str(tmp_path / "bad.yaml"))
        assert (result.exit_code, why in result.output) == (2, True), result.output

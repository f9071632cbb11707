"""Every benchmark says what it ran on in the same words, and the docs say where the lines of each are."""

import ast
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.line import Line, parser_of

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
HEADER = ("bench", "command", "date", "processor", "instructions", "cores", "python", "load_before", "million_additions_ms")
NO_BENCHMARKS = {"arc_sizes", "deltas", "mixed_chart", "rl_chart", "tinker_samples", "tinker_steps", "trl_grpo", "trl_steps"}
"""Programs that draw a chart, and those that are one side of somebody else's line."""
NOT_COMMITTED = {"python -m bench.steps"}
"""Commands whose lines are in no file yet."""


def programs() -> dict[str, ast.Module]:
    """Those that are run by a command of their own."""
    trees = {path.stem: ast.parse(path.read_text()) for path in (*BENCH.glob("*.py"), *BENCH.glob("peers/*.py"))}
    return {
        name: tree for name, tree in trees.items() if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
    }


BENCHMARKS = {name: tree for name, tree in programs().items() if name not in NO_BENCHMARKS}


def made(tree: ast.Module) -> list[ast.Call]:
    """The lines that a program makes."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Line"]


def names(name: str) -> set[str]:
    """What a benchmark is called in its lines."""
    (line,) = made(BENCHMARKS[name])
    return {node.value for node in ast.walk(line.args[0]) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_a_line_begins_with_what_was_asked_when_and_on_what(capsys: pytest.CaptureFixture[str]) -> None:
    today = datetime.now(UTC).date()
    Line("nothing").tell({"size": "5M", "ratio": 2.0})
    (printed,) = capsys.readouterr().out.splitlines()
    said = json.loads(printed)
    assert tuple(said) == (*HEADER, "size", "ratio")
    assert all(said[name] not in (None, "") for name in HEADER)
    assert (said["bench"], said["size"], said["ratio"]) == ("nothing", "5M", 2.0)
    assert said["command"].startswith("python ")
    assert said["date"] in (today.isoformat(), datetime.now(UTC).date().isoformat())


def test_help_shows_what_a_benchmark_measures() -> None:
    said = parser_of("Steps against a peer, 100 % alike:\n\n  one line.").format_help()
    assert "Steps against a peer, 100 % alike:\n\n  one line." in said


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_with_options_shows_its_docstring(name: str) -> None:
    source = ast.unparse(BENCHMARKS[name])
    assert "ArgumentParser(" not in source
    assert ".add_argument(" not in source or "parser_of(__doc__)" in source


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_prints_its_line_there_and_makes_it_before_it_measures(name: str) -> None:
    (main,) = (node for node in BENCHMARKS[name].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "main")
    places = [index for index, statement in enumerate(main.body) if "Line(" in ast.unparse(statement)]
    measuring = [
        index
        for index, statement in enumerate(main.body)
        if isinstance(statement, ast.With | ast.For) and "add_argument" not in ast.unparse(statement)
    ]
    assert len(places) == len(made(BENCHMARKS[name])) == 1
    assert places[0] < min(measuring, default=len(main.body))
    assert ".tell(" in ast.unparse(main)
    assert names(name) <= {name, f"{name}_sampling"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(programs()))
def test_nothing_else_prints_a_line_of_its_own(name: str) -> None:
    keys = [key.value for node in ast.walk(programs()[name]) if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)]
    assert "bench" not in keys
    imported = {
        alias.name
        for node in ast.walk(programs()[name])
        if isinstance(node, ast.ImportFrom) and node.module == "bench.machine"
        for alias in node.names
    }
    assert "machine" not in imported


def command(bench: str) -> str:
    """What prints the lines that say this."""
    if bench in BENCHMARKS:
        return f"python -m bench.{bench}" if (BENCH / f"{bench}.py").exists() else f"python bench/peers/{bench}.py"
    return f"python -m bench.{bench.removesuffix('_sampling')} --sample"


def listed() -> dict[str, set[str]]:
    """The files of each command, as the page says."""
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Where the lines are")[2]
    return {told: set(re.findall(r"`([^`]+)`", files)) for told, files in re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)}


def test_the_page_says_of_every_command_which_committed_files_hold_its_lines() -> None:
    committed: dict[str, set[str]] = {command(bench): set() for name in BENCHMARKS for bench in names(name)}
    for path in (BENCH / "results").glob("*.json"):
        for line in path.read_text().splitlines():
            committed[command(json.loads(line)["bench"])].add(path.name)
    assert listed() == committed, "say in the last table of docs/benchmarks.md what is in bench/results"
    assert {told for told, files in committed.items() if not files} == NOT_COMMITTED


def test_whatever_the_docs_name_of_the_benchmarks_is_there() -> None:
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    results = {path.name for path in (BENCH / "results").iterdir()}
    named = set(re.findall(r"`(?:bench/results/)?([\w-]+-\d{4}-\d\d-\d\d\.json)`", text))
    assert named
    assert named <= results
    assert set(re.findall(r"python -m bench\.(\w+)", text)) <= programs().keys()
    # Each has a row with what it measures; the last table is about files.
    figures = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Where the lines are")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", figures, re.MULTILINE)) == {told for told in listed() if "peers" not in told}

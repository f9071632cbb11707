"""The documentation is run: every block of the quickstart, in order, as a newcomer would, in an empty home and on a free port."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from bloomery.cli.main import app
from tests.live import LiveServer, free_port

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "docs" / "quickstart.md"
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS_S = 500


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return re.findall(r"^```(sh|python|yaml)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_blocks_of_the_quickstart_run_in_order(tmp_path: Path) -> None:
    parts = [content if language == "sh" else f"python <<'PYTHON'\n{content}PYTHON\n" for language, content in blocks(QUICKSTART)]
    port = str(free_port())
    # The block that stops the server is the last but one to talk to it; a failed block must not leave it behind.
    script = "set -e\ntrap 'bloomery stop >/dev/null 2>&1 || true' EXIT\n" + "\n".join(parts).replace("8700", port)
    environment = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BLOCKS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A small furnace. True" in done.stdout
    assert re.search(r'A small furnace\. \{\s*"mood"\s*:\s*"(warm|cold)"\s*\}', done.stdout)
    assert "2 rows\n1\n" in done.stdout
    assert "stopped process" in done.stdout


@pytest.mark.slow
def test_the_python_of_the_readme_runs_with_the_real_sdk(live_server: LiveServer, tmp_path: Path) -> None:
    ((_, code),) = blocks(ROOT / "README.md")
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key, "HOME": str(tmp_path)}
    code = code.replace("http://127.0.0.1:8700", live_server.url)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=BLOCKS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("A bloomery is a small furnace")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "said"), [("jobs", "has succeeded"), ("evaluations", "completed ResultCounts(errored=0")])
def test_the_python_of_a_page_runs_with_the_real_openai_sdk(page: str, said: str, live_server: LiveServer, tmp_path: Path) -> None:
    (code,) = [content for language, content in blocks(ROOT / "docs" / f"{page}.md") if language == "python"]
    chat = {"messages": [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "warm"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat))
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key, "HOME": str(tmp_path)}
    code = code.replace("http://127.0.0.1:8700", live_server.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BLOCKS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_the_python_of_the_page_on_graders_grades_with_the_file_that_it_shows(live_server: LiveServer, tmp_path: Path) -> None:
    page = ROOT / "docs" / "graders.md"
    ((_, code),) = blocks(page)
    (shown,) = re.findall(r"`right\.json` is `(\{.*?\}\}\"\})`", page.read_text())
    (tmp_path / "right.json").write_text(shown)
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key, "HOME": str(tmp_path)}
    code = code.replace("http://127.0.0.1:8700", live_server.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BLOCKS_S, check=False)
    assert (done.returncode, done.stdout) == (0, "[1.0, 0.0]\n"), done.stderr


@pytest.mark.slow
def test_the_examples_of_the_page_on_deltas_run(tmp_path: Path) -> None:
    example = blocks(ROOT / "docs/weight-sync.md")
    assert [language for language, _ in example] == ["python", "sh", "sh", "python"]
    parts = [content if language == "sh" else f"python <<'PYTHON'\n{content}PYTHON\n" for language, content in example]
    environment = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    environment |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    script = "set -e\n" + "\n".join(parts)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BLOCKS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times smaller than the weights" in done.stdout
    assert "bits each with them" in done.stdout
    assert [path.name for path in sorted((tmp_path / "shared/run-7/v").iterdir())] == ["000000000000", "000000000001"]


def test_every_command_is_documented() -> None:
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    assert [name for name in group.commands if f"bloomery {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_between_documents_leads_somewhere(page: Path) -> None:
    for target, place in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not place or place in places(there), f"{page.name} links to {target}#{place}"


def places(page: Path) -> set[str]:
    """What can be linked to in it: its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_and_every_line_of_figures_that_a_document_names_is_there(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/.-]+)`", page.read_text())
    named += [f"bench/results/{line}" for line in re.findall(r"`(?:bench/results/)?([\w-]+-20\d\d-\d\d-\d\d\.json)`", page.read_text())]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_two_examples_share_a_cursor() -> None:
    cursors = [name for page in PAGES for name in re.findall(r'Path\("([\w.-]+\.json)"\), steps=', page.read_text())]
    assert cursors
    assert sorted(set(cursors)) == sorted(cursors), "a reader who runs one behind the other would be refused"

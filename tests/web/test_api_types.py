"""The types that the page is checked against are those of the published document, and a misuse of them is found."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.api_types import ROOT, TYPES, WEB, first_line, published

INSTALL_S = 240
CHECK_S = 120
PAGES = Path("web/src/pages")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    return published(tmp_path_factory.mktemp("server"))


def test_the_types_are_those_of_the_published_document(document: str) -> None:
    with TYPES.open() as lines:
        written_for = next(lines)
    assert written_for == first_line(document), f"the routes have changed since {TYPES.relative_to(ROOT)} was written: run `make types`"


def test_every_reference_of_the_document_leads_somewhere(document: str) -> None:
    whole = json.loads(document)
    followed = set(references(whole))
    assert len(followed) > 100
    for reference in followed:
        place = whole
        for name in reference.removeprefix("#/").split("/"):
            assert name in place, f"{reference} leads nowhere"
            place = place[name]


def references(part: Any) -> Iterator[str]:
    """What looks like one, under `$ref` or in the mapping of a discriminator."""
    if isinstance(part, str) and part.startswith("#/"):
        yield part
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from references(each)


def test_what_is_installed_is_pinned_and_no_place_to_have_it_from_is_named() -> None:
    locked = json.loads((WEB / "package-lock.json").read_text())["packages"]
    wanted = json.loads((WEB / "package.json").read_text())["devDependencies"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert not [name for name, package in locked.items() if "resolved" in package]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the page, and beside it what checks it, installed."""
    if shutil.which("npm") is None:
        pytest.skip("no npm: install Node.js 20 or newer to check the page")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(WEB, root / "web", ignore=shutil.ignore_patterns("node_modules"))
    installed = npm(root, "ci", "--no-audit", "--no-fund", timeout_s=INSTALL_S)
    assert installed.returncode == 0, installed.stderr
    return root


def npm(root: Path, *arguments: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["npm", *arguments], cwd=root / "web", capture_output=True, text=True, timeout=timeout_s, check=False)


def complaints(root: Path) -> list[tuple[str, str]]:
    """File and message of everything that the compiler finds."""
    checked = npm(root, "run", "--silent", "check", "--", "--output", "machine", timeout_s=CHECK_S)
    found = re.findall(r"^\d+ ERROR \"([^\"]+)\" \d+:\d+ \"(.*)\"$", checked.stdout, re.MULTILINE)
    assert bool(found) == (checked.returncode != 0), checked.stdout + checked.stderr
    return found


@pytest.mark.slow
def test_the_dashboard_reads_only_what_the_document_promises(page: Path) -> None:
    assert complaints(page) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "written", "misuse", "message"),
    [
        ("runs/trainings.ts", "base: run.base_model", "base: run.basis", "Property 'basis' does not exist on type"),
        (
            "deployments/List.svelte",
            "value: (deployment) => deployment.live.number",
            "value: (deployment) => deployment.live.count",
            "'count' does not exist",
        ),
        ("traces/Traces.svelte", 'Row<"/api/v1/spans">', 'Row<"/api/v1/tracks">', "does not satisfy the constraint 'keyof paths'"),
        (
            "runs/Run.svelte",
            'get("/api/v1/jobs/{job}", { job: id })',
            'get("/api/v1/job/{job}", { job: id })',
            "is not assignable to parameter of type 'keyof paths'",
        ),
    ],
)
def test_a_misuse_of_an_answer_is_found(page: Path, file: str, written: str, misuse: str, message: str) -> None:
    script = page / PAGES / file
    right = script.read_text()
    assert right.count(written) == 1
    script.write_text(right.replace(written, misuse))
    try:
        found = complaints(page)
    finally:
        script.write_text(right)
    assert any(where.endswith(file) and message in said for where, said in found), found

"""docs/api.md names every route, field, code and refusal that there is, in its section, and no route that there is not."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from bloomery.api import errors
from bloomery.api.routes.openai import refused
from bloomery.api.routes.openai.requests import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, REFUSED_IN_MESSAGES, ChatRequest, CompletionRequest
from bloomery.types.resources import FeedbackType
from bloomery.types.statistics import Paired
from tests.api.server import serving

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"
SECTIONS = {
    "runs": "Training runs",
    "samples": "Samples with drafts",
    "versions": "Exports",
    "deployments": "Deployments",
    "traffic": "Traffic and feedback",
    "datasets": "Data sets",
    "jobs": "Managed jobs",
    "graders": "Graders",
    "evaluations": "Evaluations",
    "keys": "Keys",
    "server": "The server",
    "openai": "OpenAI's contract",
}
METHODS = ("get", "post", "put", "patch", "delete")
PAGED = {"limit", "offset", "data", "has_more"}

Operation = dict[str, Any]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server.http.get("/api/v1/openapi.json").json()


def section(title: str) -> str:
    """The text under a heading of the page."""
    _, _, below = PAGE.read_text().partition(f"\n## {title}\n")
    assert below, f"docs/api.md has no section `{title}`"
    return below.partition("\n## ")[0]


def words(text: str) -> set[str]:
    """Everything in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def operations(schema: dict[str, Any], tag: str) -> dict[str, Operation]:
    """What the app serves under a tag, by method and path as the page writes it."""
    served = {
        f"{method.upper()} {path}": path_item[method] for path, path_item in schema["paths"].items() for method in METHODS if method in path_item
    }
    return {route: operation for route, operation in served.items() if operation.get("tags") == [tag]}


def fields(schema: dict[str, Any], part: Any) -> set[str]:
    """The parameters and properties that a part of the schema mentions, through all references."""
    if isinstance(part, list):
        return set().union(*(fields(schema, item) for item in part))
    if not isinstance(part, dict):
        return set()
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return set() if name == "HTTPValidationError" else fields(schema, schema["components"]["schemas"][name])
    mine = {part["name"]} if "in" in part else set(part["properties"]) if isinstance(part.get("properties"), dict) else set()
    return mine.union(*(fields(schema, item) for item in part.values()))


@pytest.mark.parametrize(("tag", "title"), SECTIONS.items())
def test_a_section_names_its_routes_and_no_others(schema: dict[str, Any], tag: str, title: str) -> None:
    named = {word for word in words(section(title)) if word.partition(" ")[0].lower() in METHODS}
    assert set(operations(schema, tag)) == named


def test_every_route_of_ours_belongs_to_a_section(schema: dict[str, Any]) -> None:
    tags = {tag for path_item in schema["paths"].values() for operation in path_item.values() for tag in operation.get("tags", ["untagged"])}
    assert tags - {"tinker"} == set(SECTIONS)
    everything = PAGE.read_text()
    named = {word for word in words(everything) if re.match(r"[A-Z]+ /", word)}
    assert named == set().union(*(operations(schema, tag) for tag in SECTIONS))


@pytest.mark.parametrize("tag", sorted(SECTIONS.keys() - {"openai"}))
def test_a_section_names_every_field_that_is_taken_or_shown(schema: dict[str, Any], tag: str) -> None:
    there_are = set().union(*(fields(schema, operation) for operation in operations(schema, tag).values()))
    assert len(there_are) > 5
    text = section(SECTIONS[tag])
    in_paths = set(re.findall(r"\{(\w+)\}", text))
    assert there_are - PAGED - in_paths - words(text) == set()


def test_pages_errors_and_types_of_feedback_are_explained() -> None:
    assert words(section("Lists")) >= PAGED
    assert words(section("Errors")) >= {*errors.STATUS, "model_not_found", "invalid_api_key"}
    rows = re.findall(r"^\| (`.*`) \| (\d+) \|", section("Errors"), re.MULTILINE)
    assert {code: int(status) for codes, status in rows for code in words(codes)} == dict(errors.STATUS)
    assert words(section("Traffic and feedback")) >= set(get_args(FeedbackType))
    assert words(section("Deployments")) >= set(Paired._fields)


def test_the_openai_section_names_what_is_taken_and_what_is_refused() -> None:
    taken = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    not_taken = {*REFUSED_IN_CHAT, *REFUSED_IN_COMPLETIONS, *REFUSED_IN_MESSAGES}
    text = section(SECTIONS["openai"])
    assert words(text) >= taken | not_taken
    assert {word.removeprefix("/v1/") for word in words(text) if word.startswith("/v1/")} == set(refused.INSTEAD)

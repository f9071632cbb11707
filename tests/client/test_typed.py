"""What methods of the client may be given is typed, and is what their routes take."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest

from bloomery.client import Client
from bloomery.client.client import Spans
from bloomery.client.evaluations import Evaluations
from bloomery.types.resources import CreateRun
from tests.api.server import serving

Parameters = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server.http.get("/api/v1/openapi.json").json()["paths"]


def taken(method: Callable[..., object]) -> dict[str, Any]:
    """The types of what a method may be given by name, `Unpack` unpacked."""
    hints = get_type_hints(method)
    unpacked = {name: kind for name, kind in hints.items() if get_origin(kind) is Unpack}
    named = {name: kind for name, kind in hints.items() if name != "return" and name not in unpacked}
    return named | {name: kind for each in unpacked.values() for name, kind in get_type_hints(get_args(each)[0]).items()}


@pytest.mark.parametrize(
    ("method", "path", "beside"),
    [
        (Spans.list, "/api/v1/spans", {"offset"}),
        (Spans.totals, "/api/v1/spans/totals", set()),
        (Evaluations.pairs, "/api/v1/evaluations/{evaluation}/pairs", set()),
        (Evaluations.list, "/api/v1/evaluations", {"offset"}),
        (Evaluations.leaderboard, "/api/v1/leaderboard", set()),
    ],
)
def test_a_method_takes_what_its_route_does(paths: dict[str, Any], method: Callable[..., object], path: str, beside: set[str]) -> None:
    given = taken(method)
    assert Any not in given.values()
    assert {"kind" if name == "kinds" else name for name in given} | beside == {each["name"] for each in paths[path]["get"]["parameters"]}


def test_a_run_takes_the_fields_of_its_body_as_they_are_typed_there() -> None:
    given = taken(Client.create_run)
    assert given.pop("idempotency_key") == str | None
    assert given == {name: field.annotation for name, field in CreateRun.model_fields.items()}


def test_a_judgement_takes_what_its_route_does(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        fields = server.http.get("/api/v1/openapi.json").json()["components"]["schemas"]["GiveFeedback"]["properties"]
    given = taken(Client.feedback)
    assert set(given) == set(fields)
    assert [name for name, kind in given.items() if kind is Any] == ["value"]

"""docs/tinker.md names every route and field of the contract that the code has, and no route that it has not."""

import inspect
import re
from pathlib import Path

from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.refused import REFUSED
from tests.api.server import serving

PAGE = Path(__file__).parent.parent.parent / "docs" / "tinker.md"


def words() -> set[str]:
    """Everything in backticks."""
    return set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))


def test_every_route_is_named_and_no_other(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        schema = server.http.get("/api/v1/openapi.json").json()
        served = {
            f"{method.upper()} {path}"
            for path, methods in schema["paths"].items()
            for method, operation in methods.items()
            if operation.get("tags") == ["tinker"]
        }
    refused = {f"{method} /api/v1{path}" for method, path in REFUSED}
    assert {word for word in words() if re.match(r"[A-Z]+ /", word)} == served | refused


def test_every_field_is_named() -> None:
    kinds = [kind for kind in vars(bodies).values() if inspect.isclass(kind) and issubclass(kind, bodies.Body)]
    fields = {field for kind in kinds for field in kind.model_fields} - {"type"}
    assert len(fields) > 50
    assert fields - words() == set()

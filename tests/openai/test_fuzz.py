"""The HTTP door, fuzzed from the published OpenAPI document: no answer is the server's fault, every refusal has its contract's envelope.

schemathesis makes requests that fit the document and requests that do not; they go to a real server with a scripted engine.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.openai.server import ScriptedServer

pytestmark = pytest.mark.slow

OPENAI = ("/v1/", "/oai/api/v1/")
OUR_TAGS = {"runs", "versions", "deployments", "traffic", "datasets", "keys", "server", "openai"}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server of its own: what gets through leaves things behind."""
    with ScriptedServer(tmp_path_factory.mktemp("fuzzed")).listening() as server:
        yield server


def operations(server: ScriptedServer, tags: set[str]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(server.http.get("/api/v1/openapi.json").json())
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if tags.intersection(operation.definition.raw.get("tags", ()))]


def fuzz(server: ScriptedServer, operation: Any, examples: int) -> None:
    """As many requests that fit, and as many that do not, where there is anything to get wrong."""
    _fuzz(server, operation, GenerationMode.POSITIVE, examples)
    with suppress(Unsatisfiable):
        _fuzz(server, operation, GenerationMode.NEGATIVE, examples)


def _fuzz(server: ScriptedServer, operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def knock(case: Any) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            # What names no model gets no further.
            case.body["model"] = "tiny"
        answer = case.call(base_url=server.url, headers={"x-api-key": server.http.headers["x-api-key"]}, timeout=30)
        check(case, answer)

    knock()


def check(case: Any, answer: Any) -> None:
    what = f"{case.method} {case.formatted_path}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, what
    assert answer.status_code != 422, what
    if answer.status_code < 400:
        return
    assert answer.headers["x-request-id"], what
    error = answer.json()["error"]
    fields = {"message", "type", "param", "code"} if case.formatted_path.startswith(OPENAI) else {"code", "message", "field"}
    assert set(error) == fields, what
    assert error["message"], what


@pytest.mark.timeout(1200)
def test_no_request_is_the_servers_fault(fuzzed: ScriptedServer) -> None:
    broken = []
    for operation in operations(fuzzed, OUR_TAGS):
        try:
            fuzz(fuzzed, operation, examples=100 if "openai" in operation.definition.raw["tags"] else 25)
        except AssertionError as error:
            broken.append(f"{operation.label}: {error}")
    assert broken == []
    assert fuzzed.sdk().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}]).choices

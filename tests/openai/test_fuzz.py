"""The HTTP door, fuzzed from the published OpenAPI document: no answer is the server's fault, every refusal has its contract's envelope.

schemathesis makes requests that fit the document and requests that do not; they go to a real server with a scripted engine.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET
from schemathesis.core.failures import FailureGroup

from tests.openai.server import ScriptedServer

pytestmark = pytest.mark.slow

OPENAI = ("/v1/", "/oai/api/v1/")
OUR_TAGS = {"runs", "samples", "versions", "deployments", "traffic", "datasets", "keys", "server", "openai"}
FUZZED_ELSEWHERE = {"tinker"}
"""The Training API: tests/tinker/test_fuzz.py and test_fuzz_json.py."""
TAKEN = {
    "DELETE /api/v1/keys/{name}",
    "GET /api/v1/datasets",
    "GET /api/v1/datasets/{name}",
    "GET /api/v1/datasets/{name}/versions/{version}/rows",
    "GET /api/v1/deployments",
    "GET /api/v1/deployments/{name}",
    "GET /api/v1/feedback",
    "GET /api/v1/keys",
    "GET /api/v1/models",
    "GET /api/v1/runs",
    "GET /api/v1/runs/{run_id}",
    "GET /api/v1/runs/{run_id}/checkpoints",
    "GET /api/v1/runs/{run_id}/metrics",
    "GET /api/v1/runs/{run_id}/operations/{seq}",
    "GET /api/v1/snapshots",
    "GET /api/v1/spans",
    "GET /api/v1/spans/{span_id}",
    "GET /api/v1/status",
    "GET /api/v1/versions/{version}/fidelity",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /api/v1/datasets",
    "POST /api/v1/datasets/{name}/curate",
    "POST /api/v1/deployments",
    "POST /api/v1/deployments/{name}/promote",
    "POST /api/v1/deployments/{name}/rollback",
    "POST /api/v1/feedback",
    "POST /api/v1/gc",
    "POST /api/v1/runs",
    "POST /api/v1/versions/{version}/fidelity",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/responses",
}
"""Operations that must have answered 2xx: what is refused by its outline is never looked into."""
MOST_DRAWS: Final = 8


class Known(NamedTuple):
    """Names of what is there, for a name that is made up gets no further than to the look-up."""

    paths: dict[str, dict[str, Any]]
    """Parameters of paths, by the tag of the operations."""
    fields: dict[str, Any]
    """Fields of bodies."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server of its own: what gets through leaves things behind."""
    with ScriptedServer(tmp_path_factory.mktemp("fuzzed")).listening() as server:
        yield server


@pytest.fixture(scope="module")
def known(fuzzed: ScriptedServer) -> Known:
    """One of everything."""
    with fuzzed.client() as client:
        run = client.create_run("tiny", 4)
        version = run.save_snapshot("kept").result().version
        client.deployments.create("router", version)
        client.datasets.create("data")
        rows = client.datasets.add_version("data", {"train": '{"text": "a", "label": "b"}'})
        client.keys.create("spare", ["read"])
        span = client.chat("tiny", [{"role": "user", "content": "x"}])["id"]
        assert client.feedback(span, "correct", True).target == span
    paths = {
        "runs": {"run_id": run.id, "seq": 1},
        "versions": {"version": version, "name": "adapter_config.json"},
        "deployments": {"name": "router"},
        "traffic": {"span_id": span},
        "datasets": {"name": "data", "version": rows.id},
        "keys": {"name": "spare"},
        "openai": {"name": "tiny"},
    }
    return Known(paths, {"model": "tiny", "base_model": "tiny", "version": "tiny", "target": span, "parent": rows.id})


def operations(server: ScriptedServer) -> list[Any]:
    schema = schemathesis.openapi.from_dict(server.http.get("/api/v1/openapi.json").json())
    found = [result.ok() for result in schema.get_all_operations()]
    assert {tag for operation in found for tag in tags_of(operation)} == OUR_TAGS | FUZZED_ELSEWHERE
    assert all(len(tags_of(operation)) == 1 for operation in found)
    return [operation for operation in found if tags_of(operation) <= OUR_TAGS]


def tags_of(operation: Any) -> set[str]:
    return set(operation.definition.raw.get("tags", ()))


def fuzz(server: ScriptedServer, operation: Any, known: Known, examples: int) -> set[int]:
    """As many requests that fit, and as many that do not, where there is anything to get wrong; the statuses of the answers.

    Of those that fit there are more where one must be taken and none is: what a draw of them gets right is luck.
    """
    answered = set[int]()
    for draw in range(MOST_DRAWS):
        answered |= _fuzz(server, operation, GenerationMode.POSITIVE, known, examples, draw)
        if operation.label not in TAKEN or any(map(taken, answered)):
            break
    with suppress(Unsatisfiable):
        answered |= _fuzz(server, operation, GenerationMode.NEGATIVE, known, examples, 0)
    return answered


def taken(status: int) -> bool:
    return 200 <= status < 300


def _fuzz(server: ScriptedServer, operation: Any, mode: GenerationMode, known: Known, examples: int, draw: int) -> set[int]:
    answered = set[int]()
    (tag,) = tags_of(operation)

    @seed(draw)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def knock(case: Any) -> None:
        if mode == GenerationMode.POSITIVE:
            case.path_parameters.update({name: value for name, value in known.paths.get(tag, {}).items() if name in case.path_parameters})
            if isinstance(case.body, dict):
                case.body.update({name: value for name, value in known.fields.items() if name in case.body})
        answer = case.call(base_url=server.url, headers={"x-api-key": server.http.headers["x-api-key"]}, timeout=30)
        check(case, answer)
        if not fits(case):
            assert answer.status_code >= 400, f"{case.method} {case.formatted_path}: taken though it does not fit the document: {case.body!r:.300}"
        answered.add(answer.status_code)

    knock()
    return answered


def fits(case: Any) -> bool:
    """Whether the body, where there is one, is what the document says; bytes are of none of its forms."""
    if case.body is NOT_SET or case.media_type != "application/json":
        return True
    if isinstance(case.body, bytes):
        return False
    schema = case.operation.definition.raw["requestBody"]["content"][case.media_type]["schema"]
    return jsonschema_rs.is_valid({**schema, "components": case.operation.schema.raw_schema["components"]}, case.body)


def check(case: Any, answer: Any) -> None:
    what = f"{case.method} {case.formatted_path}: {answer.status_code} {answer.content[:300]!r}"
    assert answer.status_code < 500, what
    assert answer.status_code != 422, what
    if answer.status_code < 400:
        case.operation.validate_response(answer, case=case)
        return
    assert answer.headers["x-request-id"], what
    error = answer.json()["error"]
    fields = {"message", "type", "param", "code"} if case.formatted_path.startswith(OPENAI) else {"code", "message", "field"}
    assert set(error) == fields, what
    assert error["message"], what


@pytest.mark.timeout(1200)
def test_no_request_is_the_servers_fault(fuzzed: ScriptedServer, known: Known) -> None:
    broken, succeeded = [], set()
    for operation in operations(fuzzed):
        try:
            answered = fuzz(fuzzed, operation, known, examples=100 if "openai" in tags_of(operation) else 25)
        except (AssertionError, FailureGroup) as error:
            broken.append(f"{operation.label}: {error}")
        else:
            succeeded |= {operation.label} if any(map(taken, answered)) else set()
    assert broken == []
    assert succeeded >= TAKEN, sorted(TAKEN - succeeded)
    assert fuzzed.sdk().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}]).choices

"""The HTTP door, fuzzed from the published OpenAPI document: no answer is the server's fault, every refusal has its contract's envelope.

schemathesis makes requests that fit the document and requests that do not; they go to a real server with a scripted engine. What it cannot make up
is in `test_fuzz_changed.py`.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import jsonschema_rs
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET

from bloomery.api.routes.bloomery.runs import MSGPACK
from bloomery.client import Client
from bloomery.models.families import read_config
from bloomery.models.names import stored_places
from bloomery.sync.publish import publish
from bloomery.types.evaluations import EvaluationSpec
from bloomery.types.jobs import Data, JobResult, JobSpec
from bloomery.types.leases import FinishJob
from bloomery.types.operations import Result, SaveSnapshot, SnapshotResult
from bloomery.types.protocol import Execute
from bloomery.types.rollouts import RecordedStep
from tests.api.server import KEY
from tests.live import wait_until
from tests.openai.server import Script, ScriptedEngine, ScriptedServer
from tests.services.fake_engine import BASE, HeldRun

pytestmark = pytest.mark.slow

OPENAI = ("/v1/", "/oai/api/v1/")
OUR_TAGS = {"runs", "samples", "versions", "deployments", "traffic", "datasets", "graders", "evaluations", "jobs", "keys", "server", "openai"}
FUZZED_ELSEWHERE = {"tinker"}
"""The Training API: tests/tinker/test_fuzz.py and test_fuzz_json.py."""
BEGUN_FROM_GOOD = {
    "POST /api/v1/datasets/{name}/versions",
    "POST /api/v1/keys",
    "POST /api/v1/runs/{run_id}/operations/{seq}",
    "POST /api/v1/runs/{run_id}/operations/{seq}/checkpoint",
    "POST /api/v1/runs/{run_id}/operations/{seq}/load",
    "POST /api/v1/runs/{run_id}/operations/{seq}/snapshot",
    "POST /api/v1/runs/{run_id}/rollouts/{step}",
    "POST /api/v1/samples",
}
"""What it takes to be taken is more than the document can say, or has been said before: test_fuzz_changed.py."""
FORMS = {"POST /v1/files", "POST /v1/uploads/{upload}/parts"}
"""The document can say what a form has, and not what a file says: test_files.py and test_uploads.py break both."""
UPLOADS = {"POST /v1/uploads", "POST /v1/uploads/{upload}/complete", "POST /v1/uploads/{upload}/cancel"}
"""The parts of what is completed are a form's."""
OVER_TOO_SOON = {
    "POST /api/v1/evaluations/{evaluation}/cancel",
    "POST /v1/evals/{eval_id}/runs/{run_id}",
    "POST /v1/evals/{eval_id}/runs/{run_id}/cancel",
}
"""Evaluations end here before anybody could cancel one: tests/api/test_evaluations.py and test_evals.py show some that have not."""
TAKEN = {
    "DELETE /api/v1/datasets/{name}",
    "DELETE /api/v1/evaluations/{evaluation}",
    "DELETE /api/v1/keys/{name}",
    "DELETE /api/v1/login",
    "DELETE /v1/evals/{eval_id}",
    "DELETE /v1/evals/{eval_id}/runs/{run_id}",
    "DELETE /v1/files/{file}",
    "GET /api/v1/datasets",
    "GET /api/v1/datasets/{name}",
    "GET /api/v1/datasets/{name}/versions/{version}/estimate",
    "GET /api/v1/datasets/{name}/versions/{version}/preview",
    "GET /api/v1/datasets/{name}/versions/{version}/rejected",
    "GET /api/v1/datasets/{name}/versions/{version}/rows",
    "GET /api/v1/datasets/{name}/versions/{version}/statistics",
    "GET /api/v1/deployments",
    "GET /api/v1/deployments/{name}",
    "GET /api/v1/deployments/{name}/swaps",
    "GET /api/v1/agents",
    "GET /api/v1/endpoints",
    "GET /api/v1/evaluations",
    "GET /api/v1/evaluations/{evaluation}",
    "GET /api/v1/evaluations/{evaluation}/items",
    "GET /api/v1/evaluations/{evaluation}/pairs",
    "GET /api/v1/feedback",
    "GET /api/v1/graders",
    "GET /api/v1/graders/{name}",
    "GET /api/v1/graders/{name}/attacks",
    "GET /api/v1/graders/{name}/calibrations",
    "GET /api/v1/graders/{name}/versions",
    "GET /api/v1/jobs",
    "GET /api/v1/jobs/{job}",
    "GET /api/v1/jobs/{job}/card",
    "GET /api/v1/jobs/{job}/events",
    "GET /api/v1/jobs/{job}/points",
    "GET /api/v1/keys",
    "GET /api/v1/leaderboard",
    "GET /api/v1/models",
    "GET /api/v1/runners/jobs",
    "GET /api/v1/runners/jobs/{job}/points",
    "GET /api/v1/runs",
    "GET /api/v1/runs/{run_id}",
    "GET /api/v1/runs/{run_id}/checkpoints",
    "GET /api/v1/runs/{run_id}/metrics",
    "GET /api/v1/runs/{run_id}/operations/{seq}",
    "GET /api/v1/runs/{run_id}/rollouts",
    "GET /api/v1/runs/{run_id}/rollouts/export",
    "GET /api/v1/runs/{run_id}/rollouts/{step}",
    "GET /api/v1/snapshots",
    "GET /api/v1/spans",
    "GET /api/v1/spans/totals",
    "GET /api/v1/spans/{span_id}",
    "GET /api/v1/status",
    "GET /api/v1/versions/{version}/card",
    "GET /api/v1/versions/{version}/fidelity",
    "GET /api/v1/versions/{version}/files",
    "GET /api/v1/versions/{version}/files/{name}",
    "GET /metrics",
    "GET /v1/batches",
    "GET /v1/batches/{batch}",
    "GET /v1/evals",
    "GET /v1/evals/{eval_id}",
    "GET /v1/evals/{eval_id}/runs",
    "GET /v1/evals/{eval_id}/runs/{run_id}",
    "GET /v1/evals/{eval_id}/runs/{run_id}/output_items",
    "GET /v1/evals/{eval_id}/runs/{run_id}/output_items/{output_item_id}",
    "GET /v1/files",
    "GET /v1/files/{file}",
    "GET /v1/files/{file}/content",
    "GET /v1/fine_tuning/jobs",
    "GET /v1/fine_tuning/jobs/{job}",
    "GET /v1/fine_tuning/jobs/{job}/checkpoints",
    "GET /v1/fine_tuning/jobs/{job}/events",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /api/v1/chains",
    "POST /api/v1/chains/resolve",
    "POST /api/v1/datasets",
    "POST /api/v1/datasets/validate",
    "POST /api/v1/datasets/{name}/curate",
    "POST /api/v1/datasets/{name}/upload",
    "POST /api/v1/datasets/{name}/versions/{version}/split",
    "POST /api/v1/deployments",
    "POST /api/v1/deployments/{name}/price",
    "POST /api/v1/deployments/{name}/promote",
    "POST /api/v1/deployments/{name}/rollback",
    "POST /api/v1/evaluations",
    "POST /api/v1/feedback",
    "POST /api/v1/gc",
    "POST /api/v1/graders",
    "POST /api/v1/graders/{name}/attack",
    "POST /api/v1/graders/{name}/calibrations",
    "POST /api/v1/graders/{name}/run",
    "POST /api/v1/graders/{name}/waive",
    "POST /api/v1/jobs",
    "POST /api/v1/jobs/estimate",
    "POST /api/v1/jobs/resolve",
    "POST /api/v1/jobs/{job}/cancel",
    "POST /api/v1/jobs/{job}/finish",
    "POST /api/v1/jobs/{job}/pause",
    "POST /api/v1/jobs/{job}/report",
    "POST /api/v1/jobs/{job}/resume",
    "POST /api/v1/login",
    "POST /api/v1/runners/claim",
    "POST /api/v1/runners/ended/{job}",
    "POST /api/v1/runners/release",
    "POST /api/v1/runs",
    "POST /api/v1/versions/{version}/fidelity",
    "POST /v1/batches",
    "POST /v1/batches/{batch}/cancel",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/evals",
    "POST /v1/evals/{eval_id}",
    "POST /v1/evals/{eval_id}/runs",
    "POST /v1/fine_tuning/alpha/graders/run",
    "POST /v1/fine_tuning/alpha/graders/validate",
    "POST /v1/fine_tuning/jobs",
    "POST /v1/fine_tuning/jobs/{job}/cancel",
    "POST /v1/fine_tuning/jobs/{job}/pause",
    "POST /v1/fine_tuning/jobs/{job}/resume",
    "POST /v1/responses",
}
"""Operations that must have answered 2xx: what is refused by its outline is never looked into."""
OF_A_LOGIN = {"GET /api/v1/login"}
"""Here everybody shows a key: tests/api/test_login.py."""
ENDLESS = {"GET /api/v1/live"}
"""Its answer has no end, and it takes nothing: tests/api/test_live.py."""
FUZZED = TAKEN | BEGUN_FROM_GOOD | FORMS | UPLOADS | OVER_TOO_SOON | OF_A_LOGIN
CHECK: Final = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "yes", "operation": "eq"}
DATA: Final = Data(dataset="data")
ROWS: Final = b"".join(json.dumps({"text": f"number {number}", "label": str(number % 3)}).encode() + b"\n" for number in range(20))
"""For files whose bytes are the body, too."""
BYTES: Final = "application/octet-stream"
QUERY: Final = {
    "model": "tiny",
    "split": "train",
    "format": "jsonl",
    "dataset": "data",
    "grader": "checks",
    "grader_version": None,
    "parent": None,
    "version": None,
}
"""Names in queries; None: left out."""
OF_WORKERS: Final = ("POST /api/v1/jobs/{job}/report", "POST /api/v1/jobs/{job}/finish")
"""Whoever works at a job speaks of it, with the key that is good for that."""
ASKED: Final = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}
MOST_DRAWS: Final = 8
EXAMPLES: Final = 25
EXAMPLES_OF_BODIES: Final = 50
"""In OpenAI's contract, whose bodies have the most parts."""


class Lent(NamedTuple):
    """A job that somebody works at, and the key that he was lent for it."""

    job: str
    key: str


class Known(NamedTuple):
    """Names of what is there, for a name that is made up gets no further than to the look-up."""

    paths: dict[str, dict[str, Any]]
    """Parameters of paths, by the tag of the operations, or by their label."""
    fields: dict[str, Any]
    """Fields of bodies, and of the stages in them."""
    fields_of: dict[str, dict[str, Any]]
    """The same of one tag alone."""
    lend: Callable[[], Lent]
    """One more job, which is worked at: for operations of who does so."""


class PublishingEngine(ScriptedEngine):
    """What it publishes is an adapter that can be written out."""

    def _perform(self, message: Execute, run: HeldRun) -> Result:
        if not isinstance(message.operation, SaveSnapshot):
            return super()._perform(message, run)
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        blob = save({f"{name}.lora_A.weight": np.ones((4, 64), np.float32), f"{name}.lora_B.weight": np.ones((64, 4), np.float32)})
        whose = {"run_id": message.run_id, "step": run.step, "base": BASE, "parent": BASE, "template_hash": message.operation.template_hash}
        manifest = publish(self.blobs.put_all, blob, kind="lora", numerics=self.numerics, rank=4, alpha=32.0, targets=("attn",), **whose)
        return SnapshotResult(version=manifest.version, key=manifest.key, size_bytes=manifest.size_bytes, step=run.step)


class FuzzedServer(ScriptedServer):
    """Its base model has weights, of zeros."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.scripted = self.engine = PublishingEngine(self.engine.socket, self.engine.blobs)
        base = Path(self.config.models[0].path)
        save_file({name: np.zeros(place.shape, np.float32) for name, place in stored_places(read_config(base))}, base / "model.safetensors")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server of its own: what gets through leaves things behind."""
    schemathesis.openapi.media_type(MSGPACK, st.binary(max_size=200))
    with FuzzedServer(tmp_path_factory.mktemp("fuzzed")).listening() as server:
        yield server


@pytest.fixture(scope="module")
def known(fuzzed: ScriptedServer) -> Known:
    """One of everything."""
    with fuzzed.client() as client:
        run = client.create_run("tiny", 4)
        version = run.save_snapshot("kept").result().version
        run.rollouts.add(1, RecordedStep(groups=()))
        client.deployments.create("router", version)
        for name in ("data", "data-that-goes"):
            client.datasets.create(name)
        rows = client.datasets.add_version("data", {"train": ROWS.decode()})
        client.keys.create("spare", ["read"])
        span = client.chat("tiny", [{"role": "user", "content": "x"}])["id"]
        assert fuzzed.http.post("/api/v1/graders", json={"name": "checks", "spec": CHECK}).status_code == 201
        assert client.feedback(span, "correct", True).target == span
        tested = {"name": "tested", "data": {"dataset": "data", "split": "train"}, "models": ["tiny"], "graders": ["checks"]}
        evaluation = client.evaluations.create(EvaluationSpec.model_validate(tested)).id
        client.evaluations.wait(evaluation, 60)
    with fuzzed.sdk() as sdk:
        file = sdk.files.create(file=("rows.jsonl", b'{"text": "a", "label": "b"}'), purpose="fine-tune").id
        job = sdk.fine_tuning.jobs.create(model="tiny", training_file=file).id
        config: Any = {"type": "custom", "item_schema": {}, "include_sample_schema": True}
        criteria: list[Any] = [{**CHECK, "name": "checks"}]
        eval_ = sdk.evals.create(data_source_config=config, testing_criteria=criteria).id
        source: Any = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {}, "sample": {"output_text": "yes"}}]}}
        run_of_eval = sdk.evals.runs.create(eval_, data_source=source).id
        wait_until(lambda: sdk.evals.runs.retrieve(run_of_eval, eval_id=eval_).status == "completed")
        eval_that_goes = sdk.evals.create(data_source_config=config, testing_criteria=criteria).id
        asked = sdk.files.create(file=("requests.jsonl", json.dumps(ASKED).encode()), purpose="batch").id
        fuzzed.scripted.script = Script(stall_after=0)
        batch = sdk.batches.create(input_file_id=asked, endpoint="/v1/completions", completion_window="24h").id
        # Whatever is cancelled may be cancelled again.
        sdk.batches.cancel(batch)
        fuzzed.scripted.script = Script()
    numbers = itertools.count()

    def lend() -> Lent:
        with fuzzed.client() as client:
            job = client.jobs.create(JobSpec(name=f"lent-{next(numbers)}", base_model="tiny", data=DATA)).id
            while (lease := client.runner("fuzz").claim(0)) is not None and lease.job.id != job:
                pass
        assert lease is not None
        return Lent(job, lease.token)

    done = lend()
    with Client(fuzzed.url, done.key) as worker:
        made = {"run": run.id, "version": version, "checkpoint": "kept", "step": 1, "digest": "d", "compared": [], "base_version": BASE}
        worker.working(done.job).finish(FinishJob(state="succeeded", result=JobResult.model_validate(made)))
    with fuzzed.client() as client:
        steered = client.jobs.create(JobSpec(name="steered", base_model="tiny", data=DATA)).id
    of_eval = {"eval_id": eval_, "run_id": run_of_eval, "output_item_id": f"{run_of_eval}-item-0"}
    paths = {
        "runs": {"run_id": run.id, "seq": 1, "step": 1},
        "versions": {"version": version, "name": "adapter_config.json"},
        "deployments": {"name": "router"},
        "traffic": {"span_id": span},
        "datasets": {"name": "data", "version": rows.id},
        "DELETE /api/v1/datasets/{name}": {"name": "data-that-goes"},
        "graders": {"name": "checks"},
        "jobs": {"job": steered, "version": version},
        "GET /api/v1/jobs/{job}/card": {"job": done.job},
        "DELETE /v1/evals/{eval_id}": {"eval_id": eval_that_goes},
        "evaluations": {"evaluation": evaluation},
        "keys": {"name": "spare"},
        "openai": {"name": "tiny", "file": file, "job": job, "batch": batch, **of_eval},
    }
    fields = {
        "model": "tiny",
        "base_model": "tiny",
        "version": "tiny",
        "target": span,
        "parent": rows.id,
        "spec": CHECK,
        "grader": CHECK,
        "training_file": file,
        "input_file_id": asked,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "testing_criteria": criteria,
        "data_source_config": config,
        "data_source": source,
        "wait_s": 0,
    }
    fields_of = {
        "jobs": {"data": DATA.model_dump(), "begin": None},
        "keys": {"key": KEY},
        "evaluations": {"data": {"dataset": "data", "split": "train"}, "models": ["tiny"], "graders": ["checks"]},
    }
    return Known(paths, fields, fields_of, lend)


def operations(server: ScriptedServer) -> list[Any]:
    schema = schemathesis.openapi.from_dict(server.http.get("/api/v1/openapi.json").json())
    found = [result.ok() for result in schema.get_all_operations()]
    assert {tag for operation in found for tag in tags_of(operation)} == OUR_TAGS | FUZZED_ELSEWHERE
    assert all(len(tags_of(operation)) == 1 for operation in found)
    ours = [operation for operation in found if tags_of(operation) <= OUR_TAGS]
    assert {operation.label for operation in ours} == FUZZED | ENDLESS
    return ours


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
    if can_be_wrong(operation):
        answered |= _fuzz(server, operation, GenerationMode.NEGATIVE, known, examples, 0)
    return answered


def can_be_wrong(operation: Any) -> bool:
    """Whether a request can fail to fit the document: any word does in a path and in a header."""
    raw = operation.definition.raw
    return "requestBody" in raw or not all(
        parameter["in"] == "header"
        or (parameter["in"] == "path" and parameter["schema"].keys() <= {"type", "title"} and parameter["schema"]["type"] == "string")
        for parameter in raw.get("parameters", ())
    )


def taken(status: int) -> bool:
    return 200 <= status < 300


def _fuzz(server: ScriptedServer, operation: Any, mode: GenerationMode, known: Known, examples: int, draw: int) -> set[int]:
    answered = set[int]()
    (tag,) = tags_of(operation)
    paths, key = known.paths.get(tag, {}) | known.paths.get(operation.label, {}), server.http.headers["x-api-key"]
    fields = known.fields | known.fields_of.get(tag, {})
    if operation.label in OF_WORKERS:
        lent = known.lend()
        paths, key = paths | {"job": lent.job}, lent.key

    sends = requests.Session()

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
            case.path_parameters.update({name: value for name, value in paths.items() if name in case.path_parameters})
            if isinstance(case.body, dict):
                for part in (case.body, *case.body.get("stages", ())):
                    part.update({name: value for name, value in fields.items() if name in part})
            if case.media_type == BYTES:
                case.body = ROWS
            named = {name: QUERY.get(name, value) for name, value in (case.query or {}).items()}
            case.query = {name: value for name, value in named.items() if value is not None}
        answer = case.call(base_url=server.url, session=sends, headers={"x-api-key": key}, timeout=120)
        check(case, answer)
        if not fits(case):
            assert answer.status_code >= 400, f"{case.method} {case.formatted_path}: taken though it does not fit the document: {case.body!r:.300}"
        answered.add(answer.status_code)

    with sends:
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


@pytest.fixture(scope="module")
def fuzzable(fuzzed: ScriptedServer) -> dict[str, Any]:
    """Operations by label."""
    return {operation.label: operation for operation in operations(fuzzed)}


def its_turn(label: str) -> tuple[int, bool, str]:
    """What is made is looked at afterwards, and what is cancelled, collected or deleted is asked for by others before."""
    return ("POST", "GET", "DELETE").index(label.split()[0]), label.endswith(("/cancel", "/gc")), label


@pytest.mark.parametrize("label", sorted(FUZZED, key=its_turn))
def test_no_request_is_the_servers_fault(fuzzed: ScriptedServer, known: Known, fuzzable: dict[str, Any], label: str) -> None:
    operation = fuzzable[label]
    many = label.split()[1].startswith(OPENAI) and "requestBody" in operation.definition.raw
    answered = fuzz(fuzzed, operation, known, EXAMPLES_OF_BODIES if many else EXAMPLES)
    assert label not in TAKEN or any(map(taken, answered)), answered
    assert taken(fuzzed.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).status_code)

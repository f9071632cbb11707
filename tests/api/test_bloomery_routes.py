"""Bloomery's own contract, over HTTP from end to end; the engine is a fake."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from bloomery.render import ChatTokenizer
from bloomery.services.data.span_rows import RecordedSample
from bloomery.services.weights.target import Target
from bloomery.types.generation import Weights
from bloomery.types.operations import AdamParams, Failed, ForwardBackward, ForwardBackwardResult, OptimStep, Result, SaveCheckpoint, SnapshotResult
from bloomery.types.wire import encode
from tests.api.server import Server, serving
from tests.services.fake_engine import BASE
from tests.services.runs_stage import forward_backward, until
from tests.services.stage import BASE_TARGET, chat

STEP = OptimStep(adam=AdamParams(learning_rate=1e-3))
MSGPACK = {"content-type": "application/msgpack"}
GONE = "0123456789abcdef" * 2
"""The hash of a base that is served no more."""
_results: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def ok(server: Server, method: str, path: str, body: Any = None) -> Any:
    answer = server.http.request(method, f"/api/v1{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def new_run(server: Server) -> str:
    run: str = ok(server, "POST", "/runs", {"base_model": "tiny", "rank": 4})["id"]
    return run


def result(server: Server, run: str, seq: int) -> Result:
    answer = server.http.get(f"/api/v1/runs/{run}/operations/{seq}?wait=20")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/msgpack"
    return _results.decode(answer.content)


def test_a_run_is_created_trained_and_shown(server: Server) -> None:
    created = ok(server, "POST", "/runs", {"base_model": "tiny", "rank": 4, "train_mlp": False, "name": "first", "metadata": {"a": "b"}})
    run = created["id"]
    assert (created["next_seq"], created["train_mlp"], created["base_hash"], created["step"]) == (1, False, BASE, 0)
    assert isinstance(created["seed"], int)
    for seq, operation in enumerate([forward_backward(), OptimStep(adam=AdamParams(learning_rate=1e-3))], start=1):
        answer = server.http.post(f"/api/v1/runs/{run}/operations/{seq}", content=encode(operation), headers=MSGPACK)
        assert (answer.status_code, answer.json()) == (202, {"run_id": run, "seq": seq})
    assert isinstance(result(server, run, 1), ForwardBackwardResult)
    ok(server, "POST", f"/runs/{run}/operations/3/snapshot", {"name": "v1"})
    snapshot = result(server, run, 3)
    assert isinstance(snapshot, SnapshotResult)
    assert ok(server, "GET", f"/runs/{run}")["step"] == 1
    assert [saved["version"] for saved in ok(server, "GET", "/snapshots")["data"]] == [snapshot.version]
    points = ok(server, "GET", f"/runs/{run}/metrics")["data"]
    assert [point["seq"] for point in points] == [1, 2, 3]
    assert points[0]["values"]["loss"] == points[0]["values"]["loss:sum"] / 2
    assert [point["seq"] for point in ok(server, "GET", f"/runs/{run}/metrics?after=1")["data"]] == [2, 3]
    assert [run["id"] for run in ok(server, "GET", "/runs")["data"]] == [run]


def test_what_is_wrong_with_an_operation_is_told_by_the_names_of_this_contract(server: Server) -> None:
    run, step = new_run(server), encode(OptimStep(adam=AdamParams(learning_rate=1e-3)))
    ahead = server.http.post(f"/api/v1/runs/{run}/operations/1000000", content=step, headers=MSGPACK)
    unknown = server.http.get(f"/api/v1/runs/{run}/operations/7")
    unsaved = server.http.post(f"/api/v1/runs/{run}/operations/1/load", json={"run_id": run, "name": "never"})
    told = [(answer.status_code, answer.json()["error"]["field"]) for answer in (ahead, unknown, unsaved)]
    assert told == [(400, "seq"), (404, "seq"), (404, "name")]


@pytest.mark.slow
def test_another_operation_under_a_number_that_is_taken_is_refused(server: Server) -> None:
    run, there = new_run(server), new_run(server)
    ok(server, "POST", f"/runs/{run}/operations/1/checkpoint", {"name": "end"})
    result(server, run, 1)

    def submit(seq: int, operation: Any) -> Any:
        return server.http.post(f"/api/v1/runs/{there}/operations/{seq}", content=encode(operation), headers=MSGPACK)

    def save(seq: int, verb: str, body: dict[str, Any]) -> Any:
        return server.http.post(f"/api/v1/runs/{there}/operations/{seq}/{verb}", json=body)

    attempts = [
        (lambda: save(1, "load", {"run_id": run, "name": "end"}), lambda: save(1, "load", {"run_id": run, "name": "end", "optimizer": True})),
        (lambda: submit(2, STEP), lambda: submit(2, {"type": "optim_step", "adam": {"learning_rate": 1e-3}})),
        (lambda: submit(3, forward_backward()), lambda: submit(3, forward_backward())),
        (lambda: save(4, "checkpoint", {"name": "a"}), lambda: save(4, "checkpoint", {"name": "a"})),
        (lambda: save(5, "snapshot", {}), lambda: save(5, "snapshot", {"name": None})),
    ]
    others = [
        lambda: save(1, "load", {"run_id": run, "name": "end", "optimizer": False}),
        lambda: submit(2, OptimStep(adam=AdamParams(learning_rate=2e-3))),
        lambda: submit(3, structs.replace(forward_backward(), backward=False)),
        lambda: save(4, "snapshot", {"name": "a"}),
        lambda: save(5, "snapshot", {"name": "a"}),
    ]
    for seq, ((first, again), other) in enumerate(zip(attempts, others, strict=True), start=1):
        assert (first().status_code, again().status_code) == (202, 202)
        for finished in (False, True):
            error = other().json()["error"]
            assert (other().status_code, error["code"], error["field"]) == (409, "conflict", "seq")
            assert error["message"].startswith(f"operation {seq} was submitted before with another body: repeat that body, or give")
            if not finished:
                result(server, there, seq)


def test_a_run_that_is_asked_for_again_under_its_key_is_the_same_run(server: Server) -> None:
    def create(key: str, body: dict[str, Any]) -> Any:
        return server.http.post("/api/v1/runs", json={"base_model": "tiny", "rank": 4, **body}, headers={"x-idempotency-key": key})

    first, again = create("a", {"metadata": {"x": "1", "y": "2"}}), create("a", {"metadata": {"y": "2", "x": "1"}, "alpha": 32.0})
    assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
    for other in ({}, {"metadata": {"x": "1", "y": "3"}}, {"metadata": {"x": "1", "y": "2"}, "seed": first.json()["seed"]}):
        refused = create("a", other)
        assert (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["field"]) == (409, "conflict", "x-idempotency-key")
        assert "repeat that body, or give a new request a new key" in refused.json()["error"]["message"]
    assert create("b", {}).json()["id"] != first.json()["id"]
    assert len(ok(server, "GET", "/runs")["data"]) == 2
    assert (create("", {}).status_code, create("k" * 257, {}).status_code) == (400, 400)


def test_a_result_that_is_not_there_yet_is_a_202(server: Server) -> None:
    run = new_run(server)
    server.hold_engine(True)
    server.http.post(f"/api/v1/runs/{run}/operations/1", content=encode(forward_backward()), headers=MSGPACK)
    answer = server.http.get(f"/api/v1/runs/{run}/operations/1")
    assert answer.status_code == 202
    assert "the engine is " in answer.json()["waiting_for"]
    server.hold_engine(False)
    assert isinstance(result(server, run, 1), ForwardBackwardResult)
    unknown = server.http.get(f"/api/v1/runs/{run}/operations/2")
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, f"run `{run}` has no operation 2, its last one is 1: submit it first")
    assert server.http.get(f"/api/v1/runs/{run}/operations/1?wait=nan").status_code == 400


def test_a_failed_operation_is_a_result_and_the_run_goes_on(server: Server) -> None:
    run = new_run(server)
    steps = [
        ForwardBackward(loss="nonsense", loss_config={}, data=forward_backward().data),
        OptimStep(adam=AdamParams(learning_rate=1e-3)),
        OptimStep(adam=AdamParams(learning_rate=float("nan"))),
        forward_backward(),
    ]
    for seq, operation in enumerate(steps, start=1):
        server.http.post(f"/api/v1/runs/{run}/operations/{seq}", content=encode(operation), headers=MSGPACK)
    failed = result(server, run, 1)
    assert isinstance(failed, Failed)
    assert "nonsense" in failed.message
    assert isinstance(result(server, run, 2), Failed)
    unstepped = result(server, run, 3)
    assert isinstance(unstepped, Failed)
    assert "learning_rate" in unstepped.message
    assert isinstance(result(server, run, 4), ForwardBackwardResult)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"not msgpack", MSGPACK),
        (b"", MSGPACK),
        (encode(SaveCheckpoint(key="checkpoints/somebody/elses")), MSGPACK),
        (encode({"type": "optim_step", "adam": {"learning_rate": 1.0, "unknown": 1}}), MSGPACK),
        (
            encode(
                {
                    "type": "forward_backward",
                    "loss": "x",
                    "loss_config": {},
                    "data": [{"tokens": {"dtype": "int32", "shape": [9], "data": b""}, "inputs": {}}],
                }
            ),
            MSGPACK,
        ),
        (encode(forward_backward()), {"content-type": "application/json"}),
    ],
)
def test_a_body_that_is_no_computation_is_refused_and_takes_no_number(server: Server, body: bytes, headers: dict[str, str]) -> None:
    run = new_run(server)
    answer = server.http.post(f"/api/v1/runs/{run}/operations/1", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")
    assert ok(server, "GET", f"/runs/{run}")["next_seq"] == 1


def test_a_run_begins_where_a_checkpoint_of_another_ended(server: Server) -> None:
    first, second = new_run(server), new_run(server)
    ok(server, "POST", f"/runs/{first}/operations/1/checkpoint", {"name": "end"})
    saved = result(server, first, 1)
    ok(server, "POST", f"/runs/{second}/operations/1/load", {"run_id": first, "name": "end"})
    assert result(server, second, 1).digest == saved.digest  # type: ignore[union-attr]
    names = [(saved["kind"], saved["name"]) for saved in ok(server, "GET", f"/runs/{first}/checkpoints")["data"]]
    assert names == [("named", "end")]
    missing = server.http.post(f"/api/v1/runs/{second}/operations/2/load", json={"run_id": first, "name": "nothing"})
    assert missing.status_code == 404


def test_the_loop_of_deploy_record_judge_and_curate(server: Server) -> None:
    run = new_run(server)
    ok(server, "POST", f"/runs/{run}/operations/1/snapshot", {})
    version = result(server, run, 1).version  # type: ignore[union-attr]
    ok(server, "POST", "/deployments", {"name": "router", "version": "tiny"})
    promoted = ok(server, "POST", "/deployments/router/promote", {"version": version, "evidence": {"n": 1}})
    assert (promoted["live"]["version"], promoted["live"]["number"]) == (version, 2)
    assert ok(server, "POST", "/deployments/router/rollback", {"revision": 1})["live"]["version"] == BASE
    assert ok(server, "GET", "/deployments/router") == ok(server, "GET", "/deployments")["data"][0]

    rows = '{"text": "a", "label": "1"}\n{"text": "b", "label": "2"}'
    ok(server, "POST", "/datasets", {"name": "data"})
    first = ok(server, "POST", "/datasets/data/versions", {"format": "jsonl", "splits": {"train": rows, "eval": '{"text": "c", "label": "3"}'}})
    server.services.traffic.record(chat("chatcmpl-1", "new question", episode_id="e1"))
    assert (
        ok(server, "POST", "/feedback", {"target": "chatcmpl-1", "metric": "answer", "value": "4", "type": "demonstration"})["target_kind"] == "span"
    )
    assert ok(server, "GET", "/feedback?target=chatcmpl-1")["data"][0]["value"] == "4"
    detail = ok(server, "GET", "/spans/chatcmpl-1")
    assert (detail["span"]["episode_id"], detail["body"]["tokens"]["prompt"], detail["feedback"][0]["value"]) == ("e1", [1, 2, 3], "4")
    assert [span["id"] for span in ok(server, "GET", "/spans?episode=e1")["data"]] == ["chatcmpl-1"]
    through = Target(Weights(version=BASE), BASE, "router", 1, "router", deployment_id=ok(server, "GET", "/deployments/router")["id"])
    server.services.traffic.record(chat("chatcmpl-2", "another question", target=through))
    server.services.traffic.record(chat("chatcmpl-3", "another question", target=Target(Weights(version=BASE), BASE, None, None, "tiny")))
    assert [span["id"] for span in ok(server, "GET", "/spans?base_model=tiny")["data"]] == ["chatcmpl-3"]
    assert ok(server, "GET", "/spans/totals?base_model=tiny")["total"]["requests"] == 1
    unknown = server.http.get("/api/v1/spans?base_model=nothing")
    assert (unknown.status_code, unknown.json()["error"]["field"]) == (404, "base_model")
    gone = Target(Weights(version=GONE), GONE, None, None, "gone")
    server.services.traffic.record(chat("chatcmpl-4", "a question", target=gone))
    assert [span["id"] for span in ok(server, "GET", f"/spans?base_model={GONE}")["data"]] == ["chatcmpl-4"]
    second = ok(server, "POST", "/datasets/data/curate", {"parent": first["id"]})
    page = ok(server, "GET", f"/datasets/data/versions/{second['id']}/rows?split=train&offset=2")
    assert page["data"][0]["messages"] == [{"role": "user", "content": "new question"}, {"role": "assistant", "content": "4"}]
    assert [version["number"] for version in ok(server, "GET", "/datasets/data")["versions"]] == [1, 2]
    broken = server.http.post("/api/v1/datasets/data/versions", json={"format": "csv", "splits": {"train": "text,label\na\n"}})
    assert broken.json()["error"] == {"code": "invalid", "message": "train, row 1: lacks `label`; nothing was imported", "field": "splits.train"}


def test_a_recorded_request_says_what_its_tokens_say_unless_that_would_spell_a_secret(server: Server) -> None:
    tokenizer = ChatTokenizer.load(Path(server.config.models[0].path))
    prompt, answer = (tokenizer.encode(text) for text in ("hé 🙂", "no 🙃"))
    for name, question, base_hash in (("plain", "q", BASE), ("secret", "mail somebody@example.com", BASE), ("gone", "q", "f" * 32)):
        target = BASE_TARGET._replace(base_hash=base_hash)
        sampled = [RecordedSample(answer, [-1.0] * len(answer), "stop")]
        server.services.traffic.record(chat(name, question, target=target, prompt_tokens=prompt, samples=sampled))
    plain, secret, gone = (ok(server, "GET", f"/spans/{name}") for name in ("plain", "secret", "gone"))
    assert ["".join(texts) for texts in (plain["texts"]["prompt"], *plain["texts"]["samples"])] == ["hé 🙂", "no 🙃"]
    assert [len(texts) for texts in (plain["texts"]["prompt"], *plain["texts"]["samples"])] == [len(prompt), len(answer)]
    assert (secret["body"]["tokens"], secret["texts"]) == (None, None)
    assert (gone["body"]["tokens"], gone["texts"]) == (plain["body"]["tokens"], None)


def test_the_server_says_how_it_is(server: Server) -> None:
    assert [model["alias"] for model in ok(server, "GET", "/models")["data"]] == ["tiny"]
    status = ok(server, "GET", "/status")
    assert status["engines"][0]["ready"]
    assert status["replicas"] == []
    assert status["traffic"] == {"mode": "full", "queued": 0, "recorded": 0, "dropped": 0, "failed": 0}
    assert ok(server, "POST", "/gc") == {"spans": 0, "blobs": 0, "bytes": 0}
    assert server.http.get("/healthz").json()["status"] == "ok"
    assert [server.http.head(path).status_code for path in ("/healthz", "/")] == [200, 200]


def test_health_names_the_engine_that_is_missing(server: Server) -> None:
    server.call(server.engine.crash())
    server.call(wait_until_lost(server))
    answer = server.http.get("/healthz")
    replicas: dict[str, list[str]] = {"wanted": [], "ready": [], "silent": []}
    assert (answer.status_code, answer.json()) == (503, {"status": "starting", "waiting_for": ["tiny"], "replicas": replicas, "runners": []})


async def wait_until_lost(server: Server) -> None:
    await until(lambda: not server.services.links[BASE].ready)


@pytest.mark.parametrize("scope", ["infer", "read", "train", "deploy", "admin"])
def test_each_verb_needs_its_scope(server: Server, scope: str) -> None:
    verbs = {
        "read": ("GET", "/api/v1/spans", None),
        "train": ("POST", "/api/v1/runs", {"base_model": "tiny", "rank": 4}),
        "deploy": ("POST", "/api/v1/deployments", {"name": "router", "version": "tiny"}),
        "infer": ("POST", "/api/v1/feedback", {"target": "x", "metric": "m", "value": 1}),
        "admin": ("POST", "/api/v1/gc", None),
    }
    me = server.call(server.services.auth.check("tml-test-key"))
    key = server.call(server.services.auth.create(me, "limited", frozenset({scope}))).key
    refused = {
        needed
        for needed, (method, path, body) in verbs.items()
        if server.http.request(method, path, json=body, headers={"x-api-key": key}).status_code == 403
    }
    assert refused == set(verbs) - {scope}


def test_servers_of_one_process_share_no_more_than_their_routes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "one") as one, serving(tmp_path / "other") as other:
        ok(one, "POST", "/datasets", {"name": "mine"})
        assert [row["name"] for row in ok(one, "GET", "/datasets")["data"]] == ["mine"]
        assert ok(other, "GET", "/datasets")["data"] == []
        other.stop()
        assert len(ok(one, "GET", "/datasets")["data"]) == 1

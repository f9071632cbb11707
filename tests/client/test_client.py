"""The client against the real app: pipelined training, results that survive the api, and every noun once."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bloomery.client import Client
from bloomery.types.errors import Conflict, InvalidInput, NotFound, Unauthorized, Unavailable
from bloomery.types.operations import CheckpointResult, ForwardBackwardResult, OptimStepResult, SnapshotResult
from tests.api.server import KEY, URL, Server, serving
from tests.services.fake_engine import BASE
from tests.services.runs_stage import datum
from tests.services.stage import chat


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def test_operations_are_submitted_without_waiting_for_results(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4, name="mine", metadata={"a": "b"})
        server.hold_engine(True)
        pending = [step for number in range(3) for step in (run.forward_backward([datum([number, 2, 3])]), run.optim_step(1e-3, beta2=0.99))]
        scored = run.forward([datum([7, 2, 3])])
        with pytest.raises(Unavailable, match=r"has no result yet after 0.05 s: the engine is .*Ask again later"):
            pending[0].result(timeout_s=0.05)
        server.hold_engine(False)
        assert pending[-1].result().metrics["step"] == 3
        assert scored.result().outputs[0]["logprobs"].shape == (3,)
        assert [step.seq for step in pending] == [1, 2, 3, 4, 5, 6]
        assert pending[0].result() is pending[0].result()
        run.save_snapshot().result()  # shown when all before it is in the rows
        assert (run.state().step, run.state().next_seq, run.state().name) == (3, 9, "mine")
        assert [point.seq for point in run.metrics(after=5)] == [6, 7, 8]


def test_a_restart_of_the_api_loses_nothing_and_is_waited_for(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4)
        server.hold_engine(True)
        first = run.forward_backward([datum([1, 2, 3])])
        server.stop()
        restart = threading.Thread(target=lambda: (server.hold_engine(False), server.start()))
        restart.start()
        second = run.optim_step(1e-3)
        assert first.result().metrics["loss:sum"] > 0
        assert second.result().metrics["step"] == 1
        restart.join()
        taken_up = client.run(run.id)
        assert taken_up.optim_step(1e-3).result().metrics["step"] == 2


class Forgetful(httpx.BaseTransport):
    """Passes everything on, and loses the first answer to a request that makes a run."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport
        self.keys: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        if (request.method, request.url.path) == ("POST", "/api/v1/runs"):
            self.keys.append(request.headers["x-idempotency-key"])
            if len(self.keys) == 1:
                raise httpx.ReadError("the server died", request=request)
        return answer


def test_a_run_is_created_once_though_the_answer_is_lost(server: Server) -> None:
    transport = Forgetful(server.transport)
    with Client(URL, KEY, transport=transport) as client:
        first, second = client.create_run("tiny", 4), client.create_run("tiny", 4)
        assert {run.id for run in client.runs()} == {first.id, second.id}
    lost, repeated, other = transport.keys
    assert lost == repeated != other


class Deaf(httpx.BaseTransport):
    """Passes everything on, and loses every first answer to what changes something."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport
        self._heard: set[str] = set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._transport.handle_request(request)
        key = request.headers.get("idempotency-key")
        if key is not None and key not in self._heard:
            self._heard.add(key)
            raise httpx.ReadError("the server died", request=request)
        return answer


def test_what_a_client_changes_is_changed_once_though_answers_are_lost(server: Server) -> None:
    with Client(URL, KEY, transport=Deaf(server.transport)) as client:
        client.deployments.create("router", "tiny")
        client.deployments.promote("router", "tiny")
        client.deployments.rollback("router", 1)
        client.datasets.create("data")
        made = client.datasets.add_version("data", {"train": '{"text": "a", "label": "b"}'})
        client.datasets.curate("data", made.id)
        assert (client.deployments.get("router").live.number, len(client.deployments.get("router").revisions)) == (1, 2)
        assert len(client.datasets.get("data").versions) == 2
        with pytest.raises(Conflict, match="its secret is shown once: revoke it and make another"):
            client.keys.create("program", ["read"])
        assert [key.name for key in client.keys.list()] == ["development", "program"]


def test_a_program_that_is_started_again_finds_its_run_by_its_own_key(server: Server) -> None:
    found = []
    for _ in range(2):
        with server.client() as client:
            found.append(client.create_run("tiny", 4, seed=1, idempotency_key="mine").id)
            assert [run.id for run in client.runs()] == [found[0]]
    assert found[0] == found[1]


def test_a_submission_without_an_answer_stops_the_writer(server: Server) -> None:
    with server.client(patience_s=0.1) as client:
        run = client.create_run("tiny", 4)
        server.stop()
        with pytest.raises(Unavailable):
            run.optim_step(1e-3)
        server.start()
        with pytest.raises(Conflict, match=r"whether operation 1 .* was accepted is unclear"):
            run.optim_step(1e-3)
        assert client.run(run.id).forward_backward([datum([1, 2])]).seq == 1


def test_failed_operations_raise_where_their_result_is_asked_for(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4)
        empty, step, fine = run.forward_backward([]), run.optim_step(1e-3), run.optim_step(1e-3)
        with pytest.raises(InvalidInput, match=r"operation 1 of run .*data is empty"):
            empty.result()
        with pytest.raises(InvalidInput):
            step.result()
        assert fine.result().metrics["step"] == 1
        with pytest.raises(InvalidInput, match="rank"):
            client.create_run("tiny", -1)


def test_an_operation_that_was_another_one_is_not_taken_for_what_is_asked(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4)
        trained, stepped = run.forward_backward([datum([1, 2])]).result(), run.optim_step(1e-3).result()
        saved = run.save_checkpoint("end").result()
        kinds = {1: ForwardBackwardResult, 2: OptimStepResult, 3: CheckpointResult}
        again = client.run(run.id)
        assert again.submitted(1, ForwardBackwardResult).result().metrics == trained.metrics
        assert again.submitted(2, OptimStepResult).result() == stepped
        assert again.submitted(3, CheckpointResult).result() == saved
        for seq, made in kinds.items():
            for wrong in {*kinds.values(), SnapshotResult} - {made}:
                with pytest.raises(Conflict, match=f"operation {seq} of run `{run.id}` was another one: its result is a {made.__name__}"):
                    again.submitted(seq, wrong).result()
        assert again.optim_step(1e-3).seq == 4


def test_a_run_continues_from_a_checkpoint_of_another(server: Server) -> None:
    with server.client() as client:
        first = client.create_run("tiny", 4)
        first.forward_backward([datum([1, 2])])
        first.optim_step(1e-3)
        saved = first.save_checkpoint("end").result()
        second = client.create_run("tiny", 4)
        loaded = second.load(first.id, "end").result()
        assert (loaded.digest, loaded.step) == (saved.digest, 1)
        assert second.save_snapshot("v2").result().version == first.save_snapshot().result().version
        assert [(item.kind, item.name) for item in first.checkpoints()] == [("named", "end")]
        assert {run.id for run in client.runs()} == {first.id, second.id}


def test_two_writers_of_one_run_notice_each_other(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4)
        other = client.run(run.id)
        run.optim_step(1e-3).result()
        with pytest.raises(Conflict, match="submitted before with another body"):
            other.forward_backward([datum([1, 2])]).result()


@pytest.mark.slow
def test_deployments_traffic_and_data_sets(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4)
        version = run.save_snapshot("v1").result().version
        assert client.deployments.create("router", "tiny", {"why": "first"}).live.version == BASE
        assert client.deployments.promote("router", version).live.number == 2
        assert client.deployments.rollback("router", 1) == client.deployments.get("router") == client.deployments.list()[0]
        client.datasets.create("data")
        lines = "\n".join(json.dumps({"text": f"t{number}", "label": "x"}) for number in range(450))
        first = client.datasets.add_version("data", {"train": lines, "eval": '{"text": "e", "label": "y"}'})
        rows = list(client.datasets.rows("data", first.id))
        assert [row.messages[0]["content"] for row in rows] == [f"t{number}" for number in range(450)]
        server.services.traffic.record(chat("chatcmpl-1", "asked"))
        assert client.feedback("chatcmpl-1", "correct", False).type == "bool"
        assert client.feedback("chatcmpl-1", "answer", "better", type="demonstration", author="ada").author == "ada"
        assert [span.id for span in client.spans.list()] == ["chatcmpl-1"]
        assert (client.spans.totals().total.requests, client.spans.totals(kinds=["sample"]).total.requests) == (1, 0)
        detail = client.spans.get("chatcmpl-1")
        assert detail.body is not None
        assert [given.value for given in detail.feedback] == ["better", False]
        second = client.datasets.curate("data", first.id, since_us=0)
        assert second.counts["train.rows"] == 451
        assert client.datasets.get("data").versions == [first, second]
        assert [data.name for data in client.datasets.list()] == ["data"]


def test_chat_is_answered_whole_and_in_pieces(server: Server) -> None:
    with server.client() as client:
        messages = [{"role": "user", "content": "hi"}]
        whole = client.chat("tiny", messages, max_tokens=4, seed=1)
        assert (whole["system_fingerprint"], whole["usage"]["completion_tokens"]) == (BASE, 4)
        chunks = list(client.chat_stream("tiny", messages, max_tokens=4, seed=1))
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        assert text == whole["choices"][0]["message"]["content"]
        assert client.feedback(whole["id"], "correct", True).target == whole["id"]
        with pytest.raises(NotFound) as unknown:
            client.chat("nobody", messages)
        assert unknown.value.field == "model"


def test_the_server_is_asked_how_it_is(server: Server) -> None:
    with server.client() as client:
        assert client.models()[0].alias == "tiny"
        assert client.status().engines[0].aliases == ["tiny"]
        assert client.collect_garbage().blobs == 0


def test_the_key_comes_from_the_environment_when_none_is_given(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_API_KEY", "tml-test-key")
    with Client(URL, transport=server.transport) as client:
        assert client.runs() == []
    with Client(URL, "tml-wrong", transport=server.transport) as stranger, pytest.raises(Unauthorized):
        stranger.runs()


def test_an_address_where_nobody_listens_is_named() -> None:
    with Client("http://127.0.0.1:9", "tml-key", patience_s=0.1) as client, pytest.raises(Unavailable, match=r"http://127.0.0.1:9/api/v1/runs"):
        client.runs()

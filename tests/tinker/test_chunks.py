"""A batch that is more than one request: how the SDK divides it, as this server's configuration tells it to, and on slow lines."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.lib.public_interfaces import training_client
from tinker.proto.request_conv import forward_backward_request_to_proto

from bloomery.api.app import create_app
from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.services.training.active import Patience
from bloomery.types.checks import MAX_DATA, MAX_TARGETS
from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served

ADAM = types.AdamParams(learning_rate=1e-3)
SHIPPED = "bloomery-tiny"
BYTES_PER_TARGET = 8
GAP_S = 4.0
"""How long these servers wait for a missing operation while nothing comes in: longer than a busy machine keeps either side from going on."""
SLOWLY_S = 1.25 * GAP_S
PIECES = 12


@pytest.fixture(scope="module", params=["127.0.0.1", "10.1.2.3"])
def told(server: Served, request: pytest.FixtureRequest) -> types.ClientConfigResponse:
    """The configuration, as the SDK reads it on this machine and on another."""
    return config_for(server, request.param)


def config_for(server: Served, host: str) -> types.ClientConfigResponse:
    async def ask() -> types.ClientConfigResponse:
        transport = httpx.ASGITransport(create_app(server.services), client=(host, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answer = await http.post("/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers={"x-api-key": KEY})
        return types.ClientConfigResponse.model_validate(answer.json())

    return server.do(ask)


def datum(*tokens: int, weight: float = 1.0) -> types.Datum:
    inputs = {"target_tokens": list(tokens), "weights": [weight] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def test_the_sdk_is_told_to_send_no_more_than_the_door_takes(told: types.ClientConfigResponse) -> None:
    one = datum(1)
    asked = types.ForwardBackwardInput(data=[one], loss_fn="cross_entropy", loss_fn_config={})
    body = forward_backward_request_to_proto(types.ForwardBackwardRequest(forward_backward_input=asked, model_id="m", seq_id=1)).ByteSize()
    around = body - training_client._estimate_datum_bytes_count_proto(one)
    assert told.fwdbwd_max_chunk_len <= MAX_DATA
    assert told.fwdbwd_max_chunk_bytes_count + MAX_DATA * around <= MAX_BODY_BYTES
    assert told.fwdbwd_max_chunk_bytes_count / BYTES_PER_TARGET <= MAX_TARGETS
    # Otherwise the SDK would wait for what it holds back itself.
    assert told.fwdbwd_max_chunk_bytes_count <= told.fwdbwd_dispatch_bytes_semaphore_size


def test_a_client_on_another_machine_sends_requests_of_the_size_that_the_sdk_would_choose_itself(server: Served) -> None:
    usual = types.ClientConfigResponse()
    assert config_for(server, "10.1.2.3").fwdbwd_max_chunk_bytes_count == usual.fwdbwd_max_chunk_bytes_count
    assert config_for(server, "10.1.2.3").fwdbwd_dispatch_bytes_semaphore_size <= usual.fwdbwd_dispatch_bytes_semaphore_size
    assert config_for(server, "127.0.0.1").fwdbwd_max_chunk_bytes_count > usual.fwdbwd_max_chunk_bytes_count


def test_as_many_data_as_the_door_takes_are_one_request_and_more_are_two(server: Served, service: tinker.ServiceClient) -> None:
    run = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    data = [datum(*range(1, 2 + index % 3)) for index in range(MAX_DATA + 3)]
    known = len(server.engine.executed)
    whole, divided = run.forward_backward(data[:MAX_DATA], "cross_entropy"), run.forward_backward(data, "cross_entropy")
    assert len(whole.result().loss_fn_outputs) == MAX_DATA
    assert [output["logprobs"].shape for output in divided.result().loss_fn_outputs] == [[one.model_input.length] for one in data]
    assert [len(message.operation.data) for message in server.engine.executed[known:]] == [MAX_DATA, MAX_DATA, 3]


@pytest.mark.slow
def test_a_batch_of_two_requests_trains_as_the_sum_over_all_its_data(client: tinker.ServiceClient) -> None:
    divided, weighted = (client.create_lora_training_client(base_model=SHIPPED, rank=8, seed=1).result() for _ in range(2))
    counts = {(1, 2): MAX_DATA - 1, (3, 4): 2, (5, 6, 7): 3}
    before = scored(weighted, counts)
    every = [datum(*tokens) for tokens, count in counts.items() for _ in range(count)]
    result = divided.forward_backward(every, "cross_entropy").result()
    one_each = [datum(*tokens, weight=count) for tokens, count in counts.items()]
    expected = weighted.forward_backward(one_each, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == len(every) > MAX_DATA
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    norms = [run.optim_step(ADAM).result().metrics["grad_norm"] for run in (divided, weighted)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    ours, theirs = scored(divided, counts), scored(weighted, counts)
    moved = np.abs(theirs - before).max()
    assert moved > 0
    assert np.abs(ours - theirs).max() < 0.01 * moved


def scored(run: tinker.TrainingClient, texts: Iterable[tuple[int, ...]]) -> np.ndarray:
    """Log-probabilities of all their tokens."""
    outputs = run.forward([datum(*tokens) for tokens in texts], "cross_entropy").result().loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy() for output in outputs])


# Slow lines


def test_the_first_request_of_a_batch_may_take_longer_than_others_wait_for_it(tmp_path: Path) -> None:
    data = [datum(*range(1, 8)) for _ in range(MAX_DATA + 1)]
    first_bytes = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=data[:MAX_DATA], loss_fn="cross_entropy"), model_id="m", seq_id=1
        )
    ).ByteSize()
    with served(tmp_path, patience=Patience(gap_s=GAP_S)) as server, slow_line(server.url, first_bytes / SLOWLY_S) as url:
        with connected(replace(server, url=url)) as client:
            run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
            result = run.forward_backward(data, "cross_entropy").result()
            assert run.optim_step(ADAM).result().metrics["optimizer_step"] == 1
        assert len(result.loss_fn_outputs) == len(data)
        assert sorted(len(message.operation.data) for message in server.engine.executed[:2]) == [1, MAX_DATA]


@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_a_body_that_comes_in_is_waited_for(tmp_path: Path, coding: str) -> None:
    with served(tmp_path, patience=Patience(gap_s=GAP_S)) as server, Batches(server) as batches:
        early, late = batches.body(2), batches.body(1, coding)
        batches.send(early)
        answer = batches.send(late, coding, lambda: threading.Event().wait(SLOWLY_S / PIECES))
        assert answer.status_code == 200, answer.text
        assert [batches.result(seq).headers["content-type"] for seq in (1, 2)] == ["application/x-protobuf"] * 2


@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_a_body_that_stops_coming_in_is_given_up(tmp_path: Path, coding: str) -> None:
    with served(tmp_path, patience=Patience(gap_s=GAP_S)) as server, Batches(server) as batches:
        early, late = batches.body(2), batches.body(1, coding)
        batches.send(early)
        answer = batches.send(late, coding, once(lambda: batches.result(2)))
        assert answer.status_code == 200, answer.text
        assert f"did not arrive within {GAP_S:g} s" in batches.result(1).json()["error"]


class Batches:
    """A run, and requests that train it."""

    def __init__(self, server: Served) -> None:
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": KEY}, timeout=30)

    def __enter__(self) -> "Batches":
        session = self.http.post("/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        self.model_id = self.http.post("/create_model", json=new).json()["model_id"]
        return self

    def __exit__(self, *raised: object) -> None:
        self.http.close()

    def body(self, seq: int, coding: str = "identity") -> bytes:
        """A request that trains on more than a block of zstd holds."""
        rng = np.random.default_rng(seq)
        data = [datum(*rng.integers(1, 50, 20).tolist()) for _ in range(2000)]
        asked = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id=self.model_id, seq_id=seq)
        body = forward_backward_request_to_proto(request).SerializeToString()
        return zstandard.ZstdCompressor().compress(body) if coding == "zstd" else body

    def send(self, body: bytes, coding: str = "identity", between: Callable[[], object] = lambda: None) -> httpx.Response:
        """Piece by piece with something between them."""

        def pieces() -> Iterator[bytes]:
            for at in range(0, len(body), -(-len(body) // PIECES)):
                yield body[at : at - (-len(body) // PIECES)]
                between()

        headers = {"content-type": "application/x-protobuf", "content-encoding": coding}
        return self.http.post("/forward_backward", content=pieces(), headers=headers)

    def result(self, seq: int) -> httpx.Response:
        """Once it is there."""
        answer = self.http.post("/retrieve_future", json={"request_id": f"operation|{self.model_id}|{seq}|"})
        assert answer.status_code == 200, answer.text
        return answer


def once(work: Callable[[], object]) -> Callable[[], object]:
    """The first time that it is called, the work; later nothing."""
    rest = iter([work])
    return lambda: next(rest, lambda: None)()


@contextmanager
def slow_line(url: str, bytes_per_s: float) -> Iterator[str]:
    """An address behind which a server is whose line takes no more than so much from each connection."""
    host, port = str(urlsplit(url).hostname), urlsplit(url).port
    found: Future[tuple[int, Callable[[], object]]] = Future()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: float) -> None:
        while piece := await reader.read(1 << 14):
            await asyncio.sleep(len(piece) * pace)
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The end of the line is no error of whoever was on it.
        with suppress(asyncio.CancelledError, ConnectionError):
            there, back = await asyncio.open_connection(host, port)
            await asyncio.gather(pump(reader, back, 1 / bytes_per_s), pump(there, writer, 0))

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with await asyncio.start_server(carry, "127.0.0.1", 0) as server:
            found.set_result((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    listening, end = found.result(120)
    try:
        yield f"http://127.0.0.1:{listening}"
    finally:
        end()
        thread.join(120)

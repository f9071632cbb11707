"""Whatever arrives at the binary door is answered, never with a server's error or an empty body, and runs go on."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomery.api.routes.tinker import proto
from tests.live import LiveServer
from tests.tinker.over_fake_engine import KEY, MODEL, Served

EXAMPLES = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPINS = {402, 408, 409, 429}
"""Statuses upon which the SDK asks again by itself."""


class Door:
    """A run, and the numbers that were used up."""

    def __init__(self, url: str, key: str, model: str) -> None:
        headers = {"x-api-key": key, "content-type": "application/x-protobuf"}
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=60.0)
        self.session = self.json("/create_session", {"sdk_version": "0.38.0"})["session_id"]
        new = {"session_id": self.session, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": 4}}
        self.model_id: str = self.json("/create_model", new)["model_id"]
        self.seq = 0

    def json(self, path: str, body: Any) -> Any:
        answer = self.http.post(path, json=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, body: bytes) -> httpx.Response:
        """A body for the run's next number or for none."""
        answer = self.http.post("/forward_backward", content=body)
        check(answer)
        if answer.status_code == 200:
            self.seq = max(self.seq, int(answer.json()["request_id"].split("|")[2]))
        return answer

    def go_on(self) -> None:
        """What was accepted has results, and the next good operation a good one."""
        for seq in range(1, self.seq + 1):
            # Takes the place of what did not come; what did stays.
            answer = self.http.post("/optim_step", json={"model_id": self.model_id, "seq_id": seq}, headers=JSON)
            assert answer.status_code == 200 or answer.json()["code"] == "conflict"
        self.seq += 1
        assert self.send(valid(self.model_id, self.seq).SerializeToString()).status_code == 200
        for seq in range(1, self.seq + 1):
            result = self.http.post("/retrieve_future", json={"request_id": f"operation|{self.model_id}|{seq}|"}, headers=JSON)
            check(result)
            assert result.status_code == 200
        assert proto.ForwardBackwardOutput.FromString(result.content).metrics["loss:sum"] > 0


JSON = {"content-type": "application/json"}


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    assert answer.status_code not in SPINS, answer.text
    assert answer.content
    if answer.status_code >= 400:
        assert answer.json()["category"] == "user", answer.text
        # The shortest names what is not there, and that may be an empty text.
        assert len(answer.json()["error"]) >= len("no run ``"), answer.text


def valid(model_id: str, seq: int) -> Any:
    request = proto.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn="cross_entropy")
    for length in (3, 2):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(length, dtype="<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].dense = np.arange(length, dtype="<i8").tobytes()
        datum.loss_fn_inputs["target_tokens"].dtype = proto.DTYPES["DTYPE_INT64"]
        datum.loss_fn_inputs["weights"].dense = np.ones(length, dtype="<f4").tobytes()
        datum.loss_fn_inputs["weights"].dtype = proto.DTYPES["DTYPE_FLOAT32"]
    return request


@pytest.fixture
def door(server: Served) -> Iterator[Door]:
    yield from opened(Door(server.url, KEY, MODEL))


@pytest.fixture
def live_door(live_server: LiveServer) -> Iterator[Door]:
    """To a real engine, with a real model behind it."""
    yield from opened(Door(live_server.url, live_server.key, "bloomery-tiny"))


def opened(door: Door) -> Iterator[Door]:
    try:
        yield door
        door.go_on()
    finally:
        door.http.close()


@EXAMPLES
@given(body=st.binary(max_size=400))
def test_any_bytes(door: Door, body: bytes) -> None:
    door.send(body)


@EXAMPLES
@given(cut=st.integers(0, 300))
def test_a_message_cut_anywhere(door: Door, cut: int) -> None:
    body = valid(door.model_id, door.seq + 1).SerializeToString()
    door.send(body[: min(cut, len(body) - 1)])


@EXAMPLES
@given(data=st.data())
def test_a_message_with_bytes_changed(door: Door, data: st.DataObject) -> None:
    body = bytearray(valid(door.model_id, door.seq + 1).SerializeToString())
    places = st.integers(0, len(body) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        body[place] = value
    changed = proto.ForwardBackwardRequest()
    try:
        changed.ParseFromString(bytes(body))
    except proto.DecodeError:
        changed.seq_id = 0
    # A number far ahead would make the run wait for all before it, as it must.
    if changed.seq_id <= door.seq + 50:
        door.send(bytes(body))


NUMBERS = st.sampled_from([0, 1, -1, 3, 255, 2**31 - 1, -(2**31)])
LONG_NUMBERS = st.sampled_from([0, 1, -1, 3, 2**31, 2**62, -(2**63)])
TENSOR_BYTES = st.one_of(
    st.binary(max_size=40),
    st.lists(st.floats(width=32), max_size=6).map(lambda values: np.asarray(values, "<f4").tobytes()),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6).map(lambda values: np.asarray(values, "<i8").tobytes()),
)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    made = proto.Tensor(dtype=draw(st.integers(-1, 6)), shape=draw(st.lists(LONG_NUMBERS, max_size=3)))
    if draw(st.booleans()):
        made.dense = draw(TENSOR_BYTES)
    elif draw(st.booleans()):
        made.sparse_csr.values = draw(TENSOR_BYTES)
        made.sparse_csr.crow_indices = draw(TENSOR_BYTES)
        made.sparse_csr.col_indices = draw(TENSOR_BYTES)
    return made


@EXAMPLES
@given(data=st.data())
def test_a_message_with_fields_changed(door: Door, data: st.DataObject) -> None:
    request = valid(door.model_id, door.seq + 1)
    request.forward_only = data.draw(st.booleans())
    for change in data.draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3)):
        change(request, data)
    door.send(request.SerializeToString())


@settings(EXAMPLES, max_examples=50)
@given(data=st.data())
def test_a_message_with_fields_changed_reaches_a_real_engine(live_door: Door, data: st.DataObject) -> None:
    request = valid(live_door.model_id, live_door.seq + 1)
    for change in data.draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=2)):
        change(request, data)
    live_door.send(request.SerializeToString())


def _seq(request: Any, data: st.DataObject) -> None:
    request.seq_id -= data.draw(st.integers(0, 5))


def _loss(request: Any, data: st.DataObject) -> None:
    request.loss_fn = data.draw(st.sampled_from(["", "ppo", "gspo", "importance_sampling", "stable_reinforce", "custom", "x" * 1000, "\x00"]))


def _config(request: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["beta", "clip_low_threshold", "", "x"]))
    request.loss_fn_config_v2[name].number = data.draw(st.floats())
    if data.draw(st.booleans()):
        request.loss_fn_config_v2[name].text = data.draw(st.text(max_size=5))
    if data.draw(st.booleans()):
        request.loss_fn_config[name] = data.draw(st.floats())


def _inputs(request: Any, data: st.DataObject) -> None:
    names = st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "clip_low_threshold", "", "nonsense"])
    for datum in request.data:
        datum.loss_fn_inputs[data.draw(names)].CopyFrom(data.draw(tensors()))


def _tokens(request: Any, data: st.DataObject) -> None:
    for datum in request.data:
        datum.model_input.add().encoded_text.tokens = data.draw(st.binary(max_size=20))


def _chunks(request: Any, data: st.DataObject) -> None:
    for datum in request.data:
        chunk = datum.model_input.add()
        if data.draw(st.booleans()):
            chunk.image.data, chunk.image.expected_tokens = b"x", data.draw(NUMBERS)
        elif data.draw(st.booleans()):
            chunk.dmel.dmel = b"x"


def _spans(request: Any, data: st.DataObject) -> None:
    for datum in request.data:
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
            if data.draw(st.booleans()):
                span = spans.add().sampled_tokens if data.draw(st.booleans()) else spans.add().prompt_tokens
                span.sequence_id, span.offset, span.length = data.draw(st.text(max_size=5)), data.draw(LONG_NUMBERS), data.draw(LONG_NUMBERS)


def _empty(request: Any, data: st.DataObject) -> None:
    del request.data[:]


def _long(request: Any, data: st.DataObject) -> None:
    request.data.add().model_input.add().encoded_text.tokens = np.ones(data.draw(st.sampled_from([64, 65, 5000])), dtype="<i4").tobytes()


CHANGES = [_seq, _loss, _config, _inputs, _tokens, _chunks, _spans, _empty, _long]

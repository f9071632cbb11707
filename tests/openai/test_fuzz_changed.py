"""Operations whose bodies name what is there, in an order or a form that the published document cannot say: good bodies with something changed.

As at the JSON doors of the Training API (tests/tinker/test_fuzz_json.py): no answer is the server's fault, what was accepted comes to a result, and
what is good is taken afterwards.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bloomery.api.routes.bloomery.runs import MSGPACK
from bloomery.types.arrays import Array
from bloomery.types.operations import AdamParams, Datum, ForwardBackward, OptimStep, Result
from bloomery.types.rollouts import RecordedGroup, RecordedRollout, RecordedSegment, RecordedStep, packed_messages
from bloomery.types.wire import encode
from tests.api.server import KEY
from tests.openai.server import CONTEXT
from tests.openai.test_fuzz import BEGUN_FROM_GOOD, FuzzedServer, check, fits, operations, taken
from tests.tinker.test_fuzz import EXAMPLES
from tests.tinker.test_fuzz_json import change

pytestmark = pytest.mark.slow

OPERATION = "POST /api/v1/runs/{run_id}/operations/{seq}"
ROLLOUTS = "POST /api/v1/runs/{run_id}/rollouts/{step}"
BINARY = (OPERATION, ROLLOUTS)
RESULTS = msgspec.msgpack.Decoder(Result)


class Good(NamedTuple):
    """A request that is taken as it is."""

    path: dict[str, Any]
    body: Any


class World:
    """One of everything that the requests name."""

    def __init__(self, server: FuzzedServer, http: httpx.Client) -> None:
        self.http = http
        self.operations = {operation.label: operation for operation in operations(server)}
        self._numbers = itertools.count(1)
        client = server.client()
        self.run = client.create_run("tiny", 4).id
        source = client.create_run("tiny", 4)
        source.save_checkpoint("kept").result()
        self.source = source.id
        client.datasets.create("data")
        self.rows = client.datasets.add_version("data", {"train": '{"text": "a", "label": "b"}'}).id
        session = self.told("/api/v1/create_session", {"sdk_version": "0.38.0"})["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self.sampler = self.told("/api/v1/create_sampling_session", asked)["sampling_session_id"]
        self.names = [self.run, self.source, self.rows, self.sampler, session, "kept", "data", "default", "development", "tiny"]

    @property
    def number(self) -> int:
        """One that nothing has."""
        return next(self._numbers)

    def told(self, path: str, body: Any) -> Any:
        """The answer to a body that is good."""
        answer = self.http.post(path, json=body)
        assert taken(answer.status_code), answer.text
        return answer.json()

    @property
    def next(self) -> dict[str, Any]:
        """The run and the number of its next operation."""
        return {"run_id": self.run, "seq": self.http.get(f"/api/v1/runs/{self.run}").json()["next_seq"]}

    def fresh(self) -> dict[str, Any]:
        """The same of a run that has no operation yet."""
        return {"run_id": self.told("/api/v1/runs", {"base_model": "tiny", "rank": 4})["id"], "seq": 1}


def forward_backward(world: World) -> Good:
    """As plain values, which msgpack knows all of."""
    inputs = {"target_tokens": Array.of(np.array([2, 3, 4])), "weights": Array.of(np.ones(3, np.float32))}
    datum = Datum(tokens=Array.of(np.array([1, 2, 3], np.int32)), inputs=inputs)
    operation = ForwardBackward(loss="cross_entropy", loss_config={}, data=(datum, datum), return_routing=False)
    return Good(world.next, plain(operation))


def optim_step(world: World) -> Good:
    return Good(world.next, plain(OptimStep(adam=AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0))))


def rollouts(world: World) -> Good:
    segment = RecordedSegment(
        tokens=Array.of(np.array([1, 2], np.int32)),
        sampled=((0, 2),),
        logprobs=Array.of(np.zeros(2, np.float32)),
        advantages=Array.of(np.ones(2, np.float32)),
        trained=((0, 2),),
        versions=((0, 2, "v"),),
    )
    rollout = RecordedRollout(id="0.0", segments=(segment,), stopped=True, reward=1.0, parts={"a": 1.0}, reason="why")
    group = RecordedGroup(
        number=0, problem="p", prompt=Array.of(np.array([1], np.int32)), rollouts=(rollout,), messages=packed_messages([{"role": "user"}])
    )
    return Good({"run_id": world.run, "step": world.number}, plain(RecordedStep(groups=(group,))))


def plain(operation: ForwardBackward | OptimStep | RecordedStep) -> Any:
    return msgspec.msgpack.decode(encode(operation))


def drafted(world: World) -> Good:
    body = {
        "sampling_session_id": world.sampler,
        "seq_id": world.number,
        "prompt": [1, 2, 3],
        "drafts": [[4, 5], []],
        "max_tokens": 4,
        "seed": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "stop": [CONTEXT // 2],
    }
    return Good({}, body)


def rows(world: World) -> Good:
    """The files of splits as lists, whose items are lines."""
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    lines = [{"text": f"a{world.number}", "label": "b"}, chat]
    return Good({"name": "data"}, {"format": "jsonl", "splits": {"train": lines, "eval": [{"text": "c", "label": "d"}]}, "parent": world.rows})


def table(world: World) -> Good:
    """The same as text."""
    train, held_out = f'text,label\n"a{world.number}\n",b\n', "text,label\nc,d\n"
    return Good({"name": "data"}, {"format": "csv", "splits": {"train": train, "eval": held_out}, "parent": world.rows})


def key(world: World) -> Good:
    limits = {"ttl_s": 3600, "requests_per_minute": 10, "tokens_per_minute": 1000}
    return Good({}, {"name": f"key-{world.number}", "scopes": ["read", "train"], "project": f"p-{world.number}", **limits})


GOOD: list[tuple[str, Callable[[World], Good]]] = [
    (OPERATION, forward_backward),
    (OPERATION, optim_step),
    (f"{OPERATION}/checkpoint", lambda w: Good(w.next, {"name": f"c-{w.number}"})),
    (f"{OPERATION}/snapshot", lambda w: Good(w.next, {"name": f"s-{w.number}"})),
    (f"{OPERATION}/load", lambda w: Good(w.fresh(), {"run_id": w.source, "name": "kept", "optimizer": False})),
    (ROLLOUTS, rollouts),
    ("POST /api/v1/samples", drafted),
    ("POST /api/v1/datasets/{name}/versions", rows),
    ("POST /api/v1/datasets/{name}/versions", table),
    ("POST /api/v1/keys", key),
]
each_kind = pytest.mark.parametrize(("label", "good"), GOOD, ids=[f"{label} {number}" for number, (label, _) in enumerate(GOOD)])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        FuzzedServer(tmp_path_factory.mktemp("changed")).listening() as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=60.0) as http,
    ):
        yield World(server, http)


def test_every_operation_that_is_begun_from_a_good_body_has_one() -> None:
    assert {label for label, _ in GOOD} == BEGUN_FROM_GOOD


@each_kind
def test_what_is_changed_is_taken_as_it_is(world: World, label: str, good: Callable[[World], Good]) -> None:
    assert taken(send(world, label, good(world)))


@each_kind
def test_requests_with_something_changed(world: World, label: str, good: Callable[[World], Good]) -> None:
    answered = set[int]()

    @EXAMPLES
    @given(data=st.data())
    def knock(data: st.DataObject) -> None:
        asked = copy.deepcopy(good(world))
        for _ in range(data.draw(st.integers(1, 3))):
            change(asked.body, world.names, data)
        answered.add(send(world, label, asked))

    knock()
    assert any(400 <= status < 500 for status in answered), answered
    # Whether one of few changes leaves a small body good is chance; without any it is.
    assert taken(send(world, label, good(world)))


@EXAMPLES
@given(
    seq=st.sampled_from([0, -1, 2**62, 2**63 - 1, 2**63, 2**64, "x", "1.5", "٣"]),
    suffix=st.sampled_from(["", "/checkpoint", "/snapshot", "/load"]),
)
def test_numbers_that_are_not_the_next(world: World, seq: object, suffix: str) -> None:
    good = dict(GOOD[1:])[f"{OPERATION}{suffix}"](world)
    assert not taken(send(world, f"{OPERATION}{suffix}", good._replace(path={**good.path, "run_id": world.run, "seq": seq})))


@EXAMPLES
@given(good=st.sampled_from([forward_backward, optim_step]), data=st.data())
def test_an_operation_cut_or_with_bytes_changed(world: World, good: Callable[[World], Good], data: st.DataObject) -> None:
    asked = good(world)
    content = bytearray(msgspec.msgpack.encode(asked.body))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=8)):
        content[place] = value
    send(world, OPERATION, asked._replace(body=bytes(content[: data.draw(st.integers(0, len(content)))])))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc0", b"\x81\xa1a" * 100_000 + b"\xc0", b"\x82\xa1\xff\xc0", b"\x81\xa4type\xa2\xff\xff"],
    ids=["nothing", "null", "deep", "key that is no text", "tag that is no text"],
)
def test_what_is_no_operation_is_refused(world: World, content: bytes) -> None:
    assert send(world, OPERATION, Good(world.next, content)) == 400


def send(world: World, label: str, asked: Good) -> int:
    """The status of the answer, which is the contract's; what was accepted comes to its result."""
    body, media_type = as_said(label, asked.body), MSGPACK if label in BINARY else "application/json"
    case = world.operations[label].Case(path_parameters=asked.path, body=body, media_type=media_type)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = world.http.post(case.formatted_path, content=content, headers={"content-type": media_type})
    check(case, answer)
    if taken(answer.status_code):
        assert fits(case), f"{label}: taken though it does not fit the document: {content!r:.300}"
        comes_to_a_result(world, answer.json())
    return answer.status_code


def as_said(label: str, body: Any) -> Any:
    """The body as the contract has it."""
    if label in BINARY and not isinstance(body, bytes):
        try:
            return msgspec.msgpack.encode(body)
        except (OverflowError, UnicodeEncodeError):
            # msgpack has no bytes for it.
            assume(False)
    if label.endswith("/versions") and isinstance(body.get("splits"), dict):
        return body | {"splits": {split: as_lines(lines) for split, lines in body["splits"].items()}}
    return body


def as_lines(lines: Any) -> Any:
    return "\n".join(map(json.dumps, lines)) if isinstance(lines, list) else lines


def comes_to_a_result(world: World, accepted: dict[str, Any]) -> None:
    if "seq" in accepted:
        result = world.http.get("/api/v1/runs/{run_id}/operations/{seq}".format_map(accepted), params={"wait": 30})
        assert result.status_code == 200, result.text
        RESULTS.decode(result.content)
    if "request_id" in accepted:
        result = world.http.post("/api/v1/retrieve_future", json=accepted)
        assert result.status_code == 200, result.text

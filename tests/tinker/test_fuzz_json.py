"""Whatever arrives at the JSON doors is answered: never with a server's error or an empty body, a refusal names the field at fault, and runs go on.

Bodies begin as good ones, for a body of any shape is refused by its outline and never looked into.
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.api.routes.tinker import _PARTS
from bloomery.types.errors import shown
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served
from tests.tinker.test_fuzz import EXAMPLES, JSON, Door, check, opened

Place = tuple[str | int, ...]
"""The way to a value inside a body."""


class Scene(Door):
    """A run, and one of everything that requests name. The names come from a run beside it, so that they are good whatever becomes of this one."""

    def __init__(self, server: Served) -> None:
        super().__init__(server.url, KEY, MODEL)
        self._numbers = itertools.count(1)
        self._seqs = itertools.count(1)
        self._beside, self.unused = self.new_run(), self.new_run()
        self.saved, self.published = self.save("/save_weights", "kept"), self.save("/save_weights_for_sampler", "kept")
        new = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        self.sampler = self.json("/create_sampling_session", new)["sampling_session_id"]
        self.ended = self.json("/create_session", {"sdk_version": "0.38.0"})["session_id"]
        self.sampled = self.sample()
        self.names = [self.session, self.model_id, self.sampler, self.saved, self.published, self.sampled, self.ended, KEY, MODEL, "default"]
        assert self.http.post("/retrieve_future", json={"request_id": self.sampled}, headers=JSON).status_code == 200

    @property
    def number(self) -> int:
        """One that nothing has."""
        return 1000 + next(self._numbers)

    def new_run(self) -> str:
        """A run that nothing was done with."""
        new = {"session_id": self.session, "model_seq_id": self.number, "base_model": MODEL, "lora_config": {"rank": 4}}
        model_id: str = self.json("/create_model", new)["model_id"]
        return model_id

    def save(self, route: str, name: str) -> str:
        """The path of weights of the run beside."""
        future = self.json(route, {"model_id": self._beside, "seq_id": next(self._seqs), "path": name})
        path: str = self.json("/retrieve_future", {"request_id": future["request_id"]})["path"]
        return path

    def sample(self) -> str:
        """The future of a sample."""
        request_id: str = self.json("/asample", asample(self))["request_id"]
        return request_id


def asample(scene: Scene) -> dict[str, Any]:
    return {
        "type": "sample",
        "sampling_session_id": scene.sampler,
        "seq_id": scene.number,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": {"max_tokens": 2, "seed": 7, "stop": ["x"], "temperature": 0.5, "top_k": 4, "top_p": 0.9},
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 0,
        "target_prompt_logprobs": {"data": [-1, 12, 24, -1], "dtype": "int64", "shape": [2, 2]},
        "prompt_alt_tokens_k": 2,
        "record_stability_info": True,
    }


def of_run(scene: Scene, **more: Any) -> dict[str, Any]:
    return {"model_id": scene.model_id, "seq_id": scene.seq + 1, **more}


def custom_loss(scene: Scene) -> dict[str, Any]:
    told = {"tuple": [{"ref": "total"}, {"dict": {"custom/m:sum": {"ref": "total"}}}]}
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "placeholder", "name": "w", "target": "weights"},
        {"op": "call_function", "name": "x", "target": "operator.mul", "args": [{"ref": "logprobs"}, {"ref": "w"}], "kwargs": {}},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "x"}], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "args": [told], "kwargs": {}},
    ]
    inputs = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
    graph = {"format": 1, "nodes": nodes}
    return {"session_id": scene.session, "custom_loss_seq_id": scene.number, "name": "mine", "inputs": inputs, "graph": graph}


def loud(scene: Scene) -> dict[str, Any]:
    event = {"event": "GENERIC_EVENT", "event_name": "odd", "severity": "ERROR", "event_data": {"exception": "boom"}}
    return {"session_id": scene.session, "platform": "x", "sdk_version": "0.38.0", "process_uuid": "u", "events": [event]}


GOOD: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "POST /create_session": lambda s: {
        "type": "create_session",
        "sdk_version": "0.38.0",
        "tags": ["a"],
        "user_metadata": {"a": "b"},
        "project_id": "default",
        "display_name": "fuzzed",
    },
    "POST /session_heartbeat": lambda s: {"session_id": s.session},
    "POST /sessions/{ended}/finish": lambda s: {"reason": {"type": "success"}, "detail": "done"},
    "POST /sessions/search": lambda s: {
        "session_id": s.session,
        "project_ids": ["default"],
        "user_metadata": {"a": "b"},
        "display_name": "fuzzed",
        "owner": {"type": "own", "owner_urns": []},
        "statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}],
        "limit": 5,
        "cursor": {"last_created_at": "2030-01-01T00:00:00Z", "last_session_id": s.session},
    },
    "PUT /sessions/{session}/project": lambda s: {"project_id": "default"},
    "POST /telemetry": loud,
    "POST /create_model": lambda s: {
        "session_id": s.session,
        "model_seq_id": s.number,
        "base_model": MODEL,
        "user_metadata": {"a": "b"},
        "lora_config": {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
    },
    "POST /get_info": lambda s: {"model_id": s.model_id},
    "POST /unload_model": lambda s: {"model_id": s.unused},
    "POST /create_custom_loss": custom_loss,
    "POST /optim_step": lambda s: of_run(
        s, adam_params={"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
    ),
    "POST /save_weights": lambda s: of_run(s, path=f"w-{s.number}", ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}),
    "POST /save_weights_for_sampler": lambda s: of_run(s, path=f"s-{s.number}", kind="snapshot", ttl_seconds=3600, user_metadata={"a": "b"}),
    "POST /save_weights_external": lambda s: of_run(s, path=f"x-{s.number}", ttl_seconds=3600),
    "POST /load_weights": lambda s: {
        "path": s.saved,
        "optimizer": False,
        "session_id": s.session,
        "model_seq_id": s.number,
        "base_model": MODEL,
        "user_metadata": {"a": "b"},
        "optimizer_config": {"type": "adamw"},
        "weights_access_token": KEY,
    },
    "POST /copy_weights": lambda s: {
        "source_path": s.saved,
        "session_id": s.session,
        "model_seq_id": s.number,
        "ttl_seconds": 3600,
        "weights_access_token": KEY,
    },
    "POST /weights_info": lambda s: {"tinker_path": s.saved},
    "PUT /training_runs/{model_id}/checkpoints/weights/{expiring}/ttl": lambda s: {"ttl_seconds": 3600},
    "POST /create_sampling_session": lambda s: {"session_id": s.session, "sampling_session_seq_id": s.number, "model_path": s.published},
    "POST /join_sampling_session": lambda s: {"sampling_session_id": s.sampler},
    "POST /asample": asample,
    "POST /retrieve_future": lambda s: {"request_id": s.sampled, "allow_metadata_only": False},
    "POST /retrieve_futures": lambda s: {
        "target": {"type": "sampling_session", "sampling_session_id": s.sampler, "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0,
        "retrieved_request_ids": [],
    },
    "POST /cancel_future": lambda s: {"request_id": s.sample()},
}
"""A body of each route that it takes as it is."""
BINARY = {"/forward_backward"}
WITHOUT_BODY = {"/client/config", "/client/dynamic_config", "/auth/token"}
"""They look at nothing of what they are sent."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that takes custom losses too."""
    with served(tmp_path_factory.mktemp("server"), custom_losses=True) as running:
        yield running


@pytest.fixture
def scene(server: Served) -> Iterator[Scene]:
    found = Scene(server)
    for _ in opened(found):
        yield found


def send(scene: Scene, route: str, body: Any) -> httpx.Response:
    """A body to its door, and the number noted that it may have used up."""
    method, path = route.split(" ")
    if "{expiring}" in path:
        run, folder, name = scene.save("/save_weights", f"ttl-{scene.number}").removeprefix("tinker://").split("/")
        path = f"/training_runs/{run}/checkpoints/{folder}/{name}/ttl"
    answer = scene.http.request(method, path.format(session=scene.session, ended=scene.ended), content=json.dumps(body).encode(), headers=JSON)
    check(answer)
    if answer.status_code == 200 and "json" in answer.headers["content-type"]:
        accepted = str(answer.json().get("request_id", ""))
        if accepted.startswith(f"operation|{scene.model_id}|"):
            scene.seq = max(scene.seq, int(accepted.split("|")[2]))
    return answer


def test_every_route_that_takes_a_body_is_tried() -> None:
    known = {(method, route.path) for part in _PARTS for route in part.router.routes for method in route.methods if method in ("POST", "PUT")}
    tried = {tuple(route.split(" ")) for route in GOOD}
    shapes = {(method, path.replace("{ended}", "{session_id}").replace("{session}", "{session_id}")) for method, path in tried}
    shapes = {(method, "/training_runs/{run_id}/checkpoints/{folder}/{name}/ttl" if "{expiring}" in path else path) for method, path in shapes}
    untried = {path for method, path in known - shapes if not path.endswith("/publish")}
    assert untried == BINARY | WITHOUT_BODY
    assert shapes <= known


@pytest.mark.parametrize("route", GOOD)
def test_the_bodies_that_are_changed_are_taken_as_they_are(scene: Scene, route: str) -> None:
    answer = send(scene, route, GOOD[route](scene))
    assert answer.status_code == 200, answer.text
    request_id = answer.json().get("request_id") if "json" in answer.headers["content-type"] else None
    if request_id is not None:
        result = scene.http.post("/retrieve_future", json={"request_id": request_id}, headers=JSON)
        assert result.status_code == 200, result.text
        assert b'"error"' not in result.content


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 3, 129, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 2**64, -(2**63) - 1]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "\x00", "\ud800", "a/b", "x" * 129, "x" * 70_000]),
    st.sampled_from(["tinker://x", "tinker://a/weights/b", "operation|a|1|", "sample|a:sample:0|1"]),
    st.sampled_from([{}, [], [None], [[]], {"": ""}, {"type": "image"}, {"ref": "nobody"}]),
)
UNKNOWN = ["unknown", "", "model_id", "type", "x" * 1000]


@settings(EXAMPLES, max_examples=600)
@given(route=st.sampled_from(sorted(GOOD)), data=st.data())
def test_bodies_with_fields_changed(scene: Scene, route: str, data: st.DataObject) -> None:
    body, changed = copy.deepcopy(GOOD[route](scene)), set[str]()
    for _ in range(data.draw(st.integers(1, 3))):
        changed.add(change(body, scene.names, data))
    if waits(scene, body):
        return
    answer = send(scene, route, body)
    if answer.status_code == 400:
        field = answer.json()["field"]
        assert field, answer.text
        at_fault = changed.union({"body"}, *(together for together in TOGETHER if together & changed))
        # A long name of the caller's own making is shortened, dots behind it.
        assert re.split(r"[.\[]", field)[0] in at_fault | {re.split(r"[.\[]", shown(each))[0] for each in at_fault}, answer.text


TOGETHER = [
    {"model_id", "seq_id", "session_id", "model_seq_id", "destination_project_id"},
    {"optimizer", "optimizer_config"},
    {"base_model", "model_path"},
    {"inputs", "graph"},
    {"prompt", "prompt_logprobs", "prompt_logprobs_last_n", "topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"},
    {"num_samples", "sampling_params", "topk_sample_logprobs", "prompt"},
]
"""Fields that make sense only with each other: where one was changed, another may be the one that is named."""


def change(body: dict[str, Any], names: Sequence[str], data: st.DataObject) -> str:
    """Put something else somewhere, take something away, or add something unknown; says which field of the body it is in."""
    *way, last = data.draw(st.sampled_from([*places(body)] or [("unknown",)]))

    def odd() -> Any:
        # What is drawn may be changed in its turn, and is drawn again.
        return copy.deepcopy(data.draw(ODD))

    inside: Any = body
    for step in way:
        inside = inside[step]
    match data.draw(st.sampled_from(["put", "put", "put", "name", "take", "add"] if last != "unknown" else ["put", "name"])):
        case "put":
            inside[last] = odd()
        case "name":
            inside[last] = data.draw(st.sampled_from(names))
        case "take":
            del inside[last]
        case "add" if isinstance(inside, dict):
            last = data.draw(st.sampled_from(UNKNOWN))
            inside[last] = odd()
        case _:
            inside.append(odd())
    return str([*way, last][0])


def places(value: Any, way: Place = ()) -> Iterator[Place]:
    """The way to each value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*way, key)
        yield from places(each, (*way, key))


def waits(scene: Scene, body: dict[str, Any]) -> bool:
    """Whether it is for a later number of the run: it would wait for all before it, as it must."""
    seq = body.get("seq_id")
    try:
        return seq is not None and body.get("model_id") == scene.model_id and scene.seq + 1 < float(seq) <= scene.seq + 5000
    except (TypeError, ValueError, OverflowError):
        return False


@EXAMPLES
@given(route=st.sampled_from([route for route in sorted(GOOD) if "{" not in route]), content=st.binary(max_size=60))
def test_bodies_that_are_no_json(scene: Scene, route: str, content: bytes) -> None:
    answer = scene.http.post(route.split(" ")[1], content=content, headers=JSON)
    check(answer)
    assert answer.status_code == 400
    assert answer.json()["field"]


@pytest.mark.parametrize("path", sorted(WITHOUT_BODY))
@EXAMPLES
@given(content=st.binary(max_size=60))
def test_where_no_body_is_looked_at_anything_may_stand(scene: Scene, path: str, content: bytes) -> None:
    assert scene.http.post(path, content=content, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    "path", ["tinker://", "tinker://a", "tinker://a/b/c", "tinker://a/weights/", "a/weights/b", "", "tinker://a/weights/b/c", "\x00"]
)
def test_paths_that_name_nothing(scene: Scene, path: str) -> None:
    for route, field, more in (
        ("/weights_info", "tinker_path", {}),
        ("/copy_weights", "source_path", {"destination_project_id": "default"}),
        ("/load_weights", "path", {"session_id": scene.session, "model_seq_id": 77, "optimizer": False}),
        ("/create_sampling_session", "model_path", {"session_id": scene.session, "sampling_session_seq_id": 1}),
    ):
        answer = scene.http.post(route, json={field: path, **more}, headers=JSON)
        check(answer)
        assert (answer.status_code, answer.json()["field"]) in ((400, field), (404, field))

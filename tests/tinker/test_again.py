"""The same number again: with the same body the same answer, with another one a refusal and no word of what was never done."""

from typing import Any

import httpx
import pytest

from bloomery.api.routes.tinker import proto
from tests.tinker.over_fake_engine import KEY, MODEL, Served
from tests.tinker.samples import ENDLESS
from tests.tinker.test_fields import get, post, said
from tests.tinker.test_fuzz import valid


@pytest.fixture
def model_id(server: Served) -> str:
    session = said(post(server, "/create_session", {"sdk_version": "0.38.0"}))["session_id"]
    created = said(post(server, "/create_model", new(session, 0)))
    return str(created["model_id"])


def new(session: str, number: int, **lora: Any) -> dict[str, Any]:
    return {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": 4, **lora}}


def path_of(server: Served, accepted: Any) -> str:
    return str(said(post(server, "/retrieve_future", {"request_id": accepted["request_id"]}))["path"])


@pytest.mark.parametrize("route", ["/save_weights", "/save_weights_for_sampler", "/save_weights_external"])
def test_weights_are_saved_under_the_name_that_came_first(server: Served, model_id: str, route: str) -> None:
    first = said(post(server, route, {"model_id": model_id, "seq_id": 1, "path": "one"}))
    assert path_of(server, first).endswith("/one")
    refused = post(server, route, {"model_id": model_id, "seq_id": 1, "path": "two"})
    assert refused.status_code == 400
    assert (refused.json()["code"], refused.json()["field"], refused.json()["category"]) == ("conflict", "seq_id", "user")
    again = said(post(server, route, {"seq_id": 1, "path": "one", "model_id": model_id}))
    assert again == first
    assert path_of(server, again).endswith("/one")
    forged = {"request_id": first["request_id"].replace("one", "two")}
    assert said(post(server, "/retrieve_future", forged))["path"].endswith("/one")
    assert post(server, "/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}}).json()["code"] == "conflict"


def test_the_same_request_for_another_sampler_is_the_sdks_own_repetition(server: Served, model_id: str) -> None:
    asked = {"model_id": model_id, "seq_id": 1, "kind": "snapshot"}
    futures = [said(post(server, "/save_weights_for_sampler", asked | {"sampling_session_seq_id": number}))["request_id"] for number in (3, 4)]
    samplers = [said(post(server, "/retrieve_future", {"request_id": future}))["sampling_session_id"] for future in futures]
    assert len({get(server, f"/samplers/{sampler}")["base_model"] for sampler in samplers}) == 1
    assert len(set(samplers)) == 2
    assert post(server, "/save_weights_for_sampler", asked | {"path": "name"}).json()["code"] == "conflict"
    other = post(server, "/save_weights_for_sampler", asked | {"sampling_session_seq_id": 5, "ttl_seconds": 3600})
    assert (other.status_code, other.json()["code"]) == (400, "conflict")


def test_what_is_said_and_what_is_left_at_its_default_is_the_same_request(server: Served, model_id: str) -> None:
    asked = {"model_id": model_id, "seq_id": 1, "path": "one"}
    first = said(post(server, "/save_weights", asked))
    assert said(post(server, "/save_weights", asked | {"overwrite": False, "ttl_seconds": None, "type": None})) == first
    assert post(server, "/save_weights", asked | {"overwrite": True}).json()["code"] == "conflict"


def test_a_request_that_makes_no_sense_keeps_its_place_when_it_comes_again(server: Served, model_id: str) -> None:
    bad = {"model_id": model_id, "seq_id": 1, "path": "no/name"}
    first = said(post(server, "/save_weights", bad))
    assert said(post(server, "/save_weights", bad)) == first
    assert post(server, "/save_weights", bad | {"path": "name"}).json()["code"] == "conflict"


def test_another_batch_under_a_number_that_is_taken_is_refused(server: Served, model_id: str) -> None:

    def send(message: Any) -> httpx.Response:
        headers = {"x-api-key": KEY, "content-type": "application/x-protobuf"}
        return httpx.post(f"{server.url}/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)

    message = valid(model_id, 1)
    first = said(send(message))
    assert said(send(proto.ForwardBackwardRequest.FromString(message.SerializeToString()))) == first
    message.forward_only = True
    assert send(message).json()["code"] == "conflict"


def test_a_run_is_created_as_it_was_asked_for_first(server: Served, model_id: str) -> None:
    session = model_id.split(":train:")[0]
    assert said(post(server, "/create_model", new(session, 0)))["model_id"] == model_id
    refused = post(server, "/create_model", new(session, 0, rank=64))
    assert refused.status_code == 400
    assert (refused.json()["code"], refused.json()["field"]) == ("conflict", "model_seq_id")


def test_a_run_that_begins_with_weights_does_not_say_that_it_loaded_others(server: Served, model_id: str) -> None:
    session = model_id.split(":train:")[0]
    paths = [path_of(server, said(post(server, "/save_weights", {"model_id": model_id, "seq_id": seq, "path": f"at-{seq}"}))) for seq in (1, 2)]
    load = {"session_id": session, "model_seq_id": 1, "optimizer": True}
    first = said(post(server, "/load_weights", load | {"path": paths[0]}))
    assert path_of(server, first) == paths[0]
    assert said(post(server, "/load_weights", load | {"path": paths[0]})) == first
    refused = post(server, "/load_weights", load | {"path": paths[1]})
    assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (400, "conflict", "model_seq_id")


CHANGED: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 3]}]}},
    "seed": {"sampling_params": {"max_tokens": 2, "seed": 8}},
    "length": {"sampling_params": {"max_tokens": 3, "seed": 7}},
    "how many": {"num_samples": 2},
    "its prompt's log-probabilities": {"prompt_logprobs": True},
}


@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED)
def test_another_sample_under_a_number_that_is_taken_is_refused(server: Served, model_id: str, changes: dict[str, Any]) -> None:
    session = model_id.split(":train:")[0]
    sampler = said(post(server, "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}))
    asked: dict[str, Any] = {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": 4,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2, "seed": 7},
    }
    first, before = said(post(server, "/asample", asked)), len(server.engine.sampled)
    answer = post(server, "/retrieve_future", {"request_id": first["request_id"]}).content
    refused = post(server, "/asample", asked | changes)
    assert refused.status_code == 400
    assert (refused.json()["code"], refused.json()["field"], refused.json()["category"]) == ("conflict", "seq_id", "user")
    # What is spelled out and is so by itself changes nothing.
    assert said(post(server, "/asample", asked | {"num_samples": 1, "prompt_logprobs": False})) == first
    assert post(server, "/retrieve_future", {"request_id": first["request_id"]}).content == answer
    assert len(server.engine.sampled) <= before + 1
    assert said(post(server, "/asample", asked | changes | {"seq_id": 5})) != first


def test_another_sample_may_have_the_number_of_one_that_was_cancelled(server: Served, model_id: str) -> None:
    session = model_id.split(":train:")[0]
    sampler = said(post(server, "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}))
    asked: dict[str, Any] = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "sampling_params": {"max_tokens": 2}}
    begun = said(post(server, "/asample", asked | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(ENDLESS)}]}}))
    said(post(server, "/cancel_future", {"request_id": begun["request_id"]}))
    other = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
    assert said(post(server, "/asample", asked | other)) == begun
    assert post(server, "/retrieve_future", {"request_id": begun["request_id"]}).status_code == 200

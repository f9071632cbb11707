"""Bodies that are larger than is taken, or no bodies at all, are refused in the contract's own form: no status that the SDK does not know."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.api.routes.tinker.messages import CONTENT_TYPE
from tests.tinker.over_fake_engine import KEY, MODEL, Served

MIB = 1 << 20
REFUSAL = {"error", "category", "code", "field"}
ROUTES = [
    ("POST", "/forward_backward"),
    ("POST", "/create_session"),
    ("POST", "/asample"),
    ("POST", "/retrieve_future"),
    ("PUT", "/training_runs/run-1/checkpoints/weights/one/ttl"),
]


def sent(server: Served, method: str, path: str, headers: dict[str, str], body: Iterator[bytes] | None = None) -> tuple[int, Any]:
    """The answer to a request with these headers, whether its body follows or not."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.putrequest(method, f"/api/v1{path}")
        for name, value in {"x-api-key": KEY, "content-type": CONTENT_TYPE, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body, encode_chunked=body is not None)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_body_that_says_it_is_too_large_is_refused_unread_as_the_contract_does(server: Served, method: str, path: str) -> None:
    status, answer = sent(server, method, path, {"content-length": str(300 * MIB)})
    assert (status, set(answer)) == (400, REFUSAL)
    assert (answer["category"], answer["code"], answer["field"]) == ("user", "too_large", "body")
    assert "300 MiB, at most 256" in answer["error"]


def test_what_belongs_to_our_own_contract_keeps_its_form(server: Served) -> None:
    for method, path in (("POST", "/runs"), ("POST", "/nowhere"), ("DELETE", "/create_session")):
        status, answer = sent(server, method, path, {"content-length": str(300 * MIB)})
        assert (status, answer["error"]["code"]) == (413, "too_large")


@pytest.mark.slow
def test_a_body_that_does_not_say_its_length_is_refused_the_same(server: Served) -> None:
    pieces = (bytes(MIB) for _ in range(MAX_BODY_BYTES // MIB + 1))
    status, answer = sent(server, "POST", "/forward_backward", {"transfer-encoding": "chunked"}, pieces)
    assert (status, set(answer)) == (400, REFUSAL)
    assert (answer["category"], answer["code"], answer["field"]) == ("user", "too_large", "body")


@pytest.mark.slow
def test_the_sdk_says_so_at_once_and_other_runs_go_on(service: tinker.ServiceClient) -> None:
    run, other = (service.create_lora_training_client(base_model=MODEL, rank=4).result() for _ in range(2))
    numbers = types.TensorData.from_numpy(np.zeros(MAX_BODY_BYTES // 8 + 1, np.int64))
    huge = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": numbers})
    with pytest.raises(tinker.BadRequestError, match="send it in parts") as refused:
        run.forward_backward([huge], "cross_entropy").result(timeout=60)
    assert (refused.value.body["category"], refused.value.body["field"]) == ("user", "body")
    small = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [1], "weights": [1.0]})
    assert other.forward_backward([small], "cross_entropy").result().metrics


def test_what_is_no_protobuf_names_the_body_as_what_is_no_json_does(server: Served) -> None:
    headers = {"x-api-key": KEY}
    binary = httpx.post(f"{server.url}/api/v1/forward_backward", content=b"\xff\xff\xff", headers={**headers, "content-type": CONTENT_TYPE})
    text = httpx.post(f"{server.url}/api/v1/optim_step", content=b"{", headers={**headers, "content-type": "application/json"})
    for answer in (binary, text):
        assert (answer.status_code, answer.json()["category"], answer.json()["field"]) == (400, "user", "body")

"""What the published document says of fields of OpenAI's contract that are not offered: what asks for nothing fits it and is taken, nothing else."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jsonschema_rs
import pytest

from bloomery.api.routes.openai import embeddings, eval_requests, fine_tuning_requests, requests, response_requests
from bloomery.api.routes.openai.shapes import Refused
from bloomery.types.errors import InvalidInput, NotSupported
from tests.openai.server import ScriptedServer
from tests.openai.test_contract import USER

MOST: Final = 100
ROWS: Final = {"type": "file_content", "content": [{"item": {"a": "b"}}]}
ASKED_OF_ITEMS: Final = {"type": "template", "template": [{"role": "user", "content": "x"}]}
CALL: Final = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CALLED: Final = {"type": "function_call_output", "call_id": "c", "output": "x"}


class Form(NamedTuple):
    """Where fields stand that are not offered: in a good body that has `field` in the place of all of them."""

    path: str
    parse: Callable[[dict[str, Any]], Any]
    refused: Refused
    body: Callable[[dict[str, Any]], dict[str, Any]]


def _item(item: dict[str, Any]) -> Form:
    """Of an input."""
    return Form(
        "/v1/responses",
        lambda body: response_requests.parse_response(body, MOST),
        response_requests.REFUSED_IN_ITEMS,
        lambda field: {"model": "tiny", "input": [{"role": "user", "content": "x"}, {**item, **field}]},
    )


FORMS: Final = {
    "chat": Form(
        "/v1/chat/completions",
        lambda body: requests.parse_chat(body, MOST),
        requests.REFUSED_IN_CHAT,
        lambda field: {"model": "tiny", "messages": USER, **field},
    ),
    "message": Form(
        "/v1/chat/completions",
        lambda body: requests.parse_chat(body, MOST),
        requests.REFUSED_IN_MESSAGES,
        lambda field: {"model": "tiny", "messages": [{"role": "assistant", "content": "x", **field}]},
    ),
    "completion": Form(
        "/v1/completions", requests.parse_completion, requests.REFUSED_IN_COMPLETIONS, lambda field: {"model": "tiny", "prompt": "x", **field}
    ),
    "embedding": Form(
        "/v1/embeddings",
        lambda body: requests.parse(body, embeddings.EmbeddingRequest, embeddings.REFUSED),
        embeddings.REFUSED,
        lambda field: {"model": "tiny", "input": "x", **field},
    ),
    "response": Form(
        "/v1/responses",
        lambda body: response_requests.parse_response(body, MOST),
        response_requests.REFUSED_IN_RESPONSES,
        lambda field: {"model": "tiny", "input": "x", **field},
    ),
    "text of a response": Form(
        "/v1/responses",
        lambda body: response_requests.parse_response(body, MOST),
        response_requests.REFUSED_IN_TEXT,
        lambda field: {"model": "tiny", "input": "x", "text": field},
    ),
    "item that is a message": _item({"type": "message", "role": "assistant", "content": "x"}),
    "item without a type": _item({"role": "assistant", "content": "x"}),
    "item that is a call": _item(CALL),
    "item that is an output": _item(CALLED),
    "fine-tuning": Form(
        "/v1/fine_tuning/jobs",
        fine_tuning_requests.parse_job,
        fine_tuning_requests.REFUSED,
        lambda field: {"model": "tiny", "training_file": "file-1", **field},
    ),
    "eval": Form(
        "/v1/evals/{eval_id}/runs",
        eval_requests.parse_run,
        eval_requests.REFUSED_IN_PARAMS,
        lambda field: {
            "data_source": {
                "type": "completions",
                "source": ROWS,
                "model": "tiny",
                "input_messages": ASKED_OF_ITEMS,
                "sampling_params": {"temperature": 1, **field},
            }
        },
    ),
}
LOOK_ALIKES: Final = (0, 1, 0.0, False, True, "", "x", [], ["x"], {}, {"x": 1})


@pytest.fixture(scope="module")
def document(openai_server: ScriptedServer) -> dict[str, Any]:
    published: dict[str, Any] = openai_server.http.get("/api/v1/openapi.json").json()
    return published


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_asks_for_nothing_is_taken_as_the_document_says(document: dict[str, Any], form: Form) -> None:
    schema = document["paths"][form.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fitting = jsonschema_rs.validator_for({**schema, "components": document["components"]})
    assert form.refused
    for name, nothing in form.refused.items():
        for value in (None, *nothing):
            body = form.body({name: value})
            form.parse(body)
            assert fitting.is_valid(body), body
        for value in LOOK_ALIKES:
            # In Python 0 is False.
            if not any(type(value) is type(each) and value == each for each in nothing):
                body = form.body({name: value})
                with pytest.raises((NotSupported, InvalidInput)):
                    form.parse(body)
                assert not fitting.is_valid(body), body

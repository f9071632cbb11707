"""Projects of their own on a live server, and clients in them."""

from typing import Any

import httpx
import tinker
from tinker import types

from tests.live import LiveServer

MODEL = "bloomery-tiny"
ADAM = types.AdamParams(learning_rate=5e-3)
TRAINER = ["infer", "read", "train"]


def new_key(server: LiveServer, project: str, name: str, scopes: list[str] | None = None) -> str:
    """A key of a project, which is there from then on."""
    body = {"name": name, "project": project, "scopes": scopes or TRAINER}
    answer = httpx.post(f"{server.url}/api/v1/keys", json=body, headers={"x-api-key": server.key})
    assert answer.status_code == 201, answer.text
    key: str = answer.json()["key"]
    return key


def rest_of(server: LiveServer, key: str) -> tinker.RestClient:
    """The unmodified client for looking at things."""
    return tinker.RestClient(base_url=server.url, api_key=key)


def post(server: LiveServer, path: str, body: Any, key: str | None = None) -> httpx.Response:
    """What the SDK would not send."""
    return httpx.post(f"{server.url}/api/v1{path}", json=body, headers={"x-api-key": key or server.key})


def datum(tokens: list[int]) -> types.Datum:
    """A supervised example."""
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(run: tinker.TrainingClient, tokens: list[int], steps: int = 1) -> None:
    """Take steps on one example."""
    for _ in range(steps):
        run.forward_backward([datum(tokens)], "cross_entropy")
        run.optim_step(ADAM).result()


def loss(run: tinker.TrainingClient, tokens: list[int]) -> float:
    """Of one example."""
    return run.forward([datum(tokens)], "cross_entropy").result().metrics["loss:sum"]

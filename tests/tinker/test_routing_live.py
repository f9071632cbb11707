"""Routing of a mixture of experts through the SDK: `loss_fn_inputs["routing"]` in and out, asked for by `return_routing`."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from tokenizers import Tokenizer, models

from tests.live import LiveServer, running_server
from tests.models.builders import saved

# The SDK leaves its connections to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
TOKENS = [7, 3, 300, 12, 5, 41]
EXPERTS = 8
ASKING = {"return_routing": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("experts")
    model = saved("qwen3_moe", place / "mixture")
    words = {f"w{index}": index for index in range(320)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(model / "tokenizer.json"))
    with running_server(place / "data", "--model", str(model)) as live:
        yield live


@pytest.fixture
def client(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as found:
        yield found
    gc.collect()


def test_routing_goes_out_and_comes_back(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4, seed=3).result()
    plain = run.forward([datum()], "cross_entropy").result()
    assert set(plain.loss_fn_outputs[0]) == {"logprobs", "elementwise_loss"}
    told = run.forward([datum()], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    routing = told["routing"].to_numpy()
    assert routing.shape[0] == len(TOKENS)
    replayed = run.forward_backward([datum(routing)], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    assert replayed["logprobs"].data == told["logprobs"].data == plain.loss_fn_outputs[0]["logprobs"].data
    elsewhere = (routing + 1) % EXPERTS
    moved = run.forward([datum(elsewhere)], "cross_entropy", ASKING).result().loss_fn_outputs[0]
    assert np.array_equal(moved["routing"].to_numpy(), elsewhere)
    assert moved["logprobs"].data != told["logprobs"].data


def test_bad_routing_is_a_user_error_and_the_run_goes_on(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model="mixture", rank=4).result()
    for routing, message in ((np.zeros((2, 2, 2), np.int64), "expected integers"), (np.full((6, 2, 2), 99), "names experts from 0 to")):
        with pytest.raises(tinker.RequestFailedError, match=message):
            run.forward([datum(routing)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="must be 0 or 1"):
        run.forward([datum()], "cross_entropy", {"return_routing": 2.0}).result()
    assert run.forward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0


def datum(routing: np.ndarray | None = None) -> tinker.Datum:
    inputs = {"target_tokens": [*TOKENS[1:], 9], "weights": [1.0] * len(TOKENS)}
    if routing is not None:
        inputs["routing"] = tinker.TensorData.from_torch(torch.from_numpy(routing.astype(np.int64)))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)

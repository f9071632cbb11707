"""A batch that is more than one request: how the SDK divides it, as this server's configuration tells it to."""

from collections.abc import Iterable

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib.public_interfaces import training_client
from tinker.proto.request_conv import forward_backward_request_to_proto

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.types.checks import MAX_DATA, MAX_TARGETS
from tests.tinker.over_fake_engine import KEY, MODEL, Served

ADAM = types.AdamParams(learning_rate=1e-3)
SHIPPED = "bloomery-tiny"
BYTES_PER_TARGET = 8


@pytest.fixture(scope="module")
def told(server: Served) -> types.ClientConfigResponse:
    """The configuration, as the SDK reads it."""
    answer = httpx.post(f"{server.url}/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers={"x-api-key": KEY})
    return types.ClientConfigResponse.model_validate(answer.json())


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

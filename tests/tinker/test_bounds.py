"""What a run may be and be asked: at a bound taken, beyond it refused by the name of the field, and the run goes on. With the unmodified SDK."""

import pytest
import tinker
from tinker import types

from bloomery.services.training.validate import MAX_RANK
from tests.services.fake_engine import CONTEXT
from tests.tinker.over_fake_engine import MODEL, Served

ADAM = types.AdamParams(learning_rate=1e-3)


@pytest.fixture
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=MODEL, rank=4).result()


def trains(run: tinker.TrainingClient) -> bool:
    """Whether the next step is a good one."""
    run.forward_backward([supervised(2)], "cross_entropy").result()
    return "grad_norm" in run.optim_step(ADAM).result().metrics


def supervised(length: int) -> types.Datum:
    inputs = {"target_tokens": [1] * length, "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints([1] * length), loss_fn_inputs=inputs)


def rewarded(length: int) -> types.Datum:
    inputs = {"target_tokens": [1] * length, "logprobs": [-1.0] * length, "advantages": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints([1] * length), loss_fn_inputs=inputs)


def test_an_adapter_has_rank_128_and_no_higher(service: tinker.ServiceClient) -> None:
    assert MAX_RANK == 128
    widest = service.create_lora_training_client(base_model=MODEL, rank=128).result()
    assert widest.get_info().lora_rank == 128
    assert trains(widest)
    with pytest.raises(tinker.BadRequestError, match="rank is 129: it must be from 1 to 128") as refused:
        service.create_lora_training_client(base_model=MODEL, rank=129).result()
    assert refused.value.response.json()["field"] == "lora_config.rank"


def test_a_datum_fills_the_context_and_is_no_longer(server: Served, run: tinker.TrainingClient) -> None:
    assert run.forward([supervised(CONTEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape == [CONTEXT]
    known = len(server.engine.executed)
    with pytest.raises(tinker.RequestFailedError, match=rf"`data\[1\]\S*` has {CONTEXT + 1} tokens, the model's context is {CONTEXT}"):
        run.forward_backward([supervised(3), supervised(CONTEXT + 1)], "cross_entropy").result()
    assert [type(message.operation).__name__ for message in server.engine.executed[known:]] == ["Rejected"]
    with pytest.raises(tinker.RequestFailedError, match="an earlier operation failed"):
        run.optim_step(ADAM).result()
    assert trains(run)


@pytest.mark.parametrize(
    ("loss", "config", "told"),
    [
        ("ppo", {"clip_high": 1.2}, r"`loss_fn_config\.clip_high`: loss `ppo` has no option `clip_high`"),
        ("importance_sampling", {"beta": 0.1}, r"`loss_fn_config\.beta`: loss `importance_sampling` has no option `beta`"),
        ("cross_entropy", {"clip_low_threshold": 0.8}, r"`loss_fn_config\.clip_low_threshold`: loss `cross_entropy` has no option"),
        ("ppo", {"temperature": 0.0}, r"`loss_fn_config\.temperature` is 0\.0: it must be from 0\.01 to 100"),
        ("cross_entropy", {"temperature": 100.5}, r"`loss_fn_config\.temperature` is 100\.5: it must be from 0\.01 to 100"),
    ],
)
def test_an_option_that_a_loss_does_not_have_is_refused_by_name(run: tinker.TrainingClient, loss: str, config: dict[str, float], told: str) -> None:
    data = [supervised(3) if loss == "cross_entropy" else rewarded(3)]
    with pytest.raises(tinker.RequestFailedError, match=told):
        run.forward_backward(data, loss, config).result()
    with pytest.raises(tinker.RequestFailedError, match="an earlier operation failed"):
        run.optim_step(ADAM).result()
    assert trains(run)

"""What records of operations know about each other."""

from typing import Any

import msgspec
import pytest

from bloomery.types.operations import ForwardBackward, LoraSpec
from bloomery.types.wire import encode

SPEC = LoraSpec(rank=4, seed=1)
OTHER: dict[str, Any] = {"rank": 8, "alpha": 16.0, "train_attn": False, "train_mlp": False, "train_unembed": False}


def test_weights_fit_wherever_only_the_seed_differs() -> None:
    assert SPEC.misfit(msgspec.structs.replace(SPEC, seed=2)) is None
    assert {"seed", *OTHER} == set(SPEC.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_weights_fit_nowhere_else_and_the_field_is_named(field: str) -> None:
    other = msgspec.structs.replace(SPEC, **{field: OTHER[field]})
    assert SPEC.misfit(other) == other.misfit(SPEC) == field


def test_an_operation_of_an_older_journal_gives_everything() -> None:
    told = msgspec.msgpack.decode(encode(ForwardBackward(loss="cross_entropy", loss_config={}, data=(), return_logprobs=False)))
    assert told.pop("return_logprobs") is False
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=ForwardBackward).return_logprobs

"""What cannot be trained is refused with the field to change, before it reaches an engine."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from bloomery.services.models import Size
from bloomery.services.validate import check_adam, check_forward_backward, check_labels
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, InvalidInput, NotSupported
from bloomery.types.operations import AdamParams, Datum, ForwardBackward

SIZE = Size(context=8, vocab_size=10)


def ids(*values: int) -> Array:
    return Array.of(np.asarray(values, np.int64))


def floats(*values: float) -> Array:
    return Array.of(np.asarray(values, np.float32))


GOOD = Datum(tokens=ids(1, 2, 3), inputs={"target_tokens": ids(2, 3, 4), "weights": floats(0, -1, 2)})
SAMPLED = Datum(tokens=ids(1, 2), inputs={"target_tokens": ids(2, 3), "logprobs": floats(-1, -2), "advantages": floats(1, -1)})


def test_good_data_pass() -> None:
    soft = {"target_tokens": Array.of(np.ones((3, 2), np.int64)), "weights": Array.of(np.ones((3, 2), np.float32))}
    check_forward_backward(operation(GOOD, GOOD, changed(inputs=soft)), SIZE)
    check_forward_backward(operation(SAMPLED, loss="importance_sampling"), SIZE)


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda: operation(), "data", "empty"),
        (lambda: operation(GOOD, loss="l2"), "loss_fn", "unknown loss `l2`"),
        (lambda: operation(GOOD, loss="ppo"), "loss_fn", "not supported yet"),
        (lambda: operation(GOOD, config={"clip": 1.0}), "loss_fn_config", "no option `clip`"),
        (lambda: operation(GOOD, changed(tokens=ids())), "data[1].tokens", "at least 1"),
        (lambda: operation(changed(tokens=floats(1, 2, 3))), "data[0].tokens", "expected integers"),
        (lambda: operation(changed(tokens=ids(*range(9)))), "data[0].tokens", "context is 8"),
        (lambda: operation(changed(tokens=ids(1, 2, 10))), "data[0].tokens", "token id 10: ids are from 0 to 9"),
        (lambda: operation(changed(tokens=ids(1, -1, 2))), "data[0].tokens", "token id -1"),
        (lambda: operation(with_input(target_tokens=ids(1, 2, 99))), "data[0].target_tokens", "token id 99"),
        (lambda: operation(with_input(target_tokens=ids(1, 2))), "data[0].target_tokens", "expected integers [3] or [3, K]"),
        (lambda: operation(with_input(target_tokens=Array.of(np.ones((3, 0), np.int64)))), "data[0].target_tokens", "[3, 0]"),
        (lambda: operation(with_input(target_tokens=floats(1, 2, 3))), "data[0].target_tokens", "float32[3]"),
        (lambda: operation(with_input(weights=floats(1, 2))), "data[0].weights", "expected float32[3]"),
        (lambda: operation(with_input(weights=ids(1, 2, 3))), "data[0].weights", "int64[3]"),
        (lambda: operation(with_input(weights=floats(1, math.nan, 3))), "data[0].weights", "not finite"),
        (lambda: operation(with_input(weights=floats(1, math.inf, 3))), "data[0].weights", "not finite"),
        (lambda: operation(with_input(mask=floats(1, 1, 1))), "data[0].mask", "does not take"),
        (lambda: operation(GOOD, loss="importance_sampling"), "data[0].advantages", "lacks `advantages`"),
        (lambda: operation(changed(inputs={"weights": floats(1, 1, 1)})), "data[0].target_tokens", "lacks `target_tokens`"),
    ],
)
def test_bad_data_name_the_field(make: Callable[[], ForwardBackward], field: str, says: str) -> None:
    with pytest.raises((InvalidInput, NotSupported)) as refused:
        check_forward_backward(make(), SIZE)
    assert refused.value.field == field
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("learning_rate", value) for value in (math.nan, math.inf, -math.inf, -1e-3)),
        *((name, value) for name in ("beta1", "beta2") for value in (math.nan, -0.1, 1.0)),
        *(("eps", value) for value in (math.nan, 0.0, -1.0, math.inf)),
        *((name, value) for name in ("weight_decay", "grad_clip_norm") for value in (math.nan, -1.0, math.inf)),
    ],
)
def test_numbers_that_would_spoil_the_run_are_refused(field: str, value: float) -> None:
    check_adam(AdamParams(learning_rate=1e-3, beta1=0.0, weight_decay=0.1, grad_clip_norm=1.0))
    with pytest.raises(InvalidInput) as refused:
        check_adam(msgspec.structs.replace(AdamParams(learning_rate=1e-3), **{field: value}))
    assert refused.value.field == field


@pytest.mark.parametrize(("name", "metadata", "field"), [("", {}, "name"), ("x" * 129, {}, "name"), (None, {"a": "b" * 70_000}, "metadata")])
def test_labels_are_short(name: str | None, metadata: dict[str, str], field: str) -> None:
    check_labels("fine", {"renderer": "qwen3"})
    with pytest.raises(BloomeryError) as refused:
        check_labels(name, metadata)
    assert refused.value.field == field


def operation(*data: Datum, loss: str = "cross_entropy", config: dict[str, float | str] | None = None) -> ForwardBackward:
    return ForwardBackward(loss=loss, loss_config=config or {}, data=data)


def changed(**fields: object) -> Datum:
    return msgspec.structs.replace(GOOD, **fields)


def with_input(**inputs: Array) -> Datum:
    return changed(inputs={**GOOD.inputs, **inputs})

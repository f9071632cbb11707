"""What cannot be trained is refused with the field to change, before it reaches an engine."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.services.engines.models import Size
from bloomery.types.arrays import Array
from bloomery.types.checks import MAX_DATA, MAX_EXPERTS_TOLD, MAX_SOFT_TARGETS, MAX_TARGETS, check_forward_backward
from bloomery.types.errors import BloomeryError, InvalidInput, NotSupported
from bloomery.types.losses import LOSSES
from bloomery.types.operations import Datum, ForwardBackward
from bloomery.types.routing import RoutingShape

SIZE = Size(context=8, vocab_size=10, width=8)
Config = dict[str, float | str]


def ids(*values: int) -> Array:
    return Array.of(np.asarray(values, np.int64))


def floats(*values: float) -> Array:
    return Array.of(np.asarray(values, np.float32))


def soft(positions: int, width: int) -> dict[str, Array]:
    return {"target_tokens": Array.of(np.ones((positions, width), np.int64)), "weights": Array.of(np.ones((positions, width), np.float32))}


GOOD = Datum(tokens=ids(1, 2, 3), inputs={"target_tokens": ids(2, 3, 4), "weights": floats(0, -1, 2)})
SAMPLED = Datum(tokens=ids(1, 2), inputs={"target_tokens": ids(2, 3), "logprobs": floats(0, -2), "advantages": floats(0, -1)})


def operation(*data: Datum, loss: str = "cross_entropy", config: Config | None = None) -> ForwardBackward:
    return ForwardBackward(loss=loss, loss_config=config or {}, data=data)


def changed(datum: Datum = GOOD, **fields: object) -> Datum:
    return msgspec.structs.replace(datum, **fields)


def with_input(datum: Datum = GOOD, **inputs: Array) -> Datum:
    return changed(datum, inputs={**datum.inputs, **inputs})


def sampled(*, loss: str = "ppo", config: Config | None = None, **inputs: Array) -> ForwardBackward:
    return operation(with_input(SAMPLED, **inputs), loss=loss, config=config)


def test_good_data_pass() -> None:
    check_forward_backward(operation(GOOD, GOOD, changed(inputs=soft(3, 2)), changed(inputs=soft(3, MAX_SOFT_TARGETS))), SIZE)
    for name, form in LOSSES.items():
        if "logprobs" in form.inputs:
            check_forward_backward(operation(SAMPLED, SAMPLED, loss=name), SIZE)
            check_forward_backward(operation(SAMPLED, loss=name, config={key: option.default for key, option in form.options.items()}), SIZE)


def test_optional_inputs_pass_and_padding_at_masked_tokens_is_not_looked_at() -> None:
    thresholds = {"clip_low_threshold": floats(7, 0.5), "clip_high_threshold": floats(0, 1.5)}
    check_forward_backward(sampled(**thresholds), SIZE)
    check_forward_backward(sampled(loss="gspo", sequence_ratio_mask=floats(0, 1), **thresholds), SIZE)
    check_forward_backward(sampled(loss="gspo", sequence_ratio_mask=floats(0, 0), advantages=floats(0, 0)), SIZE)


INPUTS = "data[0].loss_fn_inputs"


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda: operation(), "data", "empty"),
        (lambda: operation(GOOD, loss="l2"), "loss_fn", "unknown loss `l2`: use one of cross_entropy, importance_sampling, ppo"),
        (lambda: operation(GOOD, loss="custom"), "loss_fn_config.loss_id", "forward_backward_custom"),
        (lambda: operation(GOOD, changed(tokens=ids())), "data[1].model_input", "at least one"),
        (lambda: operation(changed(tokens=floats(1, 2, 3))), "data[0].model_input", "float32[3]"),
        (lambda: operation(changed(tokens=ids(*range(9)))), "data[0].model_input", "context is 8"),
        (lambda: operation(changed(tokens=ids(1, 2, 10))), "data[0].model_input", "token id 10: ids are from 0 to 9"),
        (lambda: operation(changed(tokens=ids(1, -1, 2))), "data[0].model_input", "token id -1"),
        (lambda: operation(with_input(target_tokens=ids(1, 2, 99))), f"{INPUTS}.target_tokens", "token id 99"),
        (lambda: operation(with_input(target_tokens=ids(1, 2))), f"{INPUTS}.target_tokens", "expected integers [3] or [3, K]"),
        (lambda: operation(with_input(target_tokens=Array.of(np.ones((3, 0), np.int64)))), f"{INPUTS}.target_tokens", "[3, 0]"),
        (lambda: operation(with_input(target_tokens=floats(1, 2, 3))), f"{INPUTS}.target_tokens", "float32[3]"),
        (lambda: operation(with_input(target_tokens=Array.of(np.ones((), np.int64)))), f"{INPUTS}.target_tokens", "int64[]"),
        (lambda: operation(changed(inputs=soft(3, MAX_SOFT_TARGETS + 1))), f"{INPUTS}.target_tokens", "at most 256"),
        (lambda: operation(with_input(weights=floats(1, 2))), f"{INPUTS}.weights", "expected float32[3]"),
        (lambda: operation(with_input(weights=ids(1, 2, 3))), f"{INPUTS}.weights", "int64[3]"),
        (lambda: operation(with_input(weights=floats(1, math.nan, 3))), f"{INPUTS}.weights", "not finite (nan at [1]): send a number there"),
        (lambda: operation(with_input(weights=floats(1, math.inf, 3))), f"{INPUTS}.weights", "not finite"),
        (lambda: operation(with_input(mask=floats(1, 1, 1))), f"{INPUTS}.mask", "loss `cross_entropy` takes target_tokens, weights"),
        (lambda: operation(GOOD, loss="importance_sampling"), f"{INPUTS}.logprobs", "lacks `logprobs`"),
        (lambda: operation(changed(inputs={"weights": floats(1, 1, 1)})), f"{INPUTS}.target_tokens", "lacks `target_tokens`"),
        (lambda: sampled(target_tokens=Array.of(np.ones((2, 1), np.int64))), f"{INPUTS}.target_tokens", "expected integers [2]"),
        (lambda: sampled(weights=floats(1, 1)), f"{INPUTS}.weights", "and optionally clip_low_threshold, clip_high_threshold"),
        (lambda: sampled(loss="importance_sampling", clip_low_threshold=floats(1, 1)), f"{INPUTS}.clip_low_threshold", "takes"),
        (lambda: sampled(sequence_ratio_mask=floats(1, 1)), f"{INPUTS}.sequence_ratio_mask", "takes"),
        (lambda: sampled(loss="gspo", sequence_ratio_mask=floats(0, 0)), f"{INPUTS}.sequence_ratio_mask", "marks no token"),
        (lambda: sampled(clip_low_threshold=floats(0, 1.5)), f"{INPUTS}.clip_low_threshold", "holds 1.5: it must be from 0 to 1"),
        (lambda: sampled(clip_high_threshold=floats(2, 0.2)), f"{INPUTS}.clip_high_threshold", "an absolute ratio (1.2, not 0.2)"),
        (lambda: sampled(clip_high_threshold=floats(2, 2, 2)), f"{INPUTS}.clip_high_threshold", "expected float32[2]"),
        (lambda: sampled(clip_high_threshold=floats(math.nan, 2)), f"{INPUTS}.clip_high_threshold", "not finite"),
        (lambda: sampled(config={"clip": 1.0}), "loss_fn_config.clip", "no option `clip`; it has clip_low_threshold, clip_high_threshold"),
        (lambda: operation(GOOD, config={"beta": 1.0}), "loss_fn_config.beta", "it has temperature"),
        (lambda: sampled(config={"clip_high_threshold": 0.2}), "loss_fn_config.clip_high_threshold", "an absolute ratio (1.2, not 0.2)"),
        (lambda: sampled(config={"clip_low_threshold": math.nan}), "loss_fn_config.clip_low_threshold", "from 0 to 1"),
        (lambda: sampled(config={"clip_high_threshold": math.inf}), "loss_fn_config.clip_high_threshold", "from 1 to 1e+06"),
        (lambda: sampled(config={"clip_high_threshold": "1.2"}), "loss_fn_config.clip_high_threshold", "text `1.2`: it must be a number"),
        (lambda: sampled(loss="dro", config={"beta": -0.1}), "loss_fn_config.beta", "is -0.1"),
        (lambda: sampled(loss="stable_reinforce", config={"kl_coef": 0.1}), "loss_fn_config.kl_coef", "it has clip_high_threshold, kl_coeff"),
        (lambda: sampled(loss="reinforce", config={"weighting": "tis"}), "loss_fn_config.weighting", "no option `weighting`"),
    ],
)
def test_bad_data_name_the_field(make: Callable[[], ForwardBackward], field: str, says: str) -> None:
    with pytest.raises((InvalidInput, NotSupported)) as refused:
        check_forward_backward(make(), SIZE)
    assert refused.value.field == field
    assert says in refused.value.message


def test_an_operation_has_a_bounded_number_of_targets() -> None:
    width = MAX_SOFT_TARGETS
    size = SIZE._replace(context=16)
    wide = changed(tokens=ids(*range(8), *range(8)), inputs=soft(16, width))
    fitting = MAX_TARGETS // (16 * width)
    check_forward_backward(operation(*[wide] * fitting), size)
    with pytest.raises(InvalidInput, match=f"at most {MAX_TARGETS}") as refused:
        check_forward_backward(operation(*[wide] * fitting, GOOD), size)
    assert refused.value.field == "data"


def test_an_operation_has_a_bounded_number_of_data() -> None:
    check_forward_backward(operation(*[GOOD] * MAX_DATA), SIZE)
    with pytest.raises(InvalidInput, match=f"`data` has {MAX_DATA + 1} data, at most {MAX_DATA} are taken at a time") as refused:
        check_forward_backward(operation(*[GOOD] * (MAX_DATA + 1)), SIZE)
    assert refused.value.field == "data"


def test_experts_that_fit_no_answer_are_not_asked_for() -> None:
    size = SIZE._replace(context=1 << 13, routing=RoutingShape(experts=8, top_k=8, sparse_layers=tuple(range(64))))
    long = changed(tokens=Array.of(np.ones(1 << 13, np.int64)), inputs={"target_tokens": Array.of(np.ones(1 << 13, np.int64))})
    long = msgspec.structs.replace(long, inputs=long.inputs | {"weights": Array.of(np.ones(1 << 13, np.float32))})
    asked = msgspec.structs.replace(operation(*[long] * 8), return_routing=True)
    check_forward_backward(asked, size)
    with pytest.raises(InvalidInput, match=f"at most {MAX_EXPERTS_TOLD} are given at a time") as refused:
        check_forward_backward(msgspec.structs.replace(asked, return_routing_weights=True), size)
    assert refused.value.field == "loss_fn_config.return_routing"


ARRAYS = st.builds(
    lambda shape, kind, seed: Array.of((np.random.default_rng(seed).normal(size=shape) * 9).astype(kind)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(["int32", "int64", "float32"]),
    st.integers(0, 99),
)
NAMES = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "clip_low_threshold", "sequence_ratio_mask", "", "mask"])
OPTIONS = st.sampled_from(["beta", "clip_low_threshold", "clip_high_threshold", "kl_coeff", "x"])


@given(
    loss=st.sampled_from([*LOSSES, "custom", ""]),
    config=st.dictionaries(OPTIONS, st.floats() | st.text(max_size=3), max_size=2),
    data=st.lists(st.builds(Datum, tokens=ARRAYS, inputs=st.dictionaries(NAMES, ARRAYS, max_size=5)), max_size=2),
)
def test_noise_is_refused_in_our_own_words(loss: str, config: Any, data: list[Datum]) -> None:
    made = operation(*data, loss=loss, config=config)
    try:
        check_forward_backward(made, SIZE)
    except BloomeryError as error:
        refused = (error.category, (error.field or "").startswith(("data", "loss_fn")))
    else:
        refused = ("user", loss in LOSSES and len(data) > 0)
    assert refused == ("user", True)

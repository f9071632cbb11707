"""What a run may be and what an optimizer may be told: refused with the field to change."""

import math

import msgspec
import pytest

from bloomery.services.training.validate import check_labels
from bloomery.types.checks import check_adam
from bloomery.types.errors import BloomeryError, InvalidInput
from bloomery.types.operations import AdamParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("learning_rate", value) for value in (math.nan, math.inf, -math.inf, -1e-3, 100.1, 1e30)),
        *((name, value) for name in ("beta1", "beta2") for value in (math.nan, -0.1, 1.0)),
        *(("eps", value) for value in (math.nan, 0.0, -1.0, math.inf, 1e-31)),
        *((name, value) for name in ("weight_decay", "grad_clip_norm") for value in (math.nan, -1.0, math.inf)),
        ("weight_decay", 1001.0),
    ],
)
def test_numbers_that_would_spoil_the_run_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_adam(msgspec.structs.replace(AdamParams(learning_rate=1e-3), **{field: value}))
    assert refused.value.field == field
    assert f"`{field}`" in refused.value.message


def test_unusual_numbers_that_mean_something_pass() -> None:
    check_adam(AdamParams(learning_rate=0.0, beta1=0.0, weight_decay=0.1, grad_clip_norm=1.0, eps=1e-30))
    check_adam(AdamParams(learning_rate=100.0))
    check_adam(AdamParams(learning_rate=1e-3, weight_decay=1000.0))


@pytest.mark.parametrize(("name", "metadata", "field"), [("", {}, "name"), ("x" * 129, {}, "name"), (None, {"a": "b" * 70_000}, "metadata")])
def test_labels_are_short(name: str | None, metadata: dict[str, str], field: str) -> None:
    check_labels("fine", {"renderer": "qwen3"})
    with pytest.raises(BloomeryError) as refused:
        check_labels(name, metadata)
    assert refused.value.field == field

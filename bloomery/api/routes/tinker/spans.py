"""Provenance spans: which sampled sequence the positions of a datum come from.

They are the client's word. That they tile what they annotate is checked; no loss computed here needs more of them, because the log-probabilities in
the datum are those of the sampler, bit for bit.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bloomery.types.errors import InvalidInput
from bloomery.types.losses import TARGETS
from bloomery.types.operations import Datum

SAMPLED: Final = "sampled_tokens"
NEEDS_SAMPLED: Final = "stable_reinforce"
"""The loss whose contract has advantages at sampled tokens alone."""


def check_spans(message: Any, datum: Datum, field: str, loss: str) -> None:
    """Refuse spans that cannot be what they say; a datum may have none."""
    inputs, outputs = message.model_input_spans, message.loss_fn_input_spans
    if not inputs and not outputs:
        return
    if not inputs or not outputs:
        lacking = "loss_fn_input_spans" if inputs else "model_input_spans"
        raise InvalidInput(f"`{field}` has spans for one side and no `{lacking}`: send both or neither", field=f"{field}.{lacking}")
    _check_tiling(inputs, f"{field}.model_input_spans", "model_input", datum.tokens.shape[0])
    if TARGETS not in datum.inputs:
        # The check of the loss's inputs says so.
        return
    _check_tiling(outputs, f"{field}.loss_fn_input_spans", TARGETS, datum.inputs[TARGETS].shape[0])
    if loss == NEEDS_SAMPLED and "advantages" in datum.inputs:
        _check_advantages(datum.inputs["advantages"].numpy(), outputs, f"{field}.loss_fn_inputs.advantages")


def _check_tiling(spans: Sequence[Any], field: str, what: str, length: int) -> None:
    for index, span in enumerate(spans):
        kind = span.WhichOneof("span")
        if kind is None:
            raise InvalidInput(f"`{field}[{index}]` is neither of a prompt nor sampled", field=field)
        one = getattr(span, kind)
        if not one.sequence_id or one.offset < 0 or one.length < 0:
            raise InvalidInput(f"`{field}[{index}]` needs a `sequence_id`, and `offset` and `length` of at least 0", field=field)
    if (covered := sum(_length(span) for span in spans)) != length:
        raise InvalidInput(f"`{field}` cover {covered} positions, but `{what}` has {length}: they must tile it", field=field)


def _check_advantages(advantages: np.ndarray, spans: Sequence[Any], field: str) -> None:
    sampled = np.repeat([span.WhichOneof("span") == SAMPLED for span in spans], [_length(span) for span in spans])
    if advantages.shape == sampled.shape and (wrong := np.flatnonzero((advantages != 0) & ~sampled)).size:
        message = f"`{field}` is {advantages[wrong[0]]} at position {wrong[0]}, which the spans call part of a prompt: set it to 0 there"
        raise InvalidInput(message, field=field)


def _length(span: Any) -> int:
    return int(getattr(span, span.WhichOneof("span")).length)

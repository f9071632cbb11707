"""Data to packed rows and back; which of them form a micro-batch `models.pads.split` says.

Shapes: R packed rows, K soft targets per row (1 where targets are plain tokens).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.models.pads import packed_positions, packed_starts
from bloomery.train.losses import Loss
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.losses import TARGETS
from bloomery.types.operations import Datum


class MicroBatch(NamedTuple):
    """Data laid out back to back; pad rows hold zeros and take part in nothing."""

    lengths: list[int]
    tokens_R: Tensor
    positions_R: Tensor
    targets_RK: Tensor
    inputs: dict[str, Tensor]
    real_R: Tensor
    sequence_R: Tensor
    """Which datum each row belongs to."""
    routing_RLT: Tensor | None
    """Experts to send each row to, -1 where the router is free; None where it is free everywhere."""
    routing_weights_RLT: Tensor | None
    """What to multiply their answers with, nan where the router weighs; None where it weighs all."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        return MicroBatch(
            self.lengths,
            self.tokens_R.to(device),
            self.positions_R.to(device),
            self.targets_RK.to(device),
            {name: values.to(device) for name, values in self.inputs.items()},
            self.real_R.to(device),
            self.sequence_R.to(device),
            None if self.routing_RLT is None else self.routing_RLT.to(device),
            None if self.routing_weights_RLT is None else self.routing_weights_RLT.to(device),
        )


def pack(data: Sequence[Datum], loss: Loss) -> MicroBatch:
    """Lay out data for one forward."""
    lengths = [datum.tokens.shape[0] for datum in data]
    starts = packed_starts(lengths)
    width = max(_width(datum.inputs[TARGETS]) for datum in data)
    tokens = np.zeros(starts[-1], np.int64)
    targets = np.zeros((starts[-1], width), np.int64)
    inputs = {name: np.zeros((starts[-1], width), np.float32) for name in (*loss.form.inputs, *loss.form.optional)}
    real, sequence = np.zeros(starts[-1], np.bool_), np.zeros(starts[-1], np.int64)
    for index, (datum, start, length) in enumerate(zip(data, starts, lengths, strict=False)):
        rows, columns = slice(start, start + length), slice(_width(datum.inputs[TARGETS]))
        tokens[rows], real[rows], sequence[rows] = datum.tokens.numpy(), True, index
        targets[rows, columns] = datum.inputs[TARGETS].numpy().reshape(length, -1)
        for name, values in loss_inputs(datum, loss).items():
            inputs[name][rows, columns] = values.reshape(length, -1)
    return MicroBatch(
        lengths,
        torch.from_numpy(tokens),
        packed_positions(lengths),
        torch.from_numpy(targets),
        {name: torch.from_numpy(values) for name, values in inputs.items()},
        torch.from_numpy(real),
        torch.from_numpy(sequence),
        _at_rows([None if datum.routing is None else datum.routing.numpy().astype(np.int64) for datum in data], starts, -1),
        _at_rows([_weights(datum) for datum in data], starts, np.nan),
    )


def _weights(datum: Datum) -> NDArray[np.float32] | None:
    """What a datum's experts are weighed with, nan where its router is free."""
    if datum.routing is None or datum.routing_weights is None:
        return None
    weights: NDArray[np.float32] = np.where(datum.routing.numpy() < 0, np.float32(np.nan), datum.routing_weights.numpy())
    return weights


def _at_rows(given: Sequence[NDArray[Any] | None], starts: Sequence[int], missing: float) -> Tensor | None:
    """What data say of their rows, beginning at `starts`, and `missing` in all others; None where none says anything."""
    example = next((values for values in given if values is not None), None)
    if example is None:
        return None
    rows = np.full((starts[-1], *example.shape[1:]), missing, example.dtype)
    for values, start in zip(given, starts, strict=False):
        if values is not None:
            rows[start : start + len(values)] = values
    return torch.from_numpy(rows)


def unpack(values_RK: Tensor, data: Sequence[Datum]) -> list[np.ndarray]:
    """Each datum's values in the shape of its targets."""
    lengths = [datum.tokens.shape[0] for datum in data]
    shapes = [datum.inputs[TARGETS].shape for datum in data]
    values = values_RK.numpy()
    rows = (values[start : start + length] for start, length in zip(packed_starts(lengths), lengths, strict=False))
    return [row[:, : shape[1] if len(shape) == 2 else 1].reshape(shape) for row, shape in zip(rows, shapes, strict=True)]


def unpack_rows(values_RLT: Tensor, data: Sequence[Datum]) -> list[np.ndarray]:
    """Each datum's rows."""
    lengths = [datum.tokens.shape[0] for datum in data]
    return [values_RLT[start : start + length].numpy() for start, length in zip(packed_starts(lengths), lengths, strict=False)]


def check_token_ids(data: Sequence[Datum], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, whoever let them in: on a GPU such a look-up takes the whole process along."""
    # All at once: a look at each of very many short ones takes as long as a pass.
    for of_data in ([datum.tokens for datum in data], [datum.inputs[TARGETS] for datum in data]):
        ids = np.concatenate([array.numpy().ravel() for array in of_data])
        wrong = (ids < 0) | (ids >= vocab_size)
        if wrong.any():
            ends = np.cumsum([math.prod(array.shape) for array in of_data])
            index = int(np.searchsorted(ends, wrong.argmax(), side="right"))
            raise InvalidInput(f"data[{index}] holds token ids outside the vocabulary: they are from 0 to {vocab_size - 1}", field="data")


def loss_inputs(datum: Datum, loss: Loss) -> dict[str, np.ndarray]:
    """All inputs of the loss in the shape of the targets: what the datum leaves out is filled in."""
    form, shape = loss.form, datum.inputs[TARGETS].shape
    filled = {name: np.full(shape, loss.options[name], np.float32) for name in form.optional if name in loss.options}
    filled |= {name: (datum.inputs[form.factor].numpy() != 0).astype(np.float32) for name in form.masks}
    return filled | {name: values.numpy() for name, values in datum.inputs.items() if name != TARGETS}


def _width(targets: Array) -> int:
    return targets.shape[1] if len(targets.shape) == 2 else 1

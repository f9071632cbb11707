"""Data to packed rows and back: which data form a micro-batch is a function of their lengths and the run's budget alone.

Shapes: R packed rows, K soft targets per row (1 where targets are plain tokens).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bloomery.models.attention import ROW_PAD, packed_positions, packed_starts, pad_to
from bloomery.models.config import DecoderConfig
from bloomery.train.losses import Loss
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum

TARGETS = "target_tokens"


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
        )


def split(lengths: Sequence[int], budget: int) -> list[slice]:
    """Consecutive data whose padded lengths fit the budget; one that is longer than the budget goes alone."""
    parts, start, rows = [], 0, 0
    for index, length in enumerate(lengths):
        padded = pad_to(length, ROW_PAD)
        if index > start and rows + padded > budget:
            parts.append(slice(start, index))
            start, rows = index, 0
        rows += padded
    return [*parts, slice(start, len(lengths))]


def pack(data: Sequence[Datum], loss: Loss) -> MicroBatch:
    """Lay out data for one forward."""
    lengths = [datum.tokens.shape[0] for datum in data]
    starts = packed_starts(lengths)
    width = max(_width(datum.inputs[TARGETS]) for datum in data)
    tokens = np.zeros(starts[-1], np.int64)
    targets = np.zeros((starts[-1], width), np.int64)
    inputs = {name: np.zeros((starts[-1], width), np.float32) for name in loss.inputs}
    real, sequence = np.zeros(starts[-1], np.bool_), np.zeros(starts[-1], np.int64)
    for index, (datum, start, length) in enumerate(zip(data, starts, lengths, strict=False)):
        rows, columns = slice(start, start + length), slice(_width(datum.inputs[TARGETS]))
        tokens[rows], real[rows], sequence[rows] = datum.tokens.numpy(), True, index
        targets[rows, columns] = datum.inputs[TARGETS].numpy().reshape(length, -1)
        for name, values in inputs.items():
            values[rows, columns] = datum.inputs[name].numpy().reshape(length, -1)
    return MicroBatch(
        lengths,
        torch.from_numpy(tokens),
        packed_positions(lengths),
        torch.from_numpy(targets),
        {name: torch.from_numpy(values) for name, values in inputs.items()},
        torch.from_numpy(real),
        torch.from_numpy(sequence),
    )


def unpack(values_RK: Tensor, data: Sequence[Datum]) -> list[np.ndarray]:
    """Each datum's values in the shape of its targets."""
    lengths = [datum.tokens.shape[0] for datum in data]
    shapes = [datum.inputs[TARGETS].shape for datum in data]
    values = values_RK.numpy()
    rows = (values[start : start + length] for start, length in zip(packed_starts(lengths), lengths, strict=False))
    return [row[:, : shape[1] if len(shape) == 2 else 1].reshape(shape) for row, shape in zip(rows, shapes, strict=True)]


def check(data: Sequence[Datum], loss: Loss, config: DecoderConfig) -> None:
    """Refuse what would fail in the middle of a batch; the message names the datum and what to change."""
    if not data:
        raise InvalidInput("the batch is empty: send at least one datum", field="data")
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        length = _check_tokens(datum.tokens, where, config)
        targets = _input(datum, TARGETS, where)
        if targets.shape[:1] != (length,) or len(targets.shape) > (2 if loss.soft_targets else 1) or 0 in targets.shape:
            raise InvalidInput(f"{where}: `{TARGETS}` has shape {list(targets.shape)}, expected [{length}]", field=f"{where}.{TARGETS}")
        _check_range(targets, f"{where}.{TARGETS}", config.vocab_size)
        for name in loss.inputs:
            shape = _input(datum, name, where).shape
            if shape != targets.shape:
                raise InvalidInput(f"{where}: `{name}` has shape {list(shape)}, `{TARGETS}` has {list(targets.shape)}", field=f"{where}.{name}")


def _check_tokens(tokens: Array, where: str, config: DecoderConfig) -> int:
    if len(tokens.shape) != 1 or tokens.shape[0] == 0:
        raise InvalidInput(f"{where}: tokens have shape {list(tokens.shape)}, expected [N] with N at least 1", field=f"{where}.tokens")
    if tokens.shape[0] > config.context:
        raise InvalidInput(f"{where}: {tokens.shape[0]} tokens do not fit the model's context of {config.context}", field=f"{where}.tokens")
    _check_range(tokens, f"{where}.tokens", config.vocab_size)
    return tokens.shape[0]


def _check_range(tokens: Array, where: str, vocab_size: int) -> None:
    values = tokens.numpy()
    if values.dtype.kind != "i" or values.min() < 0 or values.max() >= vocab_size:
        raise InvalidInput(f"{where}: token ids must be integers from 0 to {vocab_size - 1}", field=where)


def _input(datum: Datum, name: str, where: str) -> Array:
    if name not in datum.inputs:
        raise InvalidInput(f"{where} lacks the loss input `{name}`", field=f"{where}.{name}")
    return datum.inputs[name]


def _width(targets: Array) -> int:
    return targets.shape[1] if len(targets.shape) == 2 else 1

"""Consecutive checkpoints of a model that nobody has to train: matrices of bf16 weights before and behind updates, as training leaves them.

Weights are Student's t with 8 degrees of freedom, of a scale for each matrix and one for each row; norms lie around one. Their masters are float32
and in the middle of a long run, so what bf16 rounds away lies anywhere within half a step of it. An update is Adam's (0.9, 0.999): the running mean
of gradients by the root of their running square, where a gradient is noise around a small direction that stays. Rows of the embedding have a
gradient only when their token occurs, which is rare for most.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.types.tensor_file import TensorSpec

DIRECTION: Final = 0.15
"""Of a gradient's noise, whose deviation is one: how large what stays is."""
_KEPT: Final = 0.9
"""Of the running mean, a step."""
_DECAY: Final = 0.01
_OCCURRING: Final = 0.35
"""The share of steps in which the most frequent token occurs."""
_BLOCK: Final = 1 << 18
"""Elements that are made at a time."""

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]


class Shape(NamedTuple):
    """A tensor of the model."""

    name: str
    rows: int
    columns: int
    scale: float | None
    """Of its weights; a norm has none."""


def shapes(layers: int, *, hidden: int = 1024, inner: int = 3072, tokens: int = 0) -> list[Shape]:
    """Those of a Qwen3 of 0.6B, with so many layers, and so many rows of the embedding."""
    found = [Shape("embed", tokens, hidden, 0.02)] if tokens else []
    for layer in range(layers):
        scale = 0.022 + 0.018 * layer / layers
        sizes: tuple[tuple[str, int, int, float], ...]
        sizes = (("q", 2 * hidden, hidden, 1.2), ("k", hidden, hidden, 1.3), ("v", hidden, hidden, 1.0), ("o", hidden, 2 * hidden, 1.0))
        sizes += (("gate", inner, hidden, 1.0), ("up", inner, hidden, 1.0), ("down", hidden, inner, 1.0))
        found += [Shape(f"{layer}.{name}", rows, columns, scale * more) for name, rows, columns, more in sizes]
        found += [Shape(f"{layer}.{name}", 1, hidden, None) for name in ("norm1", "norm2")]
    return found


def checkpoints(shape: Shape, learning_rate: float, steps: int, seed: int) -> list[Bits]:
    """The elements [rows * columns] of a tensor before and behind each of so many updates."""
    found: list[list[Bits]] = [[] for _ in range(steps + 1)]
    rng = np.random.default_rng([seed, *shape.name.encode()])
    rows = max(_BLOCK // shape.columns, 1)
    for start in range(0, shape.rows, rows):
        part = shape._replace(rows=min(rows, shape.rows - start))
        for kept, bits in zip(found, _trained(part, learning_rate, steps, rng), strict=True):
            kept.append(bits)
    return [np.concatenate(kept) for kept in found]


def models(tensors: Sequence[Shape], learning_rate: float, steps: int, seed: int) -> list[MemoryWeights]:
    """All tensors together, before and behind each of so many updates."""
    layout = Layout.of({shape.name: TensorSpec("BF16", (shape.rows, shape.columns)) for shape in tensors})
    made = {shape.name: checkpoints(shape, learning_rate, steps, seed) for shape in tensors}
    return [MemoryWeights(layout, {name: found[number] for name, found in made.items()}) for number in range(steps + 1)]


def _trained(shape: Shape, learning_rate: float, steps: int, rng: np.random.Generator) -> Iterator[Bits]:
    size = (shape.rows, shape.columns)
    master = _weights(shape, rng)
    occurs = rng.random((shape.rows, 1)) * _OCCURRING if shape.name == "embed" else np.ones((shape.rows, 1))
    direction = DIRECTION * rng.standard_normal(size, np.float32)
    mean, variance = _mean(occurs, direction, rng), (occurs * (1 + DIRECTION**2)).astype(np.float32)
    yield rounded(master).ravel()
    for _ in range(steps):
        there = (rng.random(occurs.shape) < occurs).astype(np.float32)
        mean = _KEPT * mean + (1 - _KEPT) * there * (direction + rng.standard_normal(size, np.float32))
        master -= np.float32(learning_rate) * (mean / np.sqrt(variance) + np.float32(_DECAY) * master)
        yield rounded(master).ravel()


def _weights(shape: Shape, rng: np.random.Generator) -> Floats:
    """The masters [rows, columns]."""
    size = (shape.rows, shape.columns)
    if shape.scale is None:
        weights = np.abs(1 + np.float32(0.3) * rng.standard_normal(size, np.float32))
    else:
        scale = np.float32(shape.scale) * np.exp(np.float32(0.25) * rng.standard_normal((shape.rows, 1), np.float32))
        weights = scale * rng.standard_normal(size, np.float32) / np.sqrt(rng.standard_gamma(4, size, np.float32) / 4)
    bits = rounded(weights)
    step = np.ldexp(np.float32(1), ((bits >> 7) & 0xFF).astype(np.int32) - 134)
    masters: Floats = widened(bits) + step * (rng.random(size, np.float32) - np.float32(0.5))
    return masters


def _mean(occurs: NDArray[np.float64], direction: Floats, rng: np.random.Generator) -> Floats:
    """The running mean of gradients that have come for long: of each row those of the steps in which it had one."""
    ages = _KEPT ** np.arange(60) * (1 - _KEPT)
    weights = (rng.random((len(occurs), len(ages))) < occurs) * ages
    noise = np.sqrt((weights**2).sum(1, keepdims=True)).astype(np.float32)
    mean: Floats = direction * weights.sum(1, keepdims=True).astype(np.float32) + noise * rng.standard_normal(direction.shape, np.float32)
    return mean


def rounded(values: Floats) -> Bits:
    """As bits of bf16, the nearest, of two the even one."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def widened(bits: Bits) -> Floats:
    """What such bits are in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)

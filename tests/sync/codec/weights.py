"""Random weights that change as training changes them, and weights that break on demand."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.layout import Chunk, Layout, MemoryWeights
from bloomery.sync.codec.numbers import NUMBERS
from bloomery.sync.state_hash import Bits
from bloomery.types.tensor_file import TensorSpec

EVERY_DTYPE = {f"of.{name.lower()}": TensorSpec(name, (3, 7)) for name in NUMBERS}


def layout_of(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    return Layout.of({name: TensorSpec(*spec) for name, spec in specs.items()})


def random_weights(layout: Layout, rng: np.random.Generator) -> MemoryWeights:
    """Floats as models have them, small and of both signs; other numbers anyhow."""
    weights = MemoryWeights.zeros(layout)
    for tensor in layout.tensors:
        weights[tensor.name][:] = random_bits(tensor.dtype, tensor.numel, rng)
    return weights


def random_bits(dtype: str, count: int, rng: np.random.Generator) -> Bits:
    kind = NUMBERS[dtype]
    if dtype == "BF16":
        return ((rng.standard_t(8, count) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype in ("F16", "F32", "F64"):
        return (rng.standard_t(8, count) * 0.02).astype(f"f{kind.item_bytes}").view(kind.dtype)
    return rng.integers(0, 1 << (8 * kind.item_bytes), count, dtype=np.uint64).astype(kind.dtype)


def stepped(weights: MemoryWeights, rng: np.random.Generator, share: float = 0.02, wild: float = 0.1) -> MemoryWeights:
    """Other weights: a share of the elements moved by a step or two, and of these a share to anything."""
    after = copied(weights)
    for tensor in weights.layout.tensors:
        kind, flat = NUMBERS[tensor.dtype], after[tensor.name]
        at = np.flatnonzero(rng.random(tensor.numel) < share)
        steps = rng.choice(np.array([1, -1, 2, -2, 5, -300], np.int64), len(at), p=[0.43, 0.43, 0.05, 0.05, 0.02, 0.02])
        moved = kind.ordered(kind.ordered(flat[at]) + steps.astype(kind.dtype))
        anything = rng.integers(0, 1 << (8 * kind.item_bytes), len(at), dtype=np.uint64).astype(kind.dtype)
        flat[at] = np.where(rng.random(len(at)) < wild, anything, moved)
    return after


def copied(weights: MemoryWeights) -> MemoryWeights:
    """In arrays of its own."""
    return MemoryWeights(weights.layout, {tensor.name: weights[tensor.name].copy() for tensor in weights.layout.tensors})


def same(one: MemoryWeights, two: MemoryWeights) -> bool:
    """Bit for bit."""
    return all(np.array_equal(one[tensor.name], two[tensor.name]) for tensor in one.layout.tensors)


class Watched:
    """Weights that tell what is written to them, before it is."""

    def __init__(self, weights: MemoryWeights, on_write: Callable[[Chunk, NDArray[np.uint32], Bits], None]) -> None:
        self.layout, self._weights, self._on_write = weights.layout, weights, on_write

    def read(self, chunk: Chunk) -> Bits:
        return self._weights.read(chunk)

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        self._on_write(chunk, indices, values)
        self._weights.write(chunk, indices, values)

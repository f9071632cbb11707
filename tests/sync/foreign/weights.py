"""Weights before and after a step, of every dtype and many shapes, and as safetensors files."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.sync.state_hash import UNSIGNED, Bits
from bloomery.types import tensor_file
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec

DTYPES: Final = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I64")
SHAPES: Final = ((), (1,), (700,), (40, 90), (3, 7, 50), (300, 4), (0,), (0, 5), (5, 0), (2, 3, 4, 5, 6))


class Step(NamedTuple):
    """The same weights twice."""

    old: MemoryWeights
    new: MemoryWeights


def step(specs: Mapping[str, TensorSpec], shares: Mapping[str, float], seed: int = 0) -> Step:
    """Of every tensor a share of the elements moves, most by one unit in the last place, one in thirty to anywhere."""
    draw = np.random.default_rng(seed)
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for name, spec in specs.items():
        unsigned = UNSIGNED[ITEM_BYTES[spec.dtype]]
        before = _drawn(draw, spec)
        moved = draw.random(before.size) < shares[name]
        by = np.where(draw.random(before.size) < 1 / 30, draw.integers(0, 1 << 63, before.size), draw.choice([1, 1, 1, -1, -1, 2], before.size))
        old[name], new[name] = before, np.where(moved, before + by.astype(unsigned), before)
    layout = Layout.of(specs)
    return Step(MemoryWeights(layout, old), MemoryWeights(layout, new))


def one(shape: tuple[int, ...] = (64, 500), share: float = 0.02, dtype: str = "BF16", seed: int = 0) -> Step:
    """Of a single tensor `w`."""
    return step({"w": TensorSpec(dtype, shape)}, {"w": share}, seed)


def every_kind(dtypes: tuple[str, ...] = DTYPES, shares: tuple[float, ...] = (0.0, 0.02, 0.4)) -> Step:
    """A tensor of every dtype, shape and share."""
    named = {f"{dtype}.{shape}.{share}": (TensorSpec(dtype, shape), share) for dtype in dtypes for shape in SHAPES for share in shares}
    return step({name: spec for name, (spec, _) in named.items()}, {name: share for name, (_, share) in named.items()})


def to_file(weights: MemoryWeights, path: Path) -> Path:
    """A safetensors file of them."""
    tensors = weights.layout.tensors
    specs = {tensor.name: TensorSpec(tensor.dtype, tensor.shape) for tensor in tensors}
    path.write_bytes(b"".join([tensor_file.header(specs, {}), *(weights[tensor.name].tobytes() for tensor in tensors)]))
    return path


def from_file(path: Path) -> MemoryWeights:
    """Weights in memory."""
    data = path.read_bytes()
    places = tensor_file.places(data, size=len(data))
    tensors = {name: np.frombuffer(data[place.start : place.stop], UNSIGNED[ITEM_BYTES[place.spec.dtype]]).copy() for name, place in places.items()}
    return MemoryWeights(Layout.of({name: place.spec for name, place in places.items()}), tensors)


def _drawn(draw: np.random.Generator, spec: TensorSpec) -> Bits:
    """Bits of numbers around 0, where a dtype has a sign and an exponent; any bits otherwise."""
    size, unsigned = math.prod(spec.shape), UNSIGNED[ITEM_BYTES[spec.dtype]]
    floats = draw.normal(0, 0.02, size)
    if spec.dtype == "F32":
        return floats.astype(np.float32).view(unsigned)
    if spec.dtype == "BF16":
        return (floats.astype(np.float32).view(np.uint32) >> 16).astype(unsigned)
    if spec.dtype == "F16":
        return floats.astype(np.float16).view(unsigned)
    return draw.integers(0, 120, size).astype(unsigned)

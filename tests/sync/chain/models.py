"""Small weights of many chunks, and what becomes of them: version `n` is the same in every process."""

from functools import cache
from pathlib import Path

import numpy as np

from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.sync.state_hash import UNSIGNED
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec
from tests.sync.codec.weights import copied, same

# Neighbours of different dtypes are in chunks of their own, however small.
LAYOUT = Layout.of(
    {
        "a": TensorSpec("BF16", (40, 50)),
        "b": TensorSpec("F32", (300,)),
        "c": TensorSpec("BF16", (3000,)),
        "d": TensorSpec("U8", (500,)),
        "e": TensorSpec("F16", (700,)),
        "f": TensorSpec("BF16", (64,)),
        "g": TensorSpec("F8_E4M3", (256,)),
    }
)
OTHER = Layout.of({"a": TensorSpec("BF16", (41, 50))})
RUN = "run-1"


@cache
def version(number: int) -> MemoryWeights:
    """Nobody writes to it. From one to the next a fiftieth changes by one unit in the last place, but for a chunk that never does."""
    if number == 0:
        return drawn(LAYOUT)
    return stepped(version(number - 1), number)


def drawn(layout: Layout, seed: int = 0) -> MemoryWeights:
    """Any weights."""
    chance = np.random.default_rng(seed)
    return MemoryWeights(layout, {name: _numbers(dtype, shape, chance) for name, dtype, shape, _ in layout.tensors})


def stepped(weights: MemoryWeights, seed: int, *, share: float = 0.02) -> MemoryWeights:
    """Others that differ a little."""
    chance = np.random.default_rng(seed)
    after = copied(weights)
    for tensor in weights.layout.tensors:
        if tensor.name != "f":
            bits = after[tensor.name]
            places = chance.choice(len(bits), max(1, int(share * len(bits))), replace=False)
            bits[places] += chance.choice(np.array([1, -1]), len(places)).astype(bits.dtype)
    return after


def empty() -> MemoryWeights:
    """Where a reader's weights are to be."""
    return MemoryWeights.zeros(LAYOUT)


def in_files(folder: Path) -> MemoryWeights:
    """Weights that outlive their process; zeros at first."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, dtype, shape, _ in LAYOUT.tensors:
        path = folder / name
        kind = UNSIGNED[ITEM_BYTES[dtype]]
        arrays[name] = np.memmap(path, kind, "r+" if path.exists() else "w+", shape=shape)
    return MemoryWeights(LAYOUT, arrays)


def which(weights: MemoryWeights, upto: int = 20) -> int | None:
    """The version that these weights are, bit for bit."""
    return next((number for number in range(upto + 1) if same(weights, version(number))), None)


def _numbers(dtype: str, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray:
    values = chance.standard_normal(shape).astype(np.float32)
    match dtype:
        case "F32":
            return values.view(np.uint32)
        case "F16":
            return values.astype(np.float16).view(np.uint16)
        case "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
    return chance.integers(1, 100, shape).astype(np.uint8)

"""Deltas that `fireworks-delta-compression` made of weights which a formula gives, so that they are read without it.

`python -m tests.sync.foreign.golden` makes them again; the package's licence is MIT, and what it writes is the user's in any case.
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.sync.foreign.delta import FORMATS, Format
from bloomery.sync.state_hash import UNSIGNED, Bits
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec
from tests.sync.foreign.setup import run
from tests.sync.foreign.weights import Step, to_file

FOLDER: Final = Path(__file__).parent / "golden"
SPECS: Final = {
    "down.weight": TensorSpec("BF16", (200, 1000)),
    "embedding.weight": TensorSpec("BF16", (30_000, 4)),
    "half.weight": TensorSpec("F16", (300, 200)),
    "float.weight": TensorSpec("F32", (300, 200)),
    "quantised.weight": TensorSpec("F8_E4M3", (300, 200)),
    "quantised.wide": TensorSpec("F8_E5M2", (300, 200)),
    "bytes": TensorSpec("U8", (3, 5, 7)),
    "counts": TensorSpec("I64", (40,)),
    "scale": TensorSpec("BF16", ()),
    "frozen.weight": TensorSpec("BF16", (1500, 2000)),
    "nothing": TensorSpec("BF16", (0, 8)),
}
UNCHANGED: Final = frozenset({"frozen.weight", "nothing"})


def file(form: Format) -> Path:
    return FOLDER / f"{form}.safetensors"


def weights() -> Step:
    """Numbers around one, of which a fiftieth moves by a unit in the last place and every thousandth by another exponent."""
    old, new = {}, {}
    for salt, (name, spec) in enumerate(sorted(SPECS.items())):
        size, unsigned = math.prod(spec.shape), UNSIGNED[ITEM_BYTES[spec.dtype]]
        before = _around_one(_noise(size, 3 * salt), unsigned)
        moved, how = _noise(size, 3 * salt + 1) % 50 == 0, _noise(size, 3 * salt + 2)
        by = np.where(how % 20 == 0, 1 << 8 * before.itemsize - 3, np.where(how % 2 == 0, 1, -1)).astype(unsigned)
        if name == "scale":
            moved[:] = True
        old[name], new[name] = before, before if name in UNCHANGED else np.where(moved, before + by, before)
    layout = Layout.of(SPECS)
    return Step(MemoryWeights(layout, old), MemoryWeights(layout, new))


def _around_one(noise: NDArray[np.uint64], unsigned: Any) -> Bits:
    bits = 8 * np.dtype(unsigned).itemsize
    return (np.uint64(3 << bits - 4) + noise % np.uint64(1 << bits - 4)).astype(unsigned)


def _noise(size: int, salt: int) -> NDArray[np.uint64]:
    """The same on every machine and in every version of numpy."""
    x = (np.arange(size, dtype=np.uint64) + np.uint64(salt << 32)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x >> np.uint64(17)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        before, after = (to_file(each, Path(folder) / name) for each, name in zip(weights(), ("old", "new"), strict=True))
        for form in FORMATS:
            run("encode", form, before, after, file(form))

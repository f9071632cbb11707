"""Payloads made by hand, of a tensor of BF16 (64, 500), to be changed in ways that no writer would."""

import bz2
import pickle
import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import zstandard

from bloomery.sync.codec.layout import MemoryWeights
from bloomery.sync.foreign import arc3, archive, pickles
from bloomery.types.tensor_file import TensorSpec
from tests.sync.foreign.weights import Step

SHAPE: Final = (64, 500)
CODEBOOK: Final = (2, 1, 4)
"""Values of mantissas as zigzag."""


def delta_of(payload: bytes, checksum: int) -> bytes:
    return archive.write({"w": payload}, {"w": str(checksum)})


def checksum_of(weights: MemoryWeights) -> int:
    return zlib.adler32(weights["w"].tobytes())


def envelope(raw: bytes, codec: str = "zstd") -> bytes:
    zipped = bz2.compress(raw) if codec == "bz2" else zstandard.ZstdCompressor().compress(raw)
    return arc3.PREFIX + pickles.write({"codec": codec, "data": zipped})


def opened(step_: Step) -> dict[str, Any]:
    """The payload of a step, as a dict of plain data."""
    payload = arc3.encode(step_.old["w"], step_.new["w"], TensorSpec("BF16", (64, 500)))
    fields = pickle.loads(payload[len(arc3.PREFIX) :])
    data = bz2.decompress(fields["data"]) if fields["codec"] == "bz2" else zstandard.decompress(fields["data"])
    found: dict[str, Any] = pickle.loads(data)
    return found


def changed(field: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A payload with one field another; `a.b` is one of a field's."""

    def change(payload: dict[str, Any]) -> dict[str, Any]:
        first, _, rest = field.partition(".")
        return {**payload, first: changed(rest, value)(payload[first]) if rest else value(payload[first]) if callable(value) else value}

    return change


def coded(both: Step) -> dict[str, Any]:
    payload = opened(both)
    values = np.frombuffer(payload["mantissa_stream"]["data"], payload["mantissa_stream"]["dtype"])
    return {**payload, "mantissa_stream": codes_of(values, list(CODEBOOK))}


def codes_of(values: np.ndarray[Any, Any], codebook: list[int]) -> dict[str, Any]:
    """Values in the form that no version of the package has been seen to write, though it reads it."""
    codes = np.array([codebook.index(value) if value in codebook else 7 for value in values.tolist()], np.uint8)
    bits = (codes[:, None] >> np.arange(3) & 1).reshape(-1)
    beside = np.flatnonzero(codes == 7)
    gaps = np.diff(beside, prepend=0).astype(np.uint16)
    return {
        "kind": "codebook3",
        "count": len(values),
        "codebook": bytes(codebook),
        "codes": np.packbits(bits.astype(np.uint8), bitorder="little").tobytes(),
        "exception_positions": {"count": len(gaps), "dtype": "uint16", "data": gaps.tobytes()},
        "exception_values": values[beside].tobytes(),
    }

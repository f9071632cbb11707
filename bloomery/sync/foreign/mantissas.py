"""The mantissas of changed elements: as they are, against those before (XOR), or their difference as zigzag (0, -1, 1, -2, ... are 0, 1, 2, 3, ...).

The values lie back to back, or (`codebook3`) as codes of three bits, of which 7 says that the value is among those that follow.
"""

from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from bloomery.sync.foreign import gaps
from bloomery.sync.foreign.fields import Fields
from bloomery.sync.foreign.gaps import WIDTHS
from bloomery.sync.foreign.pickles import Value
from bloomery.types.errors import Corrupt

TRANSFORMS: Final = ("raw", "xor", "zigzag")
KINDS: Final = ("raw", "codebook3")
_CODE_BITS: Final = 3
_ESCAPE: Final = 7
_LEVEL: Final = 1

Mantissas = NDArray[np.int64]
"""Of changed elements [n]."""


def write(old: Mantissas, new: Mantissas, alone: NDArray[np.bool_]) -> dict[str, Value]:
    """The fields of mantissas [n], in the form that zstd makes least of; of elements in which not they `alone` changed, zeros."""
    forms = {name: gaps.smallest(np.where(alone, _transformed(name, old, new), 0)) for name in TRANSFORMS}
    name = min(forms, key=lambda each: len(zstandard.ZstdCompressor(level=_LEVEL).compress(forms[each].tobytes())))
    values = forms[name]
    stream: dict[str, Value] = {"kind": "raw", "dtype": values.dtype.name, "data": values.tobytes()}
    return {"transform": name, "mantissa_dtype": values.dtype.name, "mantissa_stream": stream}


def read(fields: Fields, old: Mantissas, bits: int) -> Mantissas:
    """The mantissas of `bits` bits that those of elements [n] become; Corrupt for any that have more, or of more or fewer elements."""
    transform = fields.one_of("transform", *TRANSFORMS)
    fields.one_of("mantissa_dtype", *WIDTHS)
    stream = fields.fields("mantissa_stream")
    values = _read_raw(stream) if stream.one_of("kind", *KINDS) == "raw" else _read_codes(stream, len(old))
    stream.done()
    if len(values) != len(old):
        raise Corrupt(f"mantissas of {len(old)} elements are due, and there are {len(values)}")
    if int(values.max(initial=0)) >= 2 << bits:
        raise Corrupt(f"a value of {int(values.max())} makes no mantissa of {bits} bits")
    found = _restored(transform, old, values.astype(np.int64))
    if int(found.min(initial=0)) < 0 or int(found.max(initial=0)) >= 1 << bits:
        raise Corrupt(f"a mantissa of the weights would not keep to its {bits} bits: the delta is damaged, or of other weights")
    return found


def _transformed(name: str, old: Mantissas, new: Mantissas) -> Mantissas:
    if name == "raw":
        return new
    if name == "xor":
        return old ^ new
    difference = new - old
    return (difference << 1) ^ (difference >> 63)


def _restored(name: str, old: Mantissas, values: Mantissas) -> Mantissas:
    if name == "raw":
        return values
    if name == "xor":
        return old ^ values
    return old + ((values >> 1) ^ -(values & 1))


def _read_raw(stream: Fields) -> NDArray[Any]:
    return gaps.numbers(stream.data("data"), stream.one_of("dtype", *WIDTHS))


def _read_codes(stream: Fields, count: int) -> NDArray[np.uint8]:
    stream.exactly("count", count)
    codebook = gaps.numbers(stream.data("codebook"), "uint8")
    codes = _unpacked(stream.data("codes"), count)
    positions = gaps.read_flat(stream.fields("exception_positions"), count)
    values = gaps.numbers(stream.data("exception_values"), "uint8")
    if len(codebook) > _ESCAPE or len(values) != len(positions) or not np.array_equal(np.flatnonzero(codes == _ESCAPE), positions):
        raise Corrupt("values beside the codebook are not those that the codes name")
    found = codes.copy()
    coded = codes != _ESCAPE
    if int(codes[coded].max(initial=0)) >= max(1, len(codebook)) or (coded.any() and not len(codebook)):
        raise Corrupt(f"a code names none of the {len(codebook)} values of the codebook")
    found[coded] = codebook[codes[coded]]
    found[positions] = values
    return found


def _unpacked(data: memoryview, count: int) -> NDArray[np.uint8]:
    if len(data) != (count * _CODE_BITS + 7) // 8:
        raise Corrupt(f"{len(data)} bytes do not hold codes of {count} elements")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=count * _CODE_BITS).reshape(count, _CODE_BITS)
    return (bits[:, 0] | bits[:, 1] << 1 | bits[:, 2] << 2).astype(np.uint8)

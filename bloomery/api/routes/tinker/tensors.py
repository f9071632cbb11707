"""Between the contract's tensors and ours.

Requests may hold bf16 and int32 values and sparse rows; inside there are only dense float32 and int64.
Shapes: rows x columns of a sparse tensor, N tokens of a datum.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from bloomery.api.routes.tinker import proto
from bloomery.types.arrays import Array
from bloomery.types.checks import MAX_SOFT_TARGETS
from bloomery.types.errors import InvalidInput

MAX_ELEMENTS: Final = 1 << 26
"""A sparse tensor names its dense size in a few bytes; this bounds what those of a request may ask to be filled in."""
_MAX_DIMENSIONS: Final = 8
WIDEST: Final = 8
"""Bytes of the largest values."""

_FLOAT32, _INT64, _INT32, _BFLOAT16 = (proto.DTYPES[f"DTYPE_{name}"] for name in ("FLOAT32", "INT64", "INT32", "BFLOAT16"))
_STORED: Final[dict[int, np.dtype[Any]]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4"), _BFLOAT16: np.dtype("<u2")}
_SENT: Final = {"float32": _FLOAT32, "int64": _INT64, "int32": _INT32}


def decode_tensor(tensor: Any, field: str) -> Array:
    """A dense Array of float32 or int64 from a tensor of the wire."""
    if tensor.dtype not in _STORED:
        raise InvalidInput(f"`{field}` has no known dtype; send float32, int64, int32 or bfloat16", field=field)
    encoding = tensor.WhichOneof("encoding")
    if encoding == "sparse_csr":
        return Array.of(_fill_rows(tensor, field))
    values = _widen(_values(tensor.dense, tensor.dtype, field), tensor.dtype)
    return Array.of(_shaped(values, tuple(tensor.shape), field))


def filled(tensor: Any) -> int:
    """Values of a sparse tensor when its zeros are filled in; 0 of a dense one, whose body has them all, and of one that cannot be filled in.

    What no tensor may have counts as little more than one may: sides are numbers of 63 bits, which nobody should have to multiply.
    """
    if tensor.WhichOneof("encoding") != "sparse_csr" or len(tensor.shape) != 2 or min(tensor.shape) < 0:
        return 0
    rows, columns = (min(int(side), MAX_ELEMENTS + 1) for side in tensor.shape)
    return min(rows * columns, MAX_ELEMENTS + 1)


def check_sparse(tensor: Any, length: int | None, field: str) -> None:
    """Refuse a sparse tensor, before it is filled in, that no row of `length` tokens has (None: any length will do)."""
    if length is None or tensor.WhichOneof("encoding") != "sparse_csr" or len(tensor.shape) != 2:
        return
    if tensor.shape[0] != length or tensor.shape[1] > MAX_SOFT_TARGETS:
        expected = f"[{length}, K] with at most {MAX_SOFT_TARGETS} columns"
        raise InvalidInput(f"`{field}` is sparse {list(tensor.shape)}, expected {expected}, one row for each token", field=field)


def check_fill(values: int) -> None:
    """Refuse sparse tensors that would be too large together."""
    if values > MAX_ELEMENTS:
        message = (
            f"sparse tensors have more than {MAX_ELEMENTS} values in all, zeros among them, and no more are filled in at a time: send fewer data"
        )
        raise InvalidInput(message, field="data")


def decode_tokens(payload: bytes, field: str) -> np.ndarray:
    """Token ids of one text chunk."""
    return _values(payload, _INT32, field)


def encode_tensor(array: Array) -> Any:
    """A dense tensor of the wire."""
    return proto.Tensor(dense=array.data, dtype=_SENT[array.dtype], shape=array.shape)


def encode_records(outputs: Sequence[dict[str, Array]], record_type: Any) -> Iterator[Any]:
    """Outputs of consecutive data as records: one record as long as names, dtypes and trailing shapes stay the same."""
    for layout, group in groupby(outputs, key=_layout):
        data = list(group)
        record = record_type(num_datums=len(data))
        for name, dtype, trailing_shape in layout:
            arrays = [datum[name] for datum in data]
            field = record.fields[name]
            field.dtype = _SENT[dtype]
            field.trailing_shape.extend(trailing_shape)
            field.data = b"".join(array.data for array in arrays)
            field.offsets = np.cumsum([0, *(len(array.data) for array in arrays)]).astype("<i8").tobytes()
        yield record


def _layout(output: dict[str, Array]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(output.items()))


def _values(payload: bytes, dtype: int, field: str) -> np.ndarray:
    size = _STORED[dtype].itemsize
    if len(payload) % size:
        raise InvalidInput(f"`{field}` has {len(payload)} bytes, which is not a multiple of its {size}-byte values", field=field)
    return np.frombuffer(payload, dtype=_STORED[dtype])


def _widen(values: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == _BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64) if dtype == _INT32 else values


def _shaped(values: np.ndarray, shape: tuple[int, ...], field: str) -> np.ndarray:
    if not shape:
        return values
    if not _possible(shape) or math.prod(shape) != values.size:
        raise InvalidInput(f"`{field}` has {values.size} values, which do not fill its shape, {_told(shape)}", field=field)
    return values.reshape(shape)


def _possible(shape: tuple[int, ...]) -> bool:
    """Whether there can be such an array: an empty one may have sides that no memory has addresses for."""
    return len(shape) <= _MAX_DIMENSIONS and min(shape) >= 0 and math.prod(max(side, 1) for side in shape) <= sys.maxsize // WIDEST


def _told(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) <= _MAX_DIMENSIONS else f"one of {len(shape)} sides"


def _fill_rows(tensor: Any, field: str) -> np.ndarray:
    shape = tuple(tensor.shape)
    if len(shape) != 2 or not _possible(shape) or math.prod(shape) > MAX_ELEMENTS:
        raise InvalidInput(f"`{field}` is sparse and needs a shape [rows, columns] of at most {MAX_ELEMENTS} values, not {_told(shape)}", field=field)
    csr = tensor.sparse_csr
    values = _widen(_values(csr.values, tensor.dtype, field), tensor.dtype)
    starts, columns = _values(csr.crow_indices, _INT64, field), _values(csr.col_indices, _INT64, field)
    check_rows(starts, columns, values.size, shape, field)
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense


def check_rows(starts: np.ndarray, columns: np.ndarray, count: int, shape: tuple[int, ...], field: str) -> None:
    """Refuse indices of a sparse tensor [rows, columns] that do not place each of its `count` values."""
    rows, width = shape
    if starts.size != rows + 1 or starts[0] != 0 or starts[-1] != count or np.any(np.diff(starts) < 0):
        raise InvalidInput(f"`{field}`: the row pointers of a sparse tensor rise from 0 to its {count} values, one per row and one more", field=field)
    if columns.size != count or np.any(columns < 0) or np.any(columns >= width):
        raise InvalidInput(f"`{field}`: a sparse tensor names one column between 0 and {width - 1} for each of its {count} values", field=field)

"""`Array`: a small dense tensor as bytes, with numpy at both ends."""

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bloomery.types.wire import Wire

DType = Literal["int32", "int64", "float32"]
_DTYPES: dict[str, DType] = {"int32": "int32", "int64": "int64", "float32": "float32"}


class Array(Wire, frozen=True):
    """Little-endian, C-contiguous values: `len(data) == prod(shape) * itemsize`."""

    dtype: DType
    # The product of millions of sizes takes hours.
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    data: bytes

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Wrap a numpy array of int32, int64 or float32."""
        name = _DTYPES.get(values.dtype.name)
        if name is None:
            raise TypeError(f"an Array holds int32, int64 or float32, not {values.dtype.name}")
        return cls(dtype=name, shape=values.shape, data=np.ascontiguousarray(values).tobytes())

    def numpy(self) -> NDArray[Any]:
        """A read-only view of the values in their shape."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if expected != len(self.data) or min(self.shape, default=0) < 0:
            raise ValueError(f"an Array of {self.dtype}{list(self.shape)} has {expected} bytes, not {len(self.data)}")

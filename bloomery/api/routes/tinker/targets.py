"""Token ids at places of a prompt, as the contract sends them, and the log-probabilities that come back in the same shape and layout.

Row i of the tensor [P - 1, K] names ids for position i + 1 of a prompt of P tokens; a cell of -1 names none and gets 0. In a sparse tensor only the
listed cells name anything, and only those come back. Shapes: C cells that name an id.
"""

from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bloomery.api.routes.tinker import bodies, proto
from bloomery.api.routes.tinker.tensors import check_rows
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import PromptTargets

FIELD: Final = "target_prompt_logprobs"
_NONE: Final = -1
_LARGEST_ID: Final = (1 << 31) - 1

Ints = NDArray[np.int64]


class TargetCells(NamedTuple):
    """The layout of a request's tensor: `size` values, of which those at `named` [C] name ids; `starts` and `columns` of a sparse one."""

    shape: tuple[int, int]
    size: int
    named_C: Ints
    sparse: tuple[Ints, Ints] | None

    def answered(self, logprobs_C: NDArray[np.float32]) -> Any:
        """The tensor of the answer."""
        values = np.zeros(self.size, "<f4")
        values[self.named_C] = logprobs_C
        tensor = proto.Tensor(dtype=proto.DTYPES["DTYPE_FLOAT32"], shape=self.shape)
        if self.sparse is None:
            tensor.dense = values.tobytes()
            return tensor
        starts, columns = self.sparse
        tensor.sparse_csr.values = values.tobytes()
        tensor.sparse_csr.crow_indices = starts.astype("<i8").tobytes()
        tensor.sparse_csr.col_indices = columns.astype("<i8").tobytes()
        return tensor


class Targets(NamedTuple):
    """What the engine is asked, and where its answers go."""

    asked: PromptTargets
    cells: TargetCells

    @classmethod
    def of(cls, tensor: bodies.Tensor, length: int) -> Self:
        """The targets in a request with a prompt of `length` tokens."""
        shape, values = _shape(tensor, length), _values(tensor)
        sparse = _sparse(tensor, values.size, shape)
        if sparse is None and values.size != shape[0] * shape[1]:
            raise _refused(f"has {values.size} values, which do not fill its shape {list(shape)}")
        rows = np.arange(values.size) // shape[1] if sparse is None else np.repeat(np.arange(shape[0]), np.diff(sparse[0]))
        named_C = np.flatnonzero(values != _NONE)
        if not named_C.size:
            raise _refused("names no token id: every cell is -1")
        asked = PromptTargets(positions=Array.of((rows[named_C] + 1).astype(np.int32)), ids=Array.of(values[named_C].astype(np.int32)))
        return cls(asked, TargetCells(shape, values.size, named_C, sparse))


def _shape(tensor: bodies.Tensor, length: int) -> tuple[int, int]:
    shape = tensor.shape or []
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise _refused(f"is {tensor.dtype}{shape}: it must be int64[{length - 1}, K], a row for each token of the prompt but the first")
    return shape[0], shape[1]


def _values(tensor: bodies.Tensor) -> Ints:
    values = np.array(tensor.data, dtype=np.float64)
    if values.size and not (np.all(values >= _NONE) and np.all(values <= _LARGEST_ID) and np.all(values % 1 == 0)):
        raise _refused("holds a value that is neither a token id nor -1")
    return values.astype(np.int64)


def _sparse(tensor: bodies.Tensor, count: int, shape: tuple[int, int]) -> tuple[Ints, Ints] | None:
    starts, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if starts is None and columns is None:
        return None
    if starts is None or columns is None:
        raise _refused("has one of `sparse_crow_indices` and `sparse_col_indices`: a sparse tensor has both, any other neither")
    crow, col = np.array(starts, np.int64), np.array(columns, np.int64)
    check_rows(crow, col, count, shape, FIELD)
    return crow, col


def _refused(what: str) -> InvalidInput:
    return InvalidInput(f"`{FIELD}` {what}", field=FIELD)

"""Tensors of torch as weights that a chain publishes, or that follow one: read and changed where they lie, a chunk at a time.

    TorchWeights(model.state_dict())

Names, dtypes and shapes are those of the layout, so both sides of a chain give their tensors the same ones.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.models.rests import rest
from bloomery.models.tensor_bytes import raw_bits
from bloomery.sync.codec.layout import Chunk, Layout, Part, gather
from bloomery.sync.state_hash import UNSIGNED, Bits
from bloomery.types.errors import NotSupported
from bloomery.types.tensor_file import TensorSpec

_DTYPES: Final = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


class TorchWeights:
    """These very tensors, on whatever device; `write` changes them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise NotSupported(f"tensor `{name}` holds {tensor.dtype} numbers, of which no deltas are made")
        self.layout = Layout.of({name: TensorSpec(_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()})
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def read(self, chunk: Chunk) -> Bits:
        """See `Weights`."""
        return gather(chunk, (_bits(self._tensors[part.tensor.name].reshape(-1)[part.start : part.stop]) for part in self.layout.parts(chunk)))

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """See `Weights`."""
        for part in self.layout.parts(chunk):
            rest()
            begin, end = part.among(indices)
            self._write(part, indices[begin:end], values[begin:end])

    def write_all(self, chunk: Chunk, values: Bits) -> None:
        """Give a chunk these elements [numel], which may begin at any byte."""
        for part in self.layout.parts(chunk):
            rest()
            tensor = self._tensors[part.tensor.name]
            if tensor.is_contiguous():
                tensor.view(-1)[part.start : part.stop] = _elements(values[part.within], tensor)
            else:
                self._write(part, np.arange(part.at, part.within.stop, dtype=np.uint32), values[part.within])

    def _write(self, part: Part, indices: NDArray[np.uint32], values: Bits) -> None:
        tensor = self._tensors[part.tensor.name]
        new = _elements(values, tensor)
        at = torch.from_numpy(indices.astype(np.int64) + (part.start - part.at)).to(tensor.device)
        # Elements of a tensor that is some rows of another lie in one piece; of one that lies otherwise, as of an expert, places are told apart.
        if tensor.is_contiguous():
            tensor.view(-1)[at] = new
        else:
            tensor[torch.unravel_index(at, tensor.shape)] = new


def _elements(values: Bits, like: Tensor) -> Tensor:
    """Raw bits [n] as elements of such a tensor, where it is."""
    return torch.from_numpy(values.copy()).view(like.dtype).to(like.device)


def _bits(flat: Tensor) -> Bits:
    found: Bits = raw_bits(flat.cpu()).numpy()
    return found.view(UNSIGNED[flat.element_size()])

"""Tensors as one safetensors blob and back, without a second copy of all values: checkpoints and snapshots of whole models are large."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.models.pieces import joined
from bloomery.types import tensor_file
from bloomery.types.tensor_file import TensorPlace, TensorSpec

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The blob, tensors in the order of their names: equal arguments give equal bytes."""
    ordered = dict(sorted(tensors.items()))
    specs = {name: TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in ordered.items()}
    return b"".join([tensor_file.header(specs, metadata), *map(values, ordered.values())])


def values(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian and C-contiguous; of one that is so already on the CPU nothing is copied."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat.data


def raw_bits(tensor: Tensor) -> Tensor:
    """The raw bits of each element as a whole number, where they lie: equal also where numbers are none, and another one for a zero with a sign."""
    return tensor.detach().view(_BITS[tensor.element_size()])


def num_set(tensor: Tensor) -> int:
    """Elements that are not zero; a zero with a sign is one."""
    return int(raw_bits(tensor).count_nonzero())


class Packed(Mapping[str, Tensor]):
    """The tensors of a blob, each copied out of it when it is asked for."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._places = tensor_file.places(self._data, size=len(data))
        unknown = {place.spec.dtype for place in self._places.values()} - _DTYPES.keys()
        if unknown:
            raise ValueError(f"no tensors of type {min(unknown)} are expected")

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        return _tensor(bytearray(self._data[place.start : place.stop]), place, place.start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def joined(self, names: Sequence[str]) -> Tensor:
        """The elements [n] of some tensors of one dtype, one after the other: one copy where they lie so in the blob."""
        own = [self._places[name] for name in names]
        if all(one.stop == next_one.start and one.spec.dtype == next_one.spec.dtype for one, next_one in pairwise(own)):
            whole = TensorSpec(own[0].spec.dtype, (sum(math.prod(place.spec.shape) for place in own),))
            place = TensorPlace(whole, own[0].start, own[-1].stop)
            return _tensor(bytearray(self._data[place.start : place.stop]), place, place.start)
        return joined([self[name] for name in names])

    def at_once(self) -> dict[str, Tensor]:
        """All of them, cut out of one copy of the blob: sooner, where they are many and small."""
        copy = bytearray(self._data)
        return {name: _tensor(copy, place, 0) for name, place in self._places.items()}


def _tensor(data: bytearray, place: TensorPlace, start: int) -> Tensor:
    """A view of `data`, which begins at byte `start` of the blob."""
    dtype = _DTYPES[place.spec.dtype]
    if place.start == place.stop:
        return torch.empty(place.spec.shape, dtype=dtype)
    count = (place.stop - place.start) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=place.start - start).view(place.spec.shape)

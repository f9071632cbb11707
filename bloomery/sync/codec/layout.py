"""What a set of weights consists of: its tensors in canonical order, the chunks that their elements are cut into, and where weights lie.

Elements have one index among all of a set, the one that state hashes use: the tensors in the order of their names, each C-contiguous. Neighbouring
tensors of one dtype are a run; a run is cut every `CHUNK_ELEMENTS`, so no chunk mixes dtypes and small tensors share one. What travels beside a
delta is `Layout.table`, whose hash is the layout's identity. The table has one encoding: names front-coded in order, each with exactly what it shares
with the one before it.

A table may claim anything, so nothing in here is as large as a claim: chunks are computed when they are asked for.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import takewhile
from operator import eq
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec import kernels
from bloomery.sync.manifest import digest
from bloomery.sync.state_hash import UNSIGNED, Bits
from bloomery.types.errors import Corrupt, NotSupported, TooLarge, shown
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec

CHUNK_LOG2: Final = 20
"""As headers of objects say it."""
CHUNK_ELEMENTS: Final = 1 << CHUNK_LOG2
"""As many as a chunk has at most."""
MAX_ELEMENTS: Final = 1 << 48
"""As far as state hashes keep what they promise."""
MAX_TABLE_BYTES: Final = 64 << 20
_MAX_TENSORS: Final = 1 << 20
_MAX_NAME_BYTES: Final = 1024
_MAX_NAMES_BYTES: Final = 256 << 20
"""Of all names together: front coding makes many of few bytes."""
_MAX_DIMENSIONS: Final = 16
_CODES: Final = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "F64", "I8", "I16", "I32", "I64", "U16", "U32", "U64", "BOOL", "F8_E8M0")
"""Dtypes as safetensors calls them; a table has their place here, from 1 on."""


class Tensor(NamedTuple):
    """One of a layout; `first` is the index of its first element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Chunk(NamedTuple):
    """Neighbouring elements of one dtype, `first` to `first + numel`."""

    number: int
    first: int
    numel: int
    dtype: str

    @property
    def unsigned(self) -> Any:
        """What its elements are as raw bits."""
        return UNSIGNED[ITEM_BYTES[self.dtype]]

    @property
    def size_bytes(self) -> int:
        """Of its elements."""
        return self.numel * ITEM_BYTES[self.dtype]


class Part(NamedTuple):
    """What a chunk has of one tensor: the tensor's elements `start` to `stop`, from element `at` of the chunk on."""

    tensor: Tensor
    start: int
    stop: int
    at: int

    @property
    def within(self) -> slice:
        """Where it is in the chunk."""
        return slice(self.at, self.at + self.stop - self.start)

    def among(self, indices: NDArray[np.uint32]) -> tuple[int, int]:
        """From which to before which of ascending indices of the chunk [n] those of the part are."""
        # Numbers of another type would have all of them converted.
        begin, end = np.searchsorted(indices, np.array((self.within.start, self.within.stop), np.uint32)).tolist()
        return begin, end


class ChunkSizes(NamedTuple):
    """Of every chunk."""

    numels: NDArray[np.int64]
    """[chunks]"""
    item_bytes: NDArray[np.int64]
    """[chunks]"""


class _Run(NamedTuple):
    first: int
    numel: int
    dtype: str
    chunk: int
    """Number of its first chunk."""


class Layout:
    """Names, dtypes and shapes of a set of weights, in canonical order."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        """Tensors as `of` and `parse` give them: in order, and counted through."""
        self.tensors = tensors
        self.elements = tensors[-1].first + tensors[-1].numel if tensors else 0
        self._firsts = [tensor.first for tensor in tensors]
        self._runs = _runs(tensors)
        self._run_chunks = [run.chunk for run in self._runs]
        self.chunk_count = _end(self._runs)

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> "Layout":
        """Of tensors by their names. NotSupported names a dtype that has no whole bytes or is not known, TooLarge what no layout has room for."""
        for name, spec in specs.items():
            if spec.dtype not in _CODES:
                raise NotSupported(f"tensor `{shown(name)}` holds {spec.dtype} numbers; deltas are of {', '.join(_CODES)}")
        found = cls(_counted((name, *specs[name]) for name in sorted(specs)))
        _check_sizes(found.tensors, TooLarge)
        if len(found.table) > MAX_TABLE_BYTES:
            raise TooLarge(f"names and shapes of these tensors take {len(found.table)} bytes, and a layout has at most {MAX_TABLE_BYTES}")
        return found

    @classmethod
    def parse(cls, table: bytes) -> "Layout":
        """What `table` was; Corrupt for anything else, without taking more memory than a layout may."""
        found = cls(_counted(_entries(table)))
        _check_sizes(found.tensors, Corrupt)
        if found.table != table:
            raise Corrupt("the table of tensors is not in canonical form, so its hash would not identify it")
        return found

    @cached_property
    def table(self) -> bytes:
        """The canonical bytes: equal layouts give equal bytes."""
        parts, before = [_varint(len(self.tensors))], b""
        for tensor in self.tensors:
            name = _utf8(tensor.name)
            shared = sum(takewhile(bool, map(eq, before, name)))
            shape = b"".join(map(_varint, tensor.shape))
            parts += [_varint(shared), _varint(len(name) - shared), name[shared:], bytes((_CODES.index(tensor.dtype) + 1, len(tensor.shape))), shape]
            before = name
        return b"".join(parts)

    @cached_property
    def hash(self) -> str:
        """Identity of the layout."""
        return digest(self.table)

    @property
    def size_bytes(self) -> int:
        """Of all elements."""
        return sum(run.numel * ITEM_BYTES[run.dtype] for run in self._runs)

    def chunk(self, number: int) -> Chunk:
        """The chunk of this number, from 0 on."""
        if not 0 <= number < self.chunk_count:
            raise IndexError(f"there is no chunk {number} of {self.chunk_count}")
        run = self._runs[bisect_right(self._run_chunks, number) - 1]
        at = (number - run.chunk) * CHUNK_ELEMENTS
        return Chunk(number, run.first + at, min(CHUNK_ELEMENTS, run.numel - at), run.dtype)

    def chunks(self) -> Iterator[Chunk]:
        """All of them in order."""
        return map(self.chunk, range(self.chunk_count))

    @cached_property
    def chunk_sizes(self) -> ChunkSizes:
        """Of all chunks at once; ask only where there may be so many."""
        numels = [np.minimum(CHUNK_ELEMENTS, run.numel - np.arange(0, run.numel, CHUNK_ELEMENTS)) for run in self._runs]
        items = [np.full(len(each), ITEM_BYTES[run.dtype]) for each, run in zip(numels, self._runs, strict=True)]
        return ChunkSizes(*(np.concatenate([np.zeros(0, np.int64), *each], dtype=np.int64) for each in (numels, items)))

    def parts(self, chunk: Chunk) -> Iterator[Part]:
        """Which elements of which tensors a chunk consists of, in order."""
        stop = chunk.first + chunk.numel
        # The last of the tensors that begin there or before is the one that has elements there: those in front of it may be empty.
        for place in range(bisect_right(self._firsts, chunk.first) - 1, bisect_left(self._firsts, stop)):
            tensor = self.tensors[place]
            begin, end = max(tensor.first, chunk.first), min(tensor.first + tensor.numel, stop)
            if begin < end:
                yield Part(tensor, begin - tensor.first, end - tensor.first, begin - chunk.first)

    def difference(self, other: "Layout") -> str | None:
        """In which tensor two layouts first differ, as a sentence about this one; None where they are the same."""
        if self.hash == other.hash:
            return None
        mine, others = ({tensor.name: tensor for tensor in layout.tensors} for layout in (self, other))
        for name in sorted(mine.keys() | others.keys()):
            if name not in others:
                return f"`{shown(name)}` is there and should not be"
            if name not in mine:
                return f"`{shown(name)}` is missing"
            if (found := mine[name])[1:3] != (wanted := others[name])[1:3]:
                return f"`{shown(name)}` is {found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        return None


class Weights(Protocol):
    """Weights of a layout somewhere, read and changed a chunk at a time."""

    layout: Layout

    def read(self, chunk: Chunk) -> Bits:
        """Its elements [numel] in one aligned piece, little-endian; a view or a copy, which nobody writes to."""

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """Give the elements at `indices` [n] of the chunk the bits `values` [n]."""


class MemoryWeights:
    """In arrays of this process; `write` changes these very arrays."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Bits]) -> None:
        """`tensors`: unsigned, C-contiguous and of the layout's shapes, or flat."""
        self.layout = layout
        for name, dtype, shape, _ in layout.tensors:
            given, wanted = tensors[name], UNSIGNED[ITEM_BYTES[dtype]]
            if given.dtype != wanted or given.size != math.prod(shape) or not given.flags.c_contiguous:
                raise TypeError(
                    f"`{name}` should be {math.prod(shape)} elements of {wanted.__name__} in one piece, and is {given.dtype} [{given.size}]"
                )
        self._flat = {tensor.name: tensors[tensor.name].reshape(-1) for tensor in layout.tensors}

    @classmethod
    def zeros(cls, layout: Layout) -> "MemoryWeights":
        """New arrays that a base may be applied to."""
        return cls(layout, {tensor.name: np.zeros(tensor.numel, UNSIGNED[ITEM_BYTES[tensor.dtype]]) for tensor in layout.tensors})

    def __getitem__(self, name: str) -> Bits:
        """A tensor's elements, flat."""
        return self._flat[name]

    def read(self, chunk: Chunk) -> Bits:
        """A view where the chunk is of one tensor."""
        return gather(chunk, (self._flat[part.tensor.name][part.start : part.stop] for part in self.layout.parts(chunk)))

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """In place."""
        scatter(((part, self._flat[part.tensor.name]) for part in self.layout.parts(chunk)), indices, values)

    def write_all(self, chunk: Chunk, values: Bits) -> None:
        """The same of all elements [numel] of a chunk."""
        for part in self.layout.parts(chunk):
            self._flat[part.tensor.name][part.start : part.stop] = values[part.within]


def gather(chunk: Chunk, parts: Iterable[Bits]) -> Bits:
    """A chunk's elements out of what its parts have [n]: a view where it is one aligned piece."""
    pieces = list(parts)
    if len(pieces) == 1 and pieces[0].flags.aligned:
        return pieces[0]
    return np.concatenate(pieces, dtype=chunk.unsigned)


def scatter(parts: Iterable[tuple[Part, Bits]], indices: NDArray[np.uint32], values: Bits) -> None:
    """Write elements [n] of a chunk, by ascending indices, to the flat tensors that it is cut from."""
    for part, flat in parts:
        begin, end = part.among(indices)
        kernels.put(flat, part.start - part.at, indices[begin:end], values[begin:end])


def _counted(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    found, first = [], 0
    for name, dtype, shape in entries:
        found.append(Tensor(name, dtype, shape, first))
        first += math.prod(shape)
    return tuple(found)


def _runs(tensors: tuple[Tensor, ...]) -> list[_Run]:
    runs: list[_Run] = []
    for tensor in tensors:
        if tensor.numel == 0:
            continue
        if runs and runs[-1].dtype == tensor.dtype:
            runs[-1] = runs[-1]._replace(numel=runs[-1].numel + tensor.numel)
        else:
            runs.append(_Run(tensor.first, tensor.numel, tensor.dtype, _end(runs)))
    return runs


def _end(runs: list[_Run]) -> int:
    """Chunks of all runs: the number that the next chunk has."""
    return runs[-1].chunk + -(-runs[-1].numel // CHUNK_ELEMENTS) if runs else 0


def _check_sizes(tensors: tuple[Tensor, ...], error: type[Corrupt] | type[TooLarge]) -> None:
    """What makes indices of elements, and the arithmetic with them, hold."""
    total = tensors[-1].first + tensors[-1].numel if tensors else 0
    if total > MAX_ELEMENTS or len(tensors) > _MAX_TENSORS:
        raise error(f"{len(tensors)} tensors of {total} elements: a layout has at most {_MAX_TENSORS} of {MAX_ELEMENTS}")
    for tensor in tensors:
        if not 0 < len(_utf8(tensor.name)) <= _MAX_NAME_BYTES:
            raise error(f"the name of a tensor has 1 to {_MAX_NAME_BYTES} bytes, not {len(_utf8(tensor.name))}")
        if len(tensor.shape) > _MAX_DIMENSIONS or any(size > MAX_ELEMENTS for size in tensor.shape):
            raise error(
                f"tensor `{shown(tensor.name)}` has a shape that no layout has room for: at most {_MAX_DIMENSIONS} sizes of at most {MAX_ELEMENTS}"
            )


def _entries(table: bytes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """What a table says, in its order."""
    read = _Reader(table)
    count, before, names_bytes = read.varint(), b"", 0
    if count > min(_MAX_TENSORS, len(table)):
        raise Corrupt(f"a table of {len(table)} bytes claims {count} tensors")
    for _ in range(count):
        shared, more = read.varint(), read.varint()
        if shared > len(before) or shared + more > _MAX_NAME_BYTES:
            raise Corrupt("a name in the table of tensors shares more than there is with the one before it, or is too long")
        name = before[:shared] + read.take(more)
        names_bytes += len(name)
        if name <= before or names_bytes > _MAX_NAMES_BYTES:
            raise Corrupt("the table does not name its tensors in order, each once, or names too many")
        code, dimensions = read.take(2)
        if not 1 <= code <= len(_CODES) or dimensions > _MAX_DIMENSIONS:
            raise Corrupt(f"the table of tensors has a dtype or a shape that there is not: {code} with {dimensions} sizes")
        yield _text(name), _CODES[code - 1], tuple(read.varint() for _ in range(dimensions))
        before = name
    if read.left:
        raise Corrupt(f"{read.left} bytes follow the last tensor of the table")


class _Reader:
    """Takes a table apart; Corrupt where it ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise Corrupt("the table of tensors is cut off")
        self._at += count
        return self._data[self._at - count : self._at]

    def varint(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            (byte,) = self.take(1)
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise Corrupt("a number in the table of tensors has no end")


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have their highest bit set."""
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*parts, number))


def _utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise Corrupt(f"the name of a tensor is no text: {shown(repr(name))}") from None


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise Corrupt(f"the name of a tensor is no text: {shown(repr(name))}") from None

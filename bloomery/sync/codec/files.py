"""Weights in safetensors files: a single one, or a directory with as many as its index names. Mapped, they take no memory of their own."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bloomery.disk.mapped import mapped
from bloomery.models.weight_files import weight_files
from bloomery.sync.codec.layout import Chunk, Layout, Part, gather
from bloomery.sync.state_hash import UNSIGNED, Bits
from bloomery.types import tensor_file
from bloomery.types.errors import BloomeryError, InvalidInput, NotFound, blame
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz"})
"""Of files that hold weights: those that nobody reads here would be the old ones beside the new."""
_INDEX: Final = ".index.json"
OWN_INDEX: Final = "model.safetensors.index.json"
"""Says which file of a directory has which tensor."""


class _Place(NamedTuple):
    file: int
    start: int
    """Byte of its first element in the file."""


class FileWeights:
    """The tensors of one file or directory, read a chunk at a time; closed by `with`."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """NotFound, InvalidInput or Corrupt where there are no weights that can be read."""
        self.path, self.paths = path, _files(path)
        self._owned, self._writable = ExitStack(), writable
        self._flat: dict[str, Bits] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Chunks that were read stay as they are."""
        self._flat = {}
        self._owned.close()

    def read(self, chunk: Chunk) -> Bits:
        """A view of the file where the chunk is of one tensor."""
        return gather(chunk, (self._flat[part.tensor.name][part.start : part.stop] for part in self.layout.parts(chunk)))

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """Into the file, each tensor's part of the chunk in one piece: a full disk is an error then, which it is not in a mapping."""
        for part in self.layout.parts(chunk):
            begin, end = part.among(indices)
            if begin < end:
                self._write(part, indices[begin:end] - np.uint32(part.at), values[begin:end])

    def sync(self) -> None:
        """What was written survives a power cut."""
        for handle in self._handles:
            os.fsync(handle)

    def _open(self) -> None:
        specs: dict[str, TensorSpec] = {}
        self._places: dict[str, _Place] = {}
        self._handles: list[int] = []
        files: list[memoryview] = []
        for number, file in enumerate(self.paths):
            handle = os.open(file, os.O_RDWR if self._writable else os.O_RDONLY)
            self._owned.callback(os.close, handle)
            self._handles.append(handle)
            files.append(mapped(handle))
            with naming(file):
                found = tensor_file.places(files[-1], size=len(files[-1]))
            if doubled := found.keys() & specs.keys():
                raise InvalidInput(
                    f"{self.path}: tensor `{min(doubled)}` is in {self.paths[self._places[min(doubled)].file].name} and in {file.name}"
                )
            specs |= {name: place.spec for name, place in found.items()}
            self._places |= {name: _Place(number, place.start) for name, place in found.items()}
        with naming(self.path):
            self.layout = Layout.of(specs)
        for tensor in self.layout.tensors:
            place, dtype = self._places[tensor.name], np.dtype(UNSIGNED[ITEM_BYTES[tensor.dtype]])
            self._flat[tensor.name] = np.frombuffer(files[place.file], dtype, tensor.numel, place.start) if tensor.numel else np.zeros(0, dtype)

    def _write(self, part: Part, indices: NDArray[np.uint32], values: Bits) -> None:
        place, piece = self._places[part.tensor.name], self._flat[part.tensor.name][part.start : part.stop].copy()
        piece[indices] = values
        data, at = piece.data.cast("B"), place.start + part.start * piece.itemsize
        while data:
            written = os.pwrite(self._handles[place.file], data, at)
            data, at = data[written:], at + written


class Beside(NamedTuple):
    """Of a directory what lies beside its weights, by paths within it."""

    kept: list[Path]
    left: list[Path]
    """Other files of weights, which say what the model was before, and what is no file."""


def beside(directory: Path, weights: list[Path]) -> Beside:
    """Everything in a directory and below but these weights; links to directories are not followed."""
    kept: list[Path] = []
    left: list[Path] = []
    for path in _below(directory):
        if path.is_file() and path not in weights:
            stale = path.suffix in _WEIGHTS or (path.name.endswith(_INDEX) and path != directory / OWN_INDEX)
            (left if stale else kept).append(path.relative_to(directory))
        elif not path.is_file():
            left.append(path.relative_to(directory))
    return Beside(sorted(kept), sorted(left))


def _below(directory: Path) -> Iterator[Path]:
    for above, directories, names in os.walk(directory):
        yield from sorted(Path(above) / name for name in names)
        yield from (Path(above) / name for name in directories if (Path(above) / name).is_symlink())
        directories[:] = sorted(name for name in directories if not (Path(above) / name).is_symlink())


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        with blame(InvalidInput, f"the index of {path}"):
            return weight_files(path)
    if not path.is_file():
        raise NotFound(f"there is no file or directory {path}")
    return [path]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of what does not know its file name it."""
    try:
        yield
    except BloomeryError as error:
        raise type(error)(f"{path}: {error.message}") from error

"""Programs: the calls of native kernels that computed something once, and compute it again in one call.

A step of a few rows takes less time in its kernels than between them. A `Recorder` is on while the ordinary code computes a step; it writes down each
call of a kernel with its arguments, and hands out the memory of what comes of it, which stays where it is. So there is no second form of a model that
could differ from the first: the same kernels get the same numbers from the same places. Whatever else torch computes meanwhile would be missing when
the program runs, so a recorder refuses (`Recorder.refused`) where it sees torch do more than look at memory in another way. It does not see
numbers read past torch's dispatcher, as by `numpy` or `tolist`: whoever records holds a program's first answer against one computed otherwise.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate, chain
from threading import local
from typing import Any, Final, NamedTuple, Self
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HEAD_WORDS: Final = 2
"""Of a call, before its arguments: who is called, and how many words there are."""
_ALIGNED_FLOATS: Final = 16
"""As torch places its tensors."""
_current = local()


class Workspace:
    """Memory for what is computed on the way, taken again when nothing looks at it any more: by what comes next, and by other programs.

    Two programs that share one cannot run at the same time.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.float32]] = []

    def floats(self, shape: Sequence[int]) -> Tensor:
        """A tensor with any numbers in it."""
        count = math.prod(shape)
        fitting = [place for place, block in enumerate(self._free) if len(block) >= count]
        block = self._free.pop(min(fitting, key=lambda place: len(self._free[place]))) if fitting else _aligned(count)
        own = block[:count]
        tensor = torch.from_numpy(own).view(*shape)
        # Torch holds the array for as long as any view of the tensor is held.
        finalize(own, self._free.append, block)
        return tensor


class Recorder(TorchDispatchMode):
    """Writes down the calls of kernels that this thread makes inside of it."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        self.calls: list[tuple[int, Sequence[Any]]] = []
        """Addresses of what is called (`kernels/call.h`), and its arguments: integers, addresses, floats, and arrays of ctypes."""
        self.refused: str | None = None
        """What was computed that programs cannot compute."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks its modes. Nothing is compiled here, and what keeps a compiler away would import it first, which takes seconds."""
        return False

    def __enter__(self) -> Self:
        _current.recorder = self
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *reason: object) -> None:
        _current.recorder = None
        super().__exit__(*reason)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = _memories(result)
        # What gives no tensor reads numbers, which a program would take for those of every step.
        if func._schema.is_mutable or not found or not found <= _memories(args):
            self.refuse(str(func))
        return result

    def floats(self, shape: Sequence[int]) -> Tensor:
        """Room for an answer."""
        return self._workspace.floats(shape)

    def refuse(self, what: str) -> None:
        """It is about to be computed, and no program can."""
        self.refused = self.refused or what

    def add(self, address: int, arguments: Sequence[Any]) -> None:
        """A kernel is about to be called."""
        self.calls.append((address, arguments))


class Move(NamedTuple):
    """Memory whose place other memory of the same size takes."""

    start: int
    size_bytes: int
    new_start: int


class Program:
    """Recorded calls. Whoever runs it sees to it that all the memory that they name is still there."""

    def __init__(self, calls: Sequence[tuple[int, Sequence[Any]]]) -> None:
        self._calls = len(calls)
        words: list[int] = []
        arrays: dict[int, ctypes.Array[Any]] = {}
        for address, arguments in calls:
            words += address, _HEAD_WORDS + len(arguments)
            for argument in arguments:
                if isinstance(argument, ctypes.Array):
                    arrays[len(words)] = argument
                words.append(_word(argument))
        # Where the arrays among the arguments begin, behind all calls, and the words that say so.
        starts = accumulate(map(len, arrays.values()), initial=len(words))
        self._array_words, self._array_starts = np.array([*arrays], np.int64), np.fromiter(starts, np.int64)[:-1]
        self._words = np.array([*words, *chain.from_iterable(arrays.values())], np.int64)
        self._point()

    def moved(self, moves: Sequence[Move]) -> "Program":
        """The same calls with other memory. Whoever moves sees to it that no number of theirs that is no address lies where old memory did."""
        twin = copy(self)
        twin._words = _moved(self._words, moves) if moves else self._words.copy()
        twin._point()
        return twin

    def run(self, run: Callable[[int, int], None]) -> None:
        """All of it, by `bindings.run`."""
        run(self._words.ctypes.data, self._calls)

    def _point(self) -> None:
        """To the arrays, in its own memory."""
        self._words[self._array_words] = self._words.ctypes.data + self._array_starts * self._words.itemsize


def current_recorder() -> Recorder | None:
    """Of this thread."""
    return getattr(_current, "recorder", None)


def _aligned(count: int) -> NDArray[np.float32]:
    memory = np.empty(count + _ALIGNED_FLOATS, np.float32)
    start = -memory.ctypes.data // memory.itemsize % _ALIGNED_FLOATS
    return memory[start : start + count]


def _memories(found: Any) -> set[int]:
    """Of all tensors that are there."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)}


def _word(argument: Any) -> int:
    match argument:
        case None:
            return 0
        case float():
            bits: int = struct.unpack("<i", struct.pack("<f", argument))[0]
            return bits
        case ctypes.Array():
            # A place that is filled in when its own is known.
            return 0
        case _:
            return int(argument)


def _moved(words: NDArray[np.int64], moves: Sequence[Move]) -> NDArray[np.int64]:
    starts, sizes, new_starts = np.array(sorted(moves), np.int64).T
    place = np.searchsorted(starts, words, side="right") - 1
    inside = (place >= 0) & (words < starts[place] + sizes[place])
    return words + np.where(inside, new_starts[place] - starts[place], 0)

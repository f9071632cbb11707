"""What `tight` computes, in numpy: what kernels are held against, and what there is where they are not."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec import bits
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import settled, signs_and_sizes
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import Corrupt

CLASSES: Final = 16
ONES, SIZES, EXCEPTIONS = range(3)
"""Forms of sizes."""
_COUNT_BITS: Final = 21

Whole = NDArray[np.int64]


class _Class(NamedTuple):
    """What is told of a class before its gaps."""

    changes: int
    gap_parameter: int
    form: int
    size_parameter: int
    exceptions: int


def pack(old: Bits, found: Differences, kind: Number) -> bytes:
    """The payload of these changes, of which there is one at least."""
    exponents = kind.exponents(old[found.indices])
    lowest = lowest_exponent(exponents, kind)
    class_of = _clipped(exponents, lowest)
    negative, size = signs_and_sizes(found.by, kind)
    ranks = _ranks_of(old, found.indices, lowest, kind)
    heads, gaps, sizes, mask = [], [], [], 0
    for number in range(CLASSES):
        chosen = np.flatnonzero(class_of == number)
        if not len(chosen):
            continue
        mask |= 1 << number
        between = _between(ranks[chosen])
        form, told = _sizes(size[chosen].astype(np.int64), negative[chosen])
        k = bits.parameter(int(between.sum()), len(chosen))
        heads += [*_count(len(chosen)), bits.fixed(k, 5), *form]
        gaps.append(bits.Grown(between, k))
        sizes += told
    return bits.joined([bits.fixed(lowest, 8), bits.fixed(mask, 16), *heads, *gaps, *sizes])


def unpack(payload: memoryview, old: Bits, kind: Number) -> Differences:
    """What was packed; every number is held against what is possible, and every choice against how it is made."""
    read = bits.Reader(payload)
    lowest, mask = read.fixed(8), read.fixed(16)
    if not mask:
        raise Corrupt("a payload without changes")
    heads = {number: _head(read) for number in range(CLASSES) if mask >> number & 1}
    if sum(head.changes for head in heads.values()) > len(old):
        raise Corrupt(f"more changes than {len(old)} elements")
    ranks = {number: _gaps(read, head, len(old)) for number, head in heads.items()}
    by = {number: _differences(read, head, kind) for number, head in heads.items()}
    read.finish()
    at, order = _places(old, ranks, lowest, kind)
    if lowest != lowest_exponent(kind.exponents(old[at]), kind):
        raise Corrupt("classes that do not begin where they should")
    return Differences(at.astype(np.uint32), np.concatenate(list(by.values()))[order])


def decode(payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
    """What it makes of the elements `old`, as `settled` says it."""
    return settled(old, unpack(payload, old, kind), kind, first, state)


def lowest_exponent(exponents: Bits, kind: Number) -> int:
    """Of changed elements [n]: from which on sixteen exponents are those of the most, the smallest of several."""
    windows = max((1 << min(kind.exponent_bits, 8)) - CLASSES, 0) + 1
    known = np.concatenate([[0], np.cumsum(np.bincount(exponents, minlength=windows + CLASSES - 1))])
    return int(np.argmax(known[CLASSES : CLASSES + windows] - known[:windows])) if windows > 1 else 0


def _ranks_of(old: Bits, indices: NDArray[np.uint32], lowest: int, kind: Number) -> Whole:
    """How many elements of its class are before each of those."""
    class_of, found = _classes(old, lowest, kind), np.empty(len(indices), np.int64)
    for number in range(CLASSES):
        its = class_of[indices] == number
        if its.any():
            found[its] = np.searchsorted(np.flatnonzero(class_of == number), indices[its])
    return found


def _places(old: Bits, ranks: dict[int, Whole], lowest: int, kind: Number) -> tuple[Whole, Whole]:
    """The reverse: ascending places [n], and where in all ranks, one class behind the other, each has its own; Corrupt for ranks of nobody."""
    class_of, found = _classes(old, lowest, kind), []
    for number, rank in ranks.items():
        members = np.flatnonzero(class_of == number)
        if rank[-1] >= len(members):
            raise Corrupt(f"gaps that lead behind the last of {len(members)} elements of a class")
        found.append(members[rank])
    at = np.concatenate(found)
    order = np.argsort(at)
    return at[order], order


def _classes(old: Bits, lowest: int, kind: Number) -> NDArray[np.int16]:
    return _clipped(kind.exponents(old), lowest)


def _clipped(exponents: Bits, lowest: int) -> NDArray[np.int16]:
    found: NDArray[np.int16] = np.clip(exponents.astype(np.int16) - np.int16(lowest), 0, CLASSES - 1)
    return found


def _between(places: Whole) -> Whole:
    return np.diff(places, prepend=-1) - 1


def _sizes(size: Whole, negative: NDArray[np.bool_]) -> tuple[list[bits.Part], list[bits.Part]]:
    """What the head and what the rest of the payload says of by how much elements of a class moved."""
    signs = bits.Bits(negative.astype(np.uint64), np.ones(len(size), np.uint64))
    exceptions = np.flatnonzero(size > 1)
    if not len(exceptions):
        return [bits.fixed(ONES, 2)], [signs]
    if 2 * len(exceptions) > len(size):
        k = bits.parameter(int(size.sum()) - len(size), len(size))
        return [bits.fixed(SIZES, 2), bits.fixed(k, 5)], [signs, bits.Grown(size - 1, k)]
    larger = size[exceptions] - 2
    k = bits.parameter(int(larger.sum()), len(exceptions))
    between = bits.Grown(_between(exceptions), _exception_parameter(len(size), len(exceptions)))
    return [bits.fixed(EXCEPTIONS, 2), bits.fixed(k, 5), *_count(len(exceptions))], [signs, between, bits.Grown(larger, k)]


def _exception_parameter(changes: int, exceptions: int) -> int:
    return bits.parameter(changes - exceptions, exceptions)


def _count(number: int) -> list[bits.Part]:
    below = number.bit_length() - 1
    return [bits.fixed(below, 5), bits.fixed(number - (1 << below), below)]


def _head(read: bits.Reader) -> _Class:
    changes, gap_parameter, form = _read_count(read), read.fixed(5), read.fixed(2)
    if form > EXCEPTIONS:
        raise Corrupt("a form of sizes that there is not")
    size_parameter = read.fixed(5) if form else 0
    return _Class(changes, gap_parameter, form, size_parameter, _read_count(read) if form == EXCEPTIONS else 0)


def _read_count(read: bits.Reader) -> int:
    below = read.fixed(5)
    if below >= _COUNT_BITS:
        raise Corrupt("a count beyond a chunk")
    return (1 << below) + read.fixed(below)


def _gaps(read: bits.Reader, head: _Class, most: int) -> Whole:
    """Ascending places [n] among the elements of a class."""
    found = _ranks(read, head.changes, head.gap_parameter, most, "gaps")
    _refuse_parameter(head.gap_parameter, int(found[-1]) + 1 - head.changes, head.changes)
    return found


def _ranks(read: bits.Reader, count: int, k: int, most: int, name: str) -> Whole:
    """Ascending places [count], below `most`, from what lies between them."""
    found = np.cumsum(read.grown(count, k, most)) + np.arange(count)
    if found[-1] >= most:
        raise Corrupt(f"{name} that lead behind the last of {most} elements")
    return found


def _differences(read: bits.Reader, head: _Class, kind: Number) -> Bits:
    """By how much [n] the elements of a class moved."""
    most = 1 << (8 * kind.item_bytes - 1)
    negative = read.flags(head.changes)
    size = np.ones(head.changes, np.int64)
    if head.form == SIZES:
        size += read.grown(head.changes, head.size_parameter, most - 1)
    elif head.form == EXCEPTIONS:
        if 2 * head.exceptions > head.changes:
            raise Corrupt("more exceptions than others")
        k = _exception_parameter(head.changes, head.exceptions)
        exceptions = _ranks(read, head.exceptions, k, head.changes, "exceptions")
        size[exceptions] = 2 + read.grown(head.exceptions, head.size_parameter, most - 2)
    _refuse_choices(head, size)
    if (size[~negative] == most).any():
        raise Corrupt("a size that no difference has")
    found = size.astype(kind.dtype)
    return np.where(negative, -found, found)


def _refuse_choices(head: _Class, size: Whole) -> None:
    larger = size[size > 1]
    if head.form == SIZES:
        if 2 * len(larger) <= head.changes:
            raise Corrupt("sizes where exceptions belong")
        _refuse_parameter(head.size_parameter, int(size.sum()) - head.changes, head.changes)
    elif head.form == EXCEPTIONS:
        _refuse_parameter(head.size_parameter, int(larger.sum()) - 2 * head.exceptions, head.exceptions)


def _refuse_parameter(told: int, total: int, numbers: int) -> None:
    if told != bits.parameter(total, numbers):
        raise Corrupt(f"a parameter of {told} for {numbers} numbers of {total}")

"""Loops of `jitted` for the bits of `tight`, which numba compiles: as `tight.h` has them, and with the reasons of `native.REASONS`.

Payloads are words of 64 bits here, the lowest bit first, and places in them are counted in bits. Little-endian machines only.
"""

from typing import Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

# Numba keeps what it compiled for as long as this file stays as it is, so nothing of another one is read here, and some constants are said again.
_jit: Final = numba.njit(nogil=True, cache=True, boundscheck=False)
CLASSES: Final = 16
EXPONENTS: Final = 256
STEPS: Final = 8
WIDTH: Final = 32
COUNT_BITS: Final = 21
ONES, SIZES, EXCEPTIONS = range(3)
TILE: Final = 1024
"""Elements that are counted at a time: whole groups, and at most 255 words, for sums over them have a byte each."""
GROUP: Final = 8
"""Words of classes, which are bytes, that are looked through one by one."""
GAP_PARAMETER, FORM, SIZE_PARAMETER, EXCEPTION_COUNT = range(4)
"""What is told of a class beside its changes."""
BEHIND, SIZE, ENDS, NUMBER, COUNT, OTHER_FORM, OTHER_PARAMETER, REST, EMPTY, LOWEST = -2, *(-number for number in range(6, 15))
_ONE: Final = np.uint64(1)
_LOW_BITS: Final = np.uint64(0x0101010101010101)
_ALL_BUT_HIGH: Final = np.uint64(0x7F7F7F7F7F7F7F7F)
_EVEN_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)


@intrinsic
def trailing_zeros(_typing, _number):
    """Below the lowest bit that is set; 64 where none is."""

    def generated(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generated


@_jit
def logarithm(number):
    """The whole part of the binary one, of a number above zero."""
    found = 0
    while number >> (found + 1):
        found += 1
    return found


@_jit
def parameter(total, numbers):
    """See `bits.parameter`."""
    mean = total // numbers
    return logarithm(mean) if mean else 0


@_jit
def below(width):
    """So many ones; less than 64."""
    return (_ONE << np.uint64(width)) - _ONE


# ---- bits


@_jit
def put(words, at, number, width):
    """Where the next number goes; words are zero from here on."""
    place, shift = at >> 6, np.uint64(at & 63)
    words[place] |= number << shift
    # In two steps: by all 64 nothing is moved.
    words[place + 1] |= (number >> (np.uint64(63) - shift)) >> _ONE
    return at + width


@_jit
def put_grown(words, at, number, k):
    number = np.uint64(number)
    steps = np.int64(number >> np.uint64(k))
    if steps < STEPS:
        return put(words, at, below(steps) | (number & below(k)) << np.uint64(steps + 1), steps + 1 + k)
    doublings = logarithm(steps - (STEPS - 1))
    begin = (np.uint64(STEPS - 1) + (_ONE << np.uint64(doublings))) << np.uint64(k)
    at = put(words, at, below(STEPS + doublings), STEPS + doublings + 1)
    return put(words, at, number - begin, k + doublings)


@_jit
def put_count(words, at, number):
    width = logarithm(number)
    return put(words, put(words, at, np.uint64(width), 5), np.uint64(number - (1 << width)), width)


@_jit
def ahead(words, at):
    """The next 64 bits."""
    place, shift = at >> 6, np.uint64(at & 63)
    return words[place] >> shift | words[place + 1] << (np.uint64(63) - shift) << _ONE


@_jit
def get(words, at, end, width):
    """A number, or why there is none, and where the next one is."""
    if at + width > end:
        return np.int64(ENDS), end
    return np.int64(ahead(words, at) & below(width)), at + width


@_jit
def get_grown(words, at, end, k, most):
    """The same of one that is told in steps, and is at most so large."""
    ones = np.int64(trailing_zeros(~ahead(words, at)))
    if ones >= STEPS + WIDTH:
        return np.int64(NUMBER), end
    doublings = max(ones - STEPS, 0)
    if at + ones + 1 > end:
        return np.int64(ENDS), end
    if k + doublings > WIDTH:
        return np.int64(NUMBER), end
    begin = ones if ones < STEPS else STEPS - 1 + (1 << doublings)
    rest, at = get(words, at + ones + 1, end, k + doublings)
    if rest < 0:
        return rest, end
    found = (begin << k) + rest
    return (found if found <= most else np.int64(NUMBER)), at


@_jit
def get_count(words, at, end):
    width, at = get(words, at, end, 5)
    if width < 0:
        return width, end
    if width >= COUNT_BITS:
        return np.int64(COUNT), end
    rest, at = get(words, at, end, width)
    return (rest if rest < 0 else (1 << width) + rest), at


# ---- classes


@_jit
def exponent(bits, shift, mask):
    return np.int64(np.uint64(bits) >> shift & mask)


@_jit
def class_of(field, lowest):
    return min(max(field - lowest, 0), CLASSES - 1)


@_jit
def lowest_of(exponents, exponent_bits):
    """From which on sixteen are those of the most; they are counted in `exponents` [256 + 16]."""
    found, total = 0, exponents[:CLASSES].sum()
    most = total
    for first in range(1, (1 << exponent_bits) - CLASSES + 1):
        total += exponents[first + CLASSES - 1] - exponents[first - 1]
        if total > most:
            most, found = total, first
    return found


@_jit
def classify(old, shift, mask, lowest, classes):
    """The class of each of a tile's elements; those behind the end are in none."""
    # Numbers stay as narrow as they are, so that as many as possible are computed at a time.
    shift, first, last = shift & np.uint64(8 * old.itemsize - 1), np.uint8(lowest), np.uint8(min(lowest + CLASSES - 1, EXPONENTS - 1))
    for i in range(len(old)):
        classes[i] = old[i] >> shift & mask
    for i in range(len(old)):
        classes[i] = min(max(classes[i], first), last) - first
    classes[len(old) :] = CLASSES


@_jit
def others(word, which):
    """A one in the byte of each class that is not this one, which is in all bytes of `which`."""
    return ((word ^ which) + _ALL_BUT_HIGH) >> np.uint64(7) & _LOW_BITS


@_jit
def sum_of(counts):
    """Of eight bytes."""
    pairs = (counts & _EVEN_BYTES) + (counts >> np.uint64(8) & _EVEN_BYTES)
    return np.int64(pairs * np.uint64(0x0001000100010001) >> np.uint64(48))


@_jit
def count(words, which):
    """How many classes of some words are this one; of at most 255, for sums have a byte each."""
    found = np.uint64(0)
    for i in range(len(words)):
        found += others(words[i], which)
    return 8 * len(words) - sum_of(found)


@_jit
def rank_in(words, place, which):
    """The same of those before a place."""
    whole, rest = place >> 3, place & 7
    return count(words[:whole], which) + rest - sum_of(others(words[whole], which) & below(8 * rest))


@_jit
def passed(words, word, rank, which):
    """The word that has the class for the time that comes behind `rank` more, from a word on, and how many of those are left there."""
    here = 0
    while here <= rank:
        rank -= here
        found = np.uint64(0)
        for i in range(GROUP):
            found += others(words[np.uint64(word + i)], which)
        here = 8 * GROUP - sum_of(found)
        word += GROUP
    word -= GROUP
    here = 8 - sum_of(others(words[np.uint64(word)], which))
    while here <= rank:
        rank -= here
        word += 1
        here = 8 - sum_of(others(words[np.uint64(word)], which))
    return word, rank


@_jit
def place_in(word, rank, which):
    """Where among eight the class is for the time that comes behind so many."""
    same = others(word, which) ^ _LOW_BITS
    for _ in range(rank):
        same &= same - _ONE
    return np.int64(trailing_zeros(same) >> np.uint64(3))


# ---- payloads


@_jit
def pack(old, indices, by, shift, exponent_bits, top, words):
    """How many bits the payload has, of places that ascend; room for three words for each change, and 34, all zero."""
    mask, whole = below(exponent_bits), (np.uint64(2) << top) - _ONE
    exponents = np.zeros(EXPONENTS + CLASSES, np.int64)
    for i in range(len(indices)):
        exponents[exponent(old[indices[i]], shift, mask)] += 1
    lowest = lowest_of(exponents, exponent_bits)
    changes, told = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    for each in range(EXPONENTS):
        changes[class_of(each, lowest)] += exponents[each]
    firsts = np.cumsum(changes) - changes
    gaps, sizes, negative = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64), np.empty(len(indices), np.uint64)
    for i in range(len(indices)):
        which = class_of(exponent(old[indices[i]], shift, mask), lowest)
        to, moved = firsts[which] + told[which], np.uint64(by[i])
        told[which] += 1
        negative[to] = moved >> top
        sizes[to] = (moved ^ (np.uint64(0) - negative[to])) + negative[to] & whole
    count_gaps(old, indices, shift, mask, lowest, firsts, changes, gaps)
    at = put(words, 0, np.uint64(lowest), 8)
    for which in range(CLASSES):
        at = put(words, at, np.uint64(changes[which] > 0), 1)
    heads = np.zeros((CLASSES, 4), np.int64)
    for which in range(CLASSES):
        if changes[which]:
            its = slice(firsts[which], firsts[which] + changes[which])
            at = put_head(words, at, gaps[its], sizes[its], heads[which])
    for which in range(CLASSES):
        for i in range(firsts[which], firsts[which] + changes[which]):
            at = put_grown(words, at, gaps[i], heads[which, GAP_PARAMETER])
    for which in range(CLASSES):
        its = slice(firsts[which], firsts[which] + changes[which])
        at = put_sizes(words, at, sizes[its], negative[its], heads[which])
    return at


@_jit
def count_gaps(old, indices, shift, mask, lowest, firsts, changes, gaps):
    """Of each change the elements of its class since the one before, to where its class is told."""
    classes = np.empty(TILE, np.uint8)
    words = classes.view(np.uint64)
    told, seen, following = firsts.copy(), np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    i = 0
    for start in range(0, len(old), TILE):
        if i == len(indices):
            break
        classify(old[start : start + TILE], shift, mask, lowest, classes)
        while i < len(indices) and indices[i] < start + TILE:
            place = np.int64(indices[i]) - start
            which = np.int64(classes[place])
            rank = seen[which] + rank_in(words, place, np.uint64(which) * _LOW_BITS)
            gaps[told[which]] = rank - following[which]
            following[which] = rank + 1
            told[which] += 1
            i += 1
        for which in range(CLASSES):
            if told[which] < firsts[which] + changes[which]:
                seen[which] += count(words, np.uint64(which) * _LOW_BITS)


@_jit
def put_head(words, at, gaps, sizes, head):
    """Of a class; `head` becomes what is told of it."""
    exceptions = larger = 0
    for i in range(len(sizes)):
        exceptions += sizes[i] > 1
        larger += max(sizes[i] - 2, 0)
    head[GAP_PARAMETER], head[SIZE_PARAMETER], head[EXCEPTION_COUNT] = parameter(gaps.sum(), len(gaps)), 0, exceptions
    head[FORM] = SIZES if 2 * exceptions > len(sizes) else EXCEPTIONS if exceptions else ONES
    at = put(words, put_count(words, at, len(sizes)), np.uint64(head[GAP_PARAMETER]), 5)
    at = put(words, at, np.uint64(head[FORM]), 2)
    if head[FORM] == ONES:
        return at
    head[SIZE_PARAMETER] = parameter(sizes.sum() - len(sizes), len(sizes)) if head[FORM] == SIZES else parameter(larger, exceptions)
    at = put(words, at, np.uint64(head[SIZE_PARAMETER]), 5)
    return put_count(words, at, exceptions) if head[FORM] == EXCEPTIONS else at


@_jit
def put_sizes(words, at, sizes, negative, head):
    for i in range(len(sizes)):
        at = put(words, at, negative[i], 1)
    if head[FORM] == SIZES:
        for i in range(len(sizes)):
            at = put_grown(words, at, sizes[i] - 1, head[SIZE_PARAMETER])
    elif head[FORM] == EXCEPTIONS:
        k, following = parameter(len(sizes) - head[EXCEPTION_COUNT], head[EXCEPTION_COUNT]), 0
        for i in range(len(sizes)):
            if sizes[i] > 1:
                at = put_grown(words, at, i - following, k)
                following = i + 1
        for i in range(len(sizes)):
            if sizes[i] > 1:
                at = put_grown(words, at, sizes[i] - 2, head[SIZE_PARAMETER])
    return at


@_jit
def unpack(words, end, old, shift, exponent_bits, top, indices, by):
    """Places, and by how much each moves: as many as there are, or why they cannot be; `end` bits are in words, behind which are two of zeros."""
    lowest, at = get(words, 0, end, 8)
    those, at = get(words, at, end, 16)
    if those < 0:
        return those
    if those == 0:
        return np.int64(EMPTY)
    changes, heads = np.zeros(CLASSES, np.int64), np.zeros((CLASSES, 4), np.int64)
    for which in range(CLASSES):
        if those >> which & 1:
            changes[which], at = get_head(words, at, end, heads[which])
            if changes[which] < 0:
                return changes[which]
    total = changes.sum()
    if total > min(len(old), len(indices)):
        return np.int64(COUNT)
    firsts, ranks, moved = np.cumsum(changes) - changes, np.empty(total, np.int64), np.empty(total, by.dtype)
    for which in range(CLASSES):
        if changes[which]:
            at = get_ranks(words, at, end, len(old), heads[which], ranks[firsts[which] : firsts[which] + changes[which]])
            if at < 0:
                return at
    for which in range(CLASSES):
        if changes[which]:
            at = get_sizes(words, at, end, heads[which], top, moved[firsts[which] : firsts[which] + changes[which]])
            if at < 0:
                return at
    if end - at >= 8 or ahead(words, at) & below(end - at):
        return np.int64(REST)
    return spread(old, shift, exponent_bits, lowest, firsts, changes, ranks, moved, indices, by)


@_jit
def get_head(words, at, end, head):
    """The changes of a class, or why there can be none, and where the next head is; `head` becomes what is told beside."""
    changes, at = get_count(words, at, end)
    if changes < 0:
        return changes, end
    head[GAP_PARAMETER], at = get(words, at, end, 5)
    head[FORM], at = get(words, at, end, 2)
    if head[FORM] < 0:
        return head[FORM], end
    if head[FORM] > EXCEPTIONS:
        return np.int64(OTHER_FORM), end
    if head[FORM] != ONES:
        head[SIZE_PARAMETER], at = get(words, at, end, 5)
        if head[SIZE_PARAMETER] < 0:
            return head[SIZE_PARAMETER], end
    if head[FORM] == EXCEPTIONS:
        head[EXCEPTION_COUNT], at = get_count(words, at, end)
        if head[EXCEPTION_COUNT] < 0:
            return head[EXCEPTION_COUNT], end
        if 2 * head[EXCEPTION_COUNT] > changes:
            return np.int64(OTHER_FORM), end
    return changes, at


@_jit
def get_ranks(words, at, end, most, head, ranks):
    """Ascending places among the elements of a class, and where the next number is, or why there is none."""
    following = 0
    for i in range(len(ranks)):
        gap, at = get_grown(words, at, end, head[GAP_PARAMETER], most)
        if gap < 0:
            return gap
        ranks[i] = following + gap
        following = ranks[i] + 1
        if following > most:
            return np.int64(BEHIND)
    return at if parameter(following - len(ranks), len(ranks)) == head[GAP_PARAMETER] else np.int64(OTHER_PARAMETER)


@_jit
def get_sizes(words, at, end, head, top, moved):
    """By how much the elements of a class move, and where the next number is, or why there is none."""
    most = np.int64(_ONE << top)
    if at + len(moved) > end:
        return np.int64(ENDS)
    for i in range(len(moved)):
        # 1, or the largest there is, which is one less than none.
        moved[i] = _ONE - np.uint64(2) * (words[(at + i) >> 6] >> np.uint64((at + i) & 63) & _ONE)
    at += len(moved)
    total = 0
    if head[FORM] == SIZES:
        larger = 0
        for i in range(len(moved)):
            beyond, at = get_grown(words, at, end, head[SIZE_PARAMETER], most - 1)
            if beyond < 0:
                return beyond
            if not resized(moved, i, 1 + beyond, most):
                return np.int64(SIZE)
            total += beyond
            larger += beyond > 0
        if 2 * larger <= len(moved):
            return np.int64(OTHER_FORM)
        return at if parameter(total, len(moved)) == head[SIZE_PARAMETER] else np.int64(OTHER_PARAMETER)
    if head[FORM] != EXCEPTIONS:
        return at
    # Their places are read twice: sizes stand behind all of them.
    k, places = parameter(len(moved) - head[EXCEPTION_COUNT], head[EXCEPTION_COUNT]), at
    for _ in range(head[EXCEPTION_COUNT]):
        gap, at = get_grown(words, at, end, k, len(moved))
        if gap < 0:
            return gap
    i = 0
    for _ in range(head[EXCEPTION_COUNT]):
        gap, places = get_grown(words, places, end, k, len(moved))
        i += gap
        if i >= len(moved):
            return np.int64(BEHIND)
        beyond, at = get_grown(words, at, end, head[SIZE_PARAMETER], most - 2)
        if beyond < 0:
            return beyond
        if not resized(moved, i, 2 + beyond, most):
            return np.int64(SIZE)
        total += beyond
        i += 1
    return at if parameter(total, head[EXCEPTION_COUNT]) == head[SIZE_PARAMETER] else np.int64(OTHER_PARAMETER)


@_jit
def resized(moved, i, size, most):
    """Whether an element can move by so much; its direction is there."""
    larger = moved[i] == 1
    if larger and size == most:
        return False
    moved[i] = np.uint64(size) if larger else np.uint64(0) - np.uint64(size)
    return True


@_jit
def spread(old, shift, exponent_bits, lowest, firsts, changes, ranks, moved, indices, by):
    """Elements of classes become places among all, in their order; how many there are, or why they cannot be."""
    mask = below(exponent_bits)
    # With a group behind the last, for one may begin anywhere.
    classes, hits, here = np.empty(TILE + 8 * GROUP, np.uint8), np.zeros(TILE // 64, np.uint64), np.empty(TILE, by.dtype)
    words, exponents = classes.view(np.uint64), np.zeros(EXPONENTS + CLASSES, np.int64)
    entry, seen, out = firsts.copy(), np.zeros(CLASSES, np.int64), 0
    for start in range(0, len(old), TILE):
        if out == len(ranks):
            break
        classify(old[start : start + TILE], shift, mask, lowest, classes)
        for which in range(CLASSES):
            end, pattern = firsts[which] + changes[which], np.uint64(which) * _LOW_BITS
            if entry[which] == end:
                continue
            following = seen[which] + count(words[: TILE // 8], pattern)
            word, before = 0, seen[which]
            while entry[which] < end and ranks[entry[which]] < following:
                word, rest = passed(words, word, ranks[entry[which]] - before, pattern)
                before = ranks[entry[which]] - rest
                place = 8 * word + place_in(words[word], rest, pattern)
                hits[place >> 6] |= _ONE << np.uint64(place & 63)
                here[place] = moved[entry[which]]
                entry[which] += 1
            seen[which] = following
        for word in range(len(hits)):
            while hits[word]:
                place = 64 * word + np.int64(trailing_zeros(hits[word]))
                hits[word] &= hits[word] - _ONE
                indices[out], by[out] = start + place, here[place]
                exponents[exponent(old[start + place], shift, mask)] += 1
                out += 1
    if out < len(ranks):
        return np.int64(BEHIND)
    return out if lowest_of(exponents, exponent_bits) == lowest else np.int64(LOWEST)

"""Loops of `jitted`, which numba compiles: a place in a payload is held against its end by them, for nothing else does.

What is compiled is kept beside the bytecode, and holds no lock of Python's. Reasons are those of `native.REASONS`, by their numbers.
"""

from typing import Final

import numba
import numpy as np

_jit: Final = numba.njit(nogil=True, cache=True, boundscheck=False)
FAR: Final = 255
CLASSES: Final = 16
STEPS: Final = 8
WIDTH: Final = 32
BLOCK: Final = 64
"""Changes whose elements are read before their keys are computed."""
NOWHERE, BEHIND, LENGTH, PADDING, WIDE, SIZE, ENDS, NUMBER = (-number for number in range(1, 9))


@_jit
def find(old_words, new_words, old, new, indices):
    """Places that differ; words are the same memory as numbers of eight bytes, as far as it goes."""
    found = 0
    per_word = 8 // old.itemsize
    for word in range(len(old_words)):
        if old_words[word] != new_words[word]:
            for at in range(word * per_word, (word + 1) * per_word):
                if old[at] != new[at]:
                    indices[found] = at
                    found += 1
    for at in range(len(old_words) * per_word, len(old)):
        if old[at] != new[at]:
            indices[found] = at
            found += 1
    return found


@_jit
def ordered(bits, flips, top):
    """Of elements of any size, as numbers of eight bytes."""
    return bits ^ flips if bits >> top else bits


@_jit
def key(x):
    """See `state_hash`."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@_jit
def settle(old, indices, by, flips, top, one, two, values):
    """New elements from ordered differences, and what they add to both sums of the state hash."""
    whole = (np.uint64(2) << top) - np.uint64(1)
    added, other = np.uint64(0), np.uint64(0)
    moved = np.empty(BLOCK, np.uint64)
    for start in range(0, len(indices), BLOCK):
        # Slices, whose places nobody doubts: then many keys are computed at a time.
        some, its, to = indices[start : start + BLOCK], by[start : start + BLOCK], values[start : start + BLOCK]
        for i in range(len(some)):
            before = np.uint64(old[some[i]])
            after = ordered((ordered(before, flips, top) + np.uint64(its[i])) & whole, flips, top)
            to[i] = after
            moved[i] = after - before
        if one is not None:
            for i in range(len(some)):
                at = np.uint64(some[i])
                added += key(at + one) * moved[i]
                other += key(at + two) * moved[i]
    return added, other


@_jit
def write(flat, first, indices, values):
    """False, and nothing is written, where an element is not there."""
    for i in range(len(indices)):
        if not 0 <= first + np.int64(indices[i]) < len(flat):
            return False
    for i in range(len(indices)):
        flat[first + np.int64(indices[i])] = values[i]
    return True


@_jit
def differ(old, new, indices, flips, top, by):
    for i in range(len(indices)):
        by[i] = ordered(np.uint64(new[indices[i]]), flips, top) - ordered(np.uint64(old[indices[i]]), flips, top)


@_jit
def pack(indices, negative, sizes, limit, gaps, signs, exception_gaps, codes, wide):
    """Sizes are numbers of eight bytes here."""
    gap_bytes = exception_bytes = exceptions = far = 0
    following = exception = 0
    for i in range(len(indices)):
        between = np.int64(indices[i]) - following
        following = np.int64(indices[i]) + 1
        while between >= FAR:
            gaps[gap_bytes] = FAR
            gap_bytes += 1
            between -= FAR
        gaps[gap_bytes] = between
        gap_bytes += 1
        if negative[i]:
            signs[i >> 3] |= np.uint8(1 << (i & 7))
        if sizes[i] == 1:
            continue
        between = i - exception
        exception = i + 1
        while between >= FAR:
            exception_gaps[exception_bytes] = FAR
            exception_bytes += 1
            between -= FAR
        exception_gaps[exception_bytes] = between
        exception_bytes += 1
        if sizes[i] >= limit:
            codes[exceptions] = FAR
            wide[far] = sizes[i]
            far += 1
        else:
            codes[exceptions] = sizes[i] - np.uint64(2)
        exceptions += 1
    return gap_bytes, exception_bytes, exceptions, far


@_jit
def places(gaps, count, found):
    """Where gaps lead, as many as there are, or why they cannot."""
    if len(gaps) and gaps[-1] == FAR:
        return NOWHERE
    at = led = 0
    for i in range(len(gaps)):
        at += gaps[i]
        if gaps[i] == FAR:
            continue
        if at >= count:
            return BEHIND
        found[led] = at
        led += 1
        at += 1
    return led


@_jit
def unpack(gaps, signs, exception_gaps, codes, wide, count, top, indices, by):
    """Places and differences, as many as there are, or why they cannot be."""
    changes = places(gaps, count, indices)
    if changes < 0:
        return changes
    exceptions = np.empty(len(exception_gaps), np.uint32)
    led = places(exception_gaps, changes, exceptions)
    if led < 0:
        return led
    if len(signs) != (changes + 7) // 8 or len(codes) != led:
        return LENGTH
    if changes & 7 and signs[-1] >> np.uint8(changes & 7):
        return PADDING
    most, whole = np.uint64(1) << top, (np.uint64(2) << top) - np.uint64(1)
    for i in range(changes):
        by[i] = whole if signs[i >> 3] >> np.uint8(i & 7) & 1 else np.uint64(1)
    far = 0
    for i in range(led):
        size = (np.uint64(codes[i]) + np.uint64(2)) & whole
        if codes[i] == FAR:
            if whole == FAR:
                return WIDE
            if far >= len(wide):
                return LENGTH
            size = np.uint64(wide[far])
            far += 1
            if size < np.uint64(FAR + 2):
                return WIDE
        negative = by[exceptions[i]] != 1
        if size == 0 or size > most or (size == most and not negative):
            return SIZE
        by[exceptions[i]] = np.uint64(0) - size if negative else size
    return changes if far == len(wide) else LENGTH


@_jit
def decode(gaps, signs, exception_gaps, codes, wide, old, flips, top, one, two, indices, values):
    """The same of elements that are there: how many change, and what they add to both sums of the state hash."""
    by = np.empty(len(gaps), old.dtype)
    changes = unpack(gaps, signs, exception_gaps, codes, wide, len(old), top, indices, by)
    if changes < 0:
        return changes, np.uint64(0), np.uint64(0)
    added, other = settle(old, indices[:changes], by[:changes], flips, top, one, two, values)
    return changes, added, other


@_jit
def ranks(old, indices, shift, classes, found):
    """How many elements of its class are before each change."""
    seen = np.zeros((2, CLASSES), np.int64)
    at = 0
    mask = np.uint32(len(classes) - 1)
    for i in range(len(indices)):
        here = np.int64(indices[i])
        # Two counts in turn: one would wait for itself.
        while at + 1 < here:
            seen[0, classes[(old[at] >> shift) & mask]] += 1
            seen[1, classes[(old[at + 1] >> shift) & mask]] += 1
            at += 2
        if at < here:
            seen[0, classes[(old[at] >> shift) & mask]] += 1
            at += 1
        which = classes[(old[here] >> shift) & mask]
        found[i] = seen[0, which] + seen[1, which]


@_jit
def scan(old, shift, classes, firsts, ends, ranked, places, entries):
    """Elements by their places among those of their class, which ascend from `firsts` to `ends` of each; how many there are."""
    left = np.empty(CLASSES, np.int64)
    entry = firsts.copy()
    never = np.int64(1) << 60
    for which in range(CLASSES):
        left[which] = ranked[firsts[which]] if firsts[which] < ends[which] else never
    mask = np.uint32(len(classes) - 1)
    out, total = 0, len(ranked)
    for at in range(len(old)):
        which = classes[(old[at] >> shift) & mask]
        rest = left[which]
        left[which] = rest - 1
        if rest == 0:
            here = entry[which]
            places[out] = at
            entries[out] = here
            out += 1
            entry[which] = here + 1
            left[which] = ranked[here + 1] - ranked[here] - 1 if here + 1 < ends[which] else never
            if out == total:
                break
    return out


@_jit
def put(payload, at, number, width):
    for place in range(width):
        if number >> np.uint64(place) & np.uint64(1):
            payload[(at + place) >> 3] |= np.uint8(1 << ((at + place) & 7))
    return at + width


@_jit
def put_all(payload, at, numbers, widths):
    for i in range(len(numbers)):
        at = put(payload, at, numbers[i], np.int64(widths[i]))
    return at


@_jit
def put_grown(payload, at, numbers, k):
    for i in range(len(numbers)):
        number = np.uint64(numbers[i])
        steps = number >> np.uint64(k)
        doublings, begin, ones = 0, steps << np.uint64(k), np.int64(steps)
        if steps >= STEPS:
            while (steps - np.uint64(STEPS - 1)) >> np.uint64(doublings + 1):
                doublings += 1
            begin = (np.uint64(STEPS - 1) + (np.uint64(1) << np.uint64(doublings))) << np.uint64(k)
            ones = STEPS + doublings
        at = put(payload, at, (np.uint64(1) << np.uint64(ones)) - np.uint64(1), ones + 1)
        at = put(payload, at, number - begin, k + doublings)
    return at


@_jit
def get(payload, at, width):
    found = np.uint64(0)
    for place in range(width):
        found |= np.uint64(payload[(at + place) >> 3] >> np.uint8((at + place) & 7) & 1) << np.uint64(place)
    return found


@_jit
def flags(payload, at, found):
    for i in range(len(found)):
        found[i] = payload[(at + i) >> 3] >> np.uint8((at + i) & 7) & 1


@_jit
def get_grown(payload, at, end, k, most, found):
    """As many numbers as `found` has; where they end, or why they cannot."""
    for i in range(len(found)):
        ones = 0
        while True:
            if at >= end:
                return np.int64(ENDS)
            bit = payload[at >> 3] >> np.uint8(at & 7) & 1
            at += 1
            if not bit:
                break
            ones += 1
            if ones >= STEPS + WIDTH:
                return np.int64(NUMBER)
        doublings = max(ones - STEPS, 0)
        if k + doublings > WIDTH:
            return np.int64(NUMBER)
        if at + k + doublings > end:
            return np.int64(ENDS)
        begin = np.uint64(ones) if ones < STEPS else np.uint64(STEPS - 1) + (np.uint64(1) << np.uint64(doublings))
        number = (begin << np.uint64(k)) + get(payload, at, k + doublings)
        if number > np.uint64(most):
            return np.int64(NUMBER)
        found[i] = number
        at += k + doublings
    return np.int64(at)

"""Loops of `jitted`, which numba compiles: a place in a payload is held against its end by them, for nothing else does.

What is compiled is kept beside the bytecode, and holds no lock of Python's. Reasons are those of `native.REASONS`, by their numbers.
"""

from typing import Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_jit: Final = numba.njit(nogil=True, cache=True, boundscheck=False)
FAR: Final = 255
HEAD: Final = 8
BLOCK: Final = 256
"""Changes that are settled at a time."""
WORDS: Final = 8
"""That are compared at a time."""
AHEAD: Final = 64
"""How many before that their elements are fetched."""
NOWHERE, BEHIND, LENGTH, PADDING, WIDE, SIZE = (-number for number in range(1, 7))


@_jit
def find(old_words, new_words, old, new, flips, top, indices, by):
    """Places that differ, and by how much; words are the same memory as numbers of eight bytes, as far as it goes."""
    found = 0
    per_word = 8 // old.itemsize
    whole = len(old_words) // WORDS * WORDS
    for start in range(0, whole, WORDS):
        differs = np.uint64(0)
        for i in range(WORDS):
            differs |= old_words[np.uint64(start + i)] ^ new_words[np.uint64(start + i)]
        if differs:
            for word in range(start, start + WORDS):
                if old_words[np.uint64(word)] != new_words[np.uint64(word)]:
                    found = tell(old, new, flips, top, word * per_word, (word + 1) * per_word, indices, by, found)
    return tell(old, new, flips, top, whole * per_word, len(old), indices, by, found)


@_jit
def tell(old, new, flips, top, first, end, indices, by, found):
    """Those of a few elements; room for all that there are."""
    for at in range(first, end):
        before, after = np.uint64(old[np.uint64(at)]), np.uint64(new[np.uint64(at)])
        # Written whether it counts or not, for nobody can guess; never behind `at`.
        indices[found] = at
        by[found] = ordered(after, flips, top) - ordered(before, flips, top)
        found += before != after
    return found


@_jit
def ordered(bits, flips, top):
    """Of elements of any size, as numbers of eight bytes."""
    return bits ^ (flips & (np.uint64(0) - (bits >> top)))


@_jit
def key(x):
    """See `state_hash`."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@intrinsic
def fetch(_typing, array, _index):
    """Have an element on its way to the processor's cache."""

    def generated(context, builder, signature, arguments):
        of = context.make_array(array)(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(of.data, [arguments[1]]), cgutils.voidptr_t)
        whole = ir.IntType(32)
        prefetch = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, whole, whole, whole])
        # To be read, and to stay; data.
        numbers = [ir.Constant(whole, number) for number in (0, 3, 1)]
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", (cgutils.voidptr_t,), prefetch), [address, *numbers])
        return context.get_dummy_value()

    return types.void(array, types.intp), generated


@_jit
def settle(old, indices, by, flips, top, one, two, values):
    """New elements from ordered differences, and what they add to both sums of the state hash.

    A block of old ones is read before anything is hashed, so that as many as possible are on their way from memory at a time.
    """
    moved, whole = np.empty(BLOCK, np.uint64), (np.uint64(2) << top) - np.uint64(1)
    added = other = np.uint64(0)
    for start in range(0, len(indices), BLOCK):
        at, by_so_much, becomes = indices[start : start + BLOCK], by[start : start + BLOCK], values[start : start + BLOCK]
        for i in range(len(at)):
            # Places are not below zero, which numba would look for.
            fetch(old, np.intp(indices[np.uint64(min(start + i + AHEAD, len(indices) - 1))]))
            before = np.uint64(old[np.uint64(at[i])])
            after = ordered((ordered(before, flips, top) + np.uint64(by_so_much[i])) & whole, flips, top)
            becomes[i] = after
            moved[i] = after - before
        if one is not None:
            for i in range(len(at)):
                added += key(np.uint64(at[i]) + one) * moved[i]
                other += key(np.uint64(at[i]) + two) * moved[i]
    return added, other


@_jit
def write(flat, first, indices, values):
    """False, and nothing is written, where an element is not there."""
    outside = False
    for i in range(len(indices)):
        at = first + np.int64(indices[i])
        outside |= (at < 0) | (at >= len(flat))
    if outside:
        return False
    for i in range(len(indices)):
        # Not below zero, which numba would look for.
        flat[np.uint64(first + np.int64(indices[i]))] = values[i]
    return True


@_jit
def put_gap(gaps, at, gap):
    """Where the next one goes."""
    while gap >= 2 * FAR:
        gaps[at] = FAR
        at += 1
        gap -= FAR
    is_far = np.int64(gap >= FAR)
    gaps[at] = FAR
    gaps[at + is_far] = gap - is_far * FAR
    return at + is_far + 1


@_jit
def pack(indices, by, top, gaps, signs, exception_gaps, codes, wide):
    """Bytes of gaps and of exception gaps, exceptions, and how many of those are wide.

    What is rare is branched for, other bytes are written whether they count or not: a processor would guess wrong as often as it guesses.
    """
    gap_bytes = exception_bytes = exceptions = far = 0
    following = exception = 0
    for i in range(len(indices)):
        gap_bytes = put_gap(gaps, gap_bytes, np.int64(indices[i]) - following)
        following = np.int64(indices[i]) + 1
        moved = np.uint64(by[i])
        negative = moved >> top
        signs[i >> 3] |= np.uint8(negative << np.uint64(i & 7))
        size = (np.uint64(0) - moved) & ((np.uint64(2) << top) - np.uint64(1)) if negative else moved
        differs = np.int64(size != 1)
        if differs and i - exception >= FAR:
            exception_bytes = put_gap(exception_gaps, exception_bytes, i - exception) - 1
        else:
            exception_gaps[exception_bytes] = i - exception
        codes[exceptions] = size - np.uint64(2)
        if size >= np.uint64(FAR + 2):
            codes[exceptions] = FAR
            wide[far] = size
            far += 1
        exception = i + 1 if differs else exception
        exception_bytes += differs
        exceptions += differs
    return gap_bytes, exception_bytes, exceptions, far


@_jit
def led_to(gaps):
    """To how many places."""
    found = 0
    for i in range(len(gaps)):
        found += gaps[i] != FAR
    return found


@_jit
def places(gaps, count, found):
    """Where gaps lead, as many as there are, or why they cannot; room for a place for each gap."""
    if len(gaps) and gaps[-1] == FAR:
        return NOWHERE
    # Each byte leads on by one element at least.
    if len(gaps) > count:
        return BEHIND
    at = led = 0
    for i in range(len(gaps)):
        # No branch: a processor would guess wrong each time that a gap is far. What is written for such a one is written over, for the last leads on.
        leads = np.int64(gaps[i] != FAR)
        at += np.int64(gaps[i])
        found[led] = at
        led += leads
        at += leads
    return led if at <= count else BEHIND


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
    for i in range(changes // 8):
        eight = by[8 * i : 8 * i + 8]
        for bit in range(8):
            eight[bit] = whole if signs[i] >> np.uint8(bit) & 1 else np.uint64(1)
    for i in range(changes // 8 * 8, changes):
        by[i] = whole if signs[i >> 3] >> np.uint8(i & 7) & 1 else np.uint64(1)
    far = 0
    for i in range(led):
        size = (np.uint64(codes[i]) + np.uint64(2)) & whole
        if codes[i] == FAR:
            if whole == FAR:
                return WIDE
            if far + by.itemsize > len(wide):
                return LENGTH
            size = np.uint64(0)
            for place in range(by.itemsize):
                size |= np.uint64(wide[far + place]) << np.uint64(8 * place)
            far += by.itemsize
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
    changes = unpack(gaps, signs, exception_gaps, codes, wide, len(old), top, indices, values)
    if changes < 0:
        return changes, np.uint64(0), np.uint64(0)
    # Their differences lie where they go.
    its = values[:changes]
    added, other = settle(old, indices[:changes], its, flips, top, one, two, its)
    return changes, added, other


@_jit
def decode_fast(payload, old, flips, top, one, two, indices, values):
    """The same of a payload of `fast`, and not of its streams."""
    refused = np.int64(LENGTH), np.uint64(0), np.uint64(0)
    if len(payload) < HEAD:
        return refused
    gap_bytes, exception_bytes = np.int64(0), np.int64(0)
    for place in range(HEAD // 2):
        gap_bytes |= np.int64(payload[place]) << (8 * place)
        exception_bytes |= np.int64(payload[HEAD // 2 + place]) << (8 * place)
    # Slices end where the payload does, and so may be shorter than they should: then the signs, or the sizes, are.
    gaps, rest = payload[HEAD : HEAD + gap_bytes], payload[HEAD + gap_bytes :]
    sign_bytes = (led_to(gaps) + 7) // 8
    signs, rest = rest[:sign_bytes], rest[sign_bytes:]
    exception_gaps, rest = rest[:exception_bytes], rest[exception_bytes:]
    if len(gaps) < gap_bytes or len(exception_gaps) < exception_bytes:
        return refused
    sizes = led_to(exception_gaps)
    return decode(gaps, signs, exception_gaps, rest[:sizes], rest[sizes:], old, flips, top, one, two, indices, values)

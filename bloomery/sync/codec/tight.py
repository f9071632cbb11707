"""Payloads of bits that are counted among elements of one exponent.

Whether an update moves an element to its neighbour depends on how far that is, which is what the exponent of the element says: of each exponent below
the next one twice as many move. The receiver has the old elements, so positions are told within each of sixteen classes of them by themselves, as the
number of elements of the class that stay: `number` by a parameter (`bits.grown`), which is `bits.parameter` of all in the class.

    u8 lowest exponent | u16 classes that have changes
    for each of those, from the lowest: count of changes (5 bits: one less than its bits; those below its highest) | 5 bits: parameter of gaps |
        2 bits: form of sizes | form 1, 2: 5 bits: parameter of sizes | form 2: count of exceptions, written as the other
    for each: gaps
    for each: a bit per change, set where the element became smaller | form 1: sizes less 1 | form 2: gaps between exceptions, counted in changes |
        sizes of exceptions less 2
    zeros to a whole byte

The lowest exponent is that from which on sixteen exponents have the most changes, the smallest of several; exponents below are in the first class,
those above in the last. Form 0: all moved by one. Form 2, where at most half of them moved by more: these are the exceptions. Form 1: the others.
"""

from bloomery.sync.codec import kernels
from bloomery.sync.codec.fast import WORTH
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.state_hash import NOTHING, Bits, StateHash
from bloomery.types.errors import Corrupt


def encode(old: Bits, new: Bits, kind: Number) -> bytes | None:
    """None where all new elements are not much longer, where nothing changed, and for elements of eight bytes."""
    payload = encode_differences(old, kernels.find(old, new, kind), kind)
    return payload if payload is not None and len(payload) <= WORTH * new.nbytes else None


def encode_differences(old: Bits, found: Differences, kind: Number) -> bytes | None:
    """Of what was found already; None where nothing was, and for elements of eight bytes."""
    if not len(found.indices) or not possible(kind):
        return None
    return kernels.pack_tight(old, found, kind)


def decode(payload: memoryview, old: Bits, kind: Number, first: int = 0, state: StateHash = NOTHING) -> Changes:
    """What changed, and to what, of elements of which the first has index `first`, and all have the state hash `state`."""
    if not possible(kind):
        raise Corrupt(f"elements of {kind.item_bytes} bytes have no payloads of this kind")
    return kernels.decode_tight(payload, old, kind, first, state)


def possible(kind: Number) -> bool:
    """Whether every difference is a number of at most 32 bits."""
    return kind.item_bytes <= 4

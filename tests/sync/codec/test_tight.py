"""Payloads counted within exponents: an oracle that writes the documented bits one by one, one encoding of all changes, and hostile bytes."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings

from bloomery.sync.codec import bits, choose, fast_zstd, plain_tight, tight
from bloomery.sync.codec.choose import Codec
from bloomery.sync.codec.numbers import NUMBERS, Differences, Number
from bloomery.types.errors import Corrupt

from .chunks import EVERY, FULL, applied, damaged, pairs, special, weights

BF16, U8, F32 = NUMBERS["BF16"], NUMBERS["U8"], NUMBERS["F32"]


def differences(old, new, kind) -> Differences:
    at = np.flatnonzero(old != new).astype(np.uint32)
    return Differences(at, kind.ordered(new[at]) - kind.ordered(old[at]))


def fixed(number: int, width: int) -> str:
    """Lowest bit first."""
    return "".join(str(number >> place & 1) for place in range(width))


def grown(number: int, k: int) -> str:
    steps = number >> k
    if steps < 8:
        return "1" * steps + "0" + fixed(number, k)
    doublings = int(math.log2(steps - 7))
    return "1" * (8 + doublings) + "0" + fixed(number - ((7 + 2**doublings) << k), k + doublings)


def parameter(numbers: list[int]) -> int:
    mean = sum(numbers) // len(numbers)
    return int(math.log2(mean)) if mean else 0


def count(number: int) -> str:
    below = int(math.log2(number))
    return fixed(below, 5) + fixed(number - 2**below, below)


def gaps(places: list[int]) -> list[int]:
    return [place - before - 1 for place, before in zip(places, [-1, *places], strict=False)]


def oracle(old: np.ndarray, new: np.ndarray, kind: Number) -> bytes:
    """As the docs say it, element by element."""
    exponents, half = kind.exponents(old).tolist(), 1 << (8 * kind.item_bytes - 1)
    moved = ((kind.ordered(new).astype(object) - kind.ordered(old).astype(object) + half) % (2 * half) - half).tolist()
    highest = max((1 << kind.exponent_bits) - 16, 0)
    changed = [exponent for exponent, by in zip(exponents, moved, strict=True) if by]
    lowest = max(range(highest + 1), key=lambda first: (sum(first <= exponent < first + 16 for exponent in changed), -first))
    heads, positions, sizes, mask = "", "", "", 0
    for number in range(16):
        members = [by for exponent, by in zip(exponents, moved, strict=True) if min(max(exponent - lowest, 0), 15) == number]
        between = gaps([place for place, by in enumerate(members) if by])
        steps = [by for by in members if by]
        if not steps:
            continue
        mask |= 1 << number
        heads += count(len(steps)) + fixed(parameter(between), 5)
        positions += "".join(grown(gap, parameter(between)) for gap in between)
        sizes += "".join("01"[by < 0] for by in steps)
        exceptions = [place for place, by in enumerate(steps) if abs(by) > 1]
        if not exceptions:
            heads += fixed(0, 2)
        elif 2 * len(exceptions) > len(steps):
            told = [abs(by) - 1 for by in steps]
            heads += fixed(1, 2) + fixed(parameter(told), 5)
            sizes += "".join(grown(size, parameter(told)) for size in told)
        else:
            told = [abs(steps[place]) - 2 for place in exceptions]
            heads += fixed(2, 2) + fixed(parameter(told), 5) + count(len(exceptions))
            apart = parameter([len(steps) - len(exceptions)] + [0] * (len(exceptions) - 1))
            sizes += "".join(grown(gap, apart) for gap in gaps(exceptions)) + "".join(grown(size, parameter(told)) for size in told)
    written = fixed(lowest, 8) + fixed(mask, 16) + heads + positions + sizes
    written += "0" * (-len(written) % 8)
    return bytes(int(written[place : place + 8][::-1], 2) for place in range(0, len(written), 8))


@settings(max_examples=300, deadline=None)
@given(pair=pairs())
def test_it_is_what_the_docs_say_and_comes_back(pair):
    kind, old, new = pair
    payload = tight.encode_differences(old, differences(old, new, kind), kind)
    if not tight.possible(kind) or (old == new).all():
        assert payload is None
        return
    assert payload == oracle(old, new, kind)
    before = old.copy()
    assert (applied(old, tight.decode(memoryview(payload), old, kind)) == new).all()
    assert (old == before).all()


@EVERY
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_full_chunk_comes_back(kind, share):
    if not tight.possible(kind):
        pytest.skip("elements of eight bytes have none")
    old, new = weights(kind, FULL if share < 1 else FULL // 16, share=share)
    payload = tight.encode_differences(old, differences(old, new, kind), kind)
    assert (applied(old, tight.decode(memoryview(payload), old, kind)) == new).all()


@EVERY
def test_every_special_number_becomes_every_other(kind):
    if not tight.possible(kind):
        pytest.skip("elements of eight bytes have none")
    found = special(kind)
    old, new = np.repeat(found, len(found)), np.tile(found, len(found))
    payload = tight.encode_differences(old, differences(old, new, kind), kind)
    assert (applied(old, tight.decode(memoryview(payload), old, kind)) == new).all()


def test_positions_cost_what_exponents_leave_of_them():
    # Of each exponent half as many change as of the one below.
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(FULL).astype(np.float32) * 0.02).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    chance = 0.0005 * 2.0 ** (121 - BF16.exponents(old).astype(int))
    changed = rng.random(FULL) < chance
    new = old + changed.astype(np.uint16)
    payload = tight.encode(old, new, BF16)
    entropy = -(np.log2(np.where(changed, chance, 1 - chance), where=chance < 1, out=np.zeros(FULL))).sum()
    signs = changed.sum()
    assert 8 * len(payload) < 1.05 * (entropy + signs)
    assert len(payload) < 0.75 * len(fast_zstd.encode(old, new, BF16))
    assert choose.encode(old, new, BF16)[:2] == (Codec.TIGHT, payload)


def test_damaged_payloads_are_refused_or_are_canonical_payloads_of_something_else():
    rng = np.random.default_rng(2)
    read = 0
    for kind, share in ((BF16, 0.02), (BF16, 0.5), (U8, 0.1), (F32, 0.1), (NUMBERS["F8_E4M3"], 0.05)):
        old, new = weights(kind, 2000, share=share)
        payload = tight.encode_differences(old, differences(old, new, kind), kind)
        for _ in range(300):
            other = damaged(payload, rng)
            try:
                told = tight.decode(memoryview(other), old, kind)
            except Corrupt:
                continue
            read += 1
            changed = applied(old, told)
            assert tight.encode_differences(old, differences(old, changed, kind), kind) == other
    assert read


def written(*parts: str) -> memoryview:
    text = "".join(parts)
    text += "0" * (-len(text) % 8)
    return memoryview(bytes(int(text[place : place + 8][::-1], 2) for place in range(0, len(text), 8)))


# One change, of the first of eight elements of U8, by one.
ONE = (fixed(0, 8), fixed(1, 16), count(1), fixed(0, 5), fixed(0, 2), grown(0, 0), "0")


def instead(place: int, *parts: str) -> memoryview:
    return written(*ONE[:place], *parts, *ONE[place + 1 :])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (memoryview(b""), "ends within a number"),
        (written(*ONE)[:-1], "ends within a number"),
        (instead(1, fixed(0, 16)), "without changes"),
        (instead(1, fixed(2, 16)), "behind the last of 0 elements"),
        (instead(0, fixed(1, 8)), "do not begin where they should"),
        (instead(2, fixed(31, 5)), "a count beyond a chunk"),
        (instead(2, count(9)), "more changes than 8 elements"),
        (instead(3, fixed(1, 5)), "a parameter of 1"),
        (instead(4, fixed(3, 2)), "a form of sizes that there is not"),
        (instead(5, grown(8, 0)), "behind the last of 8 elements"),
        (instead(5, "1" * 200), "more bits than any has"),
        (instead(5, grown(2**31, 0)), "8 is possible"),
        (instead(6, "01"), "bits behind the end"),
        (written(*ONE, "0" * 8), "bits behind the end"),
        (written(*ONE[:4], fixed(1, 2), fixed(0, 5), *ONE[5:], grown(0, 0)), "sizes where exceptions belong"),
        (written(*ONE[:4], fixed(1, 2), fixed(0, 5), *ONE[5:], grown(128, 0)), "127 is possible"),
        (written(*ONE[:4], fixed(1, 2), fixed(6, 5), *ONE[5:], grown(127, 6)), "no difference has"),
        (written(*ONE[:4], fixed(1, 2), fixed(1, 5), *ONE[5:], grown(1, 1)), "a parameter of 1 for 1 numbers of 1"),
        (written(*ONE[:4], fixed(2, 2), fixed(0, 5), count(1), *ONE[5:], grown(0, 0), grown(0, 0)), "more exceptions than others"),
    ],
)
def test_impossible_payloads_are_refused_with_the_reason(payload, reason):
    with pytest.raises(Corrupt, match=reason):
        plain_tight.unpack(memoryview(payload), np.zeros(8, np.uint8), U8)
    with pytest.raises(Corrupt):
        tight.decode(payload, np.zeros(8, np.uint8), U8)


def test_the_one_change_that_those_begin_from_is_read():
    assert tight.decode(written(*ONE), np.zeros(8, np.uint8), U8).values.tolist() == [1]
    assert tight.encode_differences(np.zeros(8, np.uint8), Differences(np.array([0], np.uint32), np.array([1], np.uint8)), U8) == written(*ONE)


def test_elements_of_eight_bytes_have_none():
    assert tight.encode(np.zeros(99, np.uint64), np.ones(99, np.uint64), NUMBERS["F64"]) is None
    with pytest.raises(Corrupt, match="elements of 8 bytes"):
        tight.decode(written(*ONE), np.zeros(8, np.uint64), NUMBERS["F64"])


def test_numbers_far_out_cost_few_bits():
    assert bits.joined([bits.grown(np.array([2**32 - 1]), 0)]) == written(grown(2**32 - 1, 0)).tobytes()
    assert len(grown(2**32 - 1, 0)) == 71
    reader = bits.Reader(written(*(grown(number, 3) for number in (0, 7, 8, 63, 64, 71, 72, 87, 88, 2**32 - 1))))
    assert reader.grown(10, 3, 2**32 - 1).tolist() == [0, 7, 8, 63, 64, 71, 72, 87, 88, 2**32 - 1]


def test_a_golden_payload():
    # Deltas lie in stores for years.
    old = (np.arange(20_000, dtype=np.uint32) * 40_503 % 65_536).astype(np.uint16)
    new = old.copy()
    new[::37] += 1
    new[::740] ^= 0x8000
    payload = tight.encode(old, new, BF16)
    assert (len(payload), zlib.crc32(payload)) == (598, 301444365)

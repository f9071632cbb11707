"""Positions as gaps, flat and row by row, held against what a loop over a set says; and what is refused of them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.sync.foreign import gaps
from bloomery.sync.foreign.fields import Fields
from bloomery.sync.foreign.gaps import Positions
from bloomery.types.errors import Corrupt

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Positions]:
    """A shape and some positions in it."""
    shape = draw(shapes)
    chosen = draw(st.sets(st.integers(0, math.prod(shape) - 1), max_size=200))
    return shape, np.array(sorted(chosen), np.int64)


def views(written: dict[str, Any]) -> dict[str, Any]:
    """As a pickle gives it back."""
    return {name: memoryview(value) if isinstance(value, bytes) else value for name, value in written.items()}


def flat(written: dict[str, Any], size: int) -> Positions:
    return gaps.read_flat(Fields(views(written), "the test"), size)


def by_rows(written: dict[str, Any], shape: tuple[int, ...]) -> Positions:
    fields = Fields(views(written), "the test")
    fields.exactly("kind", "row")
    return gaps.read_rows(fields, shape)


@given(placed())
def test_positions_come_back_from_both_forms(given_: tuple[tuple[int, ...], Positions]) -> None:
    shape, positions = given_
    assert flat(gaps.write_flat(positions), math.prod(shape)).tolist() == positions.tolist()
    assert by_rows(gaps.write_rows(positions, shape), shape).tolist() == positions.tolist()


@given(placed())
def test_rows_are_written_as_a_loop_would(given_: tuple[tuple[int, ...], Positions]) -> None:
    shape, positions = given_
    rows, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    columns = [[place % width for place in positions.tolist() if place // width == row] for row in range(rows)]
    counts = gaps.smallest(np.array([len(row) for row in columns]))
    stream = counts.tobytes()
    for row in filter(None, columns):
        own = gaps.smallest(np.array([now - before for before, now in zip([0, *row], row, strict=False)]))
        stream += bytes([own.itemsize]) + own.tobytes()
    assert gaps.write_rows(positions, shape)["data"] == stream
    assert gaps.count_rows(Fields(views(gaps.write_rows(positions, shape)), "the test")) == len(positions)


@pytest.mark.parametrize("far", [0, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, 1 << 40])
def test_gaps_take_the_fewest_bytes_that_hold_them(far: int) -> None:
    written = gaps.write_flat(np.array([far], np.int64))
    assert written["dtype"] == next(name for name, width in gaps.WIDTHS.items() if far < 1 << 8 * width)
    assert flat(written, far + 1).tolist() == [far]
    if far:
        with pytest.raises(Corrupt, match="past the end"):
            flat(written, far)


def written(count: int, dtype: str, data: bytes) -> dict[str, Any]:
    return {"count": count, "dtype": dtype, "data": data}


EIGHT = (1 << 63).to_bytes(8, "little")
HOSTILE_FLAT: dict[str, tuple[dict[str, Any], str]] = {
    "counts 2^60": (written(1 << 60, "uint8", b"\1"), "no more than 100"),
    "counts more than there are": (written(3, "uint8", b"\1\1"), "3 positions are due"),
    "counts fewer than there are": (written(1, "uint8", b"\1\1"), "1 positions are due"),
    "half a number": (written(1, "uint16", b"\1"), "no whole numbers"),
    "a type that has code": (written(1, "object", bytes(8)), "can be uint8"),
    "a gap past the end": (written(1, "uint8", b"\x64"), "past the end"),
    "gaps that add up past the end": (written(3, "uint8", b"\x32\x31\x32"), "past the end"),
    "a position twice": (written(2, "uint8", b"\5\0"), "twice"),
    "sums that wrap around": (written(3, "uint64", b"\5" + bytes(7) + EIGHT + EIGHT), "past the end"),
    "no count": ({"dtype": "uint8", "data": b""}, "no `count`"),
    "a field too many": ({**written(1, "uint8", b"\1"), "more": 1}, "not known"),
    "a text for the count": ({**written(1, "uint8", b"\1"), "count": "1"}, "no `count` of type int"),
}


@pytest.mark.parametrize("name", HOSTILE_FLAT)
def test_positions_that_can_be_none_are_refused(name: str) -> None:
    given_, reason = HOSTILE_FLAT[name]
    with pytest.raises(Corrupt, match=reason):
        flat(given_, 100)


def rows(**changes: Any) -> dict[str, Any]:
    """Of shape (3, 100): two in the first row, none in the second, one in the third."""
    good = {"kind": "row", "shape": (3, 100), "n_rows": 3, "row_width": 100, "count_dtype": "uint8", "data": b"\2\0\1" + b"\1\7\1" + b"\1\x63"}
    return {**good, **changes}


HOSTILE_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": (rows(shape=(100, 3)), r"\(3, 100\) is expected"),
    "2^60 rows": (rows(n_rows=1 << 60), "3 is expected"),
    "wide rows": (rows(row_width=1 << 60), "100 is expected"),
    "counts cut off": (rows(data=b"\2\0"), "counted"),
    "more in a row than it has": (rows(data=b"\x65\0\0\1" + b"\1" * 101), "counted"),
    "a row cut off": (rows(data=b"\2\0\1\1\7\1\1"), "cut off"),
    "a width that there is not": (rows(data=b"\2\0\1\3\7\1\1\x63" + bytes(6)), "no known width"),
    "bytes behind the last": (rows(data=rows()["data"] + b"\0"), "behind"),
    "a column past the end": (rows(data=b"\2\0\1\1\7\1\1\x64"), "past the end"),
    "columns that add up past the end": (rows(data=b"\2\0\1\1\x32\x32\1\x63"), "past the end"),
    "a column twice": (rows(data=b"\2\0\1\1\7\0\1\x63"), "twice"),
    "sums that wrap around": (rows(count_dtype="uint8", data=b"\2\0\1\x08" + EIGHT + EIGHT + b"\1\x63"), "past the end"),
}


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_rows_that_can_be_none_are_refused(name: str) -> None:
    assert by_rows(rows(), (3, 100)).tolist() == [7, 8, 299]
    given_, reason = HOSTILE_ROWS[name]
    with pytest.raises(Corrupt, match=reason):
        by_rows(given_, (3, 100))


@given(placed(), st.binary(max_size=60), st.sampled_from(sorted(gaps.WIDTHS)))
def test_any_bytes_are_positions_in_bounds_or_refused(given_: tuple[tuple[int, ...], Positions], data: bytes, dtype: str) -> None:
    shape, _ = given_
    count, head = len(data) // gaps.WIDTHS[dtype], gaps.Rows.of(shape)
    check_bounds(lambda: flat(written(count, dtype, data), math.prod(shape)), math.prod(shape))
    row_fields = {"kind": "row", "shape": shape, "n_rows": head.height, "row_width": head.width, "count_dtype": dtype, "data": data}
    check_bounds(lambda: by_rows(row_fields, shape), math.prod(shape))


def check_bounds(read: Callable[[], Positions], size: int) -> None:
    try:
        found = read()
    except Corrupt:
        return
    assert np.all(np.diff(found) > 0)
    assert not len(found) or 0 <= found[0] <= found[-1] < size

"""Ascending positions as their gaps, unsigned numbers of 1, 2, 4 or 8 bytes: through a whole tensor, or row by row of one.

The first gap is a position itself, and each after it the distance from the position before. Row by row, the changes of every row are counted first;
then come the rows that have some, each with the bytes of its gaps and the gaps, which begin anew at its own first element.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.foreign.fields import Fields
from bloomery.sync.foreign.pickles import Value
from bloomery.types.errors import Corrupt

WIDTHS: Final = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
"""Bytes of the numbers, by the name of their type."""
MAX_ROWS: Final = 1 << 32

Positions = NDArray[np.int64]
"""Ascending, each once [n]."""


class Rows(NamedTuple):
    """The shape that positions lie in, as rows: of one dimension or none there is one row."""

    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Rows":
        first, rest = (shape[0], shape[1:]) if len(shape) > 1 else (1, shape)
        return cls(first, max(1, math.prod(rest)))


def numbers(data: memoryview, dtype: str) -> NDArray[Any]:
    """What lies there, back to back; a view."""
    if (width := WIDTHS.get(dtype)) is None or len(data) % width:
        raise Corrupt(f"{len(data)} bytes hold no whole numbers of type {dtype!r}")
    return np.frombuffer(data, f"<u{width}")


def smallest(values: NDArray[Any]) -> NDArray[Any]:
    """The same whole numbers from 0 on, of the fewest bytes that hold all of them."""
    largest = int(values.max(initial=0))
    return values.astype(next(f"<u{width}" for width in WIDTHS.values() if largest < 1 << 8 * width))


def write_flat(positions: Positions) -> dict[str, Value]:
    """The fields of positions through a whole tensor."""
    gaps = smallest(np.diff(positions, prepend=0))
    return {"count": len(gaps), "dtype": gaps.dtype.name, "data": gaps.tobytes()}


def read_flat(fields: Fields, size: int) -> Positions:
    """Positions below `size`; Corrupt for any other, and for one that is there twice."""
    count = fields.number("count", at_most=size)
    gaps = numbers(fields.data("data"), fields.one_of("dtype", *WIDTHS))
    fields.done()
    if len(gaps) != count:
        raise Corrupt(f"{count} positions are due, and there are {len(gaps)}")
    return _added(gaps, np.zeros(min(1, count), np.int64), size)


def write_rows(positions: Positions, shape: tuple[int, ...]) -> dict[str, Value]:
    """The fields of positions row by row."""
    rows = Rows.of(shape)
    row, column = np.divmod(positions, rows.width)
    counts = np.bincount(row, minlength=rows.height)
    starts = _starts(counts[counts > 0])
    gaps = np.diff(column, prepend=0)
    gaps[starts] = column[starts]
    stream = [smallest(counts).tobytes()]
    for part in np.split(gaps, starts[1:]) if len(gaps) else ():
        small = smallest(part)
        stream += [bytes([small.itemsize]), small.tobytes()]
    counted = smallest(counts).dtype.name
    return {"kind": "row", "shape": shape, "n_rows": rows.height, "row_width": rows.width, "count_dtype": counted, "data": b"".join(stream)}


def read_rows(fields: Fields, shape: tuple[int, ...]) -> Positions:
    """Positions in a tensor of this shape; Corrupt for any beside it, and for one that is there twice."""
    rows = Rows.of(shape)
    fields.exactly("shape", shape)
    fields.exactly("n_rows", rows.height)
    fields.exactly("row_width", rows.width)
    data, counted = fields.data("data"), fields.one_of("count_dtype", *WIDTHS)
    fields.done()
    head_bytes = rows.height * WIDTHS[counted]
    counts = numbers(data[:head_bytes], counted)
    if len(counts) != rows.height or int(counts.max(initial=0)) > rows.width:
        raise Corrupt(f"the changes of {rows.height} rows, each of {rows.width} elements, are not counted so")
    changed = np.flatnonzero(counts)
    own_counts = counts[changed].astype(np.int64)
    gaps = _gaps_of_rows(data[head_bytes:], own_counts)
    return _added(gaps, _starts(own_counts), rows.width) + np.repeat(changed * rows.width, own_counts)


def count_rows(fields: Fields) -> int:
    """How many positions are there row by row, as far as the counts say."""
    counted = fields.one_of("count_dtype", *WIDTHS)
    head_bytes = fields.number("n_rows", at_most=MAX_ROWS) * WIDTHS[counted]
    return int(numbers(fields.data("data")[:head_bytes], counted).sum(dtype=np.uint64))


def _gaps_of_rows(stream: memoryview, counts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The gaps of all rows behind each other, from the bytes that say for every row how wide its own are."""
    widths, places, place = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64), 0
    for number, count in enumerate(counts.tolist()):
        if place >= len(stream) or (width := stream[place]) not in WIDTHS.values() or place + 1 + count * width > len(stream):
            raise Corrupt(f"the positions of the row that is number {number} of those with changes are cut off, or of no known width")
        widths[number], places[number] = width, place + 1
        place += 1 + count * width
    if place != len(stream):
        raise Corrupt(f"{len(stream) - place} bytes stand behind the positions of the last row")
    data = np.frombuffer(stream, np.uint8)
    within = np.arange(int(counts.sum())) - np.repeat(_starts(counts), counts)
    first, width_of = np.repeat(places, counts), np.repeat(widths, counts)
    first += within * width_of
    gaps = np.zeros(len(within), np.uint64)
    for byte in range(int(widths.max(initial=0))):
        has = np.flatnonzero(width_of > byte)
        gaps[has] |= data[first[has] + byte].astype(np.uint64) << np.uint64(8 * byte)
    return gaps


def _added(gaps: NDArray[Any], starts: NDArray[np.int64], size: int) -> Positions:
    """Positions below `size` from gaps [n] in groups, which begin at `starts` and count from 0 on each."""
    if not len(gaps):
        return np.zeros(0, np.int64)
    # Sums can then not wrap around unseen: the first that is too large is below twice the size.
    if int(gaps.max()) >= size:
        raise Corrupt(f"a gap of {int(gaps.max())} leads past the end of {size} elements")
    if np.count_nonzero(gaps == 0) > np.count_nonzero(gaps[starts] == 0):
        raise Corrupt("a position is there twice")
    sums = np.cumsum(gaps, dtype=np.int64)
    counts = np.diff(starts, append=len(gaps))
    sums -= np.repeat(sums[starts] - gaps[starts].astype(np.int64), counts)
    if int(sums.min()) < 0 or int(sums.max()) >= size:
        raise Corrupt(f"the gaps lead past the end of {size} elements")
    return sums


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of neighbouring groups begins."""
    return np.cumsum(counts) - counts

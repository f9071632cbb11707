"""Deltas added up, so that one leads where several did, and turned around, so that one leads back.

What can be done without the weights that the first delta starts from depends on how chunks are written. One that a single delta changes is taken as
it is; distances (`fast`, `fast+zstd`) add up and turn around by themselves; where all elements are written (`raw`, `planes`, every chunk of a base),
all further deltas can be applied. `tight` counts within classes of the old elements, so it needs them.

What comes of it is a delta like any other. With the weights at hand its bytes are those that `encode` makes of the first and the last; without them
that is so of chunks of distances where their codec is asked for by name.
"""

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import BinaryIO, Final

import numpy as np

from bloomery.sync.codec import container
from bloomery.sync.codec.applying import Steps, advanced, place_of
from bloomery.sync.codec.choose import Codec
from bloomery.sync.codec.container import WHOLE, Entry, Head, check_payload
from bloomery.sync.codec.delta import DISTANCES, Choice, Delta, Told, encoded, encoded_base, encoded_whole
from bloomery.sync.codec.layout import Chunk, Layout, Weights
from bloomery.sync.codec.numbers import NUMBERS
from bloomery.sync.codec.ordered import in_order
from bloomery.sync.state_hash import NOTHING, Bits, StateHash, hash_elements
from bloomery.types.errors import Conflict, Corrupt, InvalidInput

_BY_NAME: Final[dict[Choice, tuple[Codec, ...]]] = {"auto": tuple(DISTANCES), "fast": (Codec.FAST,), "fast+zstd": (Codec.FAST_ZSTD,)}
"""What sums of distances may be written as: whichever is shortest."""


def merge(deltas: Sequence[Delta], base: Weights | None = None, codec: Choice = "auto") -> bytes:
    """One delta instead of several that follow each other, or one base instead of a base and what follows it."""
    file = BytesIO()
    write_merged(file, deltas, base, codec=codec)
    return file.getvalue()


def write_merged(
    file: BinaryIO, deltas: Sequence[Delta], base: Weights | None = None, *, codec: Choice = "auto", workers: int = 1, told: Told | None = None
) -> Head:
    """The same into an empty file that can be read too. `base`: the weights that the first delta starts from; InvalidInput where they are needed."""
    steps = Steps(deltas)
    if base is not None:
        steps.check_layout(base.layout)
    elif not steps.from_anything:
        _check_mergeable(steps, codec)

    def entry(chunk: Chunk) -> Entry:
        if steps.from_anything:
            return encoded_base(chunk, _last(steps, chunk, np.zeros(chunk.numel, chunk.unsigned))).entry
        h_old, h_new = deltas[0].records[chunk.number].h_old, deltas[-1].records[chunk.number].h_new
        if h_old == h_new:
            return Entry(Codec.EMPTY, b"", 0, h_old, h_new)
        if base is None:
            return _merged(deltas, chunk, h_old, h_new, codec)
        bits = base.read(chunk)
        return encoded(chunk, bits, _last(steps, chunk, bits), h_old, codec).entry

    return container.write(file, deltas[0].kind, steps.layout, _entries(entry, steps.layout, workers, told))


def invert(delta: Delta, old: Weights | None = None, codec: Choice = "auto") -> bytes:
    """The delta that leads back from where this one leads."""
    file = BytesIO()
    write_inverse(file, delta, old, codec=codec)
    return file.getvalue()


def write_inverse(
    file: BinaryIO, delta: Delta, old: Weights | None = None, *, codec: Choice = "auto", workers: int = 1, told: Told | None = None
) -> Head:
    """The same into an empty file that can be read too. `old`: the weights that the delta starts from; without them distances keep their codec."""
    steps = Steps([delta])
    if delta.kind == "base":
        raise Conflict("a base starts from nothing, so there is no way back from it")
    if old is not None:
        steps.check_layout(old.layout)
    else:
        _check_invertible(delta)

    def entry(chunk: Chunk) -> Entry:
        record = delta.records[chunk.number]
        if record.codec == Codec.EMPTY:
            return Entry(Codec.EMPTY, b"", 0, record.h_new, record.h_old)
        if old is not None:
            bits = old.read(chunk)
            return encoded(chunk, _last(steps, chunk, bits), bits, record.h_new, codec).entry
        indices, by = delta.differences(chunk.number)
        payload = DISTANCES[record.codec].encode_differences(indices, -by, chunk.numel, NUMBERS[chunk.dtype])
        return Entry(record.codec, payload, len(indices), record.h_new, record.h_old)

    return container.write(file, "delta", steps.layout, _entries(entry, steps.layout, workers, told))


def _entries(entry: Callable[[Chunk], Entry], layout: Layout, workers: int, told: Told | None) -> Iterator[Entry]:
    for chunk, made in in_order(entry, layout.chunks(), workers):
        yield made
        if told is not None:
            told(chunk)


def _last(steps: Steps, chunk: Chunk, bits: Bits) -> Bits:
    """A chunk's elements behind all deltas, from those before the first; Conflict where they are others."""
    state = hash_elements(bits, chunk.first)
    if state != steps.deltas[0].records[chunk.number].h_old:
        raise Conflict(f"the weights are not those that the first delta starts from: {place_of(steps.layout, chunk.number)} is in another state")
    found = advanced(steps, chunk, bits, 0, state).changes
    new = bits.copy()
    new[found.indices] = found.values
    return new


def _merged(deltas: Sequence[Delta], chunk: Chunk, h_old: StateHash, h_new: StateHash, codec: Choice) -> Entry:
    """One chunk of deltas whose old weights nobody has."""
    number, kind = chunk.number, NUMBERS[chunk.dtype]
    changing = [delta for delta in deltas if delta.records[number].codec != Codec.EMPTY]
    if len(changing) == 1:
        record = changing[0].records[number]
        check_payload(record, changing[0].payload(number))
        return Entry(record.codec, changing[0].payload(number), record.changed, h_old, h_new)
    bits, moved, state = None, np.zeros(chunk.numel, chunk.unsigned), NOTHING
    for delta in changing:
        if delta.records[number].codec in WHOLE:
            _, bits, state = delta.changes(number, np.zeros_like(moved))
        elif bits is not None:
            indices, values, state = delta.changes(number, bits, state)
            bits[indices] = values
        else:
            indices, by = delta.differences(number)
            moved[indices] += by
    if bits is not None:
        if state != h_new:
            raise Corrupt(f"the deltas do not lead where they say: chunk {number} would be in another state")
        return encoded_whole(chunk, bits, h_old, h_new)
    indices = np.flatnonzero(moved).astype(np.uint32)
    made = [(each, DISTANCES[each].encode_differences(indices, moved[indices], chunk.numel, kind)) for each in _BY_NAME[codec]]
    chosen, payload = min(made, key=lambda each: len(each[1]))
    return Entry(chosen, payload, len(indices), h_old, h_new)


def _check_mergeable(steps: Steps, codec: Choice) -> None:
    """InvalidInput where the old weights are needed."""
    if codec not in _BY_NAME:
        raise InvalidInput(
            f"without the weights that the first delta starts from nothing is written as `{codec}`: name them, or take auto", field="base"
        )
    codecs = np.stack([delta.records.array["codec"] for delta in steps.deltas])
    several = (codecs != Codec.EMPTY).sum(axis=0) > 1
    # Behind a delta that writes all of a chunk its elements are known.
    known = np.logical_or.accumulate(np.isin(codecs, WHOLE), axis=0)
    counted = ((codecs == Codec.TIGHT) & ~known).any(axis=0) & several & (steps.states[0] != steps.states[-1]).any(axis=1)
    if counted.any():
        raise InvalidInput(
            f"{int(counted.sum())} of {len(counted)} chunks are `tight`, which counts within the old weights: merging needs those that the first "
            "delta starts from",
            field="base",
        )


def _check_invertible(delta: Delta) -> None:
    stuck = np.flatnonzero(~np.isin(delta.records.array["codec"], (Codec.EMPTY, *DISTANCES)))
    if len(stuck):
        label = Codec(int(delta.records.array["codec"][stuck[0]])).name.lower()
        raise InvalidInput(
            f"{len(stuck)} of {delta.layout.chunk_count} chunks do not say what was there before (the first is `{label}`): the way back needs the "
            "weights that the delta starts from",
            field="base",
        )

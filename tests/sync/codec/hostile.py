"""Objects that were tampered with by somebody who knows the format: whatever he wants to, he makes every checksum right again."""

import random
from collections.abc import Callable

import numpy as np
import xxhash
from blake3 import blake3

from bloomery.sync.codec.container import HEADER, RECORD, TRAILER_BYTES
from bloomery.sync.codec.delta import Delta
from bloomery.sync.manifest import digest

EXTREME = (0, 1, 7, 255, 2**16 - 1, 2**20, 2**20 + 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
_NUMBERS = ((8, 4), (12, 4), (16, 8), (24, 8), (48, 8), (56, 8))
"""Of the header: where its numbers lie, and in how many bytes."""


class Opened:
    """The parts of an object, each of which can be changed; `sealed` puts them together again."""

    def __init__(self, data: bytes) -> None:
        self.delta = Delta.parse(data)
        self.header = bytearray(data[: HEADER.size])
        self.table = bytearray(self.delta.layout.table)
        self.records = self.delta.records.array.copy()
        self.payloads = [bytearray(self.delta.payload(number)) for number in range(len(self.records))]

    def sealed(self, *, sums: bool = True, tail: bytes = b"") -> bytes:
        """With checksums that match; and numbers of the header that do, where `sums`."""
        for row, payload in zip(self.records, self.payloads, strict=True):
            row["checksum"] = xxhash.xxh3_64_intdigest(bytes(payload)) & 0xFFFFFFFF if payload else 0
        if sums:
            _put(self.header, 8, 4, len(self.table))
            _put(self.header, 24, 8, int(self.records["changed"].sum(dtype=np.uint64)))
            _put(self.header, 48, 8, int(self.records["length"].sum(dtype=np.uint64)))
            self.header[32:48] = bytes.fromhex(digest(bytes(self.table)))
        head = bytes(self.header[:56]) + bytes(self.table) + self.records.tobytes()
        if sums:
            _put(self.header, 56, 8, xxhash.xxh3_64_intdigest(head))
        whole = bytes(self.header) + head[56:] + b"".join(map(bytes, self.payloads)) + tail
        return whole + blake3(whole).digest()


def bomb(claims: int, blocks: int) -> bytes:
    """A zstd frame that claims so many bytes, of blocks of four bytes which each repeat a byte 128 Ki times."""
    return b"\x28\xb5\x2f\xfd\xa0" + claims.to_bytes(4, "little") + ((1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"\0") * blocks


def tampered(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Another object, or what is left of one."""
    return rng.choice(_WAYS)(data, other, rng)


def _flipped(data: bytes, other: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        _flip(changed, rng)
    return bytes(changed)


def _cut(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _longer(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice((1, 8, 32, 100)))


def _spliced(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + other[rng.randrange(len(other)) :]


def _rehashed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Anything before the hash at the end, which is made right."""
    changed = rng.choice((_flipped, _cut, _spliced))(data[:-TRAILER_BYTES], other, rng)
    return changed + blake3(changed).digest()


def _payload(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One payload flipped, cut, made longer, begun with large numbers, or another's; its length in the record or not."""
    opened = Opened(data)
    number = rng.choice([number for number, payload in enumerate(opened.payloads) if payload])
    payload = opened.payloads[number]
    match rng.randrange(6):
        case 0:
            _flip(payload, rng)
        case 1:
            del payload[rng.randrange(len(payload)) :]
        case 2:
            payload += rng.randbytes(rng.choice((1, 4, 16)))
        case 3:
            _put(payload, rng.choice((0, 4)), 4, rng.choice(EXTREME) & 0xFFFFFFFF)
        case 4:
            payload[:] = rng.choice(Opened(other).payloads)
        case _:
            payload[:] = rng.randbytes(len(payload))
    if rng.random() < 0.9:
        opened.records[number]["length"] = len(payload)
    return opened.sealed()


def _record(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One field of one record."""
    opened = Opened(data)
    row = opened.records[rng.randrange(len(opened.records))]
    name = rng.choice(RECORD.names)
    if name in ("old", "new"):
        row[name][rng.randrange(2)] ^= np.uint64(1 << rng.randrange(64))
    elif name == "zero":
        row[name][rng.randrange(3)] = rng.randrange(1, 256)
    elif name == "codec":
        row[name] = rng.randrange(8)
    else:
        row[name] = rng.choice((rng.choice(EXTREME) & 0xFFFFFFFF, (int(row[name]) + rng.choice((1, -1))) & 0xFFFFFFFF))
    return opened.sealed(sums=rng.random() < 0.9)


def _table(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The names, dtypes and shapes of tensors."""
    opened = Opened(data)
    if rng.random() < 0.3:
        opened.table[:] = Opened(other).table
    else:
        _flip(opened.table, rng)
    return opened.sealed()


def _header(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One number of the header, or a byte of what it is."""
    opened = Opened(data)
    if rng.random() < 0.3:
        opened.header[rng.randrange(8)] = rng.randrange(256)
    else:
        at, size = rng.choice(_NUMBERS)
        _put(opened.header, at, size, rng.choice(EXTREME) & ((1 << 8 * size) - 1))
    head = bytes(opened.header[:56]) + bytes(opened.table) + opened.records.tobytes()
    _put(opened.header, 56, 8, xxhash.xxh3_64_intdigest(head))
    return opened.sealed(sums=False)


def _reordered(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Two chunks in each other's place, with their records or without; or as many chunks as there are not."""
    opened = Opened(data)
    one, two = (rng.randrange(len(opened.records)) for _ in range(2))
    opened.payloads[one], opened.payloads[two] = opened.payloads[two], opened.payloads[one]
    if rng.random() < 0.5:
        opened.records[[one, two]] = opened.records[[two, one]]
    else:
        for number in (one, two):
            opened.records[number]["length"] = len(opened.payloads[number])
    return opened.sealed(tail=rng.choice((b"", b"", b"more")))


_WAYS: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    *(_flipped, _cut, _longer, _spliced, _rehashed),
    *(_payload, _payload, _payload, _record, _table, _header, _reordered),
)


def _flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _put(data: bytearray, at: int, size: int, number: int) -> None:
    data[at : at + size] = number.to_bytes(size, "little")

"""The hashes of a base's parts, as an object of their own: with them one chunk of a base can be fetched and trusted without the rest.

parts = blake3 of the head (32) | blake3 of each chunk's payload (32 each, in order)
"""

from collections.abc import Iterator

from blake3 import blake3

from bloomery.sync.chain.objects import Ref
from bloomery.sync.codec.container import HEADER, RECORD, TRAILER_BYTES, Head, head_bytes
from bloomery.sync.codec.layout import Layout
from bloomery.types.errors import Corrupt
from bloomery.types.objects import Objects

_HASH_BYTES = 32


def listed(data: memoryview, head: Head) -> bytes:
    """Of a whole object."""
    payloads = (data[record.offset : record.offset + record.length] for record in map(head.records.__getitem__, range(head.layout.chunk_count)))
    return b"".join(blake3(part).digest() for part in (data[: head.head_bytes], *payloads))


def most_bytes(layout: Layout) -> int:
    """An object of these weights is no larger: chunks that would take more than their elements are written as these."""
    return _head_bytes(layout) + layout.size_bytes + TRAILER_BYTES


class Parts:
    """A base in a store, of which single chunks are fetched."""

    def __init__(self, objects: Objects, base: Ref, parts: Ref, layout: Layout, *, part_bytes: int) -> None:
        """Fetch the list of hashes and the head; Corrupt where one is not what its hash says, or has another size than for weights of `layout`.

        At most `part_bytes` are asked for at once.
        """
        self._objects, self._base, self._part_bytes = objects, base, part_bytes
        # Both are held in memory before a hash can tell that they are not what was put there, so nobody but the layout says how large they are.
        if parts.size != (wanted := _HASH_BYTES * (layout.chunk_count + 1)):
            raise Corrupt(f"{objects.name}: `{parts.key}` is named with {parts.size} bytes, and the list of parts of these weights has {wanted}")
        self._hashes = b"".join(self._ranges(parts, 0, parts.size))
        if blake3(self._hashes).hexdigest() != parts.blake3:
            raise Corrupt(f"{objects.name}: `{parts.key}` is not what its name says: it is damaged")
        start = b"".join(self._ranges(base, 0, HEADER.size))
        if (size := head_bytes(start)) != (wanted := _head_bytes(layout)):
            raise Corrupt(f"{objects.name}: `{base.key}` says that its head has {size} bytes, and that of a base of these weights has {wanted}")
        head = b"".join(self._ranges(base, 0, size))
        self._check(0, head, "its head")
        self.head = Head.parse(head)

    def payload(self, number: int) -> bytes:
        """Of a chunk."""
        record = self.head.records[number]
        if not record.length:
            return b""
        data = b"".join(self._ranges(self._base, record.offset, record.offset + record.length))
        self._check(number + 1, data, f"chunk {number}")
        return data

    def _check(self, place: int, data: bytes, what: str) -> None:
        if blake3(data).digest() != self._hashes[place * _HASH_BYTES : (place + 1) * _HASH_BYTES]:
            raise Corrupt(f"{self._objects.name}: `{self._base.key}` is not what the list of its parts says: {what} is damaged")

    def _ranges(self, ref: Ref, start: int, stop: int) -> Iterator[bytes]:
        for place in range(start, stop, self._part_bytes):
            yield self._objects.part(ref.key, place, min(place + self._part_bytes, stop))


def _head_bytes(layout: Layout) -> int:
    return HEADER.size + len(layout.table) + layout.chunk_count * RECORD.itemsize

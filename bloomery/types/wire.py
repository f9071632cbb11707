"""Wire data is frozen, tagged and closed: unknown fields are errors, and bytes on the socket and in the journal are the same."""

from typing import Any

import msgspec


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses a process border or reaches the journal."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Msgpack bytes of a wire message; equal messages give equal bytes."""
    return _encoder.encode(message)

"""Parts of payloads: bytes as they are, or as a zstd frame where that is shorter."""

from typing import Final

import zstandard

from bloomery.types.errors import Corrupt

_LEVEL: Final = 1
"""Higher ones take longer and save 2 % at most."""


def packed(data: bytes) -> bytes:
    """The frame, if it is shorter than the data."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(data) if data else b""
    return frame if len(frame) < len(data) else data


def unpacked(stored: memoryview, size: int) -> bytes | memoryview:
    """The data, of which there are `size` bytes; no more than that is ever made."""
    if len(stored) == size:
        return stored
    if len(stored) > size:
        raise Corrupt(f"a stream of {size} bytes is stored in {len(stored)}")
    try:
        told = zstandard.get_frame_parameters(stored)
        if told.content_size != size or told.dict_id or told.has_checksum:
            raise Corrupt(f"a frame that is not one of {size} bytes without dictionary and checksum")
        # It has room for as many bytes as the frame tells, and stops there.
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a stream of {size} bytes: {error}") from error

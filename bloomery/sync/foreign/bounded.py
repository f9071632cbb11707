"""Decompression that knows how much may come of it: a few bytes of a zip bomb would otherwise fill the memory."""

import bz2

import zstandard

from bloomery.types.errors import Corrupt


def unzstd(data: memoryview, *, at_most: int) -> bytes:
    """What one zstd frame holds, which says its size itself; Corrupt for more than `at_most` bytes, before they are given memory."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise Corrupt("a zstd frame does not say what it holds")
        if size > at_most:
            raise Corrupt(f"a zstd frame says that it holds {size} bytes, and no more than {at_most} are due")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"this is no zstd frame: {error}") from error


def unbz2(data: memoryview, *, at_most: int) -> bytes:
    """What one bzip2 stream holds; Corrupt for more than `at_most` bytes, when as many have come."""
    stream = bz2.BZ2Decompressor()
    try:
        found = stream.decompress(data, max_length=at_most + 1)
    except (OSError, ValueError) as error:
        raise Corrupt(f"this is no bzip2 stream: {error}") from error
    if len(found) > at_most:
        raise Corrupt(f"a bzip2 stream holds more than the {at_most} bytes that are due")
    if not stream.eof or stream.unused_data:
        raise Corrupt("a bzip2 stream is cut off, or something stands behind it")
    return found

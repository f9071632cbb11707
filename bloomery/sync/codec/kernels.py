"""Who computes for the codecs: the one place where that is decided."""

from bloomery.sync.codec.plain import find, moved, pack, unpack

__all__ = ["find", "moved", "pack", "unpack"]

"""Who computes for the codecs: the one place where that is decided."""

from bloomery.sync.codec.plain import find, moved, pack, unpack
from bloomery.sync.codec.plain_tight import pack as pack_tight
from bloomery.sync.codec.plain_tight import unpack as unpack_tight

__all__ = ["find", "moved", "pack", "pack_tight", "unpack", "unpack_tight"]

"""Deltas as `fireworks-delta-compression` writes and reads them, of weights behind the same interface as our own.

`delta` reads, writes, applies and describes one: a safetensors file (`archive`) with the bytes of a payload for every tensor, and an Adler-32 of what
the tensor is afterwards. `arc2` is one format of payloads, `arc3` the other, whose positions are `gaps`. Its payloads are pickles, which nothing here
unpickles: `pickles` reads the few opcodes that plain data needs, `fields` takes that data apart by name and type, and `bounded` decompresses no more
than was allowed. All of it comes over networks, so whatever is not as it should be is Corrupt, with the reason, before a weight is written.
"""

"""Deltas between two safetensors files as others write them; print sizes and speeds as JSON.

`deltas.py OLD NEW REPEATS`: `arc_v2` and `arc_v3` are the package `fireworks-delta-compression` itself, which checks an Adler-32 of tensors.
`xor_zstd_1` and `coo_zstd_1` are written here in numpy after what slime and PULSE describe: their sizes are faithful, their speeds are not those of
these programs. Of each the best of so many runs, in GB of new weights a second; what is decoded is held against NEW.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from fireworks_delta_compression import delta_compress, delta_decompress
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]


class Peer(NamedTuple):
    """How a set of tensors becomes something with a size in bytes, and tensors again."""

    encode: Callable[[Tensors, Tensors], Any]
    size_bytes: Callable[[Any], int]
    decode: Callable[[Tensors, Any], Tensors]


def main(old_path: str, new_path: str, repeats: str) -> None:
    old, new = load_file(old_path), load_file(new_path)
    size_bytes = sum(tensor.nbytes for tensor in new.values())
    found: dict[str, Any] = {}
    for name, peer in PEERS.items():
        encode_s, encoded = best(int(repeats), lambda peer=peer: peer.encode(old, new))
        decode_s, decoded = best(int(repeats), lambda peer=peer, encoded=encoded: peer.decode(old, encoded))
        if not all(torch.equal(bits(decoded[key]), bits(new[key])) for key in new):
            raise SystemExit(f"{name} does not give the new weights")
        found[name] = {
            "size_bytes": peer.size_bytes(encoded),
            "encode_gb_s": size_bytes / encode_s / 1e9,
            "decode_gb_s": size_bytes / decode_s / 1e9,
        }
    changed = sum(int(np.count_nonzero(bits(old[key]).numpy() != bits(new[key]).numpy())) for key in new)
    print(json.dumps({"weights_bytes": size_bytes, "elements": sum(t.numel() for t in new.values()), "changed": changed, "peers": found}))


def best(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the fastest run, and what it made."""
    seconds, made = math.inf, None
    for _ in range(repeats):
        began = time.perf_counter()
        made = work()
        seconds = min(seconds, time.perf_counter() - began)
    return seconds, made


def bits(tensor: Tensor) -> Tensor:
    """The elements of a 16-bit tensor as whole numbers, flat; a view."""
    return tensor.view(torch.uint16).reshape(-1)


def arc(form: str) -> Peer:
    def encode(old: Tensors, new: Tensors) -> dict[str, tuple[Tensor, str]]:
        return {name: delta_compress(src=old[name], dst=new[name], compression_format=form) for name in new}

    def decode(old: Tensors, made: dict[str, tuple[Tensor, str]]) -> Tensors:
        return {
            name: delta_decompress(src=old[name], compressed_diff=data, checksum=checksum, compression_format=form)
            for name, (data, checksum) in made.items()
        }

    return Peer(encode, lambda made: sum(data.nbytes + len(checksum) for data, checksum in made.values()), decode)


def xor_encode(old: Tensors, new: Tensors) -> dict[str, bytes]:
    zip_ = zstandard.ZstdCompressor(level=1)
    return {name: zip_.compress((bits(old[name]).numpy() ^ bits(new[name]).numpy()).tobytes()) for name in new}


def xor_decode(old: Tensors, made: dict[str, bytes]) -> Tensors:
    unzip = zstandard.ZstdDecompressor()
    differences = {name: np.frombuffer(unzip.decompress(data), np.uint16) for name, data in made.items()}
    return {name: as_tensor(bits(old[name]).numpy() ^ by, old[name]) for name, by in differences.items()}


def coo_encode(old: Tensors, new: Tensors) -> bytes:
    """Rows as distances, columns as distances within a row, and the new values, of all tensors behind a description in JSON, in one zstd frame."""
    described, streams = [], []
    for name in sorted(new):
        before, after = bits(old[name]).numpy(), bits(new[name]).numpy()
        changed = np.flatnonzero(before != after)
        row, column = np.divmod(changed, row_width(new[name]))
        rows = np.diff(row, prepend=0)
        begins = rows != 0
        begins[:1] = True
        columns = np.where(begins, column, np.diff(column, prepend=0))
        small_rows, small_columns = (each.astype(narrow(each)) for each in (rows, columns))
        described.append([name, len(changed), small_rows.dtype.str, small_columns.dtype.str])
        streams += [small_rows.tobytes(), small_columns.tobytes(), after[changed].tobytes()]
    head = json.dumps(described, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(level=1).compress(len(head).to_bytes(4, "little") + head + b"".join(streams))


def coo_decode(old: Tensors, made: bytes) -> Tensors:
    data = zstandard.ZstdDecompressor().decompress(made)
    place = 4 + int.from_bytes(data[:4], "little")
    found = {}
    for name, count, row_type, column_type in json.loads(data[4:place]):
        streams = []
        for kind in (row_type, column_type, "<u2"):
            streams.append(np.frombuffer(data, kind, count, place))
            place += streams[-1].nbytes
        rows, columns, values = streams
        begins = np.flatnonzero(np.append(True, rows[1:] != 0)) if count else np.zeros(0, np.int64)
        sums = np.cumsum(columns, dtype=np.int64)
        sums -= np.repeat(sums[begins] - columns[begins], np.diff(begins, append=count))
        new = bits(old[name]).numpy().copy()
        new[np.cumsum(rows, dtype=np.int64) * row_width(old[name]) + sums] = values
        found[name] = as_tensor(new, old[name])
    return found


def row_width(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) if tensor.dim() > 1 else 1


def narrow(values: Any) -> str:
    largest = int(values.max(initial=0))
    return "<u1" if largest < 1 << 8 else "<u2" if largest < 1 << 16 else "<i4"


def as_tensor(values: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(values).view(like.dtype).reshape(like.shape)


PEERS = {
    "arc_v2": arc("arc_v2"),
    "arc_v3": arc("arc_v3"),
    "xor_zstd_1": Peer(xor_encode, lambda made: sum(map(len, made.values())), xor_decode),
    "coo_zstd_1": Peer(coo_encode, len, coo_decode),
}


if __name__ == "__main__":
    main(*sys.argv[1:])

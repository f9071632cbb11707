"""Deltas of an update: `python -m bench.delta` prints one JSON line.

The weights are those of `bench.weights`, bf16, `--layers` of a Qwen3 of 0.6B and `--tokens` rows of its embedding, before and behind one update in
the middle of a long run. Of each learning rate: `changed` elements in percent, and of every codec the bytes by those of the weights (`ratio`), bits
per changed element, and GB of weights a second, encoded from two arrays and decoded into a third that has the old ones, one thread, the best of
`--rounds`, by who computes, each with the same bytes; of numpy's `tight` a few chunks are timed. `least_bits` is what a changed element costs at
least when positions and values are told within exponents; `xor_zstd_1` is the usual delta, of each tensor the exclusive or in a frame of level 1.

`memory_gb_s` is what one thread reads when it adds up words. `verified` is the time that the state hash takes from what changed, by the time that
decoding and writing take, in percent.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.line import Line, parser_of
from bench.weights import checkpoints, shapes
from bloomery.sync.codec import fast, fast_zstd, kernels, tight
from bloomery.sync.codec.numbers import CHUNK_ELEMENTS, NUMBERS, Changes
from bloomery.sync.state_hash import change

BF16: Final = NUMBERS["BF16"]
CODECS: Final = {"fast": fast, "fast+zstd": fast_zstd, "tight": tight}
FEW: Final = 4
"""Chunks that are enough where one takes long."""
Bits = NDArray[np.uint16]


class Chunk(NamedTuple):
    """Elements before and behind the update."""

    old: Bits
    new: Bits


def main() -> None:
    """Measure every learning rate."""
    asked = _arguments()
    line = Line("delta")
    told: dict[str, Any] = {"layers": asked.layers, "tokens": asked.tokens, "seed": asked.seed, "rounds": asked.rounds}
    found = {f"{rate:g}": measure(update(rate, asked), asked.rounds) for rate in asked.learning_rates}
    line.tell({**told, "kernels": list(kernels.available()), "memory_gb_s": memory(asked.rounds), "learning_rate": found})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("layers", 14), ("tokens", 4000), ("rounds", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    return parser.parse_args()


def update(learning_rate: float, asked: argparse.Namespace) -> dict[str, Chunk]:
    """Each tensor before and behind one."""
    return {shape.name: Chunk(*checkpoints(shape, learning_rate, 1, asked.seed)) for shape in shapes(asked.layers, tokens=asked.tokens)}


def measure(tensors: dict[str, Chunk], rounds: int) -> dict[str, Any]:
    """Sizes, and speeds with everything that can compute here."""
    whole = Chunk(*(np.concatenate([tensor[side] for tensor in tensors.values()]) for side in (0, 1)))
    chunks = [Chunk(whole.old[at : at + CHUNK_ELEMENTS], whole.new[at : at + CHUNK_ELEMENTS]) for at in range(0, len(whole.old), CHUNK_ELEMENTS)]
    changed = int(np.count_nonzero(whole.old != whole.new))
    xor = sum(len(zstandard.ZstdCompressor(level=1).compress((tensor.old ^ tensor.new).tobytes())) for tensor in tensors.values())
    codecs = {name: _codec(name, chunks, changed, rounds) for name in CODECS}
    return {
        "elements": len(whole.old),
        "changed": round(100 * changed / len(whole.old), 3),
        "least_bits": round(least_bits(whole, changed), 2),
        "xor_zstd_1": {"ratio": round(whole.new.nbytes / xor, 1), "tight_smaller": round(codecs["tight"]["ratio"] * xor / whole.new.nbytes, 2)},
        "codecs": codecs,
    }


def _codec(name: str, chunks: list[Chunk], changed: int, rounds: int) -> dict[str, Any]:
    codec = CODECS[name]
    payloads = [_payload(name, chunk) for chunk in chunks]
    size, raw = sum(map(len, payloads)), sum(chunk.new.nbytes for chunk in chunks)
    speeds = {}
    for computing, its in kernels.available().items():
        few = len(chunks) if computing != "numpy" or name != "tight" else FEW
        with kernels.only(its):
            if [_payload(name, chunk) for chunk in chunks[:FEW]] != payloads[:FEW]:
                raise SystemExit(f"{name} has other bytes with {computing}")
            speeds[computing] = _speeds(codec, chunks[:few], payloads[:few], rounds)
    return {"bytes": size, "ratio": round(raw / size, 1), "bits": round(8 * size / changed, 2), "gb_s": speeds}


def _payload(name: str, chunk: Chunk) -> bytes:
    payload: bytes | None = CODECS[name].encode(*chunk, BF16)
    if payload is None:
        raise SystemExit(f"{name} is not worth it for a chunk of this update")
    return payload


def _speeds(codec: Any, chunks: list[Chunk], payloads: list[bytes], rounds: int) -> dict[str, float]:
    """GB of weights a second, and how much of applying a delta its verification takes."""
    gigabytes = sum(chunk.new.nbytes for chunk in chunks) / 1e9
    encode_s = best(rounds, lambda: [codec.encode(*chunk, BF16) for chunk in chunks])
    written = [chunk.old.copy() for chunk in chunks]
    told: list[Changes] = []

    def decode() -> None:
        told.clear()
        for chunk, payload, to in zip(chunks, payloads, written, strict=True):
            changes = codec.decode(memoryview(payload), chunk.old, BF16)
            to[changes.indices] = changes.values
            told.append(changes)

    decode_s = best(rounds, decode)
    if any((to != chunk.new).any() for to, chunk in zip(written, chunks, strict=True)):
        raise SystemExit("what was decoded is not what was encoded")
    before = [chunk.old[changes.indices] for chunk, changes in zip(chunks, told, strict=True)]
    hash_s = best(rounds, lambda: [change(changes.indices, old, changes.values) for changes, old in zip(told, before, strict=True)])
    found = {"encode": gigabytes / encode_s, "decode": gigabytes / decode_s, "verified": 100 * hash_s / decode_s}
    return {name: round(value, 2) for name, value in found.items()}


def best(rounds: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of so many."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def least_bits(whole: Chunk, changed: int) -> float:
    """Entropy of which elements of each exponent change, and by how much those do, for each that changes."""
    exponents = BF16.exponents(whole.old)
    at = np.flatnonzero(whole.old != whole.new)
    by = (BF16.ordered(whole.new[at]) - BF16.ordered(whole.old[at])).astype(np.int64)
    there, moved = np.bincount(exponents, minlength=256), np.bincount(exponents[at], minlength=256)
    bits = sum(_entropy(np.array([moves, count - moves])) for count, moves in zip(there, moved, strict=True))
    bits += sum(_entropy(np.unique(by[exponents[at] == exponent], return_counts=True)[1]) for exponent in np.flatnonzero(moved))
    return bits / changed


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits that so many of each take together."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def memory(rounds: int) -> float:
    """GB a second that one thread adds up."""
    words = np.ones(1 << 26, np.uint64)
    return round(words.nbytes / 1e9 / best(2 + rounds, words.sum), 1)


if __name__ == "__main__":
    main()

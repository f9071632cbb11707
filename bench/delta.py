"""Deltas of an update: `python -m bench.delta` prints one JSON line.

The weights are those of `bench.weights`, bf16, `--layers` of a Qwen3 of 0.6B and `--tokens` rows of its embedding, before and behind one update in
the middle of a long run. Of each learning rate: `changed` elements in percent; `least_bits`, what a changed element costs at least when positions and
values are told within exponents; `xor_zstd_1`, the usual delta, of each tensor the exclusive or in a frame of level 1; and of every codec `bytes`,
those of the weights by them (`ratio`), `bits` per changed element, and in how many of its `chunks` it gives way to raw elements, because differences
would take more than 60 % of them (`raw_chunks`): where that is all of them, deltas do not pay.

`computes` has, of whoever can compute here, each with the same bytes, of one thread and the best of `--rounds`: GB of weights a second, encoded from
two arrays, and decoded, proved and written where the old ones are, a chunk at a time, as `patch` does it; `encode_memory` and `decode_memory`, how
much of `memory_gb_s` that is in percent, where encoding has to move both arrays and the payload, and decoding the payload and, to and fro, the lines
of 64 bytes of elements that change (`tight` reads all); and `verified`, how much longer that takes than the same without the checksums of payloads
and without a state hash, by turns, in percent. A chunk's time is its best of three times as many rounds, and they are added up. Kernels without proof
are made for that here. Of numpy's `tight` a few chunks are timed. `memory_gb_s` is what one thread reads when it adds up words.

`shipped` is the whole way, one thread and the fastest who computes: GB of weights a second of `write`, which hashes the old weights and makes an
object in memory, and of `patch`, which verifies it, hashes the old weights, and writes; the bytes of the object, with the chunks of each codec.
"""

import argparse
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.line import Line, parser_of
from bench.weights import checkpoints, shapes
from bloomery.models.compiled import Compiled
from bloomery.sync.codec import container, fast, fast_zstd, kernels, native, plain, plain_tight, tight
from bloomery.sync.codec.applying import patch
from bloomery.sync.codec.choose import Codec
from bloomery.sync.codec.container import Record
from bloomery.sync.codec.delta import Choice, Delta, write
from bloomery.sync.codec.kernels import Kernels, Plain
from bloomery.sync.codec.layout import CHUNK_ELEMENTS, Layout, MemoryWeights
from bloomery.sync.codec.measure import codecs as codecs_of
from bloomery.sync.codec.numbers import NUMBERS, Changes, Differences, Number
from bloomery.sync.codec.plain import Streams
from bloomery.sync.state_hash import NOTHING, StateHash, change
from bloomery.types.tensor_file import TensorSpec

BF16: Final = NUMBERS["BF16"]
CODECS: Final = {"fast": fast, "fast+zstd": fast_zstd, "tight": tight}
SHIPPED: Final[tuple[Choice, ...]] = ("auto", "tight", "fast+zstd")
FEW: Final = 4
"""Chunks that are enough where one takes long."""
LINE_BYTES: Final = 64
"""What a processor reads and writes at least."""
Bits = NDArray[np.uint16]


class Chunk(NamedTuple):
    """Elements before and behind the update."""

    old: Bits
    new: Bits


class Speed(NamedTuple):
    """GB a second of weights, and percent."""

    encode: float
    decode: float
    encode_memory: float
    decode_memory: float
    verified: float


class Bare(Plain):
    """Numpy, without a state hash."""

    @staticmethod
    def decode(streams: Streams, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        return _unproved(old, plain.unpack(streams, len(old), kind), kind)

    @staticmethod
    def decode_fast(payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        return _unproved(old, plain.unpack(plain.split(payload), len(old), kind), kind)

    @staticmethod
    def decode_tight(payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        return _unproved(old, plain_tight.unpack(payload, old, kind), kind)


def _unproved(old: Bits, found: Differences, kind: Number) -> Changes:
    return Changes(found.indices, kind.ordered(kind.ordered(old[found.indices]) + found.by), NOTHING)


def bare(computing: str) -> Kernels:
    """The same kernels, which compute no state hash."""
    if computing == "native":
        return native.Native(Compiled("codec", Path(native.__file__).parent, native.ARGUMENTS, flags=["-DUNPROVED"], instead="nobody"))
    if computing == "numba":
        from bloomery.sync.codec.jitted import Jitted

        class BareJitted(Jitted):
            def keys(self, first: int) -> tuple[Any, Any]:
                return None, None

        return BareJitted()
    return Bare()


def main() -> None:
    """Measure every learning rate."""
    asked = _arguments()
    line = Line("delta")
    told: dict[str, Any] = {"layers": asked.layers, "tokens": asked.tokens, "seed": asked.seed, "rounds": asked.rounds}
    memory_gb_s = memory(asked.rounds)
    found = {f"{rate:g}": measure(update(rate, asked), asked.rounds, memory_gb_s) for rate in asked.learning_rates}
    line.tell({**told, "kernels": list(kernels.available()), "memory_gb_s": round(memory_gb_s, 1), "learning_rate": found})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("layers", 14), ("tokens", 4000), ("rounds", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6])
    return parser.parse_args()


def update(learning_rate: float, asked: argparse.Namespace) -> dict[str, Chunk]:
    """Each tensor before and behind one."""
    return {shape.name: Chunk(*checkpoints(shape, learning_rate, 1, asked.seed)) for shape in shapes(asked.layers, tokens=asked.tokens)}


def measure(tensors: dict[str, Chunk], rounds: int, memory_gb_s: float) -> dict[str, Any]:
    """Sizes, and speeds with everything that can compute here."""
    whole = Chunk(*(np.concatenate([tensor[side] for tensor in tensors.values()]) for side in (0, 1)))
    chunks = [Chunk(whole.old[at : at + CHUNK_ELEMENTS], whole.new[at : at + CHUNK_ELEMENTS]) for at in range(0, len(whole.old), CHUNK_ELEMENTS)]
    changed = int(np.count_nonzero(whole.old != whole.new))
    xor = sum(len(zstandard.ZstdCompressor(level=1).compress((tensor.old ^ tensor.new).tobytes())) for tensor in tensors.values())
    codecs = {name: _codec(name, chunks, changed, rounds, memory_gb_s) for name in CODECS}
    return {
        "elements": len(whole.old),
        "changed": round(100 * changed / len(whole.old), 3),
        "least_bits": round(least_bits(whole, changed), 2),
        "xor_zstd_1": {"ratio": round(whole.new.nbytes / xor, 1), "tight_smaller": round(codecs["tight"]["ratio"] * xor / whole.new.nbytes, 2)},
        "codecs": codecs,
        "shipped": shipped(tensors, rounds),
    }


def _codec(name: str, chunks: list[Chunk], changed: int, rounds: int, memory_gb_s: float) -> dict[str, Any]:
    codec = CODECS[name]
    made = [codec.encode(*chunk, BF16) for chunk in chunks]
    raw = sum(chunk.new.nbytes for chunk in chunks)
    size = sum(chunk.new.nbytes if payload is None else len(payload) for chunk, payload in zip(chunks, made, strict=True))
    paying = [(chunk, payload) for chunk, payload in zip(chunks, made, strict=True) if payload is not None]
    computes = {}
    for computing, its in (kernels.available() if paying else {}).items():
        few = paying[: len(paying) if computing != "numpy" or name != "tight" else FEW]
        with kernels.only(its):
            if any(codec.encode(*chunk, BF16) != payload for chunk, payload in few[:FEW]):
                raise SystemExit(f"{name} has other bytes with {computing}")
            applying = Applying(name, [chunk for chunk, _ in few], [payload for _, payload in few])
            speed = _speed(applying, bare(computing), rounds, memory_gb_s)
            computes[computing] = {field: round(value, 2) for field, value in speed._asdict().items()}
    sizes = {"bytes": size, "ratio": round(raw / size, 1), "bits": round(8 * size / changed, 2)}
    return {**sizes, "chunks": len(chunks), "raw_chunks": len(chunks) - len(paying), "computes": computes}


class Applying:
    """Chunks that all have a payload, and weights in which they are before the update again and again."""

    def __init__(self, name: str, chunks: list[Chunk], payloads: list[bytes]) -> None:
        self.name, self.codec, self.chunks, self.payloads = name, CODECS[name], chunks, payloads
        self.weights = [chunk.old.copy() for chunk in chunks]
        self.found = [np.flatnonzero(chunk.old != chunk.new) for chunk in chunks]
        self.states = [change(at, chunk.old[at], chunk.new[at]) for at, chunk in zip(self.found, chunks, strict=True)]
        self.records = [
            Record(0, 0, len(payload), len(at), container.checksum(payload), Codec.EMPTY, NOTHING, state)
            for payload, at, state in zip(payloads, self.found, self.states, strict=True)
        ]

    def seconds(self, *, proved: bool) -> list[float]:
        """To apply each of them; SystemExit where something else comes of it."""
        for chunk, weights in zip(self.chunks, self.weights, strict=True):
            np.copyto(weights, chunk.old)
        taken_s = []
        for record, payload, weights in zip(self.records, self.payloads, self.weights, strict=True):
            began = time.perf_counter()
            if proved:
                container.check_payload(record, payload)
            indices, values, state = self.codec.decode(memoryview(payload), weights, BF16)
            if proved and state != record.h_new:
                raise SystemExit("what was decoded is proved to be something else")
            kernels.put(weights, 0, indices, values)
            taken_s.append(time.perf_counter() - began)
        if any((weights != chunk.new).any() for weights, chunk in zip(self.weights, self.chunks, strict=True)):
            raise SystemExit("what was decoded is not what was encoded")
        return taken_s


def _speed(applying: Applying, bare_kernels: Kernels, rounds: int, memory_gb_s: float) -> Speed:
    weights_bytes, size = sum(chunk.new.nbytes for chunk in applying.chunks), sum(map(len, applying.payloads))
    encode_s = best(rounds, lambda: [applying.codec.encode(*chunk, BF16) for chunk in applying.chunks])
    proved, unproved = [], []
    for _ in range(3 * rounds):
        proved.append(applying.seconds(proved=True))
        with kernels.only(bare_kernels):
            unproved.append(applying.seconds(proved=False))
    # Who shares the machine comes and goes within a round: a whole one without him is rarer than a chunk.
    decode_s, unproved_s = (sum(np.min(rounds_s, axis=0)) for rounds_s in (proved, unproved))
    lines_bytes = sum(LINE_BYTES * len(np.unique(found * BF16.item_bytes // LINE_BYTES)) for found in applying.found)
    decode_bytes = size + lines_bytes + (weights_bytes if applying.name == "tight" else lines_bytes)
    return Speed(
        encode=weights_bytes / 1e9 / encode_s,
        decode=weights_bytes / 1e9 / decode_s,
        encode_memory=100 * (2 * weights_bytes + size) / 1e9 / encode_s / memory_gb_s,
        decode_memory=100 * decode_bytes / 1e9 / decode_s / memory_gb_s,
        verified=100 * (decode_s / unproved_s - 1),
    )


def shipped(tensors: dict[str, Chunk], rounds: int) -> dict[str, Any]:
    """Whole objects: as `bloomery sync` and chains make and apply them."""
    layout = Layout.of({name: TensorSpec("BF16", tensor.old.shape) for name, tensor in tensors.items()})
    old, new = (MemoryWeights(layout, {name: tensor[side] for name, tensor in tensors.items()}) for side in (0, 1))
    return {codec: _object(old, new, codec, rounds) for codec in SHIPPED}


def _object(old: MemoryWeights, new: MemoryWeights, codec: Choice, rounds: int) -> dict[str, Any]:
    """Of one codec."""
    gigabytes = old.layout.size_bytes / 1e9
    write_s = best(rounds, lambda: write(BytesIO(), old, new, codec=codec))
    file = BytesIO()
    write(file, old, new, codec=codec)
    data = file.getvalue()
    patch_s = min(_patch_s(data, old, new) for _ in range(rounds))
    chunks = {name: found["chunks"] for name, found in codecs_of(Delta.parse(data)).items()}
    sizes = {"bytes": len(data), "ratio": round(1e9 * gigabytes / len(data), 1), "chunks": chunks}
    return {**sizes, "write": round(gigabytes / write_s, 2), "patch": round(gigabytes / patch_s, 2)}


def _patch_s(data: bytes, old: MemoryWeights, new: MemoryWeights) -> float:
    """Seconds, on a copy: what is there already would be left alone."""
    live = MemoryWeights(old.layout, {tensor.name: old[tensor.name].copy() for tensor in old.layout.tensors})
    found = best(1, lambda: patch([Delta.parse(data)], live))
    if any((live[tensor.name] != new[tensor.name]).any() for tensor in old.layout.tensors):
        raise SystemExit("what was patched is not what was written")
    return found


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
    return words.nbytes / 1e9 / best(2 + rounds, words.sum)


if __name__ == "__main__":
    main()

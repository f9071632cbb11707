"""What a chain moves of a run: `python -m bench.chain` publishes 50 steps of a synthetic model and prints one JSON line.

The model is bf16 with a float32 master whose residual is uniform within a unit in the last place, as it is after many steps; gradients are noise
with a small persistent part, and updates are Adam's at `--learning-rate`. One reader follows every step. It loses its memory at step 30 and joins
again with an empty folder; two more join at steps 20 and 40 and follow from then on. The writer is started anew at step 25. Every byte that anybody
puts or gets counts, manifests and leases included.

`whole` is what moves where every version is a snapshot of the raw bytes: each is put once, and fetched by whoever is there. `less` is the share of it
that the chain saves; `less_deltas_only` counts deltas, merged deltas and everything small but no bases, neither put nor fetched, and
`less_from_first_model` is where readers have the model that the run began with on their disks. `changed` is the mean share of elements from one
version to the next, `ratio` what a snapshot is to a delta in the mean. Seconds are medians: of a publication with its encoding, of staging and of
flipping. At the end every reader's weights are compared bit for bit.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.line import Line, parser_of
from bench.weights import rounded, widened
from bloomery.store.objects import Folder
from bloomery.sync.chain.publisher import PublishConfig, Published, Publisher
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.types.objects import Objects, Stored
from bloomery.types.tensor_file import TensorSpec

RUN: Final = "bench"
LOST_AT: Final = 0.6
JOIN_AT: Final = (0.4, 0.8)
RESTART_AT: Final = 0.5
"""Of all steps."""
BETA1: Final = 0.9
PERSISTENT: Final = 0.15
"""Of a gradient, beside its noise."""
COLUMNS: Final = 2048


class Counted:
    """A folder of which every byte that is put or got counts, by the folder that it is of and whether a base is meant."""

    def __init__(self, inner: Objects) -> None:
        self.name, self.inner = inner.name, inner
        self.moved: Counter[str] = Counter()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Objects`."""
        self.moved[key] += len(data)
        self.inner.put(key, data)

    def create(self, key: str, data: bytes) -> str | None:
        """See `Objects`."""
        self.moved[key] += len(data)
        return self.inner.create(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """See `Objects`."""
        self.moved[key] += len(data)
        return self.inner.replace(key, data, tag)

    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        """See `Objects`."""
        found = self.inner.get(key, at_most=at_most)
        self.moved[key] += len(found[0])
        return found

    def part(self, key: str, start: int, stop: int) -> bytes:
        """See `Objects`."""
        self.moved[key] += stop - start
        return self.inner.part(key, start, stop)

    def head(self, key: str) -> Stored | None:
        """See `Objects`."""
        return self.inner.head(key)

    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        """See `Objects`."""
        return self.inner.list(folder, after=after)

    def delete(self, key: str) -> None:
        """See `Objects`."""
        self.inner.delete(key)

    def tidy(self, before_us: int) -> None:
        """See `Objects`."""
        self.inner.tidy(before_us)


class Model:
    """Weights that Adam moves."""

    def __init__(self, rows: int, learning_rate: float, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        scale = 0.03 * np.exp(0.3 * self._chance.standard_normal((rows, 1), dtype=np.float32))
        drawn = (self._chance.standard_t(8, (rows, COLUMNS)).astype(np.float32) * scale).astype(np.float32)
        bits = rounded(drawn)
        # Anywhere within the unit that rounds to these bits: between the neighbours half a unit away.
        unit = widened(bits + np.uint16(1)) - widened(bits)
        self._master = widened(bits) + unit * self._chance.uniform(-0.499, 0.499, drawn.shape).astype(np.float32)
        self._towards = np.where(self._chance.random(drawn.shape, dtype=np.float32) < 0.5, -PERSISTENT, PERSISTENT).astype(np.float32)
        self._momentum = self._towards + np.float32(np.sqrt((1 - BETA1) / (1 + BETA1))) * self._noise()
        self._learning_rate = np.float32(learning_rate)
        # Of one tensor's shape a model has several.
        self.layout = Layout.of({f"layers.{index}.weight": TensorSpec("BF16", (rows // 8, COLUMNS)) for index in range(8)})

    def step(self) -> None:
        """One update."""
        self._momentum = np.float32(BETA1) * self._momentum + np.float32(1 - BETA1) * (self._towards + self._noise())
        # The second moment of such gradients is that of their noise, but for the persistent part.
        self._master -= self._learning_rate * self._momentum / np.float32(np.sqrt(1 + PERSISTENT**2))

    def weights(self) -> MemoryWeights:
        """What is served, as it is now."""
        parts = np.split(rounded(self._master), len(self.layout.tensors))
        return MemoryWeights(self.layout, {tensor.name: np.ascontiguousarray(part) for tensor, part in zip(self.layout.tensors, parts, strict=True)})

    def _noise(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._chance.standard_normal(self._master.shape, dtype=np.float32)
        return found


def main() -> None:
    """Publish and follow, and say what moved."""
    asked = _arguments()
    line = Line("chain")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = measured(asked, Path(folder), stack)
    setting = {"elements": asked.rows * COLUMNS, "steps": asked.steps, "learning_rate": asked.learning_rate}
    line.tell({"setting": setting, **found})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=2048, help=f"of {COLUMNS} elements each; a multiple of eight")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Readers:
    """All of one kind: with nothing on their disks, or with the first model."""

    def __init__(self, store: Folder, folder: Path, stack: ExitStack, first: MemoryWeights | None) -> None:
        self.store = Counted(store)
        self.whole_fetches = 0
        self.stage_s: list[float] = []
        self.flip_s: list[float] = []
        self._folder, self._stack, self._first = folder, stack, first
        self._readers: dict[str, Receiver] = {}
        self._born = 0

    def join(self, name: str, layout: Layout) -> None:
        """A new one, in place of a former one of that name."""
        self._born += 1
        start = MemoryWeights.zeros(layout) if self._first is None else copied(self._first)
        reader = self._stack.enter_context(Receiver.open(self.store, start, RUN, folder=self._folder / f"{name}-{self._born}"))
        reader.join()
        self._readers[name] = reader
        self.whole_fetches += 1

    def follow(self) -> None:
        """Everybody who is there takes the newest version."""
        for reader in self._readers.values():
            began = time.perf_counter()
            if reader.stage() is None:
                continue
            staged = time.perf_counter()
            reader.flip()
            self.stage_s.append(staged - began)
            self.flip_s.append(time.perf_counter() - staged)
            reader.settle()
            self.whole_fetches += 1

    def check(self, newest: MemoryWeights) -> None:
        """All of them hold these, bit for bit."""
        for name, reader in self._readers.items():
            assert isinstance(reader.weights, MemoryWeights)
            wrong = [tensor.name for tensor in newest.layout.tensors if not np.array_equal(reader.weights[tensor.name], newest[tensor.name])]
            assert not wrong, f"{name} has other weights than were published, first of `{wrong[0]}`"


def measured(asked: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Everything but the setting."""
    model = Model(asked.rows, asked.learning_rate, asked.seed)
    store, old = Folder(folder / "store"), model.weights()
    counted = Counted(store)
    plain, with_model = (Readers(store, folder / name, stack, first) for name, first in (("plain", None), ("with-model", copied(old))))
    # Bases by number alone: 30 minutes are over earlier on a machine that is busy.
    config = PublishConfig(base_after_s=1e9)
    publisher = Publisher.open(counted, RUN, holder="trainer", config=config)
    done = [publisher.publish(None, old)]
    publish_s, changed = [], []
    for readers in (plain, with_model):
        readers.join("follower", model.layout)
    for step in range(1, asked.steps + 1):
        model.step()
        new = model.weights()
        if step == round(RESTART_AT * asked.steps):
            publisher = Publisher.open(counted, RUN, holder="trainer", config=config)
        began = time.perf_counter()
        done.append(publisher.publish(old, new))
        publish_s.append(time.perf_counter() - began)
        changed.append(_changed(old, new))
        old = new
        for readers in (plain, with_model):
            readers.follow()
            if step == round(LOST_AT * asked.steps):
                readers.join("follower", model.layout)
            for place, at in enumerate(JOIN_AT):
                if step == round(at * asked.steps):
                    readers.join(f"late-{place}", model.layout)
    for readers in (plain, with_model):
        readers.check(old)
    raw = model.layout.size_bytes
    return {
        "raw_bytes": raw,
        "changed": statistics.mean(changed),
        **_moved(raw, done, counted, plain, with_model),
        "ratio": raw / statistics.mean(_size(each, "delta") for each in done[1:]),
        "merged_to_raw_a_step": sum(_size(each, "merged") for each in done) / asked.steps / raw,
        "base_to_raw": _size(done[0], "base") / raw,
        "bases": sum(_size(each, "base") > 0 for each in done),
        "publish_s": statistics.median(publish_s),
        "stage_s": statistics.median(plain.stage_s + with_model.stage_s),
        "flip_s": statistics.median(plain.flip_s + with_model.flip_s),
    }


def _moved(raw: int, done: list[Published], counted: Counted, plain: Readers, with_model: Readers) -> dict[str, float]:
    """Bytes, and shares of what whole snapshots take."""
    bases = {ref.key for each in done for step in each.manifest.steps if step.kind == "base" for ref in (step.object, step.parts) if ref}
    whole = raw * (len(done) + plain.whole_fetches)
    put, got, got_with_model = (each.moved for each in (counted, plain.store, with_model.store))

    def less(taken: Callable[[str], bool], *moved: Counter[str]) -> float:
        return 1 - sum(size for each in moved for key, size in each.items() if taken(key)) / whole

    return {
        "whole_bytes": whole,
        "moved_bytes": put.total() + got.total(),
        "less": less(lambda key: True, put, got),
        "less_deltas_only": less(lambda key: key not in bases, put, got),
        "less_from_first_model": less(lambda key: True, put, got_with_model),
        "small_bytes": sum(size for each in (put, got) for key, size in each.items() if not key.startswith("obj/")),
    }


def copied(weights: MemoryWeights) -> MemoryWeights:
    """In memory of their own."""
    return MemoryWeights(weights.layout, {tensor.name: weights[tensor.name].copy() for tensor in weights.layout.tensors})


def _changed(old: MemoryWeights, new: MemoryWeights) -> float:
    return sum(int((old[tensor.name] != new[tensor.name]).sum()) for tensor in old.layout.tensors) / old.layout.elements


def _size(published: Published, kind: str) -> int:
    return sum(step.object.size for step in published.manifest.steps if step.kind == kind)


if __name__ == "__main__":
    main()

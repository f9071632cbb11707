"""What a chain moves of a run: `python -m bench.chain` publishes 50 steps of two models and prints one JSON line.

`generated` are the weights of `bench.weights`, four layers a quarter as wide as those of a Qwen3 of 0.6B and rows of its embedding, in the middle of
a long run at `--learning-rate`. `grpo` is the model that ships, served in bf16 and trained with all of its parameters (`bench.trained`) at
`--grpo-rate` until it has as many versions; `engine_less` is what its own chain saved by what the server says (`sync/bytes` beside
`sync/whole_bytes`), where the only reader is on the same machine, and where versions much of which changed are whole.

Of each, one reader follows every step. It loses its memory at step 30 and joins again with an empty folder; two more join at steps 20 and 40 and
follow from then on. The writer is started anew at step 25. Every byte that anybody puts or gets counts, manifests and leases included.

`whole` is what moves where every version is a snapshot of the raw bytes: each is put once, and fetched by whoever is there. `less` is the share of it
that the chain saves; `less_deltas_only` counts deltas, merged deltas and everything small but no bases, neither put nor fetched, as it is where
readers get their bases elsewhere; and `less_from_first_model` is where readers have the model that the run began with on their disks. `base_share` is
what bases are of all that moved. `changed` is the mean share of elements from one version to the next, `ratio` what a snapshot is to a delta in the
mean. Seconds are medians: of a publication with its encoding, of staging and of flipping. At the end every reader's weights are compared bit for bit.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import trained
from bench.line import Line, parser_of
from bench.weights import models, shapes
from bloomery.store.objects import Folder
from bloomery.sync.chain.publisher import PublishConfig, Published, Publisher
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.codec.files import FileWeights
from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.sync.run_chain import changed_share
from bloomery.types.objects import Objects, Stored

RUN: Final = "bench"
LOST_AT: Final = 0.6
JOIN_AT: Final = (0.4, 0.8)
RESTART_AT: Final = 0.5
"""Of all steps."""


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


def main() -> None:
    """Publish and follow, and say what moved."""
    asked = _arguments()
    line = Line("chain")
    found = {"generated": measured(generated(asked))}
    if asked.grpo_steps:
        with tempfile.TemporaryDirectory() as folder, trained.server("bfloat16", asked.threads) as client:
            run = trained.run(client, Path(folder), learning_rate=asked.grpo_rate, steps=asked.grpo_steps, groups=asked.groups, seed=asked.seed)
            found["grpo"] = {**measured([loaded(file) for file in run.versions]), "engine_less": engine_less(run.travelled)}
    line.tell({"setting": vars(asked), **found})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("steps", 50), ("layers", 4), ("hidden", 256), ("tokens", 300), ("grpo-steps", 50), ("groups", 4), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("learning-rate", "grpo-rate"):
        parser.add_argument(f"--{name}", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def generated(asked: argparse.Namespace) -> list[MemoryWeights]:
    """Before and behind each of so many updates."""
    tensors = shapes(asked.layers, hidden=asked.hidden, inner=3 * asked.hidden, tokens=asked.tokens)
    return models(tensors, asked.learning_rate, asked.steps, asked.seed)


def loaded(file: Path) -> MemoryWeights:
    """A version of a run, in memory."""
    with FileWeights(file) as weights:
        found = MemoryWeights.zeros(weights.layout)
        for chunk in weights.layout.chunks():
            found.write_all(chunk, weights.read(chunk))
    return found


def engine_less(travelled: Sequence[Mapping[str, float]]) -> float:
    """What the chain of the run wrote, beside whole versions."""
    return 1 - sum(each["sync/bytes"] for each in travelled) / sum(each["sync/whole_bytes"] for each in travelled)


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


def measured(versions: Sequence[MemoryWeights]) -> dict[str, Any]:
    """Of neighbouring versions of one run."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        return _measured(versions, Path(folder), stack)


def _measured(versions: Sequence[MemoryWeights], folder: Path, stack: ExitStack) -> dict[str, Any]:
    store, layout, last = Folder(folder / "store"), versions[0].layout, len(versions) - 1
    counted = Counted(store)
    plain, with_model = (Readers(store, folder / name, stack, first) for name, first in (("plain", None), ("with-model", versions[0])))
    # Bases by number alone: 30 minutes are over earlier on a machine that is busy.
    config = PublishConfig(base_after_s=1e9)
    publisher = Publisher.open(counted, RUN, holder="trainer", config=config)
    done = [publisher.publish(None, versions[0])]
    publish_s = []
    for readers in (plain, with_model):
        readers.join("follower", layout)
    for step, (old, new) in enumerate(pairwise(versions), 1):
        if step == round(RESTART_AT * last):
            publisher = Publisher.open(counted, RUN, holder="trainer", config=config)
        began = time.perf_counter()
        done.append(publisher.publish(old, new))
        publish_s.append(time.perf_counter() - began)
        for readers in (plain, with_model):
            readers.follow()
            if step == round(LOST_AT * last):
                readers.join("follower", layout)
            for place, at in enumerate(JOIN_AT):
                if step == round(at * last):
                    readers.join(f"late-{place}", layout)
    for readers in (plain, with_model):
        readers.check(versions[-1])
    raw = layout.size_bytes
    return {
        "elements": layout.elements,
        "versions": len(versions),
        "raw_bytes": raw,
        "changed": statistics.mean(changed_share(old, new) for old, new in pairwise(versions)),
        **_moved(raw, done, counted, plain, with_model),
        "ratio": raw / statistics.mean(_size(each, "delta") for each in done[1:]),
        "merged_to_raw_a_step": sum(_size(each, "merged") for each in done) / last / raw,
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
        "base_share": sum(each[key] for each in (put, got) for key in bases) / (put.total() + got.total()),
        "small_bytes": sum(size for each in (put, got) for key, size in each.items() if not key.startswith("obj/")),
    }


def copied(weights: MemoryWeights) -> MemoryWeights:
    """In memory of their own."""
    return MemoryWeights(weights.layout, {tensor.name: weights[tensor.name].copy() for tensor in weights.layout.tensors})


def _size(published: Published, kind: str) -> int:
    return sum(step.object.size for step in published.manifest.steps if step.kind == kind)


if __name__ == "__main__":
    main()

"""What deltas take, by learning rate, of generated weights and of a real run: `python -m bench.delta_sizes` prints one JSON line. Nothing is timed.

`generated` are the weights of `bench.weights`, 14 layers half as wide as those of a Qwen3 of 0.6B, before and behind one update in the middle of a
long run. `grpo` is the model that ships, trained with all of its parameters (`bench.trained`), once for each number format that it is served in and
each rate; 1e-3 is the recipe's own. Every version that the loop publishes is fetched as a file and held against the one before. With `--rank` it is
an adapter of that rank that is trained, and its file that is fetched.

Of each, over its steps: `changed` elements in percent, their mean, and of each step where there are several; `least_bits`, what a changed element
costs at least when positions and values are told within exponents; `xor_zstd_1`, the usual delta, of each tensor the exclusive or in a frame of
level 1, and how many times as large that is as what is taken (`auto_smaller`); of the run also `arc_v3`, the same of `fireworks-delta-compression` as
it was published, told to wait for all that it tries, in an environment of its own; and whole objects of each codec, `auto` among them: bytes in the
mean, how many times smaller than the weights that is (`ratio`), bits of a changed element, and in how many chunks which payload was taken.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import zstandard

from bench import trained
from bench.foreign_deltas import PATIENCE
from bench.line import Line, parser_of
from bench.peers import command, python_of
from bench.weights import models, shapes
from bloomery.client import Client
from bloomery.sync.codec import measure
from bloomery.sync.codec.delta import Choice, Delta, encode
from bloomery.sync.codec.files import FileWeights
from bloomery.sync.codec.layout import Weights

PEER: Final = Path(__file__).parent / "peers" / "arc_sizes.py"
DTYPES: Final = ("bfloat16", "float32")
CODECS: Final[tuple[Choice, ...]] = ("auto", "tight", "fast+zstd", "fast", "planes")
LAYERS: Final = 14


class Step(NamedTuple):
    """Weights beside those before them."""

    elements: int
    raw_bytes: int
    changed: int
    least_bits: float
    """Of all changes."""
    xor_bytes: int
    sizes: Mapping[Choice, int]
    """Of an object of each codec."""
    chunks: Mapping[Choice, Counter[str]]
    """Of the same, by the payload that was taken."""


def main() -> None:
    """Generate, then train, and say what would travel."""
    asked = _arguments()
    line = Line("delta_sizes")
    generated = {f"{rate:g}": shown([_generated(rate, asked)]) for rate in asked.rates}
    runs: dict[str, dict[str, Any]] = {}
    for dtype in asked.dtypes:
        with trained.server(dtype, asked.threads) as client:
            runs[dtype] = {f"{rate:g}": _trained(client, rate, asked) for rate in asked.grpo_rates}
    names = ("hidden", "tokens", "steps", "groups", "rank", "seed")
    setting = {name: getattr(asked, name) for name in names} | {"layers": LAYERS, "group_size": trained.GROUP_SIZE, "model": trained.MODEL}
    peer = {"peer": command("arc", PEER.name)} if asked.arc else {}
    line.tell({"setting": setting, **peer, "generated": generated, "grpo": runs})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2], help="of generated weights")
    parser.add_argument("--grpo-rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 1e-3])
    parser.add_argument("--no-arc", dest="arc", action="store_false", help="leave the package of arc_v3 out")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES), help="that the trained model is served in")
    for name, value in (("hidden", 512), ("tokens", 1000), ("steps", 12), ("groups", 4), ("rank", 0), ("threads", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def _generated(learning_rate: float, asked: argparse.Namespace) -> Step:
    tensors = shapes(LAYERS, hidden=asked.hidden, inner=3 * asked.hidden, tokens=asked.tokens)
    return compared(*models(tensors, learning_rate, 1, asked.seed))


def _trained(client: Client, learning_rate: float, asked: argparse.Namespace) -> dict[str, Any]:
    """Each step of a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained.run(client, Path(folder), learning_rate=learning_rate, rank=asked.rank, steps=asked.steps, groups=asked.groups, seed=asked.seed)
        told = shown([_of_files(old, new) for old, new in pairwise(run.versions)])
        return {**told, "arc_v3": arc_v3(run.versions, told)} if asked.arc else told


def arc_v3(versions: Sequence[Path], told: Mapping[str, Any]) -> dict[str, float]:
    """The same of deltas as `fireworks-delta-compression` writes them."""
    argv = [str(each) for each in (python_of("arc"), "-W", "ignore", PEER, *versions)]
    sizes = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True, env={**os.environ, **PATIENCE}).stdout)
    mean = statistics.mean(sizes)
    return {"ratio": round(told["raw_bytes"] / mean, 2), "auto_smaller": round(mean / told["codecs"]["auto"]["bytes"], 2)}


def _of_files(old: Path, new: Path) -> Step:
    with FileWeights(old) as before, FileWeights(new) as after:
        return compared(before, after)


def compared(old: Weights, new: Weights) -> Step:
    """One step."""
    xor = Counter[str]()
    for chunk in new.layout.chunks():
        turned = old.read(chunk) ^ new.read(chunk)
        for part in new.layout.parts(chunk):
            data = turned[part.at : part.at + part.stop - part.start].tobytes()
            xor[part.tensor.name] += len(zstandard.ZstdCompressor(level=1).compress(data))
    made = {codec: Delta.parse(encode(old, new, codec)) for codec in CODECS}
    counts = measure.count(made["tight"], old)
    return Step(
        elements=new.layout.elements,
        raw_bytes=new.layout.size_bytes,
        changed=sum(counts.tensors.values()),
        least_bits=measure.conditioned(counts).bits,
        xor_bytes=xor.total(),
        sizes={codec: delta.head.size_bytes for codec, delta in made.items()},
        chunks={codec: Counter({name: told["chunks"] for name, told in measure.codecs(delta).items()}) for codec, delta in made.items()},
    )


def shown(found: Sequence[Step]) -> dict[str, Any]:
    """Of all steps together."""
    if not found:
        raise SystemExit("no step taught anything: give more --steps or --groups")
    raw, xor, changes = sum(step.raw_bytes for step in found), sum(step.xor_bytes for step in found), sum(step.changed for step in found)
    changed = [round(100 * step.changed / step.elements, 3) for step in found]
    sizes = {codec: sum(step.sizes[codec] for step in found) for codec in CODECS}
    return {
        "elements": found[0].elements,
        "raw_bytes": found[0].raw_bytes,
        "changed": round(statistics.mean(changed), 3),
        **({"changed_by_step": changed} if len(found) > 1 else {}),
        "least_bits": round(sum(step.least_bits for step in found) / changes, 2),
        "xor_zstd_1": {"ratio": round(raw / xor, 2), "auto_smaller": round(xor / sizes["auto"], 2)},
        "codecs": {codec: _codec(codec, size, raw, changes, found) for codec, size in sizes.items()},
    }


def _codec(codec: Choice, size: int, raw: int, changes: int, found: Sequence[Step]) -> dict[str, Any]:
    chunks = sum((step.chunks[codec] for step in found), Counter[str]())
    return {"bytes": round(size / len(found)), "ratio": round(raw / size, 2), "bits": round(8 * size / changes, 2), "chunks": dict(chunks)}


if __name__ == "__main__":
    main()

"""What deltas take, by learning rate, of generated weights and of a real run: `python -m bench.delta_sizes` prints one JSON line. Nothing is timed.

`generated` are the weights of `bench.weights`, 14 layers half as wide as those of a Qwen3 of 0.6B, before and behind one update in the middle of a
long run. `grpo` is the model that ships: it learns to write pairs (`recipes/pairs`) by GRPO over the public API with all of its parameters, from the
weights that ship, once for each number format that it is served in and each rate; 1e-3 is the recipe's own. Every version that the loop publishes is
fetched as a file and held against the one before. Masters are float32 and begin on the weights that ship, so these are the first steps of a run.
With `--rank` it is an adapter of that rank that is trained, and its file that is fetched.

Of each, over its steps: `changed` elements in percent, their mean, and of each step where there are several; `least_bits`, what a changed element
costs at least when positions and values are told within exponents; `xor_zstd_1`, the usual delta, of each tensor the exclusive or in a frame of
level 1, and how many times as large that is as what is taken (`auto_smaller`); and whole objects of each codec, `auto` among them: bytes in the
mean, how many times smaller than the weights that is (`ratio`), bits of a changed element, and in how many chunks which payload was taken.
"""

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import zstandard

from bench.line import Line, parser_of
from bench.weights import checkpoints, shapes
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.recipes import grpo
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.sync import peft
from bloomery.sync.codec import measure
from bloomery.sync.codec.delta import Choice, Delta, encode
from bloomery.sync.codec.files import FileWeights
from bloomery.sync.codec.layout import Layout, MemoryWeights, Weights
from bloomery.types.tensor_file import TensorSpec

MODEL: Final = "bloomery-tiny"
DTYPES: Final = ("bfloat16", "float32")
CODECS: Final[tuple[Choice, ...]] = ("auto", "tight", "fast+zstd", "fast", "planes")
LAYERS: Final = 14
PROBLEMS: Final = 512


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
    trained: dict[str, dict[str, Any]] = {}
    for dtype in asked.dtypes:
        options = ("--threads", str(asked.threads), "--replicas", "0")
        with serving(MODEL, keep=False, dtype=dtype, options=options) as server, Client(server.url, server.key) as client:
            trained[dtype] = {f"{rate:g}": shown(_trained(client, rate, asked)) for rate in asked.grpo_rates}
    names = ("hidden", "tokens", "steps", "groups", "rank", "seed")
    setting = {name: getattr(asked, name) for name in names} | {"layers": LAYERS, "group_size": RolloutConfig().group_size, "model": MODEL}
    line.tell({"setting": setting, "generated": generated, "grpo": trained})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2], help="of generated weights")
    parser.add_argument("--grpo-rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 1e-3])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES), help="that the trained model is served in")
    for name, value in (("hidden", 512), ("tokens", 1000), ("steps", 12), ("groups", 4), ("rank", 0), ("threads", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def _generated(learning_rate: float, asked: argparse.Namespace) -> Step:
    found = {
        shape.name: checkpoints(shape, learning_rate, 1, asked.seed)
        for shape in shapes(LAYERS, hidden=asked.hidden, inner=3 * asked.hidden, tokens=asked.tokens)
    }
    layout = Layout.of({name: TensorSpec("BF16", old.shape) for name, (old, _) in found.items()})
    old, new = (MemoryWeights(layout, {name: steps[side] for name, steps in found.items()}) for side in (0, 1))
    return compared(old, new)


def _trained(client: Client, learning_rate: float, asked: argparse.Namespace) -> list[Step]:
    """Each step of a run of its own."""
    task = PairsTask.of(client, MODEL)
    policy = PolicyConfig(base_model=MODEL, rank=asked.rank, learning_rate=learning_rate, seed=asked.seed)
    rollouts = RolloutConfig(max_tokens=32, seed=asked.seed)
    config = GrpoConfig(policy=policy, rollouts=rollouts, groups_per_step=asked.groups, concurrency=asked.groups, kl_rollouts=0)
    problems, versions = task.problems(PROBLEMS, asked.seed), list[str]()
    with tempfile.TemporaryDirectory() as place:
        cursor = Path(place) / "cursor"
        learnt = grpo.train(client, problems, task.grade, config, cursor, steps=asked.steps, on_step=lambda told: versions.append(told.version))
        # A step of which no group taught anything published nothing.
        name = peft.ADAPTER if asked.rank else "model.safetensors"
        return list(_neighbours(client, dict.fromkeys((learnt.cursor.first, *versions)), name, Path(place)))


def _neighbours(client: Client, versions: Iterable[str], name: str, folder: Path) -> Iterator[Step]:
    def files() -> Iterator[Path]:
        for version in versions:
            file = folder / f"{version}.safetensors"
            client.versions.download(version, name, file)
            yield file

    for old, new in pairwise(files()):
        with FileWeights(old) as before, FileWeights(new) as after:
            yield compared(before, after)
        old.unlink()


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

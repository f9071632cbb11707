"""Eight adapters in one batch of 32 samples, against one merged model: `python -m bench.adapters` prints one JSON line.

The peer is our own sampler with the bare base model, which costs what one merged model costs: the same shapes, no adapter. Both take turns on the
same prompts; what counts is the decode steps, in seconds of processor time, which others on the machine disturb less, and in seconds. `one` is one
adapter for the whole batch.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from bench.line import Line, parser_of
from bench.shapes import SHAPES, decoder
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.form import Form, plain_form
from bloomery.models.fused_adapter import FusedAdapter, fuse
from bloomery.models.kernel_probe import probe
from bloomery.models.targets import adapter_targets
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, SamplingParams, Weights

MERGED: Final = "base"


def main() -> None:
    """Measure every size in both forms."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    line = Line("adapters")
    where = {"threads": asked.threads, "dtype": asked.dtype, "device": "cpu"}
    setting = {"adapters": asked.adapters, "samples": asked.samples, "rank": asked.rank, "prompt_tokens": asked.prompt, "new_tokens": asked.tokens}
    sizes = {size: _size(decoder(size, getattr(torch, asked.dtype)), asked) for size in asked.sizes}
    line.tell({**where, **setting, "rounds": asked.rounds, **sizes})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("adapters", 8), ("samples", 32), ("rank", 16), ("prompt", 32), ("tokens", 24), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    return parser.parse_args()


class Shelf:
    """The base, and adapters over it."""

    def __init__(self, base: Decoder, adapters: int, rank: int) -> None:
        self._base = base
        self._adapters = {f"adapter-{number}": _adapter(base, number, rank) for number in range(adapters)}

    @property
    def versions(self) -> list[str]:
        """Of the adapters."""
        return list(self._adapters)

    def weigh(self, weights: Weights) -> int:
        """All of them are in memory."""
        return 0

    def load(self, weights: Weights) -> Model:
        """A version."""
        return Model(weights.version, self._base, self._adapters.get(weights.version))


def _adapter(base: Decoder, seed: int, rank: int) -> FusedAdapter:
    noise = torch.Generator().manual_seed(seed)
    targets, factors = adapter_targets(base.config, unembed=False), {}
    for name, target in targets.items():
        a, b = (torch.randn(shape, generator=noise) * 0.01 for shape in target.factor_shapes(rank))
        factors[name] = Factors(a.to(base.dtype), b.to(base.dtype))
    return fuse(targets, factors, 2.0)


def _size(base: Decoder, asked: argparse.Namespace) -> dict[str, Any]:
    shelf = Shelf(base, asked.adapters, asked.rank)
    return {name: _form(Sampler(base, shelf, form=form), shelf, base, asked) for name, form in _forms(base).items()}


def _forms(base: Decoder) -> dict[str, Form]:
    return {"exact": probe(base).form, "plain": plain_form(base)}


def _form(sampler: Sampler, shelf: Shelf, base: Decoder, asked: argparse.Namespace) -> dict[str, Any]:
    mixes = {"merged": [MERGED], "one": shelf.versions[:1], "mixed": shelf.versions}
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in mixes}
    noise = np.random.default_rng(0)
    for _ in range(asked.rounds + 1):
        prompts = noise.integers(3, base.config.vocab_size, (asked.samples, asked.prompt)).tolist()
        for name, versions in mixes.items():
            costs[name].append(_step(sampler, prompts, versions, asked.tokens))
    wall, cpu = ({name: statistics.median(each[index] for each in found[1:]) for name, found in costs.items()} for index in (0, 1))
    ratios = {f"{name}_over_merged": round(wall[name] / wall["merged"], 2) for name in ("one", "mixed")}
    cpu_ratios = {f"{name}_over_merged_cpu": round(cpu[name] / cpu["merged"], 2) for name in ("one", "mixed")}
    return {"step_ms": {name: round(seconds * 1e3, 2) for name, seconds in wall.items()}, **ratios, **cpu_ratios}


def _step(sampler: Sampler, prompts: Sequence[list[int]], versions: Sequence[str], tokens: int) -> tuple[float, float]:
    """Median seconds of a step that decodes all samples, by the clock and of the processor."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, seed=number)
        weights = Weights(version=versions[number % len(versions)])
        sampler.submit(Generate(request_id=f"r{number}", weights=weights, prompt=Array.of(np.array(prompt, np.int32)), params=params))
    walls, cpus = [], []
    while sampler.busy:
        before, wall, cpu = (sampler.tokens_prefilled, sampler.tokens_sampled), time.perf_counter(), time.process_time()
        sampler.step()
        if (sampler.tokens_prefilled, sampler.tokens_sampled) == (before[0], before[1] + len(prompts)):
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


if __name__ == "__main__":
    main()

"""The pause of a flip: `python -m bench.flip` prints one JSON line.

Streams of an embedded engine follow its model, while all of its tensors are staged as an update (`begin_update`, `apply`), proved, and swapped in
(`commit`). The pause is the longest gap between two tokens of one stream around the flip, less the usual one: from a step before the first token of
the new weights to a step behind it. Steps differ by themselves: `pause_without_median_ms` is the longest of as many gaps in a row where nothing was
flipped, less the usual one. What is done beside the steps costs them time of the processor, which the gaps while it lasts show; `none` are
the gaps of the same streams when nothing else is done. `pause_of_flip_median_ms` is what the flip itself adds to steps that weights are staged beside
anyway: the longest gap around it, less the longest of as many in a row, in the median, while the same weights were staged.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.line import Line, parser_of
from bench.shapes import SHAPES, decoder
from bloomery.infer.embedded import EmbeddedEngine
from bloomery.infer.fidelity import OneModel
from bloomery.infer.versions import Model
from bloomery.models.load import stored_tensors
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, Live, SampledToken, SamplingParams
from bloomery.types.ids import new_id
from bloomery.types.serving import MODEL

BASE: Final = "b" * 32
_PROMPT_TOKENS: Final = 64
_WARM_S: Final = 3.0
_AROUND: Final = 3
"""Gaps that a flip may make longer: the one before its first token, the one behind it, and that which ends with it."""
_ASKED_MS: Final = 20.0
"""What a flip may take."""


@dataclass
class Stream:
    """When its tokens came, and of which weights the first of each version was."""

    times_s: list[float] = field(default_factory=list)
    firsts: dict[str, int] = field(default_factory=dict)
    """Number of the first token of each version."""

    def gaps_ms(self, from_s: float, until_s: float) -> list[float]:
        """Between tokens of which the second came in this time."""
        return [(after - before) * 1000 for before, after in pairwise(self.times_s) if from_s <= after < until_s]

    def longest_ms(self, from_s: float, until_s: float) -> list[float]:
        """Of each `_AROUND` gaps in a row."""
        gaps_ms = self.gaps_ms(from_s, until_s)
        return [max(gaps_ms[first : first + _AROUND]) for first in range(0, len(gaps_ms) - _AROUND + 1, _AROUND)]

    def flip_ms(self, version: str) -> float:
        """The longest gap that ends at the first token of a version, the one before or the one after."""
        first = self.firsts[version]
        times_s = self.times_s[max(0, first - 2) : first + 2]
        return max((after - before) * 1000 for before, after in pairwise(times_s))

    def staging_ms(self, version: str, from_s: float, usual_ms: float) -> float:
        """The longest of as many gaps in a row, in the median, from then to a version's first token; the usual one if they are fewer."""
        return statistics.median(self.longest_ms(from_s, self.times_s[self.firsts[version] - 1]) or [usual_ms])


def main() -> None:
    """Flip a model a few times under streams."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="150M", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    for name, value in (("streams", 4), ("flips", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    line = Line("flip")
    setting = {name: getattr(asked, name) for name in ("size", "dtype", "streams", "flips", "threads")}
    torch.set_num_threads(asked.threads)
    line.tell({**setting, **asyncio.run(_measure(asked))})


async def _measure(asked: argparse.Namespace) -> dict[str, object]:
    model = decoder(asked.size).to(getattr(torch, asked.dtype))
    published = stored_tensors(model)
    engine = EmbeddedEngine(model, OneModel(Model(BASE, model, None)), version=BASE)
    async with engine:
        updates = [_changed(published, seed) for seed in range(2)]
        streams = [Stream() for _ in range(asked.streams)]
        ended = asyncio.Event()
        readers = [asyncio.create_task(_read(engine, stream, number, model.config.vocab_size, ended)) for number, stream in enumerate(streams)]
        quiet_s = await _quiet(streams)
        flips = [await _flip(engine, streams, updates[turn % 2]) for turn in range(asked.flips)]
        again_s = await _quiet(streams)
        ended.set()
        await asyncio.gather(*readers)
    usual = [gap for from_s, until_s in (quiet_s, again_s) for stream in streams for gap in stream.gaps_ms(from_s, until_s)]
    beside = [gap for flip in flips for stream in streams for gap in stream.gaps_ms(flip.began_s, flip.ended_s)]
    usual_ms = statistics.median(usual)
    without = [longest for from_s, until_s in (quiet_s, again_s) for stream in streams for longest in stream.longest_ms(from_s, until_s)]
    pauses_ms = [max(stream.flip_ms(flip.version) for stream in streams) - usual_ms for flip in flips]
    own_ms = [max(stream.flip_ms(flip.version) - stream.staging_ms(flip.version, flip.began_s, usual_ms) for stream in streams) for flip in flips]
    return {
        "bit_exact": engine.capabilities().bit_exact,
        "bytes": sum(tensor.nbytes for tensor in published.values()),
        "none": _figures(usual),
        "while_staged_and_flipped": _figures(beside),
        "stage_to_token_median_ms": round(statistics.median((flip.ended_s - flip.began_s) * 1000 for flip in flips), 1),
        "pause_without_median_ms": round(statistics.median(without) - usual_ms, 2),
        "pause_median_ms": round(statistics.median(pauses_ms), 2),
        "pause_longest_ms": round(max(pauses_ms), 2),
        "pause_of_flip_median_ms": round(statistics.median(own_ms), 2),
        "asked_ms": _ASKED_MS,
    }


@dataclass
class Flip:
    """One update, from its beginning to the first token of it that the last stream has."""

    version: str
    began_s: float
    ended_s: float = 0.0


def _changed(published: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """All tensors, each a little other."""
    noise = torch.Generator().manual_seed(seed)
    return {name: tensor + 1e-3 * tensor.std() * torch.randn(tensor.shape, generator=noise).to(tensor.dtype) for name, tensor in published.items()}


async def _flip(engine: EmbeddedEngine, streams: list[Stream], new: Mapping[str, Tensor]) -> Flip:
    await asyncio.sleep(_WARM_S / 4)
    flip = Flip(new_id("update"), time.monotonic())
    await engine.begin_update(MODEL, flip.version)
    await engine.apply(MODEL, new)
    await engine.commit(MODEL, "keep")
    while not all(flip.version in stream.firsts and len(stream.times_s) > stream.firsts[flip.version] + 1 for stream in streams):
        await asyncio.sleep(0.001)
    flip.ended_s = time.monotonic()
    return flip


async def _quiet(streams: list[Stream]) -> tuple[float, float]:
    """From when to when nothing but streams ran; waits until all of them flow."""
    while not all(len(stream.times_s) > 8 for stream in streams):
        await asyncio.sleep(0.01)
    began_s = time.monotonic()
    await asyncio.sleep(_WARM_S)
    return began_s, time.monotonic()


async def _read(engine: EmbeddedEngine, stream: Stream, seed: int, vocab_size: int, ended: asyncio.Event) -> None:
    noise = np.random.default_rng(seed)
    # One answer as long as the context holds, so that no gap is one between two requests.
    prompt = noise.integers(0, vocab_size, _PROMPT_TOKENS).astype(np.int32)
    params = SamplingParams(max_tokens=2048 - _PROMPT_TOKENS, seed=seed)
    request = Generate(request_id=new_id("generate"), weights=Live(name=MODEL), prompt=Array.of(prompt), params=params)
    events = engine.generate(request)
    async for event in events:
        if isinstance(event, SampledToken):
            if event.version is not None:
                stream.firsts.setdefault(event.version, len(stream.times_s))
            stream.times_s.append(time.monotonic())
        if ended.is_set():
            break
    await events.aclose()


def _figures(gaps: list[float]) -> dict[str, float]:
    return {
        "gaps": len(gaps),
        "gap_median_ms": round(statistics.median(gaps), 2),
        "gap_p99_ms": round(float(np.quantile(gaps, 0.99)), 2),
        "gap_longest_ms": round(max(gaps), 2),
    }


if __name__ == "__main__":
    main()

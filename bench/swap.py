"""Weights swapped under load: `python -m bench.swap` prints one JSON line.

`engine`: streams of an embedded engine follow one name; its weights are swapped every so often in each of several ways, and not at all, which is the
peer. `server`: streams of a deployment of a live server while a run steps, and the time from `optim_step` to the first token of what it gave; who
reads them is another process than who steps, as other clients are. Gaps are between two tokens of one stream, as its reader sees them; the first
token of a stream ends no gap. `gap_at_swaps_ms` is the longest of any stream from asking for a swap to one step behind its first token, in the
median of the swaps, and `gap_before_swaps_ms` that of as long a time just before: what it grows by is to be less than a step and a flip. Streams of
an engine end seldom (`--tokens`): all begin anew at once, and a step with the prompts of some is a gap of the others that no swap makes. A server's
swap is asked for by `optim_step`, so that training and publishing count too; `gap_at_moves_ms` is from promoting what is published to one step
behind the first token of a prompt that nobody has read. That prompt makes every stream wait, swap or none: `gap_at_requests_ms` is of as long a time
up to one step behind the first token of another such prompt, before each swap, and what `gap_at_moves_ms` is longer by is what streams feel of the
swap alone.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.line import Line, parser_of
from bench.shapes import SHAPES, decoder, supervised
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.client.training import TrainingRun
from bloomery.engine.shelf import BlobShelf
from bloomery.infer.embedded import EmbeddedEngine
from bloomery.infer.engine import Patch, Update
from bloomery.infer.sampler import Sampler
from bloomery.models import tiny
from bloomery.models.decoder import Decoder
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.obs.garbage_collector import spare_what_stays
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import NO_KEYS
from bloomery.train import snapshot
from bloomery.train.full import FullParameters
from bloomery.train.lora import Lora
from bloomery.train.snapshot import Snapshot
from bloomery.train.trainable import Trainable
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, Live, SampledToken, SampleFinished, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.operations import Datum, LoraSpec
from bloomery.types.serving import MODEL

BASE = "b" * 32
POLICY = "policy"
MESSAGE = "Count from one to one hundred, in words."
_FLIP_STEPS = 160
_FEWER = (1, 2, 4)
"""Streams beside which a server's weights are swapped too: all of them may want more processors than there are."""
SPEC = LoraSpec(rank=8, seed=0)
Swap = Callable[[int], Awaitable[str]]
"""Makes the swap of this number; returns the version that tokens say from there on."""


def main() -> None:
    """Measure the engine by itself, and a server."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    line = Line("swap")
    setting = {"threads": asked.threads, "streams": asked.streams, "every_s": asked.every, "seconds": asked.seconds}
    engine = {size: asyncio.run(_engine(_model(size), asked)) for size in asked.sizes}
    server = _server(asked) if asked.swaps else None
    line.tell({**setting, "engine": engine, "server": server})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="*", default=["tiny", "5M"], choices=["tiny", *SHAPES])
    for name, value in (("streams", 8), ("tokens", 800), ("threads", 1), ("swaps", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, seconds in (("seconds", 8.0), ("every", 0.5)):
        parser.add_argument(f"--{name}", type=float, default=seconds)
    return parser.parse_args()


def _model(size: str) -> Decoder:
    return load_decoder(tiny.PATH, dtype=torch.float32) if size == "tiny" else decoder(size)


class Swapped(NamedTuple):
    """When a swap was asked for, when the name was to move to weights that were there, and when the first token of these was seen."""

    asked_s: float
    move_s: float
    token_s: float


class Gap(NamedTuple):
    """Between two tokens of a stream, and when the second was seen."""

    seconds: float
    end_s: float


@dataclass
class Load:
    """What readers saw."""

    gaps: list[Gap] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    finished: int = 0
    first_s: dict[str, float] = field(default_factory=dict)
    """When the first token that says a version was seen, since the last swap was asked for."""
    swaps: list[Swapped] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    """When the first token of a prompt that nobody has read was seen, before each of a server's swaps."""

    def see(self, version: str | None, before_s: float | None) -> float:
        """A token; returns when."""
        now_s = time.monotonic()
        if version is not None:
            self.first_s.setdefault(version, now_s)
        if before_s is not None:
            self.gaps.append(Gap(now_s - before_s, now_s))
        return now_s

    def figures(self) -> dict[str, object]:
        """In milliseconds."""
        gaps = np.array([gap.seconds for gap in self.gaps]) * 1000
        return {
            "tokens": len(gaps),
            "streams_finished": self.finished,
            "streams_failed": len(self.failures),
            "gap_median_ms": round(float(np.median(gaps)), 2),
            "gap_p99_ms": round(float(np.quantile(gaps, 0.99)), 2),
            "gap_longest_ms": round(float(gaps.max()), 2),
            **self._around_swaps(float(np.median(gaps)) / 1000),
            **swaps_figures(self.swaps),
        }

    def _around_swaps(self, step_s: float) -> dict[str, object]:
        windows_s = {"at_swaps": [(swap.asked_s, swap.token_s + step_s) for swap in self.swaps]}
        windows_s["before_swaps"] = [(2 * asked_s - end_s, asked_s) for asked_s, end_s in windows_s["at_swaps"]]
        if self.requests:
            windows_s["at_moves"] = [(swap.move_s, swap.token_s + step_s) for swap in self.swaps]
            windows_s["at_requests"] = [
                (token_s - (swap.token_s - swap.move_s), token_s + step_s) for swap, token_s in zip(self.swaps, self.requests, strict=True)
            ]
        longest_s = {name: [self._longest_s(*window_s) for window_s in each] for name, each in windows_s.items()}
        return {f"gap_{name}_ms": round(statistics.median(each) * 1000, 2) if each else None for name, each in longest_s.items()}

    def _longest_s(self, from_s: float, until_s: float) -> float:
        """Of the gaps that ended then."""
        return max((gap.seconds for gap in self.gaps if from_s <= gap.end_s < until_s), default=0.0)


def swaps_figures(found: Sequence[Swapped]) -> dict[str, object]:
    """Of what was swapped, in milliseconds."""
    swaps = [(each.token_s - each.asked_s) * 1000 for each in found]
    return {
        "swaps": len(swaps),
        "swap_to_token_median_ms": round(statistics.median(swaps), 2) if swaps else None,
        "swap_to_token_longest_ms": round(max(swaps), 2) if swaps else None,
    }


async def _engine(model: Decoder, asked: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as place:
        shelf = BlobShelf(Blobs(Path(place)), model, base_hash=BASE, numerics="bench", keys=NO_KEYS)
        adapters = [_publish(shelf, _adapter(model, seed), "lora") for seed in range(4)]
        wholes = [_publish(shelf, _whole(model, seed), "full") for seed in range(2)]
        async with EmbeddedEngine(model, shelf, version=BASE) as engine:
            await engine.load_adapter(POLICY, adapters[0])
            tensors = [_adapter(model, seed).published() for seed in range(4)]
            patches = {name: _patch(tensor) for name, tensor in tensors[0].items()}
            model_patches = {name: _patch(tensor) for name, tensor in stored_tensors(model).items()}
            ways: dict[str, tuple[str, Swap | None]] = {
                "none": (POLICY, None),
                "adapter_keep": (POLICY, lambda turn: _switch(engine, POLICY, adapters[turn % 4])),
                "adapter_tensors": (POLICY, lambda turn: _update(engine, POLICY, tensors[turn % 4])),
                "adapter_patches": (POLICY, lambda turn: _update(engine, POLICY, patches)),
                "none_again": (POLICY, None),
                "model_none": (MODEL, None),
                "model_keep": (MODEL, lambda turn: _switch(engine, MODEL, wholes[turn % 2])),
                "model_patches": (MODEL, lambda turn: _update(engine, MODEL, model_patches)),
            }
            # As an engine's process does once it is up: else a gap now and then is a collection of all that this script has imported.
            spare_what_stays()
            found: dict[str, object] = {"bit_exact": engine.capabilities().bit_exact}
            found |= {way: (await _under_load(engine, name, swap, model.config.vocab_size, asked)).figures() for way, (name, swap) in ways.items()}
        return found | {"flip": _flip(Sampler(model, shelf, form=probe(model).form), adapters, model.config.vocab_size, asked.streams)}


def _flip(sampler: Sampler, adapters: Sequence[Weights], vocab_size: int, streams: int) -> dict[str, object]:
    """Processor time of steps that flip all streams to weights in memory, and of those that do not; other processes do not disturb it."""
    sampler.serve(POLICY, adapters[0])
    noise = np.random.default_rng(0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    step = 0
    while step < 20 + _FLIP_STEPS:
        if not sampler.in_hand:
            while POLICY not in sampler.names:
                sampler.step()
            for reader in range(streams):
                sampler.submit(_request(noise, POLICY, vocab_size, 2 * _FLIP_STEPS, reader))
        flips = step >= 20 and step % 4 == 0
        if flips:
            sampler.swap(POLICY, adapters[step // 4 % 2], "keep")
        began_s = time.thread_time()
        sampler.step()
        if step >= 20 and not (flips and step < 28):
            seconds[flips].append(time.thread_time() - began_s)
        step += 1
    return {f"step_{'that_flips_' if flips else ''}cpu_ms": round(statistics.median(each) * 1000, 3) for flips, each in seconds.items()}


def _request(noise: np.random.Generator, name: str, vocab_size: int, tokens: int, seed: int) -> Generate:
    prompt = noise.integers(0, vocab_size, 64).astype(np.int32)
    params = SamplingParams(max_tokens=tokens, seed=seed)
    return Generate(request_id=new_id("generate"), weights=Live(name=name), prompt=Array.of(prompt), params=params)


async def _switch(engine: EmbeddedEngine, name: str, weights: Weights) -> str:
    return (await engine.switch(name, weights, "keep")).version


async def _update(engine: EmbeddedEngine, name: str, update: Mapping[str, Update]) -> str:
    version = new_id("update")
    await engine.begin_update(name, version)
    await engine.apply(name, update)
    return (await engine.commit(name, "keep")).version


def _patch(tensor: torch.Tensor) -> Patch:
    """One value in a hundred, as it is."""
    indices = torch.arange(0, tensor.numel(), 100)
    return Patch(indices, tensor.reshape(-1)[indices].clone(), tuple(tensor.shape))


async def _under_load(engine: EmbeddedEngine, name: str, swap: Swap | None, vocab_size: int, asked: argparse.Namespace) -> Load:
    load, until_s = Load(), time.monotonic() + asked.seconds
    readers = [asyncio.create_task(_read(engine, name, load, reader, until_s, vocab_size, asked.tokens)) for reader in range(asked.streams)]
    turn = 0
    while swap is not None and time.monotonic() < until_s - asked.every:
        await asyncio.sleep(asked.every)
        turn += 1
        load.first_s.clear()
        asked_s = time.monotonic()
        version = await swap(turn)
        while version not in load.first_s:
            await asyncio.sleep(0.0005)
        load.swaps.append(Swapped(asked_s, asked_s, load.first_s[version]))
    await asyncio.gather(*readers)
    return load


async def _read(engine: EmbeddedEngine, name: str, load: Load, reader: int, until_s: float, vocab_size: int, tokens: int) -> None:
    noise = np.random.default_rng(reader)
    while time.monotonic() < until_s:
        request = _request(noise, name, vocab_size, tokens, reader)
        before_s, reason = None, None
        try:
            async for event in engine.generate(request):
                match event:
                    case SampledToken(version=version):
                        before_s = load.see(version, before_s)
                    case SampleFinished(reason=ended):
                        reason = ended
        except Exception as error:
            load.failures.append(repr(error))
            continue
        if reason == "length":
            load.finished += 1
        else:
            load.failures.append(f"ended with {reason}")


def _publish(shelf: BlobShelf, weights: Trainable, kind: str) -> Weights:
    lora = kind == "lora"
    found = shelf.publish(
        Snapshot(
            kind="lora" if lora else "full",
            run_id="bench",
            base=BASE,
            parent=BASE,
            template_hash="bench",
            step=0,
            rank=SPEC.rank if lora else 0,
            alpha=SPEC.alpha,
            targets=(),
            data=snapshot.write(weights),
        )
    )
    return Weights(version=found.version, key=found.key)


def _adapter(model: Decoder, seed: int) -> Lora:
    lora = Lora(model, SPEC)
    lora.masters.normal_(std=0.01, generator=torch.Generator().manual_seed(seed))
    lora.refresh()
    return lora


def _whole(model: Decoder, seed: int) -> FullParameters:
    full = FullParameters(model, LoraSpec(rank=0, seed=0))
    full.masters += 1e-4 * torch.randn(full.masters.shape, generator=torch.Generator().manual_seed(seed))
    full.refresh()
    return full


def _server(asked: argparse.Namespace) -> dict[str, object]:
    """Swaps of a deployment that nobody reads, then streams of it without and with swaps, and fewer with; gaps are between chunks with text."""
    with serving("bloomery-tiny", keep=False) as server, Client(server.url, server.key) as client:
        run = client.create_run("bloomery-tiny", 8)
        client.deployments.create(POLICY, run.save_snapshot().result().version)
        data = supervised(256, [64] * 4, 0)
        numbers = count()
        # The replica may still be starting, which the first one would wait for.
        _step_to_token(client, run, data, next(numbers))
        found: dict[str, object] = {"alone": swaps_figures([_step_to_token(client, run, data, next(numbers)) for _ in range(asked.swaps)])}
        spawn = get_context("spawn")
        fewer = [(f"adapter_{streams}", streams, asked.swaps) for streams in _FEWER if streams < asked.streams]
        for way, streams, swaps in (("none", asked.streams, 0), *fewer, ("adapter", asked.streams, asked.swaps)):
            stopped, (ours, theirs) = spawn.Event(), spawn.Pipe()
            readers = spawn.Process(target=_read_chats, args=(server.url, server.key, streams, stopped, theirs))
            readers.start()
            assert ours.recv() == "begun"
            seen = [(_token_s(client, next(numbers)), _step_to_token(client, run, data, next(numbers))) for _ in range(swaps)]
            stopped.wait(0 if swaps else asked.seconds)
            stopped.set()
            load: Load = ours.recv()
            readers.join()
            load.requests += [token_s for token_s, _ in seen]
            load.swaps += [swapped for _, swapped in seen]
            found[way] = load.figures()
        return found


def _read_chats(url: str, key: str, streams: int, stopped: Event, found: Connection) -> None:
    """Read streams until `stopped`; says when they flow, and then what was seen."""
    load = Load()
    with Client(url, key) as client, ThreadPoolExecutor(streams) as pool:
        readers = [pool.submit(_read_chat, client, load, stopped) for _ in range(streams)]
        while not load.gaps and not stopped.wait(0.05):
            pass
        found.send("begun")
        for reader in readers:
            reader.result()
    found.send(load)


def _read_chat(client: Client, load: Load, stopped: Event) -> None:
    while not stopped.is_set():
        before_s = None
        try:
            for chunk in client.chat_stream(POLICY, _said(MESSAGE), max_tokens=100, temperature=1.0, ignore_eos=True):
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    before_s = load.see(None, before_s)
        except Exception as error:
            load.failures.append(repr(error))
            continue
        load.finished += 1


def _step_to_token(client: Client, run: TrainingRun, data: Sequence[Datum], number: int) -> Swapped:
    """From submitting `optim_step` to the first token that its weights serve."""
    run.forward_backward(data).result()
    began_s = time.monotonic()
    run.optim_step(1e-6)
    version = run.save_snapshot().result().version
    move_s = time.monotonic()
    client.deployments.promote(POLICY, version)
    assert _first_token(client, number) == version
    return Swapped(began_s, move_s, time.monotonic())


def _token_s(client: Client, number: int) -> float:
    """When the first token of the same request is seen with no swap before it."""
    _first_token(client, number)
    return time.monotonic()


def _first_token(client: Client, number: int) -> str:
    """The version that said it, to a prompt that no other number has."""
    chunks = client.chat_stream(POLICY, _said(f"{number:03}: {MESSAGE}"), max_tokens=1, temperature=0.0)
    version: str = next(chunk["system_fingerprint"] for chunk in chunks if chunk["choices"])
    return version


def _said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


if __name__ == "__main__":
    main()

"""Threads of an engine beside a busy process: `python -m bench.threads` prints one JSON line.

A process of its own decodes one batch with so many threads, on processors that are otherwise idle (`quiet`) and beside a process that computes
without a pause (`busy`). Between two kernels its threads wait for each other in one of these ways: `library` is what torch's OpenMP does when nothing
is said, and the peer; `replica` and `engine` is what these processes are told before torch is imported (`bloomery/engine/thread_waits.py`); `one` has
a single thread, so that nobody waits. All ways take turns in every round. Tokens per second are by the clock, of steps in which every sample decodes;
a ratio is that to the peer's in the same company.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from bench.line import Line, parser_of
from bench.shapes import SHAPES, OnlyBase, decoder
from bloomery.engine.thread_waits import prepare_threads
from bloomery.infer.sampler import Sampler
from bloomery.models.kernel_probe import probe
from bloomery.obs.machine import usable_cpus
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, SamplingParams, Weights
from bloomery.types.protocol import Role

LIBRARY: Final = "library"
ONE: Final = "one"
TOLD: Final[Mapping[str, Role]] = {"replica": "replica", "engine": "engine"}
"""Ways that a process of this role is told."""
WAYS: Final = (LIBRARY, *TOLD, ONE)
COMPANY: Final = ("quiet", "busy")
PROMPT: Final = 32
"""Tokens."""
WARM_UP: Final = 20
"""Steps."""
_VARIABLES: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""What says how threads wait, and how many there are: nobody else is to have said it."""


def main() -> None:
    """Measure every way in both companies, or be the process that samples."""
    asked = _arguments()
    if asked.way is not None:
        print(json.dumps(_decode(asked)))
        return
    line = Line("threads")
    setting = {"device": "cpu", "dtype": "float32", "threads": asked.threads, "size": asked.size, "samples": asked.samples}
    setting |= {"seconds": asked.seconds, "rounds": asked.rounds, "peer": "what torch's OpenMP does when nothing is said"}
    told = {way: {name: value for name, value in _environment(way, asked.threads).items() if name in _VARIABLES} for way in WAYS}
    line.tell({**setting, "told": told, **_measure(asked)})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("threads", max(2, usable_cpus())), ("samples", 16), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--size", choices=list(SHAPES), default="5M")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process and as its environment says")
    return parser.parse_args()


def _environment(way: str, threads: int) -> dict[str, str]:
    """Of the process that samples."""
    environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    if way in TOLD:
        prepare_threads(environment, TOLD[way], threads)
    return environment


def _measure(asked: argparse.Namespace) -> dict[str, Any]:
    rates: dict[tuple[str, str], list[float]] = {(company, way): [] for company in COMPANY for way in WAYS}
    for _ in range(asked.rounds):
        for company, way in rates:
            rates[company, way].append(_rate(company, way, asked))
    median = {each: statistics.median(found) for each, found in rates.items()}
    return {
        company: {
            "tokens_per_s": {way: round(median[company, way], 1) for way in WAYS},
            "ratio": {way: round(median[company, way] / median[company, LIBRARY], 2) for way in WAYS if way != LIBRARY},
        }
        for company in COMPANY
    }


def _rate(company: str, way: str, asked: argparse.Namespace) -> float:
    """Tokens per second of a process of its own."""
    threads = 1 if way == ONE else asked.threads
    argv = ["--way", way, "--threads", str(threads), "--samples", str(asked.samples), "--seconds", str(asked.seconds), "--size", asked.size]
    with _busy() if company == "busy" else _nobody():
        done = subprocess.run(
            [sys.executable, "-m", "bench.threads", *argv], env=_environment(way, threads), stdout=subprocess.PIPE, text=True, check=True
        )
    rate: float = json.loads(done.stdout)
    return rate


@contextmanager
def _busy() -> Iterator[None]:
    """A process that takes a processor."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _nobody() -> Iterator[None]:
    yield


def _decode(asked: argparse.Namespace) -> float:
    torch.set_num_threads(asked.threads)
    base = decoder(asked.size)
    sampler = Sampler(base, OnlyBase(base), form=probe(base).form)
    noise = np.random.default_rng(0)
    for number in range(asked.samples):
        prompt = Array.of(noise.integers(3, base.config.vocab_size, PROMPT).astype(np.int32))
        params = SamplingParams(max_tokens=base.config.context - PROMPT, seed=number)
        sampler.submit(Generate(request_id=f"r{number}", weights=Weights(version="base"), prompt=prompt, params=params))
    for _ in range(WARM_UP):
        sampler.step()
    before, began_s = sampler.tokens_sampled, time.monotonic()
    while sampler.busy and time.monotonic() < began_s + asked.seconds:
        sampler.step()
    return (sampler.tokens_sampled - before) / (time.monotonic() - began_s)


if __name__ == "__main__":
    main()

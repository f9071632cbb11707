"""What training beside it costs a stream: `python -m bench.isolation` prints one JSON line.

A server with `--replicas N` serves a deployment; the load is so many streams at a time, one after the other without a pause, over bare sockets.
Phases without and with a tenant that trains without a pause take turns, so that a drift of the machine falls on both. A gap is the time between two
tokens of a stream as they arrive; `ratio` is the 95th percentile of the gaps under training over that of the idle phases. `client_cpu` is what the
load client took of one processor, which on a small machine it takes from somebody. `--replicas 0` shows what the engine alone makes of it.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.line import Line, parser_of
from bench.shapes import SHAPES, supervised, write_directory
from bloomery.client import Client, Pending

NAME = "served"
TOKENS = 200
TRAINED = [64] * 16
"""Tokens of the sequences of one batch."""
READY_S = 120.0
_REST_S = 2.5
"""The engine tells its counts about once a second."""


class Phase(NamedTuple):
    """Gaps in seconds, and what else went on."""

    gaps: list[float]
    client_cpu: float
    tokens_trained: int


def main() -> None:
    """Measure, or be the tenant that trains."""
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=sorted(SHAPES), default="5M")
    parser.add_argument("--train", nargs=2, metavar=("URL", "KEY"))
    asked = parser.parse_args()
    if asked.train:
        _train(*asked.train)
    line = Line("isolation")
    with tempfile.TemporaryDirectory() as place, _server(Path(place), asked.size, asked.replicas) as server:
        phases = asyncio.run(_measure(server, asked))
    idle, training = ([phase for kind, phase in phases if kind == wanted] for wanted in ("idle", "training"))
    figures = {"idle": _figures(idle), "training": _figures(training)}
    ratio = round(figures["training"]["p95_ms"] / figures["idle"]["p95_ms"], 2)
    setting = {"replicas": asked.replicas, "size": asked.size, "streams": asked.streams, "seconds": asked.seconds, "rounds": asked.rounds}
    line.tell({**setting, "shares": server.shares, "ratio": ratio, **figures})


class _Server(NamedTuple):
    url: str
    key: str
    shares: str
    """The line of `up` that says who got which processors."""


async def _measure(server: _Server, asked: argparse.Namespace) -> list[tuple[str, Phase]]:
    with Client(server.url, server.key) as client:
        run = client.create_run(client.models()[0].alias, rank=8, seed=0)
        client.deployments.create(NAME, run.save_snapshot("first").result().version)
        phases = [("warm", await _phase(server, client, asked, training=False))]
        for _ in range(asked.rounds):
            for kind in ("idle", "training"):
                phases.append((kind, await _phase(server, client, asked, training=kind == "training")))
    return phases[1:]


async def _phase(server: _Server, client: Client, asked: argparse.Namespace, *, training: bool) -> Phase:
    with _tenant(server) if training else _nobody():
        await asyncio.to_thread(_wait_for_training if training else _wait_for_rest, client)
        trained, cpu_s, began = _trained(client), time.process_time(), time.perf_counter()
        deadline = began + asked.seconds
        gaps = await asyncio.gather(*(_streams(server, number, deadline) for number in range(asked.streams)))
        wall_s = time.perf_counter() - began
        return Phase([gap for each in gaps for gap in each], (time.process_time() - cpu_s) / wall_s, _trained(client) - trained)


async def _streams(server: _Server, number: int, deadline: float) -> list[float]:
    """Gaps of one stream after the other until the deadline."""
    url = httpx.URL(server.url)
    gaps: list[float] = []
    while time.perf_counter() < deadline:
        number += 1000
        body = {"model": NAME, "prompt": [number % 900 + 1] * 16, "max_tokens": TOKENS, "seed": number, "stream": True, "ignore_eos": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {server.key}\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        before = None
        async for line in reader:
            if b'"text"' in line:
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
            elif b'"error"' in line:
                raise RuntimeError(line.decode())
        writer.close()
    return gaps


@contextmanager
def _tenant(server: _Server) -> Iterator[None]:
    """A process that trains until it is told to stop."""
    process = subprocess.Popen([sys.executable, "-m", "bench.isolation", "--train", server.url, server.key])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _nobody() -> Iterator[None]:
    yield


def _train(url: str, key: str) -> None:
    """Batches without a pause, a few of them in hand at a time; ends when it is killed."""
    with Client(url, key) as client:
        model = client.models()[0]
        run = client.create_run(model.alias, rank=16, seed=1)
        pending: list[Pending[Any]] = []
        for seed in range(1 << 30):
            pending += [run.forward_backward(list(supervised(model.vocab_size, TRAINED, seed))), run.optim_step(1e-4)]
            while len(pending) > 6:
                pending.pop(0).result()


def _wait_for_training(client: Client) -> None:
    before, deadline = _trained(client), time.monotonic() + READY_S
    while _trained(client) == before:
        if time.monotonic() > deadline:
            raise TimeoutError("nothing was trained")
        time.sleep(0.1)


def _wait_for_rest(client: Client) -> None:
    """What a tenant had in hand when it was killed is trained to its end first."""
    before = -1
    while (trained := _trained(client)) != before:
        before = trained
        time.sleep(_REST_S)


def _trained(client: Client) -> int:
    return sum(int(engine.detail["tokens_trained"]) for engine in client.status().engines)


@contextmanager
def _server(place: Path, size: str, replicas: int) -> Iterator[_Server]:
    model = write_directory(SHAPES[size], place / "model")
    said = place / "said"
    argv = [sys.executable, "-m", "bloomery.cli.main", "up", "--data-dir", str(place / "data"), "--port", "0"]
    with said.open("wb") as output:
        process = subprocess.Popen([*argv, "--model", f"bench={model}", "--replicas", str(replicas)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while " is ready: " not in said.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(said.read_text())
            time.sleep(0.1)
        shares = next(line for line in said.read_text().splitlines() if "the engine computes with" in line)
        url = said.read_text().partition(" is ready: ")[2].split()[0]
        yield _Server(url, (place / "data" / "api_key").read_text().strip(), shares)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _figures(phases: list[Phase]) -> dict[str, float]:
    gaps = sorted(gap for phase in phases for gap in phase.gaps)
    return {
        "tokens": len(gaps),
        "p50_ms": round(1e3 * statistics.median(gaps), 2),
        "p95_ms": round(1e3 * gaps[int(0.95 * len(gaps))], 2),
        "p99_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 2),
        "longest_ms": round(1e3 * gaps[-1], 1),
        "tokens_trained": sum(phase.tokens_trained for phase in phases),
        "client_cpu": round(statistics.mean(phase.client_cpu for phase in phases), 3),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Many answers to one prompt, asked for at once: `python -m bench.prompts` prints one JSON line.

A server without replicas is asked in three ways in turns: `same`, so many requests with one prompt; `different`, as many with prompts of their own
of the same length, which is the peer; `n`, one request for so many answers. Prompts are fresh in every round: nothing of an earlier one helps.
What was computed of prompts is told by the answers (`usage`) and again by `/metrics`; the least there can be is one prompt, and of each other request
the last token, which is fed to sample the next. Processor time is that of the server's processes.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench.line import Line, parser_of
from bench.machine import processor_s
from bench.shapes import SHAPES, write_directory
from bloomery.cli.demo_server import Server, serving
from bloomery.obs.machine import usable_cpus

Prompt = list[int]


class Cost(NamedTuple):
    """Of one round, in seconds and tokens."""

    wall_s: float
    cpu_s: float
    computed: int
    """Tokens of prompts that were not in the cache, as the answers say."""
    computed_by_metrics: int


def main() -> None:
    """Measure every size."""
    asked = _arguments()
    line = Line("prompts")
    where = {"device": "cpu", "dtype": asked.dtype, "threads": usable_cpus()}
    sizes = {size: _size(size, asked) for size in asked.sizes}
    setting = {"requests": asked.requests, "prompt_tokens": asked.prompt, "new_tokens": asked.tokens, "rounds": asked.rounds}
    limit = round(_least(asked) / (asked.requests * asked.prompt), 4)
    peer = "the same server, requests with prompts of their own"
    line.tell({**where, **setting, "peer": peer, "prefill_ratio_limit": limit, **sizes})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("requests", 16), ("prompt", 512), ("tokens", 16), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["5M", "30M"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def _least(asked: argparse.Namespace) -> int:
    """Tokens of prompts to compute when nothing is computed twice."""
    least: int = asked.prompt + asked.requests - 1
    return least


def _size(size: str, asked: argparse.Namespace) -> dict[str, Any]:
    options = ("--threads", str(usable_cpus()), "--replicas", "0")
    with tempfile.TemporaryDirectory() as place:
        model = write_directory(SHAPES[size], Path(place) / "model")
        with serving(str(model), keep=False, dtype=asked.dtype, options=options) as server:
            costs = asyncio.run(_measure(server, SHAPES[size].vocab_size, asked))
    median = {way: Cost(*map(statistics.median, zip(*each, strict=True))) for way, each in costs.items()}
    return {way: _figures(cost) for way, cost in median.items()} | {
        "prefill_ratio": round(median["same"].computed / median["different"].computed, 4),
        "paid_once": all(cost.computed == cost.computed_by_metrics == _least(asked) for cost in costs["same"]),
        "cpu_ratio": round(median["different"].cpu_s / median["same"].cpu_s, 2),
        "wall_ratio": round(median["different"].wall_s / median["same"].wall_s, 2),
        "cpu_over_n": round(median["same"].cpu_s / median["n"].cpu_s, 2),
        "wall_over_n": round(median["same"].wall_s / median["n"].wall_s, 2),
    }


def _figures(cost: Cost) -> dict[str, float]:
    return {"computed_tokens": round(cost.computed), "cpu_ms": round(1000 * cost.cpu_s, 1), "wall_ms": round(1000 * cost.wall_s, 1)}


async def _measure(server: Server, vocab_size: int, asked: argparse.Namespace) -> dict[str, list[Cost]]:
    noise = np.random.default_rng(0)
    ways = {"same": (1, asked.requests, 1), "different": (asked.requests, 1, 1), "n": (1, 1, asked.requests)}
    """Prompts, requests for each, samples of each request."""
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    headers, limits = {"authorization": f"Bearer {server.key}"}, httpx.Limits(max_connections=asked.requests)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, limits=limits, timeout=300.0) as client:
        for _ in range(asked.rounds + 1):
            for way, (prompts, requests, samples) in ways.items():
                fresh = noise.integers(3, vocab_size, (prompts, asked.prompt)).tolist()
                costs[way].append(await _round(client, [prompt for prompt in fresh for _ in range(requests)], samples, asked.tokens))
    return {way: each[1:] for way, each in costs.items()}


async def _round(client: httpx.AsyncClient, prompts: list[Prompt], samples: int, tokens: int) -> Cost:
    before, cpu_s, began_s = await _computed(client), processor_s(os.getpid()), time.perf_counter()
    found = await asyncio.gather(*(_request(client, prompt, samples, tokens, seed) for seed, prompt in enumerate(prompts)))
    wall_s, cpu_s = time.perf_counter() - began_s, processor_s(os.getpid()) - cpu_s
    return Cost(wall_s, cpu_s, sum(found), await _computed(client) - before)


async def _request(client: httpx.AsyncClient, prompt: Prompt, samples: int, tokens: int, seed: int) -> int:
    """Tokens of its prompt that were computed for it."""
    body = {"model": "model", "prompt": prompt, "n": samples, "max_tokens": tokens, "seed": seed, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    if answer.is_error:
        raise SystemExit(f"a request failed: {answer.text}")
    usage = answer.json()["usage"]
    if usage["completion_tokens"] != samples * tokens:
        raise SystemExit(f"{usage['completion_tokens']} tokens came back, not {samples * tokens}")
    computed: int = len(prompt) - usage["prompt_tokens_details"]["cached_tokens"]
    return computed


async def _computed(client: httpx.AsyncClient) -> int:
    """Tokens of all prompts so far that were not in the cache."""
    lines = (await client.get("/metrics")).text.splitlines()

    def total(name: str) -> int:
        return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}_total{{")))

    return total("vllm:prefix_cache_queries") - total("vllm:prefix_cache_hits")


if __name__ == "__main__":
    main()

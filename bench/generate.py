"""Sampling, against `transformers` on the same machine: `python -m bench.generate` prints one JSON line.

Our sampler in this process, in bit-exact and in plain mode, and `generate` of transformers over one batch (sdpa, prompts of one length, so that it
pads nothing), take turns on the same weights and prompts, at temperature 1 and without a stop. Tokens per second are those sampled, the prompts'
prefill counts as time. A `cpu_ratio` compares the seconds of processor time, which others on the machine disturb less.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3ForCausalLM

from bench.line import Line, parser_of
from bench.machine import device_name
from bench.shapes import SHAPES, OnlyBase, write_directory
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.form import plain_form
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, SampledToken, SamplingParams, Weights

BASE: Final = Weights(version="base")
Prompts = Sequence[list[int]]


class Cost(NamedTuple):
    """Of one round, in seconds."""

    wall: float
    cpu: float


def main() -> None:
    """Measure every size at every concurrency."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    line = Line("generate")
    where = {"threads": asked.threads, "dtype": asked.dtype, "device": device_name(asked.device)}
    with tempfile.TemporaryDirectory() as place:
        sizes = {size: _size(size, Path(place) / size, asked) for size in asked.sizes}
    setting = {"prompt_tokens": asked.prompt, "new_tokens": asked.tokens, "rounds": asked.rounds}
    line.tell({**where, "peer": "transformers generate, sdpa, one batch", **setting, **sizes})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("prompt", 64), ("tokens", 64), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    return parser.parse_args()


def _size(size: str, place: Path, asked: argparse.Namespace) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, asked.dtype)
    directory = write_directory(SHAPES[size], place, dtype)
    decoder = load_decoder(directory, dtype=dtype, device=asked.device)
    peer = Qwen3ForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval().to(asked.device)
    peer.generation_config.eos_token_id = None
    contenders: dict[str, Callable[[Prompts, int], int]] = {"transformers": _Peer(peer), **_ours(decoder)}
    return {str(count): _compare(contenders, SHAPES[size].vocab_size, count, asked) for count in asked.concurrency}


def _ours(decoder: Decoder) -> dict[str, Callable[[Prompts, int], int]]:
    report = probe(decoder)
    if not report.bit_exact:
        raise SystemExit(f"not bit-exact here: {report.failures[0]}")
    forms = {"exact": report.form, "plain": plain_form(decoder)}
    return {name: _Ours(Sampler(decoder, OnlyBase(decoder), form=form)) for name, form in forms.items()}


def _compare(contenders: dict[str, Callable[[Prompts, int], int]], vocab_size: int, count: int, asked: argparse.Namespace) -> dict[str, Any]:
    noise = np.random.default_rng(count)
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for number in range(asked.rounds + 1):
        # Fresh ones every round: nobody finds keys and values of the round before.
        prompts = noise.integers(3, vocab_size, (count, asked.prompt)).tolist()
        for name, generate in contenders.items():
            costs[name].append(_cost(generate, prompts, asked.tokens if number else 4))
    median = {name: Cost(*(statistics.median(column) for column in zip(*each[1:], strict=True))) for name, each in costs.items()}
    tokens, peer = count * asked.tokens, median["transformers"]
    found: dict[str, Any] = {"tokens_per_s": {name: round(tokens / cost.wall, 1) for name, cost in median.items()}}
    for name in median.keys() - {"transformers"}:
        found[f"{name}_ratio"] = round(peer.wall / median[name].wall, 2)
        found[f"{name}_cpu_ratio"] = round(peer.cpu / median[name].cpu, 2)
    if "plain" in median:
        found["exact_over_plain"] = round(median["exact"].wall / median["plain"].wall, 2)
        found["exact_over_plain_cpu"] = round(median["exact"].cpu / median["plain"].cpu, 2)
    return found


def _cost(generate: Callable[[Prompts, int], int], prompts: Prompts, tokens: int) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    sampled = generate(prompts, tokens)
    cost = Cost(time.perf_counter() - wall, time.process_time() - cpu)
    if sampled != len(prompts) * tokens:
        raise SystemExit(f"{sampled} tokens came back, not {len(prompts) * tokens}")
    return cost


class _Ours:
    """Requests of one sampler, all at once."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, prompts: Prompts, tokens: int) -> int:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=tokens, seed=number)
            self._sampler.submit(Generate(request_id=f"r{number}", weights=BASE, prompt=Array.of(np.array(prompt, np.int32)), params=params))
        sampled = 0
        while self._sampler.busy:
            sampled += sum(isinstance(event, SampledToken) for event in self._sampler.step())
        return sampled


class _Peer:
    """One batch of transformers."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model: Any = model

    def __call__(self, prompts: Prompts, tokens: int) -> int:
        settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0)
        ids_BT = torch.tensor(prompts, device=self._model.device)
        with torch.inference_mode():
            out_BT = self._model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=settings)
        return int(out_BT[:, ids_BT.shape[1] :].numel())


if __name__ == "__main__":
    main()

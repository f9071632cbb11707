"""Eight runs with one short sequence each, together and one after another: `python -m bench.tenants` prints one JSON line.

The peer is the same engine without company: the same shares, one pass each. Attention has the exact form (as for policy gradients) and the plain one
(as for supervised learning); either way the bits are those of the run alone, which the tests prove. On a GPU, pass `--device cuda`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from bench.machine import machine
from bench.shapes import decoder, supervised
from bloomery.models.decoder import Decoder
from bloomery.train import batch
from bloomery.train.lora import Lora
from bloomery.train.losses import find_loss
from bloomery.train.passes import Share, compute
from bloomery.types.operations import LoraSpec

SIZES: Final = ("5M", "30M")


def main() -> None:
    """Measure both sizes."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    where = machine() | {"device": asked.device, "threads": asked.threads, "dtype": asked.dtype}
    sizes = {size: _measure(decoder(size, getattr(torch, asked.dtype)).to(asked.device), asked) for size in SIZES}
    setting = {"tenants": asked.tenants, "sequences": asked.sequences, "tokens": asked.tokens, "rank": asked.rank, "rounds": asked.rounds}
    print(json.dumps({"bench": "tenants", **where, **setting, **sizes}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in (("tenants", 8), ("sequences", 1), ("tokens", 64), ("rank", 8), ("rounds", 15), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def _measure(model: Decoder, asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    tenants = [Lora(model, LoraSpec(rank=asked.rank, seed=seed)) for seed in range(asked.tenants)]
    found = {}
    for form in ("exact", "plain"):
        plain = find_loss("cross_entropy", {})
        loss = replace(plain, form=replace(plain.form, exact=form == "exact"))
        data = [supervised(model.config.vocab_size, [asked.tokens] * asked.sequences, seed) for seed in range(asked.tenants)]
        shares = [Share(lora, batch.pack(part, loss), loss, True) for lora, part in zip(tenants, data, strict=True)]
        found[form] = _compare(shares, asked.rounds, asked.device)
    return found


def _compare(shares: list[Share], rounds: int, device: str) -> dict[str, float]:
    """Seconds of both ways, measured in turns so that a busy moment meets both."""
    together, alone = [], []
    for _ in range(rounds + 2):
        together.append(_seconds(lambda: compute(shares), device))
        alone.append(_seconds(lambda: [compute([share]) for share in shares], device))
    tokens = sum(share.rows for share in shares)
    seconds, apart = statistics.median(together[2:]), statistics.median(alone[2:])
    return {"tokens_per_s": round(tokens / seconds), "alone_tokens_per_s": round(tokens / apart), "ratio": round(apart / seconds, 3)}


def _seconds(work: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

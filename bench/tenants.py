"""Eight runs with one sequence each, together and one after another: `python -m bench.tenants` prints one JSON line.

The peer is the same engine without company: the same shares, one pass each. Together are as many as the engine computes together (`rows_at_once`): of
the longest sequences only a few, which fill the processors almost alone. Attention has the exact form (as for policy gradients) and the plain one
(as for supervised learning); either way the bits are those of the run alone, which the tests prove. On a GPU, pass `--device cuda`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bench.line import Line, parser_of
from bench.shapes import SHAPES, decoder, supervised
from bloomery.models.decoder import Decoder
from bloomery.train import batch
from bloomery.train.lora import Lora
from bloomery.train.losses import find_loss
from bloomery.train.passes import Share, compute
from bloomery.types.batching import rows_at_once
from bloomery.types.operations import LoraSpec


def main() -> None:
    """Measure every size with every length."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    line = Line("tenants")
    where = {"device": asked.device, "threads": asked.threads, "dtype": asked.dtype}
    sizes = {size: _measure(decoder(size, getattr(torch, asked.dtype)).to(asked.device), asked) for size in asked.sizes}
    setting = {"tenants": asked.tenants, "sequences": asked.sequences, "rank": asked.rank, "rounds": asked.rounds}
    line.tell({**where, **setting, **sizes})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["5M", "30M"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256], help="of each sequence")
    for name, value in (("tenants", 8), ("sequences", 1), ("rank", 8), ("rounds", 15), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def _measure(model: Decoder, asked: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    tenants = [Lora(model, LoraSpec(rank=asked.rank, seed=seed)) for seed in range(asked.tenants)]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for tokens in asked.tokens:
        data = [supervised(model.config.vocab_size, [tokens] * asked.sequences, seed) for seed in range(asked.tenants)]
        for form in ("exact", "plain"):
            plain = find_loss("cross_entropy", {})
            loss = replace(plain, form=replace(plain.form, exact=form == "exact"))
            shares = [Share(lora, batch.pack(part, loss), loss, True) for lora, part in zip(tenants, data, strict=True)]
            measured = _compare(_teams(shares, rows_at_once(model.config.hidden_size)), asked.rounds, asked.device)
            found.setdefault(f"{tokens}_tokens", {})[form] = measured
    return found


def _teams(shares: Sequence[Share], rows: int) -> list[list[Share]]:
    """As the engine puts them together."""
    teams: list[list[Share]] = []
    for share in shares:
        if teams and sum(member.rows for member in teams[-1]) + share.rows <= rows:
            teams[-1].append(share)
        else:
            teams.append([share])
    return teams


def _compare(teams: Sequence[Sequence[Share]], rounds: int, device: str) -> dict[str, float]:
    """Seconds of both ways, measured in turns so that a busy moment meets both."""
    shares = [share for team in teams for share in team]
    together, alone = [], []
    for _ in range(rounds + 2):
        together.append(_seconds(lambda: [compute(team) for team in teams], device))
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

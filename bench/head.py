"""Cross-entropy over a vocabulary of 151,936: `python -m bench.head` prints one JSON line.

Peers in the same run: `F.cross_entropy` on whole logits, and `F.linear_cross_entropy` of torch. Each variant runs in a process of its own, because a
peak of memory never goes down again; peaks are above the inputs. Gradients of the hidden states and of the head are compared with the plain ones.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.line import Line, parser_of
from bloomery.models.head import token_logprobs

VARIANTS: Final = ("plain", "torch_linear_cross_entropy", "bloomery")
VOCABULARY, WIDTH = 151_936, 512


def main() -> None:
    """Measure every variant and compare their gradients."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.variant is not None:
        print(json.dumps(_measure(asked.variant, asked.tokens, asked.out)))
        return
    line = Line("head")
    with tempfile.TemporaryDirectory() as place:
        found = {variant: _in_own_process(variant, Path(place), asked) for variant in VARIANTS}
        gradients = {variant: torch.load(Path(place) / variant, weights_only=True) for variant in VARIANTS}
    for variant in VARIANTS[1:]:
        found[variant]["gradient_difference"] = max(
            float((ours - plain).norm() / plain.norm()) for ours, plain in zip(gradients[variant], gradients["plain"], strict=True)
        )
        found[variant]["seconds_ratio"] = round(found[variant]["seconds"] / found["plain"]["seconds"], 2)
        found[variant]["peak_ratio"] = round(found[variant]["peak_bytes"] / found["plain"]["peak_bytes"], 3)
    setting = {"vocabulary": VOCABULARY, "width": WIDTH, "tokens": asked.tokens, "threads": asked.threads, "dtype": "float32", "device": "cpu"}
    line.tell({**setting, **found})


def _in_own_process(variant: str, place: Path, asked: argparse.Namespace) -> dict[str, float]:
    argv = ["--variant", variant, "--tokens", str(asked.tokens), "--threads", str(asked.threads), "--out", str(place / variant)]
    printed = subprocess.run([sys.executable, "-m", "bench.head", *argv], capture_output=True, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(printed)
    return figures


def _measure(variant: str, tokens: int, out: Path) -> dict[str, float]:
    noise = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(tokens, WIDTH, generator=noise).requires_grad_()
    head_VD = (torch.randn(VOCABULARY, WIDTH, generator=noise) * WIDTH**-0.5).requires_grad_()
    targets_R = torch.randint(0, VOCABULARY, (tokens,), generator=noise)
    # Whatever a first call sets up for good.
    _loss(variant, hidden_RD[:8], head_VD, targets_R[:8]).backward()
    hidden_RD.grad = head_VD.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _of_process("VmRSS"), time.perf_counter()
    _loss(variant, hidden_RD, head_VD, targets_R).backward()
    seconds, peak = time.perf_counter() - began, _of_process("VmHWM") - before
    torch.save([hidden_RD.grad, head_VD.grad], out)
    return {"peak_bytes": peak, "seconds": round(seconds, 3)}


def _loss(variant: str, hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor) -> Tensor:
    match variant:
        case "plain":
            return F.cross_entropy(F.linear(hidden_RD, head_VD), targets_R, reduction="sum")
        case "bloomery":
            return -token_logprobs(hidden_RD, head_VD, None, targets_R[:, None]).sum()
        case _:
            loss: Tensor = F.linear_cross_entropy(hidden_RD, head_VD, targets_R, reduction="sum")
            return loss


def _of_process(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


if __name__ == "__main__":
    main()

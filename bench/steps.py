"""Training steps on one device, against a plain loop over transformers: `python -m bench.steps --device cuda` prints one JSON line.

The same weights, batches and learning rate, in turns in one process; each variant, all parameters or an adapter of rank 8 in float32 or bfloat16, has
a model of its own on both sides. Ours runs as the engine runs it, in micro-batches of `--budget` tokens, of which the first is what a run of this
width has by default, and asks for metrics alone. The peer has the whole batch at once, padded, and also packed in one row, by whose positions
transformers keeps texts apart; sdpa, no checkpoints of activations, and torch's fused AdamW; an adapter is that of `peft`. In bfloat16 its weights
are in bfloat16, as ours are. Tokens per second are real ones, padding not counted, of the median step; `losses_apart` is how far those of the padded
peer are from ours and from the packed one's, at most.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3ForCausalLM

from bench.line import Line, parser_of
from bench.machine import device_name
from bench.sft import IGNORED, LEARNING_RATE, VARIANTS, Row, Trainer, random_batches
from bench.shapes import SHAPES, write_directory
from bloomery.types.batching import micro_batch_tokens

WARM_UP: Final = 2
Step = Callable[[list[Row]], float]
"""Trains on a batch and gives its mean loss."""


def main() -> None:
    """Measure every variant."""
    asked = _arguments()
    line = Line("steps")
    shape = SHAPES[asked.size]
    with tempfile.TemporaryDirectory() as place:
        model = write_directory(shape, Path(place))
        batches = random_batches(shape.vocab_size, WARM_UP + asked.steps, asked.rows, tuple(asked.lengths))
        found = {f"{kind}_{dtype}": _compare(model, batches, kind == "lora", dtype, asked) for kind, dtype in VARIANTS}
    setting = {name: getattr(asked, name) for name in ("size", "rows", "lengths", "steps")} | {"rank": 8, "returned": "metrics"}
    line.tell({"device": device_name(asked.device), **setting, "peer": f"transformers, sdpa, torch {torch.__version__}, fused AdamW", **found})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", required=True, help="`cuda`, or `cpu`")
    parser.add_argument("--size", choices=SHAPES, default="150M")
    parser.add_argument("--rows", type=int, default=16, help="texts of a batch")
    parser.add_argument("--lengths", type=int, nargs=2, default=(200, 1000), help="tokens of a text, from and to")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", type=int, nargs="*", default=(), help="tokens of a micro-batch, beside the default ones")
    return parser.parse_args()


def _compare(model: Path, batches: list[list[Row]], lora: bool, dtype: str, asked: argparse.Namespace) -> dict[str, Any]:
    default = micro_batch_tokens(SHAPES[asked.size].hidden_size, rank=8 if lora else 0)
    job = {"model": str(model), "lora": lora, "dtype": dtype, "learning_rate": LEARNING_RATE, "device": asked.device}
    makers: dict[str, Callable[[], Step]] = {
        "padded": lambda: Peer(job, padded).step,
        "packed": lambda: Peer(job, packed).step,
    }
    for budget in (default, *asked.budget):
        makers[f"ours_{budget}"] = lambda budget=budget: Trainer(job | {"micro_batch_tokens": budget}).step  # type: ignore[misc]
    speeds, losses = {}, {}
    for name, maker in makers.items():
        speeds[name], losses[name] = _measure(maker(), batches, asked.device)
        gc.collect()
    ours = speeds[f"ours_{default}"]
    return {
        "tokens_per_s": speeds,
        "ratio": round(ours / speeds["padded"], 2),
        "ratio_to_packed": round(ours / speeds["packed"], 2),
        "losses_apart": {name: round(max(map(abs, np.subtract(losses[name], losses["padded"]))), 4) for name in (f"ours_{default}", "packed")},
    }


def _measure(step: Step, batches: list[list[Row]], device: str) -> tuple[int, list[float]]:
    """Tokens per second of the median step behind the warm-up, and the losses of all."""
    speeds, losses = [], []
    for batch in batches:
        began = time.perf_counter()
        losses.append(step(batch))
        if device != "cpu":
            torch.cuda.synchronize(device)
        speeds.append(sum(len(row["input_ids"]) for row in batch) / (time.perf_counter() - began))
    return round(statistics.median(speeds[WARM_UP:])), losses


class Peer:
    """A model of transformers that trains on whole batches."""

    def __init__(self, job: Mapping[str, Any], arrange: Callable[[Sequence[Row]], dict[str, Tensor]]) -> None:
        model: Any = Qwen3ForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa")
        self._model = (get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")) if job["lora"] else model).to(job["device"])
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._adam = torch.optim.AdamW(trained, lr=job["learning_rate"], weight_decay=0.0, betas=(0.9, 0.999), fused=True)
        self._device, self._arrange = job["device"], arrange
        self._model.train()

    def step(self, batch: list[Row]) -> float:
        inputs = {name: tensor.to(self._device) for name, tensor in self._arrange(batch).items()}
        loss = self._model(**inputs, use_cache=False).loss
        loss.backward()
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(loss.detach())


def padded(batch: Sequence[Row]) -> dict[str, Tensor]:
    """Each text in a row of its own."""
    longest = max(len(row["input_ids"]) for row in batch)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", IGNORED), "attention_mask": mask}


def packed(batch: Sequence[Row]) -> dict[str, Tensor]:
    """All texts in one row, each from position 0, none of which predicts the next one's first token."""
    tokens = list(chain.from_iterable(row["input_ids"] for row in batch))
    labels = list(chain.from_iterable([IGNORED, *row["labels"][1:]] for row in batch))
    positions = list(chain.from_iterable(range(len(row["input_ids"])) for row in batch))
    return {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([positions])}


if __name__ == "__main__":
    main()

"""Supervised training of a 30M model, against TRL's SFTTrainer: `python -m bench.sft` prints one JSON line.

The same weights, batches, learning rate and threads, one after the other in processes of their own: sixteen sequences of 30 to 200 tokens, a loss on
the second half of each. Ours runs as the engine runs it, in micro-batches, and asks for metrics alone (`return_logprobs` false), because TRL gives no
more. TRL runs padded, with the same batches as ours, and packed, once as it packs by itself (`bfd`, without padding, which its documentation gives to
FlashAttention alone) and once `wrapped`, where a row's texts see each other; in bfloat16 each of these with a model in float32 under autocast, and
with weights in bfloat16, as ours are, where autocast remains, without which it is slower. The ratio is to the fastest of all, `ratio_of_same_batches`
to the fastest padded one; `arguments` are those of `SFTConfig` in which they differ. Packed forms run fewer steps. Tokens are real ones, padding not
counted; `losses` those of all steps of the same batches, and how far ours are from each at most. `products` is the physical limit: how many tokens
the matrix products of a step alone would allow, each measured alone at the rows that it has in a micro-batch: behind the last attention those with a
loss.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from itertools import product as product_of
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.line import Line, parser_of
from bench.peers import command, python_of
from bench.shapes import SHAPES, Shape, write_directory
from bloomery.engine.thread_waits import thread_waits
from bloomery.models.load import load_decoder
from bloomery.models.products import product, rows_gradient, weight_gradient
from bloomery.train.passes import compute
from bloomery.train.run import TrainableRun
from bloomery.types.arrays import Array
from bloomery.types.batching import micro_batch_tokens
from bloomery.types.operations import AdamParams, Datum, Failed, ForwardBackward, LoraSpec, Operation, OptimStep, Result, RunSpec

PEER: Final = Path(__file__).parent / "peers" / "trl_steps.py"
PEER_SAYS: Final = {
    "peer": "trl 1.16.0 SFTTrainer, adamw_torch_fused, the fastest of its forms",
    "peer_command": command("trl", "bench/peers/trl_steps.py", "JOB"),
}
PACKINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "padded": {"dataset_kwargs": {"skip_prepare_dataset": True}},
    "bfd": {"packing": True, "packing_strategy": "bfd"},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
}
"""Arguments of `SFTConfig`."""
PACKED_LENGTH, PACKED_ROWS, PACKED_STEPS = 512, 4, 4
"""About as many tokens as a padded batch has real ones."""
NUMERICS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "float32": {"": {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}},
    "bfloat16": {
        "_autocast": {"bf16": True, "model_init_kwargs": {"dtype": "float32"}},
        "_weights": {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}},
    },
}
"""And what a form is called that has them."""
BATCH, LEARNING_RATE, WARM_UP, PRODUCT_ROUNDS, HEAD_DIM = 16, 1e-3, 2, 9, 64
IGNORED: Final = -100
"""The label of a token without a loss, as transformers has it."""
PROMPT: Final = 2
"""One in so many tokens has no loss."""
OUR_WAITING: Final = thread_waits("engine")
"""As `bloomery up` starts an engine, for the sake of others; the peer has the default of OpenMP, which is faster on idle processors."""
VARIANTS: Final = (("full", "float32"), ("lora", "float32"), ("full", "bfloat16"), ("lora", "bfloat16"))

Row = dict[str, list[int]]


def main() -> None:
    """Measure every variant on both."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="30M")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", type=Path, help="only our side of this job, in this process")
    parser.add_argument("--products", action="store_true", help="only the products of the job, in this process")
    asked = parser.parse_args()
    if asked.job is not None:
        job = json.loads(asked.job.read_text())
        print(json.dumps(_products(SHAPES[asked.size], job) if asked.products else train_ours(job)))
        return
    line = Line("sft")
    with tempfile.TemporaryDirectory() as place:
        model = write_directory(SHAPES[asked.size], Path(place) / "model")
        batches = random_batches(SHAPES[asked.size].vocab_size, asked.steps)
        found = {f"{kind}_{dtype}": _compare(Path(place), model, batches, kind, dtype, asked) for kind, dtype in VARIANTS}
    setting = {"size": asked.size, "batch": BATCH, "steps": asked.steps, "threads": asked.threads, "rank": 8, "device": "cpu", "returned": "metrics"}
    line.tell({**setting, **PEER_SAYS, **found})


def random_batches(vocab_size: int, steps: int, rows_each: int = BATCH, lengths: tuple[int, int] = (30, 200)) -> list[list[Row]]:
    noise = np.random.default_rng(0)
    rows = []
    for length in noise.integers(*lengths, steps * rows_each).tolist():
        tokens = noise.integers(5, vocab_size, length + 1).tolist()
        rows.append({"input_ids": tokens, "labels": [IGNORED] * (len(tokens) // PROMPT) + tokens[len(tokens) // PROMPT :]})
    return [rows[start : start + rows_each] for start in range(0, len(rows), rows_each)]


def _compare(place: Path, model: Path, batches: list[list[Row]], kind: str, dtype: str, asked: argparse.Namespace) -> dict[str, Any]:
    job = {"model": str(model), "out": str(place / "trl"), "batches": batches, "lora": kind == "lora", "dtype": dtype}
    job |= {"threads": asked.threads, "learning_rate": LEARNING_RATE, "device": "cpu"}
    file = place / "job.json"
    file.write_text(json.dumps(job))
    itself = [sys.executable, "-m", "bench.sft", "--size", asked.size, "--job", file]
    ours, limit = _run(itself), _run([*itself, "--products"])
    ours_speed = _speed(ours, [sum(len(row["input_ids"]) for row in batch) for batch in batches])
    forms: dict[str, dict[str, Any]] = {}
    losses = {"ours": ours["losses"]}
    for form, arguments in peer_forms(dtype, len(batches)).items():
        file.write_text(json.dumps(job | {"arguments": arguments}))
        theirs = _run([python_of("trl"), PEER, file], waiting={})
        forms[form] = {"tokens_per_s": _speed(theirs, theirs["tokens"]), "arguments": arguments}
        if "packing" not in arguments:
            losses[form] = theirs["losses"]
    apart = {name: round(max(map(abs, np.subtract(ours["losses"], found))), 4) for name, found in losses.items() if name != "ours"}
    return {
        "ours": ours_speed,
        "trl": forms,
        "products": round(limit["tokens_per_s"]),
        "ratio": round(ours_speed / max(form["tokens_per_s"] for form in forms.values()), 2),
        "ratio_of_same_batches": round(ours_speed / max(forms[name]["tokens_per_s"] for name in losses if name != "ours"), 2),
        "of_products": round(ours_speed / limit["tokens_per_s"], 2),
        "losses": {name: _rounded(found) for name, found in losses.items()} | {"apart": apart},
    }


def peer_forms(dtype: str, steps: int) -> dict[str, dict[str, Any]]:
    """What each form is called, and its arguments of `SFTConfig`."""
    return {
        packing + form: {**packed, **numbers, "max_length": PACKED_LENGTH, **_amount(packing, steps)}
        for (packing, packed), (form, numbers) in product_of(PACKINGS.items(), NUMERICS[dtype].items())
    }


def _amount(packing: str, steps: int) -> dict[str, int]:
    if packing == "padded":
        return {"per_device_train_batch_size": BATCH, "max_steps": steps}
    return {"per_device_train_batch_size": PACKED_ROWS, "max_steps": min(PACKED_STEPS, steps)}


def _rounded(losses: list[float]) -> list[float]:
    return [round(loss, 3) for loss in losses]


def _run(argv: list[Any], waiting: Mapping[str, str] = OUR_WAITING) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in OUR_WAITING} | {"HF_HUB_OFFLINE": "1", **waiting}
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _speed(found: dict[str, Any], tokens: list[int]) -> int:
    """Tokens per second, the median of the steps after the first ones."""
    seconds: list[float] = found["seconds"]
    return round(statistics.median(count / taken_s for count, taken_s in list(zip(tokens, seconds, strict=False))[WARM_UP:]))


def train_ours(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    trainer = Trainer(job)
    seconds, losses = [], []
    for batch in job["batches"]:
        began = time.perf_counter()
        losses.append(trainer.step(batch))
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "losses": losses}


class Trainer:
    """Trains a run as the engine does, in micro-batches of the usual number of tokens where the job names none."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        decoder = load_decoder(Path(job["model"]), dtype=getattr(torch, job["dtype"]), device=job["device"])
        lora = LoraSpec(rank=8 if job["lora"] else 0, seed=0, train_unembed=not job["lora"])
        budget = job.get("micro_batch_tokens") or micro_batch_tokens(decoder.config.hidden_size, rank=lora.rank)
        self._run = TrainableRun(decoder, RunSpec(run_id="run", base_hash="", lora=lora, micro_batch_tokens=budget), _NoShelf())
        self._adam = AdamParams(learning_rate=job["learning_rate"], beta2=0.999, eps=1e-8)

    def step(self, batch: list[Row]) -> float:
        """One of the optimizer, for the mean loss of the batch."""
        computed = _finish(self._run, ForwardBackward(loss="cross_entropy", loss_config={}, data=_data(batch), return_logprobs=False))
        _finish(self._run, OptimStep(adam=self._adam))
        loss: float = computed.metrics["loss:sum"]  # type: ignore[union-attr]
        return loss


def _products(shape: Shape, job: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(job["threads"])
    width, inner, heads = shape.hidden_size, shape.intermediate_size, HEAD_DIM * (shape.num_heads + 2 * shape.num_kv_heads)
    block = ((heads, width), (width, HEAD_DIM * shape.num_heads), (2 * inner, width), (width, inner))
    rows = micro_batch_tokens(width, rank=8 if job["lora"] else 0)

    def seconds(rows: int, weights: Iterable[tuple[int, int]]) -> float:
        return sum(_product_seconds(rows, *weight, getattr(torch, job["dtype"]), gradient=not job["lora"]) for weight in weights)

    ending = seconds(rows, block[:1]) + seconds(rows // PROMPT, (*block[1:], (shape.vocab_size, width)))
    return {"tokens_per_s": rows / ((shape.num_layers - 1) * seconds(rows, block) + ending)}


def _product_seconds(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gradient: bool) -> float:
    """Of one weight in a forward and a backward: the median of a few rounds."""
    input_RI, weight_OI, grad_RO = (torch.randn(*size).to(dtype) for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    seconds = []
    for _ in range(PRODUCT_ROUNDS):
        began = time.perf_counter()
        product(input_RI, weight_OI)
        rows_gradient(grad_RO, weight_OI)
        if gradient:
            weight_gradient(grad_RO, input_RI)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _data(batch: list[Row]) -> tuple[Datum, ...]:
    """Weights that make the sum the mean that TRL trains."""
    learned = sum(label != IGNORED for row in batch for label in row["labels"][1:])
    data = []
    for row in batch:
        weights = np.array([0.0 if label == IGNORED else 1 / learned for label in row["labels"][1:]], np.float32)
        inputs = {"target_tokens": Array.of(np.array(row["input_ids"][1:], np.int64)), "weights": Array.of(weights)}
        data.append(Datum(tokens=Array.of(np.array(row["input_ids"][:-1], np.int32)), inputs=inputs))
    return tuple(data)


def _finish(run: TrainableRun, operation: Operation) -> Result:
    work = run.execute(operation)
    try:
        share = next(work)
        while True:
            share = work.send(compute([share])[0])
    except StopIteration as done:
        result: Result = done.value
    if isinstance(result, Failed):
        raise SystemExit(result.message)
    return result


class _NoShelf:
    """Nothing is saved here."""

    def read(self, key: str) -> bytes:
        raise NotImplementedError

    def write(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def publish(self, snapshot: object) -> Any:
        raise NotImplementedError


if __name__ == "__main__":
    main()

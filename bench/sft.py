"""Supervised training of a 30M model, against TRL's SFTTrainer: `python -m bench.sft` prints one JSON line.

The same weights, batches, learning rate and threads, one after the other in processes of their own: sixteen sequences of 30 to 200 tokens, a loss on
the second half of each. TRL runs as documented and with packing; ours runs as the engine runs it, in micro-batches, and asks for metrics alone
(`return_logprobs` false), because TRL gives no more. Tokens are real ones, padding not counted; `losses` those of all steps, and how far the two
curves are apart at most. `products` is the physical limit: how many tokens the matrix products of a step alone would allow, each measured alone at
the rows that it has in a micro-batch: behind the last attention those with a loss.
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
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.machine import machine
from bench.peers import command, python_of
from bench.shapes import SHAPES, Shape, write_directory
from bloomery.models.load import load_decoder
from bloomery.models.products import product, rows_gradient
from bloomery.train.passes import compute
from bloomery.train.run import TrainableRun
from bloomery.types.arrays import Array
from bloomery.types.batching import micro_batch_tokens
from bloomery.types.operations import AdamParams, Datum, Failed, ForwardBackward, LoraSpec, Operation, OptimStep, Result, RunSpec

PEER: Final = Path(__file__).parent / "peers" / "trl_steps.py"
PEER_SAYS: Final = {
    "peer": "trl 1.16.0 SFTTrainer, adamw_torch_fused, the better of padded and packed",
    "peer_command": command("trl", "bench/peers/trl_steps.py", "JOB"),
}
BATCH, LEARNING_RATE, WARM_UP, PRODUCT_ROUNDS, HEAD_DIM = 16, 1e-3, 2, 9, 64
PROMPT: Final = 2
"""One in so many tokens has no loss."""
OUR_WAITING: Final = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""As `bloomery up` starts an engine, for the sake of others; the peer has the default of OpenMP, which is faster on idle processors."""
VARIANTS: Final = (("full", "float32"), ("lora", "float32"), ("full", "bfloat16"), ("lora", "bfloat16"))

Row = dict[str, list[int]]


def main() -> None:
    """Measure every variant on both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="30M")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", type=Path, help="only our side of this job, in this process")
    parser.add_argument("--products", action="store_true", help="only the products of the job, in this process")
    asked = parser.parse_args()
    if asked.job is not None:
        job = json.loads(asked.job.read_text())
        print(json.dumps(_products(SHAPES[asked.size], job) if asked.products else _ours(job)))
        return
    with tempfile.TemporaryDirectory() as place:
        model = write_directory(SHAPES[asked.size], Path(place) / "model")
        batches = _batches(SHAPES[asked.size].vocab_size, asked.steps)
        found = {f"{kind}_{dtype}": _compare(Path(place), model, batches, kind, dtype, asked) for kind, dtype in VARIANTS}
    setting = {"size": asked.size, "batch": BATCH, "steps": asked.steps, "threads": asked.threads, "rank": 8, "device": "cpu", "returned": "metrics"}
    print(json.dumps({"bench": "sft", **machine(), **setting, **PEER_SAYS, **found}))


def _batches(vocab_size: int, steps: int) -> list[list[Row]]:
    noise = np.random.default_rng(0)
    rows = []
    for length in noise.integers(30, 200, steps * BATCH).tolist():
        tokens = noise.integers(5, vocab_size, length + 1).tolist()
        rows.append({"input_ids": tokens, "labels": [-100] * (len(tokens) // PROMPT) + tokens[len(tokens) // PROMPT :]})
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def _compare(place: Path, model: Path, batches: list[list[Row]], kind: str, dtype: str, asked: argparse.Namespace) -> dict[str, Any]:
    job = {"model": str(model), "out": str(place / "trl"), "batches": batches, "steps": len(batches), "batch_size": BATCH, "lora": kind == "lora"}
    job |= {"dtype": dtype, "threads": asked.threads, "learning_rate": LEARNING_RATE, "packing": False}
    file = place / "job.json"
    file.write_text(json.dumps(job))
    itself = [sys.executable, "-m", "bench.sft", "--size", asked.size, "--job", file]
    ours, limit = _run(itself), _run([*itself, "--products"])
    theirs = _run([python_of("trl"), PEER, file], waiting={})
    file.write_text(json.dumps(job | {"packing": True, "batch_size": 4}))
    packed = _run([python_of("trl"), PEER, file], waiting={})
    tokens = [sum(len(row["input_ids"]) - 1 for row in batch) for batch in batches]
    speeds = {"ours": _speed(ours, tokens), "trl": _speed(theirs, tokens), "trl_packed": _speed(packed, packed["tokens"])}
    speeds["products"] = round(limit["tokens_per_s"])
    apart = max(abs(own - other) for own, other in zip(ours["losses"], theirs["losses"], strict=True))
    losses = {"losses": {"ours": _rounded(ours["losses"]), "trl": _rounded(theirs["losses"]), "apart": round(apart, 4)}}
    ratios = {
        "ratio": round(speeds["ours"] / max(speeds["trl"], speeds["trl_packed"]), 2),
        "of_products": round(speeds["ours"] / speeds["products"], 2),
    }
    return {**speeds, **ratios, **losses}


def _rounded(losses: list[float]) -> list[float]:
    return [round(loss, 3) for loss in losses]


def _run(argv: list[Any], waiting: Mapping[str, str] = OUR_WAITING) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in OUR_WAITING} | {"HF_HUB_OFFLINE": "1", **waiting}
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _speed(found: dict[str, Any], tokens: list[int]) -> int:
    """Tokens per second, the median of the steps after the first ones."""
    return round(statistics.median(count / seconds for count, seconds in list(zip(tokens, found["seconds"], strict=False))[WARM_UP:]))


def _ours(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    decoder = load_decoder(Path(job["model"]), dtype=getattr(torch, job["dtype"]), device="cpu")
    lora = LoraSpec(rank=8 if job["lora"] else 0, seed=0, train_unembed=not job["lora"])
    budget = micro_batch_tokens(decoder.config.hidden_size, rank=lora.rank)
    run = TrainableRun(decoder, RunSpec(run_id="run", base_hash="", lora=lora, micro_batch_tokens=budget), _NoShelf())
    seconds, losses = [], []
    for batch in job["batches"]:
        operation = ForwardBackward(loss="cross_entropy", loss_config={}, data=_data(batch), return_logprobs=False)
        began = time.perf_counter()
        computed = _finish(run, operation)
        _finish(run, OptimStep(adam=AdamParams(learning_rate=job["learning_rate"], beta2=0.999, eps=1e-8)))
        seconds.append(time.perf_counter() - began)
        losses.append(computed.metrics["loss:sum"])  # type: ignore[union-attr]
    return {"seconds": seconds, "losses": losses}


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
            grad_RO.t() @ input_RI
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _data(batch: list[Row]) -> tuple[Datum, ...]:
    """Weights that make the sum the mean that TRL trains."""
    learned = sum(label != -100 for row in batch for label in row["labels"][1:])
    data = []
    for row in batch:
        weights = np.array([0.0 if label == -100 else 1 / learned for label in row["labels"][1:]], np.float32)
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

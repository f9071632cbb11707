"""A tiny random decoder, data for it, and a shelf in memory."""

from collections.abc import Iterable

import numpy as np
import torch

from bloomery.models.config import DecoderConfig, ExpertsConfig, RopeConfig
from bloomery.models.decoder import Decoder
from bloomery.sync.publish import publish
from bloomery.train.passes import compute
from bloomery.train.run import TrainableRun
from bloomery.train.snapshot import Snapshot
from bloomery.types.arrays import Array
from bloomery.types.operations import (
    AdamParams,
    Datum,
    ForwardBackward,
    ForwardBackwardResult,
    LoadCheckpoint,
    LoraSpec,
    Operation,
    OptimStep,
    Result,
    RunSpec,
    SaveSnapshot,
    SnapshotResult,
)

VOCAB = 300
BASE_HASH = "b" * 32
SAVE = SaveSnapshot(template_hash="t" * 32)


def decoder(*, dtype: torch.dtype = torch.float32, experts: bool = False, sparse_layer: int = 1) -> Decoder:
    """Two layers, 64 wide, with norms that are not one; with `experts` one of them is sparse."""
    config = DecoderConfig(
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=10_000.0, scaling={"original_max_position_embeddings": 1024}),
        tied_head=True,
        qk_norm=True,
        context=1024,
        windows=(None, None),
        experts=ExpertsConfig(num_experts=4, top_k=2, intermediate_size=32, normalise_top_k=True, sparse_layers=(sparse_layer,)) if experts else None,
    )
    model = Decoder(config, dtype=torch.float32).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(std=0.15, generator=generator)
    return model.to(dtype)


class MemoryShelf:
    """Blobs in a dictionary, published as an engine publishes them."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def read(self, key: str) -> bytes:
        return self.blobs[key]

    def write(self, key: str, data: bytes) -> None:
        self.blobs[key] = data

    def publish(self, snapshot: Snapshot) -> SnapshotResult:
        identity = snapshot._asdict()
        del identity["lasts"]
        manifest = publish(self.blobs.update, identity.pop("data"), numerics="test", **identity)
        return SnapshotResult(version=manifest.version, key=manifest.key, size_bytes=manifest.size_bytes, step=manifest.step)


def run(model: Decoder | None = None, shelf: MemoryShelf | None = None, *, budget: int = 4096, run_id: str = "run-1", **lora: object) -> TrainableRun:
    spec = RunSpec(run_id=run_id, base_hash=BASE_HASH, lora=LoraSpec(**{"rank": 8, "seed": 7, **lora}), micro_batch_tokens=budget)
    return TrainableRun(model if model is not None else decoder(), spec, shelf if shelf is not None else MemoryShelf())


def finish(trained: TrainableRun, operation: Operation) -> Result:
    """Run an operation to its end, without company."""
    work = trained.execute(operation)
    try:
        share = next(work)
        while True:
            share = work.send(compute([share])[0])
    except StopIteration as done:
        return done.value


def train(trained: TrainableRun, operations: Iterable[Operation]) -> list[Result]:
    return [finish(trained, operation) for operation in operations]


def supervised(lengths: Iterable[int], *, seed: int = 0, weight: float = 1.0) -> tuple[Datum, ...]:
    """Data with a prompt without loss (the first third) and weights that are real and signed."""
    noise = np.random.default_rng(seed)
    data = []
    for length in lengths:
        weights = (noise.normal(1.0, 0.5, length) * weight).astype(np.float32)
        weights[: length // 3] = 0
        data.append(datum(noise.integers(0, VOCAB, length), noise.integers(0, VOCAB, length), weights=weights))
    return tuple(data)


def following(lengths: Iterable[int], *, seed: int = 0) -> tuple[Datum, ...]:
    """Data whose targets are the tokens that follow, as a sampler scores them."""
    noise = np.random.default_rng(seed)
    texts = [noise.integers(0, VOCAB, length + 1) for length in lengths]
    return tuple(datum(text[:-1], text[1:], weights=np.ones(len(text) - 1)) for text in texts)


def datum(tokens: np.ndarray, targets: np.ndarray, **inputs: np.ndarray) -> Datum:
    arrays = {name: Array.of(np.asarray(values, np.float32)) for name, values in inputs.items()}
    return Datum(tokens=Array.of(np.asarray(tokens, np.int32)), inputs={"target_tokens": Array.of(np.asarray(targets, np.int64)), **arrays})


def learn(data: tuple[Datum, ...], *, loss: str = "cross_entropy", backward: bool = True) -> ForwardBackward:
    return ForwardBackward(loss=loss, loss_config={}, data=data, backward=backward)


def step(learning_rate: float = 1e-2, **adam: float) -> OptimStep:
    return OptimStep(adam=AdamParams(learning_rate=learning_rate, **adam))


def load(key: str, *, optimizer: bool = True) -> LoadCheckpoint:
    return LoadCheckpoint(key=key, optimizer=optimizer)


def logprobs(result: Result) -> list[np.ndarray]:
    assert isinstance(result, ForwardBackwardResult), result
    return [output["logprobs"].numpy() for output in result.outputs]


def gradients(trained: TrainableRun) -> dict[str, torch.Tensor]:
    """The gradients accumulated so far, by factor."""
    return {name: view.clone() for name, view in trained.weights.named(trained.weights.gradients)}


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest difference of a factor, relative to its norm."""
    return max(float((left[name] - right[name]).norm() / (right[name].norm() + 1e-12)) for name in right)

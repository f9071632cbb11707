"""`TrainableRun`: one run's state, and its operations executed one after the other.

The engine calls `execute` for each operation in order. An operation asks for its micro-batches as shares of passes (`passes.py`) and is resumed
with what they gave. All state is in the masters, the optimizer and the lineage, all randomness in the seed of the spec: a run restored from a
checkpoint and given the same operations ends with the same bits.
Shapes: R packed rows, K soft targets per row.
"""

from collections.abc import Generator
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.train import batch, checkpoint, snapshot
from bloomery.train.checkpoint import Lineage
from bloomery.train.lora import Lora, digest
from bloomery.train.losses import Loss, find_loss
from bloomery.train.optim import AdamW
from bloomery.train.passes import Share
from bloomery.train.snapshot import Snapshot
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, WorkerError, blame
from bloomery.types.operations import (
    AdamParams,
    CheckpointResult,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardResult,
    LoadCheckpoint,
    LoadResult,
    Operation,
    OptimStep,
    OptimStepResult,
    Rejected,
    Result,
    RunSpec,
    SaveCheckpoint,
    SaveSnapshot,
    SnapshotResult,
    effect_of_failure,
)

Done = TypeVar("Done", covariant=True)
Work = Generator[Share, Tensor, Done]
"""Asks for a share's log-probabilities [R, K], with its gradients at the run's copies; ends with what it was for."""


class Shelf(Protocol):
    """Where an engine lets its runs keep bytes."""

    def read(self, key: str) -> bytes:
        """The blob `key`."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Store a blob durably."""
        ...

    def publish(self, snapshot: Snapshot) -> SnapshotResult:
        """Store the weights and their manifest durably, in this order."""
        ...


class TrainableRun:
    """A LoRA run on a base model."""

    def __init__(self, decoder: Decoder, spec: RunSpec, shelf: Shelf) -> None:
        self.spec = spec
        self._decoder, self._shelf = decoder, shelf
        self.lora = Lora(decoder, spec.lora)
        self._adam = AdamW(self.lora.masters)
        self._lineage = Lineage(version=spec.base_hash)
        self._has_gradients = False
        self._spoiled_by: str | None = None

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._adam.steps

    @property
    def at_rest(self) -> bool:
        """Whether a checkpoint holds everything: no gradients wait for a step, and no failure has to be reported at the next one."""
        return not self._has_gradients and self._spoiled_by is None

    def execute(self, operation: Operation, *, seq: int | None = None) -> Work[Result]:
        """Perform an operation, pausing for each micro-batch; what goes wrong (thrown in, too) is a `Failed` result, never an exception."""
        name = _name(operation) if seq is None else f"{_name(operation)} (seq {seq})"
        try:
            with blame(WorkerError, f"run {self.spec.run_id}"):
                return (yield from self._perform(operation))
        except BloomeryError as error:
            self._clear_after_failure(operation, f"{name}: {error.message}")
            return Failed(message=error.message, category=error.category)

    def checkpoint_bytes(self) -> bytes:
        """The resumable state as of the last operation after which the run was `at_rest`: gradients and failures since then are not part of it."""
        return checkpoint.write(self.spec.base_hash, self._lineage, self.lora, self._adam)

    def restore(self, data: bytes) -> None:
        """Become the run that wrote these bytes."""
        self._load(data, "restored", optimizer=True)

    def weights_digest(self) -> str:
        """blake3 over names, shapes and values of the fp32 masters."""
        return digest((slot.name, master) for slot, master in self.lora.named(self.lora.masters))

    def snapshot(self, template_hash: str) -> Snapshot:
        """The weights as the sampler gets them, with their provenance."""
        data = snapshot.write(self.lora)
        lora = self.spec.lora
        chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        return Snapshot(
            run_id=self.spec.run_id,
            base=self.spec.base_hash,
            parent=self._lineage.parent_of(snapshot.content(data)),
            template_hash=template_hash,
            step=self.step,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=tuple(name for name, trained in chosen.items() if trained),
            data=data,
        )

    def _perform(self, operation: Operation) -> Work[Result]:
        match operation:
            case ForwardBackward():
                return (yield from self._forward_backward(operation))
            case OptimStep():
                return self._optim_step(operation.adam)
            case SaveCheckpoint():
                return self._save(operation.key)
            case SaveSnapshot():
                return self._publish(operation.template_hash)
            case LoadCheckpoint():
                self._load(self._shelf.read(operation.key), operation.key, optimizer=operation.optimizer)
                return LoadResult(digest=self.weights_digest(), step=self.step)
            case Rejected():
                raise (InvalidInput if operation.category == "user" else WorkerError)(operation.message)

    def _forward_backward(self, operation: ForwardBackward) -> Work[ForwardBackwardResult]:
        loss = find_loss(operation.loss, operation.loss_config)
        batch.check(operation.data, loss, self._decoder.config)
        logprobs: list[np.ndarray] = []
        for part in batch.split([datum.tokens.shape[0] for datum in operation.data], self.spec.micro_batch_tokens):
            data = operation.data[part]
            share = Share(self.lora, batch.pack(data, loss), loss, operation.backward)
            logprobs += batch.unpack((yield share), data)
            if operation.backward:
                self.lora.gather_gradients()
                self._has_gradients |= bool(loss.learns(share.packed.inputs).any())
        return _result(loss, operation.data, logprobs)

    def _optim_step(self, params: AdamParams) -> OptimStepResult:
        if self._spoiled_by is not None:
            raise Conflict(f"no step was taken and the gradients were cleared, because an earlier operation failed: {self._spoiled_by}")
        norm = self._adam.step(self.lora.masters, self.lora.gradients, params)
        self.lora.refresh()
        self._clear_gradients()
        return OptimStepResult(metrics={"grad_norm": norm, "step": float(self.step)})

    def _save(self, key: str) -> CheckpointResult:
        data = self.checkpoint_bytes()
        self._shelf.write(key, data)
        return CheckpointResult(key=key, digest=self.weights_digest(), size_bytes=len(data), step=self.step)

    def _publish(self, template_hash: str) -> SnapshotResult:
        published = self.snapshot(template_hash)
        result = self._shelf.publish(published)
        self._lineage = Lineage(version=result.version, content=snapshot.content(published.data), parent=published.parent)
        return result

    def _load(self, data: bytes, key: str, *, optimizer: bool) -> None:
        found = checkpoint.read(data, key)
        checkpoint.check_fits(found.header, self.spec)
        checkpoint.restore(found, self.lora, self._adam, optimizer=optimizer)
        self._lineage = found.header.lineage
        self._spoiled_by = None
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self.lora.clear_gradients()
        self._has_gradients = False

    def _clear_after_failure(self, operation: Operation, culprit: str) -> None:
        effect = effect_of_failure(operation)
        if effect == "none":
            return
        self._clear_gradients()
        if effect == "clear":
            self._spoiled_by = None
        elif self._spoiled_by is None:
            self._spoiled_by = culprit


def _result(loss: Loss, data: tuple[Datum, ...], logprobs: list[np.ndarray]) -> ForwardBackwardResult:
    """Outputs and metrics, computed over the whole operation at once so that the micro-batches leave no trace in them."""
    flat = torch.from_numpy(np.concatenate([values.ravel() for values in logprobs]))
    inputs = {name: torch.from_numpy(np.concatenate([datum.inputs[name].numpy().ravel() for datum in data])) for name in loss.inputs}
    ends = np.cumsum([values.size for values in logprobs])[:-1]
    sequence = torch.from_numpy(np.repeat(np.arange(len(logprobs)), [values.size for values in logprobs]))
    parts = np.split(loss.terms(flat, inputs, sequence).numpy(), ends)
    terms = [part.reshape(values.shape) for part, values in zip(parts, logprobs, strict=True)]
    sums = [float(np.sum(values, dtype=np.float64)) for values in terms]
    for index, value in enumerate(sums):
        if not np.isfinite(value):
            raise InvalidInput(f"data[{index}]: the loss is {value}; the gradients were cleared. Check this datum's inputs, then the learning rate")
    outputs = [{"logprobs": Array.of(values)} for values in logprobs]
    if loss.term_output is not None:
        outputs = [output | {loss.term_output: Array.of(values)} for output, values in zip(outputs, terms, strict=True)]
    return ForwardBackwardResult(outputs=tuple(outputs), metrics={"loss:sum": float(np.sum(sums))} | loss.metrics(flat, inputs, sequence))


def _name(operation: Operation) -> str:
    return str(type(operation).__struct_config__.tag)

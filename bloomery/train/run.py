"""`TrainableRun`: one run's state, and its operations executed one after the other.

The engine calls `execute` for each operation in order. An operation asks for its micro-batches as shares of passes (`passes.py`) and is resumed
with what they gave. All state is in the masters, the optimizer and the lineage, all randomness in the seed of the spec: a run restored from a
checkpoint and given the same operations ends with the same bits.
Shapes: R packed rows, K soft targets per row.
"""

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from bloomery.models.decoder import Decoder
from bloomery.models.pads import split
from bloomery.models.threads import threads_for
from bloomery.train import batch, checkpoint, custom, snapshot
from bloomery.train.checkpoint import NOTHING, Lineage, Owed
from bloomery.train.full import FullParameters
from bloomery.train.lora import Lora
from bloomery.train.losses import find_loss
from bloomery.train.optim import AdamW
from bloomery.train.outputs import result_of, told_routing, with_routing
from bloomery.train.passes import Computed, Share
from bloomery.train.probe import Answerer
from bloomery.train.snapshot import Snapshot
from bloomery.train.trainable import Trainable, digest
from bloomery.types.arrays import Array
from bloomery.types.custom_loss import CustomLoss
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, Unavailable, WorkerError, blame
from bloomery.types.fingerprint import fingerprint
from bloomery.types.footprint import trained_parts
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
Work = Generator[Share, Computed, Done]
"""Asks for what a share gives, with its gradients at the run's copies; ends with what it was for."""


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


class State(NamedTuple):
    """Names what a checkpoint of a run holds: equal states have equal bytes."""

    changes: int
    unfinished: int
    """0 where it holds nothing that waits for a step."""


class TrainableRun:
    """A run on a base model: an adapter, or (rank 0) all parameters."""

    def __init__(self, decoder: Decoder, spec: RunSpec, shelf: Shelf) -> None:
        self.spec = spec
        self._shelf = shelf
        self.weights: Trainable = Lora(decoder, spec.lora) if spec.lora.rank else FullParameters(decoder, spec.lora)
        self._answerer = Answerer(self.weights)
        self._changes = self._unfinished_changes = 0
        """How often something was changed, or may have been, that a checkpoint holds: between steps, and beside that within one."""
        self._adam = AdamW(self.weights.masters)
        self._lineage = Lineage(version=spec.base_hash)
        self._unfinished = NOTHING

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._adam.steps

    @property
    def at_rest(self) -> bool:
        """Whether nothing waits for the next step: no gradients, and no failure that it has to report."""
        return self._unfinished == NOTHING

    def state(self, *, unfinished: bool) -> State:
        """What `checkpoint_bytes` would hold."""
        return State(self._changes, self._unfinished_changes if unfinished and not self.at_rest else 0)

    def execute(self, operation: Operation, *, seq: int | None = None) -> Work[Result]:
        """Perform an operation, pausing for each micro-batch; what goes wrong (thrown in, too) is a `Failed` result, never an exception."""
        name = _name(operation) if seq is None else f"{_name(operation)} (seq {seq})"
        try:
            with blame(WorkerError, f"run {self.spec.run_id}"):
                result = yield from self._perform(operation)
        except BloomeryError as error:
            self._clear_after_failure(operation, f"{name}: {error.message}")
            return Failed(message=error.message, category=error.category, unbegun=operation.unbegun if isinstance(operation, Rejected) else "")
        if self._unfinished.owed:
            self._note_unfinished(owed=self._unfinished.without(fingerprint(operation)))
        return result

    def checkpoint_bytes(self, *, unfinished: bool = False) -> bytes:
        """The resumable state as of the last operation after which the run was `at_rest`, or, between two operations, `unfinished` as it is now."""
        waits = self._unfinished if unfinished else NOTHING
        return checkpoint.write(self.spec.base_hash, self._lineage, self.weights, self._adam, waits)

    def restore(self, data: bytes) -> None:
        """Become the run that wrote these bytes."""
        found = self._load(data, "restored", optimizer=True)
        if found.header.unfinished is not UNSET:
            if found.header.unfinished.gradients:
                checkpoint.restore_gradients(found, self.weights)
            self._unfinished = found.header.unfinished
            self._unfinished_changes += 1

    def weights_digest(self) -> str:
        """blake3 over names, shapes and values of the fp32 masters."""
        return digest(self.weights.named(self.weights.masters))

    def snapshot(self, template_hash: str) -> Snapshot:
        """The weights as the sampler gets them, with their provenance."""
        with threads_for(len(self.weights.masters)):
            data = snapshot.write(self.weights)
        lora = self.spec.lora
        return Snapshot(
            kind="lora" if lora.rank else "full",
            run_id=self.spec.run_id,
            base=self.spec.base_hash,
            parent=self._lineage.parent_of(snapshot.content(data)),
            template_hash=template_hash,
            step=self.step,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=trained_parts(lora),
            data=data,
        )

    def _perform(self, operation: Operation) -> Work[Result]:
        match operation:
            case ForwardBackward(custom=loss):
                return (yield from (self._forward_backward(operation) if loss is None else self._custom_loss(operation, loss)))
            case OptimStep():
                return self._optim_step(operation.adam)
            case SaveCheckpoint():
                return self._save(operation.key)
            case SaveSnapshot():
                return self._publish(operation)
            case LoadCheckpoint():
                self._load(self._shelf.read(operation.key), operation.key, optimizer=operation.optimizer)
                return LoadResult(digest=self.weights_digest(), step=self.step)
            case Rejected():
                raise (InvalidInput if operation.category == "user" else WorkerError)(operation.message)

    def _forward_backward(self, operation: ForwardBackward) -> Work[ForwardBackwardResult]:
        loss = find_loss(operation.loss, operation.loss_config)
        batch.check_token_ids(operation.data, self.weights.decoder.config.vocab_size)
        logprobs: list[np.ndarray] = []
        routing: list[dict[str, Array]] = []
        for part in split([datum.tokens.shape[0] for datum in operation.data], self.spec.micro_batch_tokens):
            data = operation.data[part]
            share = Share(self.weights, batch.pack(data, loss), loss, operation.backward, operation.return_routing, operation.return_logprobs)
            computed = yield share
            logprobs += batch.unpack(computed.logprobs_RK, data)
            routing += told_routing(computed, data, operation)
            if operation.backward:
                self._gather_gradients(share)
        return with_routing(result_of(loss, operation, logprobs), routing)

    def _custom_loss(self, operation: ForwardBackward, loss: CustomLoss) -> Work[ForwardBackwardResult]:
        """Per micro-batch a forward, the loss of each of its data on the host, and a backward of its derivatives as signed weights."""
        batch.check_token_ids(operation.data, self.weights.decoder.config.vocab_size)
        outcomes: list[custom.Outcome] = []
        logprobs: list[np.ndarray] = []
        routing: list[dict[str, Array]] = []
        for part in split([datum.tokens.shape[0] for datum in operation.data], self.spec.micro_batch_tokens):
            data = operation.data[part]
            plain = batch.pack([custom.weighted(datum) for datum in data], custom.WEIGHTED)
            computed = yield Share(self.weights, plain, custom.WEIGHTED, False, operation.return_routing)
            found = batch.unpack(computed.logprobs_RK, data)
            routing += told_routing(computed, data, operation)
            room = custom.Room()
            scored = [
                custom.evaluate(loss, datum, values, f"data[{len(outcomes) + index}]", gradient=operation.backward, room=room)
                for index, (datum, values) in enumerate(zip(data, found, strict=True))
            ]
            logprobs, outcomes = logprobs + found, outcomes + scored
            if operation.backward:
                yield from self._backward_weighted([custom.weighted(datum, -outcome.slope) for datum, outcome in zip(data, scored, strict=True)])
        outputs = tuple({"logprobs": Array.of(values)} for values in logprobs)
        return with_routing(ForwardBackwardResult(outputs=outputs, metrics=custom.totals(loss, outcomes)), routing)

    def _backward_weighted(self, data: list[Datum]) -> Work[None]:
        """Add the gradients of weighted log-probabilities."""
        share = Share(self.weights, batch.pack(data, custom.WEIGHTED), custom.WEIGHTED, True, logprobs=False)
        yield share
        self._gather_gradients(share)

    def _gather_gradients(self, share: Share) -> None:
        """Of a share that was computed."""
        self.weights.gather_gradients()
        if bool(share.loss.learns(share.packed.inputs).any()):
            self._note_unfinished(gradients=True)

    def _optim_step(self, params: AdamParams) -> OptimStepResult:
        if self._unfinished.spoiled_by is not None:
            raise Conflict(f"no step was taken and the gradients were cleared, because an earlier operation failed: {self._unfinished.spoiled_by}")
        if self._unfinished.owed:
            lacks = f"an earlier operation was not begun and did not come again ({self._unfinished.owed[0].name})"
            raise Unavailable(f"no step was taken and the gradients were cleared, because {lacks}: send this step's operations again")
        self._changes += 1
        with threads_for(len(self.weights.masters)):
            norm = self._adam.step(self.weights.masters, self.weights.gradients, params)
            self.weights.refresh()
            self._clear_gradients()
        return OptimStepResult(metrics={"grad_norm": norm, "step": float(self.step)})

    def _save(self, key: str) -> CheckpointResult:
        data = self.checkpoint_bytes()
        self._shelf.write(key, data)
        return CheckpointResult(key=key, digest=self.weights_digest(), size_bytes=len(data), step=self.step)

    def _publish(self, operation: SaveSnapshot) -> SnapshotResult:
        published = self.snapshot(operation.template_hash)._replace(probe=self._answerer.answer, lasts=operation.announced)
        result = self._shelf.publish(published)
        before, self._lineage = self._lineage, Lineage(version=result.version, content=snapshot.content(published.data), parent=published.parent)
        self._changes += self._lineage != before
        return result

    def _load(self, data: bytes, key: str, *, optimizer: bool) -> checkpoint.Checkpoint:
        found = checkpoint.read(data, key)
        checkpoint.check_fits(found.header, self.spec)
        self._changes += 1
        checkpoint.restore(found, self.weights, self._adam, optimizer=optimizer)
        self._lineage = found.header.lineage
        self._clear_gradients()
        return found

    def _clear_gradients(self) -> None:
        """And all that waited for a step with them."""
        self.weights.clear_gradients()
        self._unfinished = NOTHING

    def _note_unfinished(self, **changes: Any) -> None:
        self._unfinished = msgspec.structs.replace(self._unfinished, **changes)
        self._unfinished_changes += 1

    def _clear_after_failure(self, operation: Operation, culprit: str) -> None:
        effect = effect_of_failure(operation)
        if isinstance(operation, Rejected) and operation.unbegun:
            if effect == "spoil":
                self._note_unfinished(owed=(*self._unfinished.owed, Owed(fingerprint=operation.unbegun, name=culprit)))
            return
        if effect == "none":
            return
        spoiled_by = self._unfinished.spoiled_by or culprit
        self._clear_gradients()
        if effect == "spoil":
            self._note_unfinished(spoiled_by=spoiled_by)


def _name(operation: Operation) -> str:
    return str(type(operation).__struct_config__.tag)

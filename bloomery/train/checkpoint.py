"""A run's resumable state as safetensors bytes: masters, both moments, and a header with all that is not a tensor.

One that an engine writes by itself may lie between the operations of a step, and then also holds what waits for that step (`Unfinished`): gradients
as they were gathered, in float32, or why the step will fail.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import UNSET, UnsetType
from torch import Tensor

from bloomery.models.tensor_bytes import Packed, pack
from bloomery.train.optim import AdamW
from bloomery.train.trainable import Trainable, digest
from bloomery.types import tensor_file
from bloomery.types.errors import Conflict, Corrupt
from bloomery.types.operations import LoraSpec, RunSpec
from bloomery.types.wire import Wire

_FIRST, _SECOND, _GRADIENT = "first/", "second/", "gradient/"
_HEADER = "bloomery"


class Lineage(Wire, frozen=True):
    """The newest snapshot of these weights: its version (at first the base's), its content and its own parent."""

    version: str
    content: str = ""
    parent: str = ""

    def parent_of(self, content: str) -> str:
        """Publishing the same weights again gives the same parent, and so the same version."""
        return self.parent if content == self.content else self.version


class Owed(Wire, frozen=True):
    """An operation that was not begun, and that the next step does not go without: its fingerprint, and its name."""

    fingerprint: str
    name: str


class Unfinished(Wire, frozen=True):
    """What waits for the next optimizer step, beside the gradients themselves."""

    gradients: bool = False
    """Whether there are any."""
    spoiled_by: str | None = None
    """The failure that the step will report."""
    owed: tuple[Owed, ...] = ()

    def without(self, fingerprint: str) -> tuple[Owed, ...]:
        """What is still owed when one such operation came after all."""
        found = next((number for number, one in enumerate(self.owed) if one.fingerprint == fingerprint), len(self.owed))
        return self.owed[:found] + self.owed[found + 1 :]


NOTHING: Final = Unfinished()


class Header(Wire, frozen=True, kw_only=True):
    """What a checkpoint says about itself."""

    format: Literal[1] = 1
    base_hash: str
    lora: LoraSpec
    step: int
    lineage: Lineage
    unfinished: Unfinished | UnsetType = UNSET
    """Not there where nothing waits for a step, as in every checkpoint that a caller asked for."""
    digest: str = ""
    """Over the rest of this header and all tensors, optimizer included."""


class Checkpoint(NamedTuple):
    """A parsed checkpoint."""

    header: Header
    tensors: Mapping[str, Tensor]


def write(base_hash: str, lineage: Lineage, weights: Trainable, adam: AdamW, unfinished: Unfinished = NOTHING) -> bytes:
    """The bytes of a checkpoint: equal states give equal bytes."""
    parts = [("", weights.masters), (_FIRST, adam.first), (_SECOND, adam.second), (_GRADIENT, weights.gradients)]
    tensors = {f"{prefix}{name}": view for prefix, flat in parts[: 3 + unfinished.gradients] for name, view in weights.named(flat)}
    waits = UNSET if unfinished == NOTHING else unfinished
    header = Header(base_hash=base_hash, lora=weights.spec, step=adam.steps, lineage=lineage, unfinished=waits)
    sealed = msgspec.structs.replace(header, digest=_seal(header, tensors))
    return pack(tensors, {_HEADER: msgspec.json.encode(sealed, order="sorted").decode()})


def read(data: bytes, key: str) -> Checkpoint:
    """Parse what `write` wrote."""
    try:
        header = msgspec.json.decode(tensor_file.metadata(data)[_HEADER], type=Header)
        tensors = Packed(data)
    except (Corrupt, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise Corrupt(f"checkpoint `{key}` cannot be read: {error}") from error
    if header.digest != _seal(header, tensors):
        raise Corrupt(f"checkpoint `{key}` is damaged: it does not match its digest")
    return Checkpoint(header, tensors)


def check_fits(header: Header, spec: RunSpec) -> None:
    """Refuse the weights of another base, or of another shape, and say which."""
    if header.base_hash != spec.base_hash:
        raise Conflict(f"the checkpoint belongs to base model {header.base_hash}, this run to {spec.base_hash}: create a run on that base")
    if (name := header.lora.misfit(spec.lora)) is not None:
        theirs, ours = getattr(header.lora, name), getattr(spec.lora, name)
        raise Conflict(f"the checkpoint was trained with {name}={theirs}, this run has {name}={ours}: create a run with {name}={theirs}")


def restore(checkpoint: Checkpoint, weights: Trainable, adam: AdamW, *, optimizer: bool) -> None:
    """Take over the weights and, where asked, the optimizer; else it starts anew. Gradients are none then."""
    for name, master in weights.named(weights.masters):
        master.copy_(checkpoint.tensors[name])
    for prefix, flat in ((_FIRST, adam.first), (_SECOND, adam.second)):
        for name, moment in weights.named(flat):
            moment.copy_(checkpoint.tensors[f"{prefix}{name}"]) if optimizer else moment.zero_()
    adam.steps = checkpoint.header.step if optimizer else 0
    weights.clear_gradients()
    weights.refresh()


def restore_gradients(checkpoint: Checkpoint, weights: Trainable) -> None:
    """Take over the gradients that the checkpoint holds."""
    for name, gradient in weights.named(weights.gradients):
        gradient.copy_(checkpoint.tensors[f"{_GRADIENT}{name}"])


def _seal(header: Header, tensors: Mapping[str, Tensor]) -> str:
    bare = msgspec.json.encode(msgspec.structs.replace(header, digest=""), order="sorted")
    return blake3(bare + digest(sorted(tensors.items())).encode()).hexdigest()

"""A run's resumable state as safetensors bytes: masters, both moments, and a header with all that is not a tensor."""

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from bloomery.train.lora import Lora, digest
from bloomery.train.optim import AdamW
from bloomery.types.errors import Conflict, Corrupt, blame
from bloomery.types.operations import LoraSpec, RunSpec
from bloomery.types.wire import Wire

_FIRST, _SECOND = "first/", "second/"
# One key only: safetensors writes several in no fixed order, and equal states shall have equal bytes.
_HEADER = "bloomery"


class Lineage(Wire, frozen=True):
    """The newest snapshot of these weights: its version (at first the base's), its content and its own parent."""

    version: str
    content: str = ""
    parent: str = ""

    def parent_of(self, content: str) -> str:
        """Publishing the same weights again gives the same parent, and so the same version."""
        return self.parent if content == self.content else self.version


class Header(Wire, frozen=True, kw_only=True):
    """What a checkpoint says about itself."""

    format: Literal[1] = 1
    base_hash: str
    lora: LoraSpec
    step: int
    lineage: Lineage
    digest: str = ""
    """Over the rest of this header and all tensors, optimizer included."""


class Checkpoint(NamedTuple):
    """A parsed checkpoint."""

    header: Header
    tensors: Mapping[str, Tensor]


def write(base_hash: str, lineage: Lineage, lora: Lora, adam: AdamW) -> bytes:
    """The bytes of a checkpoint: equal states give equal bytes."""
    parts = (("", lora.masters), (_FIRST, adam.first), (_SECOND, adam.second))
    tensors = {f"{prefix}{slot.name}": view.cpu() for prefix, flat in parts for slot, view in lora.named(flat)}
    header = Header(base_hash=base_hash, lora=lora.spec, step=adam.steps, lineage=lineage)
    sealed = msgspec.structs.replace(header, digest=_seal(header, tensors))
    return save(tensors, {_HEADER: msgspec.json.encode(sealed, order="sorted").decode()})


def read(data: bytes, key: str) -> Checkpoint:
    """Parse what `write` wrote."""
    with blame(Corrupt, f"checkpoint `{key}` cannot be read"):
        length = int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER], type=Header)
        tensors = load(data)
    if header.digest != _seal(header, tensors):
        raise Corrupt(f"checkpoint `{key}` is damaged: it does not match its digest")
    return Checkpoint(header, tensors)


def check_fits(header: Header, spec: RunSpec) -> None:
    """Refuse the weights of another base or another shape of adapter, and say which."""
    if header.base_hash != spec.base_hash:
        raise Conflict(f"the checkpoint belongs to base model {header.base_hash}, this run to {spec.base_hash}: create a run on that base")
    for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(header.lora, name), getattr(spec.lora, name)
        if theirs != ours:
            raise Conflict(f"the checkpoint was trained with {name}={theirs}, this run has {name}={ours}: create a run with {name}={theirs}")


def restore(checkpoint: Checkpoint, lora: Lora, adam: AdamW, *, optimizer: bool) -> None:
    """Take over the weights and, where asked, the optimizer; else it starts anew."""
    for slot, master in lora.named(lora.masters):
        master.copy_(checkpoint.tensors[slot.name])
    for prefix, flat in ((_FIRST, adam.first), (_SECOND, adam.second)):
        for slot, moment in lora.named(flat):
            moment.copy_(checkpoint.tensors[f"{prefix}{slot.name}"]) if optimizer else moment.zero_()
    adam.steps = checkpoint.header.step if optimizer else 0
    lora.clear_gradients()
    lora.refresh()


def _seal(header: Header, tensors: Mapping[str, Tensor]) -> str:
    bare = msgspec.json.encode(msgspec.structs.replace(header, digest=""), order="sorted")
    return blake3(bare + digest(sorted(tensors.items())).encode()).hexdigest()

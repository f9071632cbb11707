"""One run's low-rank factors: fp32 masters, the gradients gathered for them, and the copies that the forward computes with.

Masters and gradients are flat vectors with a named view per factor, unpadded. The copies are in the engine's compute dtype, the rank padded
with zeros; a snapshot holds the same numbers. Gradients of the padding are exactly zero and are never gathered.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from bloomery.models.adapters import Factors, FusedAdapter, padded_rank, target_shapes
from bloomery.models.decoder import Decoder
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import LoraSpec

PUBLISHED_PREFIX = "base_model.model.model."
PUBLISHED_EXPERTS = ".mlp.experts."


class Slot(NamedTuple):
    """Where one factor lives in the flat vectors; its rank is dimension `rank_dim`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    rank_dim: int


class Lora:
    """Trainable state of one adapter on `decoder`, without its optimizer."""

    def __init__(self, decoder: Decoder, spec: LoraSpec) -> None:
        shapes = target_shapes(decoder.config, attention=spec.train_attn, mlp=spec.train_mlp, unembed=spec.train_unembed)
        if not shapes:
            raise InvalidInput("nothing to train: set at least one of train_attn, train_mlp and train_unembed", field="lora_config")
        self.decoder, self.spec = decoder, spec
        self.slots = _slots(shapes, spec.rank)
        self.masters = torch.cat([_initial(slot, spec.seed).flatten() for slot in self.slots]).to(decoder.device)
        self.gradients = torch.zeros_like(self.masters)
        self._targets = tuple(shapes)
        self.copies = {slot.name: _padded(slot, decoder.dtype, decoder.device) for slot in self.slots}
        self.refresh()

    @property
    def backward_bytes(self) -> int:
        """Memory of the gradients that a backward leaves at the copies."""
        return sum(copy.nbytes for copy in self.copies.values())

    def fused(self) -> FusedAdapter | None:
        """The adapter of the next forward; gradients flow through it to the copies."""
        pairs = {target: Factors(self.copies[f"{target}.lora_A"], self.copies[f"{target}.lora_B"]) for target in self._targets}
        return FusedAdapter(pairs, self.spec.alpha / self.spec.rank)

    def refresh(self) -> None:
        """Cast the masters into the copies, after every change of the masters."""
        with torch.no_grad():
            for slot in self.slots:
                self._real(slot, self.copies[slot.name]).copy_(_view(slot, self.masters))

    def gather_gradients(self) -> None:
        """Add what the last backward left at the copies to the fp32 gradients."""
        for slot in self.slots:
            copy = self.copies[slot.name]
            if copy.grad is not None:
                _view(slot, self.gradients).add_(self._real(slot, copy.grad))
                copy.grad = None

    def discard_ungathered(self) -> None:
        """Forget what a backward left at the copies."""
        for copy in self.copies.values():
            copy.grad = None

    def clear_gradients(self) -> None:
        """Forget all gradients, gathered or not."""
        self.gradients.zero_()
        self.discard_ungathered()

    def published(self) -> dict[str, Tensor]:
        """The factors in the compute dtype, unpadded, under the names that PEFT uses; those of experts are stacked, under `mlp.experts.*`."""
        return {_published_name(slot): self._real(slot, self.copies[slot.name].detach()).contiguous() for slot in self.slots}

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each factor's view of a flat vector (masters, gradients, optimizer moments)."""
        for slot in self.slots:
            yield slot.name, _view(slot, flat)

    def _real(self, slot: Slot, padded: Tensor) -> Tensor:
        return padded.narrow(slot.rank_dim, 0, self.spec.rank)


def _view(slot: Slot, flat: Tensor) -> Tensor:
    return flat[slot.start : slot.stop].view(slot.shape)


def _published_name(slot: Slot) -> str:
    stacked = slot.name.replace(".mlp.", PUBLISHED_EXPERTS) if len(slot.shape) == 3 else slot.name
    return f"{PUBLISHED_PREFIX}{stacked}.weight"


def _slots(shapes: dict[str, tuple[int, int, int]], rank: int) -> list[Slot]:
    slots: list[Slot] = []
    start = 0
    for target, (experts, inputs, outputs) in shapes.items():
        lead = (experts,) if experts else ()
        for name, shape, rank_dim in (("lora_A", (*lead, rank, inputs), -2), ("lora_B", (*lead, outputs, rank), -1)):
            stop = start + torch.Size(shape).numel()
            slots.append(Slot(f"{target}.{name}", shape, start, stop, rank_dim))
            start = stop
    return slots


def _initial(slot: Slot, seed: int) -> Tensor:
    """A uniform in +-1/sqrt(inputs), from the seed and the name alone; B zero, so that a fresh adapter changes nothing."""
    if slot.name.endswith("lora_B"):
        return torch.zeros(slot.shape)
    named_seed = int.from_bytes(blake3(f"{seed} {slot.name}".encode()).digest()[:4])
    noise: Tensor = torch.rand(slot.shape, generator=torch.Generator().manual_seed(named_seed))
    bound = math.sqrt(1 / slot.shape[-1])
    return (2 * noise - 1) * bound


def _padded(slot: Slot, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = list(slot.shape)
    shape[slot.rank_dim] = padded_rank(shape[slot.rank_dim])
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

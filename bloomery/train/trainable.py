"""What a run trains: the seam between runs and their two kinds of weights, `Lora` and `FullParameters`.

Both keep fp32 masters and gradients as flat vectors with a named view per tensor, and copies of the masters in the engine's compute dtype. The
forward computes with the copies, and a snapshot holds them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.pads import pad_to
from bloomery.models.tensor_bytes import raw_bits, values
from bloomery.types.operations import LoraSpec

_DIGEST_HEX_DIGITS = 32


class Trainable(Protocol):
    """Trainable state without its optimizer."""

    spec: LoraSpec
    decoder: Decoder
    """Whose forward the run's micro-batches go through: the engine's own, or one that is the run's alone."""
    slots: list["Slot"]
    """Where each tensor lies in the flat vectors, in their order."""
    masters: Tensor
    gradients: Tensor

    @property
    def backward_bytes(self) -> int:
        """Memory of the gradients that a backward leaves at the copies."""
        ...

    def fused(self) -> FusedAdapter | None:
        """The adapter of the next forward; gradients flow through it to the copies. None where the decoder itself is trained."""
        ...

    def refresh(self) -> None:
        """Cast the masters into the copies, after every change of the masters."""
        ...

    def gather_gradients(self) -> None:
        """Add what the last backward left at the copies to the fp32 gradients."""
        ...

    def discard_ungathered(self) -> None:
        """Forget what a backward left at the copies."""
        ...

    def clear_gradients(self) -> None:
        """Forget all gradients, gathered or not."""
        ...

    def published(self) -> Mapping[str, Tensor]:
        """What a snapshot holds, by the names it has there."""
        ...

    def stale(self) -> str | None:
        """The first tensor of which the next forward computes with something else than is published; None where there is none."""
        ...

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's view of a flat vector (masters, gradients, optimizer moments), in a fixed order."""
        ...


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where numbers are none, which are equal to nothing; a zero with a sign is another one."""
    return one.dtype == other.dtype and torch.equal(raw_bits(one), raw_bits(other))


class Slot(NamedTuple):
    """Where one tensor lives in the flat vectors."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.start + self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Its view of a flat vector."""
        return flat[self.start : self.stop].view(self.shape)


def lay_out(shapes: Mapping[str, Sequence[int]], *, align: int = 1) -> list[Slot]:
    """Slots one after the other, each beginning at a multiple of `align` elements."""
    slots: list[Slot] = []
    for name, shape in shapes.items():
        slots.append(Slot(name, torch.Size(shape), pad_to(slots[-1].stop, align) if slots else 0))
    return slots


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """blake3 over names, shapes and values of float32 tensors, in the order given."""
    state = blake3()
    for name, tensor in tensors:
        state.update(f"{name} {list(tensor.shape)}\n".encode())
        state.update(values(tensor))
    return state.hexdigest()[:_DIGEST_HEX_DIGITS]

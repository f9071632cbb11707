"""A run's weights for sampling: safetensors in the compute dtype, of an adapter under the names that PEFT uses, of a whole model under
those of its Hugging Face directory."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from blake3 import blake3

from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter, fuse
from bloomery.models.load import fill
from bloomery.models.published_names import published_factor
from bloomery.models.tensor_bytes import Packed, pack
from bloomery.train.trainable import Trainable
from bloomery.types.errors import Corrupt
from bloomery.types.probe import TrainerSide
from bloomery.types.tensor_file import METADATA


class Snapshot(NamedTuple):
    """What a run hands over to be published."""

    kind: Literal["lora", "full"]
    run_id: str
    base: str
    parent: str
    template_hash: str
    step: int
    rank: int
    alpha: float
    targets: tuple[str, ...]
    data: bytes
    probe: Callable[[], TrainerSide] | None = None
    """Says what the run's forward says of the probe with these weights, while the run has them."""
    lasts: bool = True
    """Whether somebody may want the blob long after newer versions: not of a version without a name."""


def write(weights: Trainable) -> bytes:
    """The weights blob: equal weights give equal bytes. Corrupt where the run has trained with others than it would publish."""
    if (name := weights.stale()) is not None:
        raise Corrupt(f"the run computes with another `{name}` than it would publish: restore it from its last checkpoint")
    return pack(weights.published(), METADATA)


def read(data: bytes, base: Decoder, *, rank: int, alpha: float) -> FusedAdapter:
    """The adapter of a weights blob on `base`, with the very bits that the trainer's forward used."""
    tensors = {published_factor(name): tensor.to(base.device) for name, tensor in Packed(data).at_once().items()}
    names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    factors = {name: Factors(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in names}
    return fuse(base.targets, factors, alpha / rank)


def read_model(data: bytes | memoryview, base: Decoder) -> Decoder:
    """The model of a weights blob, of the same form and dtype as `base`, gradients off."""
    decoder = Decoder(base.config, dtype=base.dtype, device=base.device).requires_grad_(False)
    fill(decoder, Packed(data))
    return decoder


def content(data: bytes) -> str:
    """Identity of the weights alone."""
    return blake3(data).hexdigest()

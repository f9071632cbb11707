"""One run's low-rank factors: fp32 masters, the gradients gathered for them, and the fused adapter that the forward computes with.

Masters and gradients are flat vectors with a named view per factor, unpadded. The adapter holds them in the engine's compute dtype, scaled, with
zeros around them; what a backward leaves at those zeros is never gathered. A snapshot holds the same numbers.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from blake3 import blake3
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.published_names import published_factor, published_name
from bloomery.models.targets import Target, adapter_targets
from bloomery.train.trainable import Slot, lay_out, same_bits
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import LoraSpec


class Lora:
    """Trainable state of one adapter on `decoder`, without its optimizer."""

    def __init__(self, decoder: Decoder, spec: LoraSpec) -> None:
        targets = adapter_targets(decoder.config, attention=spec.train_attn, mlp=spec.train_mlp, unembed=spec.train_unembed)
        if not targets:
            raise InvalidInput("nothing to train: set at least one of train_attn, train_mlp and train_unembed", field="train_attn")
        self.decoder, self.spec = decoder, spec
        self.slots = lay_out(_factor_shapes(targets, spec.rank))
        self.masters = torch.cat([_initial(slot, spec.seed).flatten() for slot in self.slots]).to(decoder.device)
        self.gradients = torch.zeros_like(self.masters)
        self._targets, self._scale = tuple(targets), spec.alpha / spec.rank
        # Made once: to cut a small adapter into its factors takes longer than what is done with them.
        masters = dict(self.named(self.masters))
        self._by_target = {target: _factors(masters, target) for target in self._targets}
        self._published = {published_name(slot.name, stacked=len(slot.shape) == 3): masters[slot.name] for slot in self.slots}
        self._adapter = FusedAdapter(targets, spec.rank, self._scale, dtype=decoder.dtype, device=decoder.device, trained=True)
        self.refresh()

    @property
    def backward_bytes(self) -> int:
        """Memory of the gradients that a backward leaves at the adapter."""
        return sum(tensor.nbytes for tensor in self._adapter.tensors)

    def fused(self) -> FusedAdapter | None:
        """The adapter of the next forward, at which a backward leaves its gradients."""
        return self._adapter

    def refresh(self) -> None:
        """Cast the masters into the adapter, after every change of the masters."""
        self._adapter.fill(self._by_target)

    def gather_gradients(self) -> None:
        """Add what the last backward left at the adapter to the fp32 gradients."""
        gathered = dict(self.named(self.gradients))
        for target in self._targets:
            if (left := self._adapter.gradients(target)) is not None:
                a, b = _factors(gathered, target)
                a.add_(left.a)
                b.add_(left.b, alpha=self._scale)
        self.discard_ungathered()

    def discard_ungathered(self) -> None:
        """Forget what a backward left at the adapter."""
        for tensor in self._adapter.tensors:
            tensor.grad = None

    def clear_gradients(self) -> None:
        """Forget all gradients, gathered or not."""
        self.gradients.zero_()
        self.discard_ungathered()

    def published(self) -> dict[str, Tensor]:
        """The factors in the compute dtype, unpadded, under the names that PEFT uses; those of experts are stacked, under `experts.*`."""
        return {name: master.to(self.decoder.dtype) for name, master in self._published.items()}

    def stale(self) -> str | None:
        """The first factor that the forward computes with otherwise; what lies around the factors is multiplied with too."""
        if self._adapter.holds(self._by_target):
            return None
        found = self._adapter.factors()
        for name, tensor in self.published().items():
            view = found[published_factor(name)]
            if not same_bits(view.values, tensor if view.scale == 1 else tensor * view.scale):
                return name
        return f"{self._adapter.num_stray()} numbers around the factors"

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each factor's view of a flat vector (masters, gradients, optimizer moments)."""
        for slot in self.slots:
            yield slot.name, slot.of(flat)


def _factors(tensors: Mapping[str, Tensor], target: str) -> Factors:
    return Factors(tensors[f"{target}.lora_A"], tensors[f"{target}.lora_B"])


def _factor_shapes(targets: Mapping[str, Target], rank: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, target in targets.items():
        shapes[f"{name}.lora_A"], shapes[f"{name}.lora_B"] = target.factor_shapes(rank)
    return shapes


def _initial(slot: Slot, seed: int) -> Tensor:
    """A uniform in +-1/sqrt(inputs), from the seed and the name alone; B zero, so that a fresh adapter changes nothing."""
    if slot.name.endswith("lora_B"):
        return torch.zeros(slot.shape)
    named_seed = int.from_bytes(blake3(f"{seed} {slot.name}".encode()).digest()[:4])
    noise: Tensor = torch.rand(slot.shape, generator=torch.Generator().manual_seed(named_seed))
    bound = math.sqrt(1 / slot.shape[-1])
    return (2 * noise - 1) * bound

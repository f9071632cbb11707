"""All parameters of a model as one run trains them: a decoder of its own, with fp32 masters behind it.

Every tensor belongs to one part, and the parts that the run does not train are those of the engine's own decoder, shared and not copied:
`attn` (projections, norms of queries and keys, whatever else a mixer has, and the norm before), `mlp` (projections or experts with their router, and
the norm before), `unembed` (token embedding, per-layer inputs, last norm and head: both sides of the vocabulary). In fp32 the decoder's trained
tensors are the masters themselves.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.load import stored_tensors
from bloomery.models.memory import free_bytes
from bloomery.models.pads import pad_to
from bloomery.train.trainable import lay_out, same_bits
from bloomery.types.footprint import check_room, trained_parts
from bloomery.types.operations import LoraSpec

_ALIGN = 16
"""Elements: every view begins at a cache line, as tensors of their own do, so that products with them take the same kernels."""
_ATTENTION = ("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "latent", "recurrent", "o", "attention_out_norm")


class FullParameters:
    """Trainable state of a whole model that begins as `base`, without its optimizer."""

    def __init__(self, base: Decoder, spec: LoraSpec) -> None:
        parts = trained_parts(spec)
        chosen = {name: tensor for name, tensor in base.named_parameters() if part_of(name) in parts}
        check_room(sum(tensor.numel() for tensor in chosen.values()), free_bytes(base.device))
        self.spec, self.slots = spec, lay_out({name: tensor.shape for name, tensor in chosen.items()}, align=_ALIGN)
        self.masters = torch.zeros(pad_to(self.slots[-1].stop, _ALIGN), device=base.device)
        self.gradients = torch.zeros_like(self.masters)
        for name, master in self.named(self.masters):
            master.copy_(chosen[name])
        self.decoder = self._own_decoder(base)
        self._copies = {name: tensor for name, tensor in self.decoder.named_parameters() if name in chosen}

    @property
    def backward_bytes(self) -> int:
        """Memory of the gradients that a backward leaves at the decoder's tensors."""
        return sum(copy.nbytes for copy in self._copies.values())

    def fused(self) -> FusedAdapter | None:
        """None: the decoder itself is trained."""
        return None

    def refresh(self) -> None:
        """Cast the masters into the decoder's tensors, where these are not the masters themselves."""
        if self.decoder.dtype != self.masters.dtype:
            with torch.no_grad():
                for name, master in self.named(self.masters):
                    self._copies[name].copy_(master)

    def gather_gradients(self) -> None:
        """Add what the last backward left at the decoder's tensors to the fp32 gradients."""
        for name, gradient in self.named(self.gradients):
            left = self._copies[name].grad
            if left is not None:
                gradient.add_(left)
                self._copies[name].grad = None

    def discard_ungathered(self) -> None:
        """Forget what a backward left at the decoder's tensors."""
        for copy in self._copies.values():
            copy.grad = None

    def clear_gradients(self) -> None:
        """Forget all gradients, gathered or not."""
        self.gradients.zero_()
        self.discard_ungathered()

    def published(self) -> dict[str, Tensor]:
        """Every tensor of the model, trained or not, under its name in a Hugging Face directory."""
        return stored_tensors(self.decoder)

    def stale(self) -> str | None:
        """The first tensor that is not what its master is in the compute dtype."""
        return next((name for name, master in self.named(self.masters) if not same_bits(self._copies[name], master.to(self.decoder.dtype))), None)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each trained tensor's view of a flat vector, named as in the decoder."""
        for slot in self.slots:
            yield slot.name, slot.of(flat)

    def _own_decoder(self, base: Decoder) -> Decoder:
        masters = dict(self.named(self.masters))
        own = {name: masters[name].to(base.dtype) if name in masters else tensor.data for name, tensor in base.named_parameters()}
        own |= dict(base.named_buffers())
        decoder = Decoder(base.config, dtype=base.dtype, device="meta").requires_grad_(False)
        decoder.load_state_dict(own, assign=True)
        for name, tensor in decoder.named_parameters():
            tensor.requires_grad_(name in masters)
        return decoder


def part_of(name: str) -> str:
    """Which of `attn`, `mlp` and `unembed` a decoder's tensor belongs to."""
    if not name.startswith("layers."):
        return "unembed"
    return "attn" if name.split(".")[2] in _ATTENTION else "mlp"


def count_parts(decoder: Decoder) -> dict[str, int]:
    """Parameters of each part."""
    counts: dict[str, int] = {}
    for name, tensor in decoder.named_parameters():
        counts[part_of(name)] = counts.get(part_of(name), 0) + tensor.numel()
    return counts

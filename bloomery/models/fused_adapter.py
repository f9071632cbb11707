"""One adapter as the forward uses it: the factors of projections that are computed together, joined."""

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.models import native
from bloomery.models.factors import Factors, padded_rank
from bloomery.models.targets import TargetShape


class FusedAdapter:
    """One adapter as the forward uses it: for each fused projection the joined `a` and the scaled block-diagonal `b`, zeros around the factors.

    A run fills it after every step and finds the gradients of a backward in it; the sampler fills one per version.
    """

    def __init__(
        self, shapes: Mapping[str, TargetShape], rank: int, scale: float, *, dtype: torch.dtype, device: torch.device | str, trained: bool = False
    ) -> None:
        self._scale = scale
        self._blocks = _blocks(shapes, rank)
        self._fused: dict[str, Factors] = {}
        for target, shape in shapes.items():
            projection = self._blocks[target].projection
            blocks = [block for block in self._blocks.values() if block.projection == projection]
            lead, width = (shape.experts,) if shape.experts else (), padded_rank(rank) * len(blocks)
            sizes = (*lead, width, shape.inputs), (*lead, max(block.outputs.stop for block in blocks), width)
            a, b = (_zeros(size, dtype, torch.device(device)).requires_grad_(trained) for size in sizes)
            self._fused.setdefault(projection, Factors(a, b))

    def get(self, projection: str) -> Factors | None:
        """The fused factors of a projection such as `layers.0.qkv`, or None where the adapter has none."""
        return self._fused.get(projection)

    @property
    def tensors(self) -> list[Tensor]:
        """All fused factors."""
        return [tensor for pair in self._fused.values() for tensor in pair]

    def fill(self, target: str, factors: Factors) -> None:
        """Take over a target's factors, unpadded."""
        block = self._blocks[target]
        with torch.no_grad():
            a, b = block.of(self._fused[block.projection])
            a.copy_(factors.a)
            b.copy_(factors.b).mul_(self._scale)

    def gradients(self, target: str) -> Factors | None:
        """What backwards left for a target's factors, unpadded and not yet scaled by `scale`; None where none did."""
        block = self._blocks[target]
        a, b = self._fused[block.projection]
        return None if a.grad is None or b.grad is None else block.of(Factors(a.grad, b.grad))

    def copy(self) -> "FusedAdapter":
        """One with the same numbers, which may change while this one is in use."""
        twin = copy(self)
        twin._fused = {projection: Factors(pair.a.detach().clone(), pair.b.detach().clone()) for projection, pair in self._fused.items()}
        return twin

    def factors(self) -> dict[str, "ScaledView"]:
        """Every factor by its published name (`published_factor`), unpadded."""
        found: dict[str, ScaledView] = {}
        for target, block in self._blocks.items():
            a, b = block.of(self._fused[block.projection])
            found[f"{target}.lora_A"], found[f"{target}.lora_B"] = ScaledView(a, 1.0), ScaledView(b, self._scale)
        return found

    def num_stray(self) -> int:
        """Numbers around the factors that are not zero, though they are multiplied with; of a zero with a sign too."""
        return sum(map(_num_set, self.tensors)) - sum(_num_set(view.values) for view in self.factors().values())


class ScaledView(NamedTuple):
    """A factor where the forward uses it: there its published values are multiplied by `scale`."""

    values: Tensor
    scale: float


def fuse(factors: Mapping[str, Factors], scale: float) -> FusedAdapter:
    """The adapter of these factors by target, all of one rank."""
    shapes = {name: TargetShape(a.shape[0] if a.dim() == 3 else 0, a.shape[-1], b.shape[-2]) for name, (a, b) in factors.items()}
    like = next((pair.a for pair in factors.values()), torch.zeros(1, 1))
    fused = FusedAdapter(shapes, like.shape[-2], scale, dtype=like.dtype, device=like.device)
    for target, pair in factors.items():
        fused.fill(target, pair)
    return fused


_FUSED_ORDER = {
    **{"q_proj": 0, "k_proj": 1, "v_proj": 2},
    **{"q_a_proj": 0, "kv_a_proj_with_mqa": 1},
    **{"in_proj_qkv": 0, "in_proj_b": 1, "in_proj_a": 2, "in_proj_z": 3},
    **{"gate_proj": 0, "up_proj": 1},
}
_FUSED_NAME = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "q_a_proj": "qkv",
    "kv_a_proj_with_mqa": "qkv",
    "q_b_proj": "q_b",
    "kv_b_proj": "kv_b",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "in_proj": "qkv",
    **dict.fromkeys(("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"), "qkv"),
    "out_proj": "o",
    "fc1_latent_proj": "latent_in",
    "fc2_latent_proj": "latent_out",
}
_OWN_NAME = {"experts": ".experts", "shared_experts": ".shared", "shared_expert": ".shared"}
"""Modules whose projections are called as others of their layer, and what tells them apart."""


class _Block(NamedTuple):
    """Where a target's factors lie in the fused ones of its projection."""

    projection: str
    ranks: slice
    outputs: slice

    def of(self, fused: Factors) -> Factors:
        """Its own part."""
        return Factors(fused.a[..., self.ranks, :], fused.b[..., self.outputs, self.ranks])


def _blocks(shapes: Mapping[str, TargetShape], rank: int) -> dict[str, _Block]:
    blocks: dict[str, _Block] = {}
    ends: dict[str, tuple[int, int]] = {}
    for target in sorted(shapes, key=lambda name: _FUSED_ORDER.get(name.rpartition(".")[2], 0)):
        # `layers.0.mlp.shared_experts.up_proj`: the layer, its module, and the projection.
        head, _, leaf = target.rpartition(".")
        module = head.rpartition(".")[2]
        layer = ".".join(head.split(".")[:2])
        projection = f"{layer}{_OWN_NAME.get(module, '')}.{_FUSED_NAME[leaf]}" if head else target
        ranks, outputs = ends.get(projection, (0, 0))
        end = outputs + shapes[target].outputs
        blocks[target] = _Block(projection, slice(ranks, ranks + rank), slice(outputs, end))
        ends[projection] = (ranks + padded_rank(rank), end)
    return blocks


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix that is to be multiplied with, its columns in one piece where the kernels read them so."""
    if len(size) == 2 and native.multiplies(torch.empty(0, dtype=dtype, device=device)):
        return torch.zeros(size[::-1], dtype=dtype, device=device).t()
    return torch.zeros(size, dtype=dtype, device=device)


def _num_set(tensor: Tensor) -> int:
    bits = torch.int16 if tensor.element_size() == 2 else torch.int32
    return int(tensor.detach().contiguous().view(bits).count_nonzero())

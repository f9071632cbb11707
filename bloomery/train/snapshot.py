"""A run's weights for sampling: safetensors in the compute dtype under the names that PEFT uses."""

from typing import NamedTuple

import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from bloomery.models.adapters import Factors, FusedAdapter, padded_rank
from bloomery.train.lora import Lora

_PREFIX = "base_model.model.model."
_EXPERTS = ".mlp.experts."


class Snapshot(NamedTuple):
    """What a run hands over to be published."""

    run_id: str
    base: str
    parent: str
    template_hash: str
    step: int
    rank: int
    alpha: float
    targets: tuple[str, ...]
    data: bytes


def write(lora: Lora) -> bytes:
    """The weights blob: equal weights give equal bytes. Experts are stacked, under `mlp.experts.*`."""
    return save({_published_name(name, tensor): tensor.cpu() for name, tensor in lora.published().items()}, {"format": "pt"})


def read(data: bytes, *, rank: int, alpha: float, device: torch.device | str = "cpu") -> FusedAdapter:
    """The adapter of a weights blob, with the very bits that the trainer's forward used."""
    tensors = {name.removeprefix(_PREFIX).replace(_EXPERTS, ".mlp."): tensor.to(device) for name, tensor in load(data).items()}
    targets = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[0] for name in tensors)
    factors = {
        target: Factors(_pad(tensors[f"{target}.lora_A.weight"], rank, -2), _pad(tensors[f"{target}.lora_B.weight"], rank, -1)) for target in targets
    }
    return FusedAdapter(factors, alpha / rank)


def content(data: bytes) -> str:
    """Identity of the weights alone."""
    return blake3(data).hexdigest()


def _published_name(name: str, tensor: Tensor) -> str:
    stacked = name.replace(".mlp.", _EXPERTS) if tensor.dim() == 3 else name
    return f"{_PREFIX}{stacked}.weight"


def _pad(factor: Tensor, rank: int, rank_dim: int) -> Tensor:
    shape = list(factor.shape)
    shape[rank_dim] = padded_rank(rank)
    padded = torch.zeros(shape, dtype=factor.dtype, device=factor.device)
    padded.narrow(rank_dim, 0, rank).copy_(factor)
    return padded

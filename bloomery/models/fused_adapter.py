"""One adapter as the forward uses it: the factors of targets that lie in one parameter, joined."""

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.models.factors import Factors, padded_rank
from bloomery.models.native import low_rank
from bloomery.models.native.low_rank import TargetPlace
from bloomery.models.targets import Target
from bloomery.models.tensor_bytes import raw_bits
from bloomery.types.errors import InvalidInput, NotSupported


class FusedAdapter:
    """For each parameter of the decoder the joined `a` and the scaled block-diagonal `b` of all its rows, zeros around the factors.

    A run fills it after every step and finds the gradients of a backward in it; the sampler fills one per version.
    """

    def __init__(
        self, targets: Mapping[str, Target], rank: int, scale: float, *, dtype: torch.dtype, device: torch.device | str, trained: bool = False
    ) -> None:
        self._scale = scale
        self._blocks: dict[str, _Block] = {}
        self._fused: dict[str, Factors] = {}
        self._places: dict[str, tuple[TargetPlace, ...]] = {}
        for parameter, names in _by_parameter(targets).items():
            like, width = targets[names[0]], padded_rank(rank * len(names))
            sizes = (*like.lead, width, like.inputs), (*like.lead, like.parameter_rows, width)
            self._fused[parameter] = Factors(*(_zeros(size, dtype, torch.device(device)).requires_grad_(trained) for size in sizes))
            for place, name in enumerate(names):
                self._blocks[name] = _Block(parameter, slice(rank * place, rank * (place + 1)), targets[name].rows)
            self._places[parameter] = tuple(self._blocks[name].place for name in names)

    def get(self, parameter: str) -> Factors | None:
        """The fused factors of a parameter such as `layers.0.qkv`, or None where the adapter has none."""
        return self._fused.get(parameter)

    def places(self, parameter: str) -> tuple[TargetPlace, ...]:
        """Where the factors of each target lie in the fused ones of a parameter."""
        return self._places[parameter]

    @property
    def layout(self) -> tuple[tuple[str, tuple[TargetPlace, ...]], ...]:
        """Its parameters, in the order of `tensors`, and what is joined in the factors of each."""
        return tuple(self._places.items())

    @property
    def tensors(self) -> list[Tensor]:
        """All fused factors."""
        return [tensor for pair in self._fused.values() for tensor in pair]

    def fill(self, target: str, factors: Factors) -> None:
        """Take over a target's factors, unpadded."""
        block = self._blocks[target]
        with torch.no_grad():
            a, b = block.of(self._fused[block.parameter])
            a.copy_(factors.a)
            b.copy_(factors.b).mul_(self._scale)

    def gradients(self, target: str) -> Factors | None:
        """What backwards left for a target's factors, unpadded and not yet scaled by `scale`; None where none did."""
        block = self._blocks[target]
        a, b = self._fused[block.parameter]
        return None if a.grad is None or b.grad is None else block.of(Factors(a.grad, b.grad))

    def copy(self) -> "FusedAdapter":
        """One with the same numbers, which may change while this one is in use."""
        twin = copy(self)
        twin._fused = {parameter: Factors(pair.a.detach().clone(), pair.b.detach().clone()) for parameter, pair in self._fused.items()}
        return twin

    def factors(self) -> dict[str, "ScaledView"]:
        """Every factor by its published name (`published_factor`), unpadded."""
        found: dict[str, ScaledView] = {}
        for target, block in self._blocks.items():
            a, b = block.of(self._fused[block.parameter])
            found[f"{target}.lora_A"], found[f"{target}.lora_B"] = ScaledView(a, 1.0), ScaledView(b, self._scale)
        return found

    def num_stray(self) -> int:
        """Numbers around the factors that are not zero, though they are multiplied with; of a zero with a sign too."""
        return sum(map(_num_set, self.tensors)) - sum(_num_set(view.values) for view in self.factors().values())


class ScaledView(NamedTuple):
    """A factor where the forward uses it: there its published values are multiplied by `scale`."""

    values: Tensor
    scale: float


def fuse(targets: Mapping[str, Target], factors: Mapping[str, Factors], scale: float) -> FusedAdapter:
    """The adapter of factors of one rank, on some of the `targets` of a model."""
    like = next((pair.a for pair in factors.values()), torch.zeros(1, 1))
    rank = like.shape[-2]
    for name, pair in factors.items():
        _check(name, targets.get(name), pair, rank)
    fused = FusedAdapter({name: targets[name] for name in factors}, rank, scale, dtype=like.dtype, device=like.device)
    for name, pair in factors.items():
        fused.fill(name, pair)
    return fused


def _check(name: str, target: Target | None, factors: Factors, rank: int) -> None:
    if target is None:
        raise NotSupported(f"the adapter is on `{name}`, on which none can be in this model: use the model that it was trained on, or leave it out")
    found, wanted = [list(each.shape) for each in factors], [list(shape) for shape in target.factor_shapes(rank)]
    if found != wanted:
        raise InvalidInput(
            f"the factors of `{name}` have shapes {found[0]} and {found[1]}, in this model and beside those of rank {rank} they must have "
            f"{wanted[0]} and {wanted[1]}: use the model that the adapter was trained on, and one rank for all of it"
        )


class _Block(NamedTuple):
    """Where a target's factors lie in the fused ones of its parameter."""

    parameter: str
    ranks: slice
    rows: slice

    @property
    def place(self) -> TargetPlace:
        """The same for kernels."""
        return TargetPlace(self.ranks.start, self.ranks.stop - self.ranks.start, self.rows.start, self.rows.stop - self.rows.start)

    def of(self, fused: Factors) -> Factors:
        """Its own part."""
        return Factors(fused.a[..., self.ranks, :], fused.b[..., self.rows, self.ranks])


def _by_parameter(targets: Mapping[str, Target]) -> dict[str, list[str]]:
    """In the order of their rows, whatever the order of the targets: in another one the same factors may give other bits."""
    found: dict[str, list[str]] = {}
    for name in sorted(targets, key=lambda name: targets[name].first_row):
        found.setdefault(targets[name].parameter, []).append(name)
    return {target.parameter: found[target.parameter] for target in targets.values()}


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix that is to be multiplied with, its columns in one piece where the kernels read them so."""
    if len(size) == 2 and low_rank.adds(torch.empty(0, dtype=dtype, device=device)):
        return torch.zeros(size[::-1], dtype=dtype, device=device).t()
    return torch.zeros(size, dtype=dtype, device=device)


def _num_set(tensor: Tensor) -> int:
    return int(raw_bits(tensor).count_nonzero())

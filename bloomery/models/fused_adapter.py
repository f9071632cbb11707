"""One adapter as the forward uses it: the factors of targets that lie in one parameter, joined."""

import math
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.factors import Factors, padded_rank
from bloomery.models.native import low_rank
from bloomery.models.native.low_rank import TargetPlace
from bloomery.models.pads import pad_to
from bloomery.models.pieces import in_pieces
from bloomery.models.targets import Target
from bloomery.models.tensor_bytes import num_set, raw_bits
from bloomery.types.errors import InvalidInput, NotSupported

_LAYOUTS: Final = 64
"""So many are remembered: the versions of a run have one."""
_ALIGNED_BYTES: Final = 64
"""Where torch would begin a tensor of its own: kernels of libraries may add up in another order elsewhere."""


class FusedAdapter:
    """For each parameter of the decoder the joined `a` and the scaled block-diagonal `b` of all its rows, zeros around the factors.

    A run fills it after every step and finds the gradients of a backward in it; the sampler fills one per version. All of it lies in one piece of
    memory, and what is done to every factor is one call where torch has one: of a small adapter the calls are what takes time.
    """

    def __init__(
        self, targets: Mapping[str, Target], rank: int, scale: float, *, dtype: torch.dtype, device: torch.device | str, trained: bool = False
    ) -> None:
        self._scale = scale
        by_columns = low_rank.adds(torch.empty(0, dtype=dtype, device=device))
        self._layout = _layout_of(tuple(targets.items()), rank, dtype.itemsize, by_columns)
        self._lay_out(torch.zeros(self._layout.length, dtype=dtype, device=device), trained=trained)

    def _lay_out(self, storage: Tensor, *, trained: bool = False) -> None:
        """Have the fused factors lie there."""
        self._storage = storage
        self._fused = {parameter: Factors(*(slot.of(storage) for slot in pair)) for parameter, pair in self._layout.slots.items()}
        self._own = {target: block.of(self._fused[block.parameter]) for target, block in self._layout.blocks.items()}
        for tensor in self.tensors:
            tensor.requires_grad_(trained)

    def get(self, parameter: str) -> Factors | None:
        """The fused factors of a parameter such as `layers.0.qkv`, or None where the adapter has none."""
        return self._fused.get(parameter)

    def places(self, parameter: str) -> tuple[TargetPlace, ...]:
        """Where the factors of each target lie in the fused ones of a parameter."""
        return self._layout.places[parameter]

    @property
    def layout(self) -> tuple[tuple[str, tuple[TargetPlace, ...]], ...]:
        """Its parameters, in the order of `tensors`, and what is joined in the factors of each."""
        return tuple(self._layout.places.items())

    @property
    def tensors(self) -> list[Tensor]:
        """All fused factors."""
        return [tensor for pair in self._fused.values() for tensor in pair]

    @torch.no_grad()
    def fill(self, factors: Mapping[str, Factors]) -> None:
        """Take over the factors of targets, unpadded."""
        if not factors:
            return
        own = [self._own[target] for target in factors]
        scaled = [pair.b for pair in own]
        torch._foreach_copy_([pair.a for pair in own] + scaled, [pair.a for pair in factors.values()] + [pair.b for pair in factors.values()])
        # One call for all of them would round the scale to their own type first, which only a power of two survives.
        for tensor in scaled:
            tensor.mul_(self._scale)

    def holds(self, factors: Mapping[str, Factors]) -> bool:
        """Whether these, of all its targets, would fill a new one with the very bits that are here, those around the factors included."""
        fresh = self._twin(torch.zeros_like(self._storage))
        fresh.fill(factors)
        return torch.equal(raw_bits(self._storage), raw_bits(fresh._storage))

    def gradients(self, target: str) -> Factors | None:
        """What backwards left for a target's factors, unpadded and not yet scaled by `scale`; None where none did."""
        block = self._layout.blocks[target]
        a, b = self._fused[block.parameter]
        return None if a.grad is None or b.grad is None else block.of(Factors(a.grad, b.grad))

    def copy(self) -> "FusedAdapter":
        """One with the same numbers, which may change while this one is in use."""
        return self._twin(self._storage.clone())

    def factors(self) -> dict[str, "ScaledView"]:
        """Every factor by its published name (`published_factor`), unpadded."""
        found: dict[str, ScaledView] = {}
        for target, (a, b) in self._own.items():
            found[f"{target}.lora_A"], found[f"{target}.lora_B"] = ScaledView(a, 1.0), ScaledView(b, self._scale)
        return found

    def num_stray(self, num_own: int | None = None) -> int:
        """Numbers around the factors that are not zero, though they are multiplied with; of a zero with a sign too. `num_own` of the factors are
        not, where somebody has counted."""
        if num_own is None:
            num_own = sum(map(num_set, in_pieces([tensor for pair in self._own.values() for tensor in pair])))
        return num_set(self._storage) - num_own

    def _twin(self, storage: Tensor) -> "FusedAdapter":
        twin = copy(self)
        twin._lay_out(storage)
        return twin


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
    fused.fill(factors)
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


class _Layout(NamedTuple):
    """Where everything lies in the memory of an adapter, of `length` numbers."""

    blocks: Mapping[str, _Block]
    slots: Mapping[str, tuple["_Slot", "_Slot"]]
    places: Mapping[str, tuple[TargetPlace, ...]]
    length: int


@lru_cache(_LAYOUTS)
def _layout_of(targets: tuple[tuple[str, Target], ...], rank: int, itemsize: int, by_columns: bool) -> _Layout:
    blocks: dict[str, _Block] = {}
    slots: dict[str, tuple[_Slot, _Slot]] = {}
    places: dict[str, tuple[TargetPlace, ...]] = {}
    by_name, length, step = dict(targets), 0, _ALIGNED_BYTES // itemsize
    for parameter, names in _by_parameter(by_name).items():
        like, width = by_name[names[0]], padded_rank(rank * len(names))
        a = _Slot(length, (*like.lead, width, like.inputs), by_columns)
        b = _Slot(pad_to(a.stop, step), (*like.lead, like.parameter_rows, width), by_columns)
        slots[parameter], length = (a, b), pad_to(b.stop, step)
        blocks |= {name: _Block(parameter, slice(rank * place, rank * (place + 1)), by_name[name].rows) for place, name in enumerate(names)}
        places[parameter] = tuple(blocks[name].place for name in names)
    return _Layout(blocks, slots, places, length)


def _by_parameter(targets: Mapping[str, Target]) -> dict[str, list[str]]:
    """In the order of their rows, whatever the order of the targets: in another one the same factors may give other bits."""
    found: dict[str, list[str]] = {}
    for name in sorted(targets, key=lambda name: targets[name].first_row):
        found.setdefault(targets[name].parameter, []).append(name)
    return {target.parameter: found[target.parameter] for target in targets.values()}


class _Slot(NamedTuple):
    """Where a matrix that is multiplied with lies among all of them, its columns in one piece where the kernels read them so."""

    start: int
    size: tuple[int, ...]
    by_columns: bool

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.start + math.prod(self.size)

    def of(self, storage: Tensor) -> Tensor:
        """Its view."""
        flat = storage[self.start : self.stop]
        return flat.view(self.size[::-1]).t() if self.by_columns and len(self.size) == 2 else flat.view(self.size)

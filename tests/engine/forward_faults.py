"""Silent faults of a sampler's forward, which does something else than the weights say that lie in memory, proved: only the probe sees these.

They are injected into `Runner`, which the sampler's side of the probe goes through as what is served does, and never into the trainer's forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.runner import Feed, Runner
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.fused_adapter import FusedAdapter
from tests.engine.faults import Fault, Patch, World


def _through(patch: Patch, change: Callable[[FusedAdapter], FusedAdapter | None]) -> None:
    """The sampler's forward alone, its head included, computes with something else than the adapter that lies in memory."""
    laid_out, logits = Runner._laid_out, Runner._logits

    def instead(model: Model) -> Model:
        return model if model.adapter is None else model._replace(adapter=change(model.adapter))

    def rows(self: Runner, feeds: Sequence[Feed], *form: Any) -> Any:
        return laid_out(self, [feed._replace(model=instead(feed.model)) for feed in feeds], *form)

    patch.setattr(Runner, "_laid_out", rows)
    patch.setattr(Runner, "_logits", lambda self, hidden_RD, model: logits(self, hidden_RD, instead(model)))


def never_applied(patch: Patch, world: World) -> None:
    """It is in memory, proved, and no forward multiplies with it."""
    _through(patch, lambda adapter: None)


def left_out_of_experts(patch: Patch, world: World) -> None:
    """Every projection is computed with it but those of experts."""
    _changed(patch, lambda tensors: [tensor.zero_() for tensor in tensors if tensor.ndim == 3])


def applied_by_a_quarter(patch: Patch, world: World) -> None:
    """Most projections are computed without it."""
    _changed(patch, lambda tensors: [tensor.zero_() for tensor in tensors[: len(tensors) * 3 // 4]])


def applied_but_for_a_quarter(patch: Patch, world: World) -> None:
    """Some are."""
    _changed(patch, lambda tensors: [tensor.zero_() for tensor in tensors[: len(tensors) // 4]])


def applied_twice(patch: Patch, world: World) -> None:
    """The scale is multiplied in once more than it should."""
    _changed(patch, lambda tensors: [tensor.mul_(2) for tensor in tensors[1::2]])


def scaled_by_another(patch: Patch, world: World) -> None:
    """The scale is that of another rank."""
    _changed(patch, lambda tensors: [tensor.mul_(1.4) for tensor in tensors[1::2]])


def _changed(patch: Patch, change: Callable[[list[Tensor]], object]) -> None:
    """The sampler's forward computes with a copy of the adapter in which this was done to the factors, A and B in turn."""

    def copied(adapter: FusedAdapter) -> FusedAdapter:
        other = adapter.copy()
        change(list(other.tensors))
        return other

    _through(patch, copied)


def first_one_for_all(patch: Patch, world: World) -> None:
    """What was compiled, captured or stacked for the adapter before goes on being computed with."""
    seen: list[FusedAdapter] = []

    def first(adapter: FusedAdapter) -> FusedAdapter:
        seen.append(adapter)
        return seen[0]

    _through(patch, first)


def base_for_all(patch: Patch, world: World) -> None:
    """A whole model is in memory, proved, and the forward goes through the base."""
    begin = Runner.__init__

    def beside(self: Runner, cache: KeyValueCache, form: Form, twin: Callable[[Decoder], Decoder]) -> None:
        begin(self, cache, form, lambda decoder: twin(world.base))

    patch.setattr(Runner, "__init__", beside)


NOT_SERVED = "is not served"

FORWARD_FAULTS = (
    Fault("adapter never applied", ("verl#7495",), 8, never_applied, NOT_SERVED),
    Fault("adapter left out of the experts", ("SkyRL#1776",), 8, left_out_of_experts, NOT_SERVED, experts=True),
    Fault("adapter applied in part", ("SkyRL#1776",), 8, applied_by_a_quarter, NOT_SERVED),
    Fault("adapter left out of a quarter", ("SkyRL#1776",), 8, applied_but_for_a_quarter, NOT_SERVED),
    Fault("scale applied twice", ("SkyRL#1077",), 8, applied_twice, NOT_SERVED),
    Fault("scale of another rank", ("SkyRL#1077",), 8, scaled_by_another, NOT_SERVED),
    Fault("adapter of before applied", ("vllm#32718",), 8, first_one_for_all, NOT_SERVED),
    Fault("model never applied", ("SkyRL#1680",), 0, base_for_all, NOT_SERVED),
)

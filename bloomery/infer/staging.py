"""New weights beside those that are served: a copy takes over tensors and patches, and nobody notices before it is swapped in.

What it must hash to is known from what it was copied from and from what it was given, at the cost of what was given; before it is swapped in it is
read back and held against that (`prove`), and asked the probe. So a tensor that went to the wrong place, or only in part, or changed meanwhile, or
that a sampler leaves out, is not served.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from threading import Lock
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from bloomery.infer.engine import Patch, Update
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter, ScaledView
from bloomery.models.load import stored_tensors
from bloomery.models.pieces import SMALL_ELEMENTS, in_pieces, runs
from bloomery.models.published_names import published_factor
from bloomery.models.rests import rest
from bloomery.models.tensor_bytes import values
from bloomery.sync import live
from bloomery.sync.proof import Expected, Proof, prove
from bloomery.sync.state_hash import StateHash, total
from bloomery.types.errors import Conflict, InvalidInput
from bloomery.types.probe import Probed


class Staging:
    """A copy of a model's weights, an adapter alone or all of a decoder, that becomes other weights."""

    def __init__(self, model: Model, version: str) -> None:
        self._version, self._decoder = version, model.decoder
        self._proof: Proof | None = None
        self._probed: Probed | None = None
        self._firsts, self._states = _known(model)
        rest()
        self._adapter = None if model.adapter is None else model.adapter.copy()
        if self._adapter is None:
            self._decoder = _copy(model.decoder)
        rest()
        self._views = _views(self._decoder, self._adapter)
        self._short: Callable[[str], str] = str if self._adapter is None else published_factor
        """Of a published name, with the prefix that PEFT wants or without it."""
        self._published = {self._short(name): name for name in self._views}
        self._applying, self._sealed = Lock(), False

    @property
    def size_bytes(self) -> int:
        """Memory of the copy."""
        return sum(tensor.nbytes for tensor in _numbers(self._decoder, self._adapter).values())

    def apply(self, update: Mapping[str, Update]) -> None:
        """Take over tensors under their published names; nothing of it, when one does not fit. From any thread, one after the other."""
        with self._applying, torch.no_grad():
            if self._sealed:
                raise Conflict("a commit of this update has begun: commit it again, or cancel it and begin another", field="name")
            changes: dict[str, Update] = {}
            for name, change in update.items():
                published = self._published.get(self._short(name), name)
                _check(name, change, self._views.get(published))
                if published in changes:
                    raise InvalidInput(f"tensor `{published}` is named twice, with its prefix and without: which of the two is meant?", field=name)
                changes[published] = change
                rest()
            whole = {name: change for name, change in changes.items() if not isinstance(change, Patch)}
            for names in self._together(whole):
                self._take_over({name: whole[name] for name in names})
                rest()
            for name, change in changes.items():
                if isinstance(change, Patch):
                    self._take_over_patch(name, change)
                    rest()

    def seal(self) -> None:
        """Nothing is taken over any more, be it that requests run with these weights, or that others were made of them, as packed ones are."""
        if not self._applying.acquire(blocking=False):
            raise Conflict("tensors are just being applied to this update: wait until they are, then commit", field="name")
        self._sealed = True
        self._applying.release()

    def prove(self, computed_with: Callable[[Decoder], Decoder]) -> None:
        """Read back what a sampler will compute with, of a sealed copy; Corrupt where that is not what was copied and given."""
        known = Expected(self._version, total(self._states.values()), self._states)
        self._proof = prove(known, self._decoder if self._adapter is not None else computed_with(self._decoder), self._adapter)

    def ask_probe(self, examine: Callable[[Model], Model]) -> None:
        """Have what was proved answer the probe (`probe.Probation`)."""
        self._probed = examine(self.model()).probed

    def model(self) -> Model:
        """What came of it, with its proof and its answer to the probe as soon as they are there."""
        return Model(self._version, self._decoder, self._adapter, self._proof, probed=self._probed)

    def _together(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Those of small tensors whose elements follow one another, and one by one those of others."""
        ordered = sorted(names, key=self._firsts.__getitem__)
        apart = [place for place, (before, name) in enumerate(pairwise(ordered), 1) if not self._follows(before, name)]
        for start, stop in pairwise((0, *apart, len(ordered))):
            for run in runs([self._views[name].values.numel() for name in ordered[start:stop]], SMALL_ELEMENTS):
                yield ordered[start + run.start : start + run.stop]

    def _follows(self, before: str, name: str) -> bool:
        one, other = self._views[before].values, self._views[name].values
        return self._firsts[name] == self._firsts[before] + one.numel() and one.dtype == other.dtype

    def _take_over(self, whole: Mapping[str, Tensor]) -> None:
        views = [self._views[name] for name in whole]
        new = [_as_computed_with(given, view) for given, view in zip(whole.values(), views, strict=True)]
        # Before they are written: what breaks off in the middle is not what is expected.
        self._states |= zip(whole, live.hash_tensors(new, min(self._firsts[name] for name in whole)), strict=True)
        torch._foreach_copy_([view.values for view in views], new)

    def _take_over_patch(self, name: str, patch: Patch) -> None:
        view = self._views[name]
        new, (values, at) = _as_computed_with(patch.values, view), _place(patch, view.values)
        # Before it is written, too; from what is given and what that replaces.
        self._states[name] += live.changed(patch.indices.long() + self._firsts[name], values[at], new)
        values[at] = new


def _known(model: Model) -> tuple[dict[str, int], dict[str, StateHash]]:
    """Index of the first element of every tensor, and what it hashes to: as was proved before, or as it is."""
    firsts = live.tensor_firsts(model.decoder, model.adapter)
    if model.proof is not None:
        return firsts, dict(model.proof.expected.tensors)
    states = live.tensor_states(live.hash_pieces(live.pieces(model.decoder, model.adapter)))
    if live.has_packed_embedding(model.decoder):
        states.pop(live.PACKED_EMBEDDING, None)
    return firsts, states


def checksum(model: Model) -> str:
    """Of the numbers in memory that make a model what it is: an adapter's own, or all of a decoder."""
    numbers = dict(sorted(_numbers(model.decoder, model.adapter).items()))
    found = blake3("".join(f"{name} {tensor.dtype} {list(tensor.shape)} " for name, tensor in numbers.items()).encode())
    for piece in in_pieces(list(numbers.values())):
        found.update(values(piece))
        rest()
    return found.hexdigest()[:32]


def _numbers(decoder: Decoder, adapter: FusedAdapter | None) -> dict[str, Tensor]:
    return stored_tensors(decoder) if adapter is None else {name: view.values for name, view in adapter.factors().items()}


def _copy(decoder: Decoder) -> Decoder:
    twin = Decoder(decoder.config, dtype=decoder.dtype, device=decoder.device).requires_grad_(False)
    rest()
    for own, other in zip(_memory(twin), _memory(decoder), strict=True):
        own.copy_(other)
        rest()
    return twin


def _memory(decoder: Decoder) -> Iterator[Tensor]:
    return chain(decoder.parameters(), decoder.buffers())


def _views(decoder: Decoder, adapter: FusedAdapter | None) -> Mapping[str, ScaledView]:
    """Every tensor that may change, by its published name."""
    if adapter is not None:
        return live.adapter_views(adapter)
    return {name: ScaledView(view, 1.0) for name, view in stored_tensors(decoder).items()}


def _check(name: str, change: Update, view: ScaledView | None) -> None:
    if view is None:
        raise InvalidInput(f"these weights have no tensor `{name}`: an update names tensors as they are published", field=name)
    shape = change.shape
    if tuple(shape) != tuple(view.values.shape):
        raise InvalidInput(f"tensor `{name}` has shape {list(shape)}, these weights have {list(view.values.shape)}", field=name)
    if not isinstance(change, Patch):
        return
    places = change.indices
    if places.dim() != 1 or places.shape != change.values.shape or places.is_floating_point():
        raise InvalidInput(f"the patch of `{name}` has {list(places.shape)} places and {list(change.values.shape)} values: one [n] each", field=name)
    if places.numel() and (int(places.min()) < 0 or int(places.max()) >= view.values.numel()):
        raise InvalidInput(f"the patch of `{name}` names a place outside of its {view.values.numel()}", field=name)
    # To sort them takes many times as long as to see that they are.
    if not bool((places[1:] > places[:-1]).all()) and len(places.unique()) < len(places):
        raise InvalidInput(f"the patch of `{name}` names a place twice: which of the two values is meant?", field=name)


class _Place(NamedTuple):
    """Where a patch goes: the elements of a tensor that are at these indices."""

    values: Tensor
    at: tuple[Tensor, ...]


def _place(patch: Patch, values: Tensor) -> _Place:
    indices = patch.indices.to(values.device).long()
    return _Place(values.view(-1), (indices,)) if values.is_contiguous() else _Place(values, torch.unravel_index(indices, values.shape))


def _as_computed_with(given: Tensor, view: ScaledView) -> Tensor:
    """Cast and then scaled, as an adapter that is read from a disk is: the same bits."""
    return live.scaled(given.to(view.values.device, view.values.dtype), view.scale)

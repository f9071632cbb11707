"""New weights beside those that are served: a copy takes over tensors and patches, and nobody notices before it is swapped in.

What it must hash to is known from what it was copied from and from what it was given, at the cost of what was given; before it is swapped in it is
read back and held against that (`prove`), and asked the probe. So a tensor that went to the wrong place, or only in part, or changed meanwhile, or
that a sampler leaves out, is not served.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from threading import Lock
from types import EllipsisType
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from bloomery.infer.engine import Patch, Update
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter, ScaledView
from bloomery.models.load import stored_tensors
from bloomery.models.published_names import published_factor, published_name
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
        self._views, self._ours = _views(self._decoder, self._adapter)
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
            for name, change in update.items():
                _check(name, change, self._views.get(self._ours(name)))
                rest()
            for name, change in update.items():
                view = self._views[self._ours(name)]
                new, place = _as_computed_with(change, view), _place(change, view)
                # Before it is written: what breaks off in the middle is not what is expected.
                published = self._published(name, view)
                self._states[published] = self._expect(published, change, new, place)
                place.put(new)
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

    def _published(self, name: str, view: ScaledView) -> str:
        """The name in full, where one without the prefix that PEFT wants was given."""
        return name if self._adapter is None else published_name(self._ours(name), stacked=view.values.dim() == 3)

    def _expect(self, name: str, change: Update, new: Tensor, place: "Place") -> StateHash:
        """Of a tensor after a change, from what is given and what that replaces."""
        if not isinstance(change, Patch):
            return live.hash_tensor(new, self._firsts[name])
        return self._states[name] + live.changed(change.indices.long() + self._firsts[name], place.values[place.at], new)


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
    found = blake3()
    for name, tensor in sorted(_numbers(model.decoder, model.adapter).items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(values(tensor))
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


def _views(decoder: Decoder, adapter: FusedAdapter | None) -> tuple[Mapping[str, ScaledView], Callable[[str], str]]:
    """Every tensor that may change, and how its published name becomes ours."""
    if adapter is not None:
        return adapter.factors(), published_factor
    return {name: ScaledView(view, 1.0) for name, view in stored_tensors(decoder).items()}, str


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


class Place(NamedTuple):
    """Where a change goes: into all of a tensor, or to some of its elements."""

    values: Tensor
    at: tuple[Tensor, ...] | EllipsisType

    def put(self, new: Tensor) -> None:
        """Write it there."""
        self.values[self.at] = new


def _place(change: Update, view: ScaledView) -> Place:
    values = view.values
    if not isinstance(change, Patch):
        return Place(values, ...)
    indices = change.indices.to(values.device).long()
    return Place(values.view(-1), (indices,)) if values.is_contiguous() else Place(values, torch.unravel_index(indices, values.shape))


def _as_computed_with(change: Update, view: ScaledView) -> Tensor:
    """Cast and then scaled, as an adapter that is read from a disk is: the same bits."""
    given = (change.values if isinstance(change, Patch) else change).to(view.values.device, view.values.dtype)
    return live.scaled(given, view.scale)

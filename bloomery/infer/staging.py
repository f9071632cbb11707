"""New weights beside those that are served: a copy takes over tensors and patches, and nobody notices before it is swapped in."""

from collections.abc import Callable, Mapping
from threading import Lock

import torch
from blake3 import blake3
from torch import Tensor

from bloomery.infer.engine import Patch, Update
from bloomery.infer.versions import Model
from bloomery.models.adapters import FusedAdapter, ScaledView, published_factor
from bloomery.models.decoder import Decoder
from bloomery.models.load import fill, stored_tensors
from bloomery.models.tensor_bytes import values
from bloomery.types.errors import Conflict, InvalidInput


class Staging:
    """A copy of a model's weights, an adapter alone or all of a decoder, that becomes other weights."""

    def __init__(self, model: Model, version: str) -> None:
        self._version, self._decoder = version, model.decoder
        self._adapter = None if model.adapter is None else model.adapter.copy()
        if self._adapter is None:
            self._decoder = _copy(model.decoder)
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
            for name, change in update.items():
                _put(change, self._views[self._ours(name)])

    def seal(self) -> None:
        """Nothing is taken over any more, be it that requests run with these weights, or that others were made of them, as packed ones are."""
        if not self._applying.acquire(blocking=False):
            raise Conflict("tensors are just being applied to this update: wait until they are, then commit", field="name")
        self._sealed = True
        self._applying.release()

    def model(self) -> Model:
        """What came of it."""
        return Model(self._version, self._decoder, self._adapter)


def checksum(model: Model) -> str:
    """Of the numbers in memory that make a model what it is: an adapter's own, or all of a decoder."""
    found = blake3()
    for name, tensor in sorted(_numbers(model.decoder, model.adapter).items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(values(tensor))
    return found.hexdigest()[:32]


def _numbers(decoder: Decoder, adapter: FusedAdapter | None) -> dict[str, Tensor]:
    return stored_tensors(decoder) if adapter is None else {name: view.values for name, view in adapter.factors().items()}


def _copy(decoder: Decoder) -> Decoder:
    twin = Decoder(decoder.config, dtype=decoder.dtype, device=decoder.device).requires_grad_(False)
    fill(twin, stored_tensors(decoder))
    return twin


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


def _put(change: Update, view: ScaledView) -> None:
    given = (change.values if isinstance(change, Patch) else change).to(view.values.device, view.values.dtype)
    # Cast and then scaled, as an adapter that is read from a disk is: the same bits.
    scaled = given if view.scale == 1 else given * view.scale
    if isinstance(change, Patch):
        view.values[torch.unravel_index(change.indices.long(), view.values.shape)] = scaled
    else:
        view.values.copy_(scaled)

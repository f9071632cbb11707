"""Silent faults of weights as others have met them, injected where they happened: in what delivers, reads, fills, packs and keeps weights, never in
what checks them. `docs/rl.md` lists them with the threads they come from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from bloomery.engine.shelf import BlobShelf
from bloomery.infer.probe import Probation
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models import packed
from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.form import Form
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.load import stored_tensors
from bloomery.models.memory import LargePages
from bloomery.models.tensor_bytes import Packed
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import NO_KEYS
from bloomery.sync.publish import manifest_key
from bloomery.train import snapshot
from bloomery.train.run import TrainableRun
from bloomery.types.generation import Weights
from tests.train.builders import BASE_HASH, SAVE, decoder, learn, run, step, supervised, train

Patch = pytest.MonkeyPatch
FORM = Form(packed=True)
NUMERICS = "test"


class World(NamedTuple):
    """A base, its shelf, and three versions of one run on it: as it began, trained, and trained further."""

    base: Decoder
    blobs: Blobs
    shelf: BlobShelf
    run: TrainableRun
    first: Weights
    old: Weights
    new: Weights

    def sampler(self, form: Form = FORM, *, alone: bool = False) -> Sampler:
        """One that holds nothing yet, and computes with packed matrices; versions are on probation in it, as in a server.

        `alone`: as in a replica, where no plain matrices stay, not even those of the base.
        """
        made = Sampler(self.base, self.shelf, form=form, alone=alone)
        if alone:
            self.shelf.kept_as = made.computed_with
        base = Model(BASE_HASH, self.base, None)
        made.versions.examine_with(Probation(base, form, made.computed_with, exact=form.exact, numerics=NUMERICS).examine)
        return made


def world(directory: Path, rank: int, *, experts: bool = False, learning_rate: float = 3e-2) -> World:
    base, blobs = decoder(experts=experts), Blobs(directory)
    shelf = BlobShelf(blobs, base, base_hash=BASE_HASH, numerics=NUMERICS, keys=NO_KEYS)
    # No power of two: what is multiplied by this scale cannot be divided back.
    trained = run(base, shelf, rank=rank, alpha=12.0)
    lessons = [learn(supervised([20, 40])), step(learning_rate)]
    saved = [train(trained, [*operations, SAVE])[-1] for operations in ([], lessons, lessons)]
    return World(base, blobs, shelf, trained, *(Weights(version=each.version, key=each.key) for each in saved))


@dataclass(frozen=True)
class Fault:
    """One way in which weights went wrong without a word; `inject` puts it into a world whose version `new` is then asked for."""

    name: str
    """As `docs/rl.md` has it."""
    threads: tuple[str, ...]
    rank: int
    inject: Callable[[Patch, World], None]
    says: str
    """What whoever asks hears instead of tokens."""
    experts: bool = False
    """Whether the base has them."""


NOT_THOSE = "the weights in memory are not those of version"


def never_delivered(patch: Patch, world: World) -> None:
    """The fused tensors stay as they were made: zeros."""
    patch.setattr(FusedAdapter, "fill", lambda self, factors: None)


def half_delivered(patch: Patch, world: World) -> None:
    """Of every factor the first rows arrive."""
    fill = FusedAdapter.fill

    def cut(self: FusedAdapter, factors: Mapping[str, Factors]) -> None:
        fill(self, {target: Factors(*(_half(each) for each in pair)) for target, pair in factors.items()})

    patch.setattr(FusedAdapter, "fill", cut)


def _half(tensor: Tensor) -> Tensor:
    left = tensor.clone()
    left.flatten()[tensor.numel() // 2 :] = 0
    return left


def unscaled(patch: Patch, world: World) -> None:
    """The scale of the adapter is not wired."""
    read = snapshot.read
    patch.setattr(snapshot, "read", lambda data, base, *, rank, alpha: read(data, base, rank=rank, alpha=float(rank)))


def adapter_of_other_experts(patch: Patch, world: World) -> None:
    """Every expert gets the factors of another one."""
    fill = FusedAdapter.fill

    def exchanged(self: FusedAdapter, factors: Mapping[str, Factors]) -> None:
        others = {target: Factors(*(each.flip(0) if each.ndim == 3 else each for each in pair)) for target, pair in factors.items()}
        fill(self, others)

    patch.setattr(FusedAdapter, "fill", exchanged)


def initial_adapter(patch: Patch, world: World) -> None:
    """After a resume whoever samples reads what the run began with."""
    read, initial = snapshot.read, world.blobs.get(world.first.key or "")
    patch.setattr(snapshot, "read", lambda data, base, **form: read(initial, base, **form))


def cached_adapter(patch: Patch, world: World) -> None:
    """A reload gives what was read before."""
    read, cached = snapshot.read, world.blobs.get(world.old.key or "")
    patch.setattr(snapshot, "read", lambda data, base, **form: read(cached, base, **form))


def cached_model(patch: Patch, world: World) -> None:
    """The same of a whole model."""
    kept = world.shelf.load(world.old).decoder
    patch.setattr(snapshot, "read_model", lambda data, base: kept)


def cached_version(patch: Patch, world: World) -> None:
    """The same a layer further out: all that belongs together comes, and belongs to another version."""
    load = world.shelf.load
    patch.setattr(world.shelf, "load", lambda weights: load(world.old))


def cached_file(patch: Patch, world: World) -> None:
    """The disk, or what stands before it, answers with the file of before."""
    get = world.blobs.get
    patch.setattr(world.blobs, "get", lambda key: get(world.old.key if key == world.new.key else key))


def newer_under_an_alias(patch: Patch, world: World) -> None:
    """The name of an older version leads to the manifest of another."""
    world.blobs.put(manifest_key(world.new.version), world.blobs.get(manifest_key(world.old.version)))


def torn_file(patch: Patch, world: World) -> None:
    """A write that ended in the middle: the rest of the file is zeros."""
    assert world.new.key is not None
    data = world.blobs.get(world.new.key)
    world.blobs.put(world.new.key, data[: len(data) * 2 // 3] + bytes(len(data) - len(data) * 2 // 3))


def partly_written_model(patch: Patch, world: World) -> None:
    """The last tensors of a whole model are still those of the base."""
    # The version that the run began with: in a replica the base itself cannot be read any more.
    read, before = snapshot.read_model, Packed(world.blobs.get(world.first.key or ""))

    def stopped(data: bytes, base: Decoder) -> Decoder:
        model = read(data, base)
        for name, tensor in stored_tensors(model).items():
            if name.startswith("model.layers.1."):
                tensor.copy_(before[name])
        return model

    patch.setattr(snapshot, "read_model", stopped)


def permuted_model(patch: Patch, world: World) -> None:
    """Queries and keys of one layer are exchanged where they have the same shape: two rows change places."""
    read = snapshot.read_model

    def exchanged(data: bytes, base: Decoder) -> Decoder:
        model = read(data, base)
        rows = stored_tensors(model)["model.layers.0.self_attn.q_proj.weight"]
        rows[[0, 1]] = rows[[1, 0]]
        return model

    patch.setattr(snapshot, "read_model", exchanged)


def permuted_in_the_library(patch: Patch, world: World) -> None:
    """The plain matrices are right, and what a library made of them for its own products is not."""
    reorder = packed.packed
    before = set(map(id, world.base.parameters()))

    def flipped(weight: Tensor, *pages: LargePages) -> Tensor:
        return reorder(weight if id(weight) in before else weight.flip(0), *pages)

    # The base is packed already when versions are.
    patch.setattr(packed, "packed", flipped)


FAULTS = (
    Fault("adapter never delivered", ("verl#7495",), 8, never_delivered, NOT_THOSE),
    Fault("partly delivered adapter", ("miles#684",), 8, half_delivered, NOT_THOSE),
    Fault("adapter settings not wired", ("SkyRL#1077",), 8, unscaled, NOT_THOSE),
    Fault("adapter of other experts", ("SkyRL#1776",), 8, adapter_of_other_experts, NOT_THOSE, experts=True),
    Fault("initial weights after resume", ("open-instruct#1627",), 8, initial_adapter, NOT_THOSE),
    Fault("cached reload of an adapter", ("vllm#32718",), 8, cached_adapter, NOT_THOSE),
    Fault("cached reload of a model", ("vllm#32718",), 0, cached_model, NOT_THOSE),
    Fault("another version's weights", ("trl#5312",), 8, cached_version, "and weights of version"),
    Fault("stale file", ("vllm#32718",), 8, cached_file, "does not hold version"),
    Fault("alias serving other weights", ("ART#758",), 8, newer_under_an_alias, "holds the manifest of version"),
    Fault("torn file", ("miles#684",), 0, torn_file, "does not hold version"),
    Fault("partly written model", ("SkyRL#1680",), 0, partly_written_model, NOT_THOSE),
    Fault("permuted tensor", ("SkyRL#1680",), 0, permuted_model, NOT_THOSE),
    Fault("permuted by a layout conversion", ("verl#7987",), 0, permuted_in_the_library, NOT_THOSE),
)

"""Staged weights have the bits of those that are read from a disk, and nobody's other weights change."""

import pytest
import torch

from bloomery.infer.engine import Patch
from bloomery.infer.staging import Staging, checksum
from bloomery.infer.versions import Model
from bloomery.models.adapters import FusedAdapter
from bloomery.models.load import stored_tensors
from bloomery.train import snapshot
from bloomery.train.lora import Lora
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import LoraSpec
from tests.infer.test_versions import other_model
from tests.train.builders import decoder

FORMS = pytest.mark.parametrize(("dtype", "experts"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])


def trained(model: torch.nn.Module, seed: int) -> Lora:
    # A scale that is no power of two: it must be applied where a disk's reader applies it.
    lora = Lora(model, LoraSpec(rank=12, seed=seed, alpha=20.0))
    lora.masters.normal_(generator=torch.Generator().manual_seed(seed))
    lora.refresh()
    return lora


def read(lora: Lora) -> FusedAdapter:
    return snapshot.read(snapshot.write(lora), rank=lora.spec.rank, alpha=lora.spec.alpha)


def same(first: FusedAdapter, second: FusedAdapter) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first.tensors, second.tensors, strict=True))


@FORMS
def test_an_adapter_that_takes_over_all_tensors_is_the_one_a_disk_would_give(dtype, experts):
    model = decoder(dtype=dtype, experts=experts)
    old, new = trained(model, 1), trained(model, 2)
    serving = Model("old", model, read(old))
    staging = Staging(serving, "new")
    staging.apply(new.published())
    assert same(staging.model().adapter, read(new))
    assert same(serving.adapter, read(old))
    assert checksum(staging.model()) == checksum(Model("again", model, read(new))) != checksum(serving)


@FORMS
def test_patches_give_the_same_bits_as_the_whole_tensors(dtype, experts):
    model = decoder(dtype=dtype, experts=experts)
    old, new = trained(model, 1).published(), trained(model, 2).published()
    staging = Staging(Model("old", model, read(trained(model, 1))), "mixed")
    patches, mixed = {}, {}
    for name, tensor in new.items():
        indices = torch.arange(1, tensor.numel(), 3, dtype=torch.int32)
        patches[name] = Patch(indices, tensor.flatten()[indices], tuple(tensor.shape))
        mixed[name] = old[name].clone().flatten().index_copy(0, indices.long(), patches[name].values).view_as(tensor)
    staging.apply(patches)
    expected = Staging(Model("old", model, read(trained(model, 1))), "mixed")
    expected.apply(mixed)
    assert same(staging.model().adapter, expected.model().adapter)


@FORMS
def test_a_whole_model_is_staged_beside_the_one_that_is_served(dtype, experts):
    base = decoder(dtype=dtype, experts=experts)
    before = {name: tensor.clone() for name, tensor in stored_tensors(base).items()}
    new = stored_tensors(other_model(base, 3))
    staging = Staging(Model("base", base, None), "new")
    staging.apply(new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in stored_tensors(staging.model().decoder).items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored_tensors(base).items())
    assert staging.size_bytes == sum(tensor.nbytes for tensor in new.values())


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (Patch(torch.tensor([0, 1]), torch.ones(3), (64,)), r"\[2\] places and \[3\] values"),
        (Patch(torch.tensor([[0]]), torch.ones(1, 1), (64,)), r"one \[n\] each"),
        (Patch(torch.tensor([0.5]), torch.ones(1), (64,)), "places"),
        (Patch(torch.tensor([-1]), torch.ones(1), (64,)), "outside of its 64"),
        (Patch(torch.tensor([64]), torch.ones(1), (64,)), "outside of its 64"),
        (Patch(torch.tensor([0]), torch.ones(1), (8, 8)), r"has shape \[8, 8\], these weights have \[64\]"),
    ],
)
def test_a_patch_that_means_nothing_is_refused(patch, says):
    staging = Staging(Model("base", decoder(), None), "new")
    with pytest.raises(InvalidInput, match=says):
        staging.apply({"model.norm.weight": patch})

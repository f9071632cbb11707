"""Staged weights have the bits of those that are read from a disk, and nobody's other weights change."""

import pytest
import torch

from bloomery.infer.engine import Patch
from bloomery.infer.staging import Staging, checksum
from bloomery.infer.versions import Model
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.load import stored_tensors
from bloomery.train import snapshot
from bloomery.train.lora import Lora
from bloomery.types.errors import Corrupt, InvalidInput
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
    return snapshot.read(snapshot.write(lora), lora.decoder, rank=lora.spec.rank, alpha=lora.spec.alpha)


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


def test_places_of_a_patch_may_come_in_any_order():
    base = decoder()
    sorted_first, unsorted = (Staging(Model("base", base, None), "new") for _ in range(2))
    patches = {name: patch(tensor + 1) for name, tensor in stored_tensors(base).items()}
    sorted_first.apply(patches)
    unsorted.apply({name: Patch(each.indices.flip(0), each.values.flip(0), each.shape) for name, each in patches.items()})
    unsorted.prove(as_it_is)
    assert checksum(unsorted.model()) == checksum(sorted_first.model())


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
        (Patch(torch.tensor([3, 5, 3]), torch.ones(3), (64,)), "a place twice"),
        (Patch(torch.tensor([0]), torch.ones(1), (8, 8)), r"has shape \[8, 8\], these weights have \[64\]"),
    ],
)
def test_a_patch_that_means_nothing_is_refused(patch, says):
    staging = Staging(Model("base", decoder(), None), "new")
    with pytest.raises(InvalidInput, match=says):
        staging.apply({"model.norm.weight": patch})


@FORMS
def test_what_was_staged_is_proved_before_it_is_served(dtype, experts):
    model = decoder(dtype=dtype, experts=experts)
    staging, new = Staging(Model("old", model, read(trained(model, 1))), "new"), trained(model, 2).published()
    whole = {name: tensor for number, (name, tensor) in enumerate(new.items()) if number % 2}
    patches = {name: patch(tensor) for name, tensor in new.items() if name not in whole}
    staging.apply(whole)
    # PEFT's prefix may be left out.
    staging.apply({name.removeprefix("base_model.model.model."): change for name, change in patches.items()})
    staging.apply(patches)
    staging.prove(as_it_is)
    proof = staging.model().proof
    assert proof is not None
    assert proof.expected.version == "new"
    Staging(staging.model(), "newer").prove(as_it_is)


@pytest.mark.parametrize("place", ["layers.0.qkv", "layers.1.mlp.down", "unembed_tokens"])
def test_a_staged_adapter_that_is_written_past_its_update_is_refused(place):
    model = decoder()
    staging = Staging(Model("old", model, read(trained(model, 1))), "new")
    staging.apply(trained(model, 2).published())
    staging.model().adapter.get(place).b[0, 0] += 1
    with pytest.raises(Corrupt, match=r"not those of version new: 1 of"):
        staging.prove(as_it_is)


def test_an_update_that_names_a_tensor_twice_is_refused_as_a_whole():
    model, new = decoder(), trained(decoder(), 2).published()
    old = read(trained(model, 1))
    staging, (name, tensor) = Staging(Model("old", model, old), "new"), next(iter(new.items()))
    with pytest.raises(InvalidInput, match="named twice"):
        staging.apply(new | {name.removeprefix("base_model.model.model."): tensor})
    assert same(staging.model().adapter, old)


def test_factors_that_do_not_follow_one_another_are_taken_over_as_neighbours_are():
    model, new = decoder(), trained(decoder(), 2).published()
    serving = Model("old", model, read(trained(model, 1)))
    together, apart = Staging(serving, "new"), Staging(serving, "new")
    together.apply(new)
    for part in (slice(0, None, 3), slice(2, None, 3), slice(1, None, 3)):
        apart.apply(dict(list(new.items())[::-1][part]))
    for staging in (together, apart):
        staging.prove(as_it_is)
    assert together.model().proof.expected == apart.model().proof.expected
    assert same(together.model().adapter, apart.model().adapter)


def test_a_staged_model_is_proved_by_what_it_began_from_and_what_it_was_given():
    base = decoder()
    staging = Staging(Model("base", base, None), "new")
    staging.apply({name: patch(tensor + 1) for name, tensor in stored_tensors(base).items()})
    staging.prove(as_it_is)
    stored_tensors(staging.model().decoder)["model.norm.weight"][1] = 7
    with pytest.raises(Corrupt, match=r"`model\.norm\.weight`"):
        staging.prove(as_it_is)


def patch(tensor: torch.Tensor) -> Patch:
    indices = torch.arange(1, tensor.numel(), 3, dtype=torch.int32)
    return Patch(indices, tensor.flatten()[indices], tuple(tensor.shape))


def as_it_is(decoder: torch.nn.Module) -> torch.nn.Module:
    return decoder

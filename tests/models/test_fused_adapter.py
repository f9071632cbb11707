"""One adapter as the forward uses it: its copies are their own, and its factors begin where torch would have tensors begin."""

import pytest
import torch

from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.targets import Target

OUTPUTS, INPUTS = 25, 33
TARGETS = {
    "layers.0.o": Target("layers.0.o", OUTPUTS, 0, outputs=OUTPUTS, inputs=INPUTS),
    "layers.0.q": Target("layers.0.qkv", 2 * OUTPUTS, 0, outputs=OUTPUTS, inputs=INPUTS),
    "layers.0.k": Target("layers.0.qkv", 2 * OUTPUTS, OUTPUTS, outputs=OUTPUTS, inputs=INPUTS),
}
DTYPES = (torch.float32, torch.bfloat16)


def factors(rank: int, dtype: torch.dtype, seed: int) -> dict[str, Factors]:
    noise = torch.Generator().manual_seed(seed)
    shapes = ((rank, INPUTS), (OUTPUTS, rank))
    return {name: Factors(*(torch.randn(shape, generator=noise).to(dtype) for shape in shapes)) for name in TARGETS}


def bits(adapter: FusedAdapter) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in adapter.tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_what_fills_a_copy_leaves_the_original_as_it_is_and_the_other_way_round(dtype: torch.dtype, rank: int) -> None:
    before, after = factors(rank, dtype, 1), factors(rank, dtype, 2)
    adapter = FusedAdapter(TARGETS, rank, 0.5, dtype=dtype, device="cpu")
    adapter.fill(before)
    held = bits(adapter)
    copied = adapter.copy()
    assert copied.holds(before)
    copied.fill(after)
    assert all(map(torch.equal, bits(adapter), held))
    assert (adapter.holds(before), copied.holds(after), copied.holds(before)) == (True, True, False)
    adapter.fill(before | {"layers.0.k": after["layers.0.k"]})
    assert copied.holds(after)
    assert all(torch.equal(copied.factors()[f"{name}.lora_A"].values, pair.a) for name, pair in after.items())


def test_a_copy_of_a_trained_adapter_needs_no_gradient_and_the_trained_one_goes_on_to() -> None:
    trained = FusedAdapter(TARGETS, 3, 0.5, dtype=torch.float32, device="cpu", trained=True)
    trained.fill(factors(3, torch.float32, 1))
    copied = trained.copy()
    assert [tensor.requires_grad for tensor in copied.tensors] == [False] * 4
    assert [tensor.requires_grad for tensor in trained.tensors] == [True] * 4
    torch.autograd.backward([tensor.square().sum() for tensor in trained.tensors])
    for name in TARGETS:
        assert trained.gradients(name) is not None
        assert copied.gradients(name) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 5, 7, 9, 17, 21])
def test_every_factor_begins_at_64_bytes_whatever_its_rank(dtype: torch.dtype, rank: int) -> None:
    adapter = FusedAdapter(TARGETS, rank, 0.5, dtype=dtype, device="cpu")
    assert len(adapter.tensors) == 4
    for made in (adapter, adapter.copy()):
        assert [tensor.data_ptr() % 64 for tensor in made.tensors] == [0] * 4

"""Attention of a GPU's own kernels: its numbers and gradients against float64, with heads of every width, and a query's bits in pages and steps."""

from itertools import pairwise

import pytest
import torch

from bloomery.models.attention import PackedAttention
from bloomery.models.native import attention as native_attention
from bloomery.models.pads import BLOCK_PLACES, packed_starts
from bloomery.models.spans import Spans
from tests.models.test_native_attention import in_float64, noise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
HEADS, KV_HEADS = 4, 2
WIDTHS = [40, 128, 256]
# Of norms: in bfloat16 weights, and what reaches them, are rounded to 8 bits.
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_values_and_gradients_are_those_of_float64(dtype: torch.dtype, dim: int, window: int | None) -> None:
    lengths = [1, 37, 300]
    rows = packed_starts(lengths)[-1]
    tensors = noise(rows, HEADS + 2 * KV_HEADS, dim).to(dtype).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    ours = [tensor.to("cuda").requires_grad_() for tensor in tensors]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    found, expected = PackedAttention(lengths, exact=True)(0, *ours, window), in_float64(*exact, lengths, window)
    # The pads of a sequence stand behind what counts, and no gradient comes from them.
    counts = torch.zeros(rows, 1, 1)
    for start, length in zip(packed_starts(lengths), lengths, strict=False):
        counts[start : start + length] = 1
    grad = (noise(rows, HEADS, dim, seed=3) * counts).to(dtype)
    got = [found * counts.to("cuda"), *torch.autograd.grad(found, ours, grad.to("cuda"))]
    wanted = [expected * counts, *torch.autograd.grad(expected, exact, grad.double())]
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.cpu().double() - theirs).norm() < ERRORS[dtype] * theirs.norm()


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_a_query_has_the_same_bits_in_a_pass_and_in_steps_over_pages(dtype: torch.dtype, dim: int) -> None:
    length = 300
    q_RHE, k_RKE, v_RKE = (noise(length, heads, dim, seed=seed).to("cuda", dtype) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    whole_RHE, _ = native_attention.attend(q_RHE, k_RKE, v_RKE, Spans.of([(0, 0, 0, length)]), None)
    blocks = torch.arange(1, 21).roll(7).flip(0).view(2, 10)
    keys_BKPE, values_BKPE = torch.full((2, 21, KV_HEADS, BLOCK_PLACES, dim), torch.nan, dtype=dtype, device="cuda")
    for start, stop in pairwise((0, 1, 4, 255, 258, length)):
        spans = Spans.of([(0, 1, start, stop - start)])._replace(tables_SM=blocks, copies={})
        for storage_BKPE, tensor in ((keys_BKPE, k_RKE), (values_BKPE, v_RKE)):
            native_attention.keep(storage_BKPE, tensor[start:stop], spans)
        found_RHE, _ = native_attention.attend(q_RHE[start:stop], keys_BKPE, values_BKPE, spans, None)
        assert torch.equal(found_RHE, whole_RHE[start:stop])

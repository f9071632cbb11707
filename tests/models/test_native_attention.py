"""The native attention: its numbers against float64, and a query's bits whatever is computed with it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.attention import PackedAttention
from bloomery.models.native import attention as native_attention
from bloomery.models.native import bindings
from bloomery.models.pads import BLOCK_PLACES, packed_starts
from bloomery.models.spans import Spans

pytestmark = pytest.mark.skipif(not bindings.present(), reason="this machine has no C compiler, or not Linux")

HEADS = [(1, 1, 8), (4, 2, 64), (3, 1, 40), (8, 1, 16), (34, 2, 24), (6, 6, 96)]
"""Query heads, key heads, dimensions: tiles of four, of two and of one query, more heads than are computed together, and odd widths."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def in_float64(q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """Sequence by sequence, each as long as its rows."""
    answers = []
    for start, stop in pairwise(packed_starts(lengths)):
        ahead = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        sees = (ahead >= 0) & (ahead < (window or 1 << 30))
        own = (tensor[start:stop].double().transpose(0, 1) for tensor in (q_RHE, k_RKE, v_RKE))
        answers.append(F.scaled_dot_product_attention(*own, attn_mask=sees, enable_gqa=True).transpose(0, 1))
    return torch.cat(answers)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_values_and_gradients_are_those_of_float64(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    lengths = [1, 37, 300]
    rows = packed_starts(lengths)[-1]
    # Parts of one projection, as a block has them: their rows do not lie back to back.
    tensors = list(noise(rows, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1))
    tensors[0] = tensors[0] * 2
    narrow, wide = ([tensor.detach().to(dtype).requires_grad_() for tensor in tensors] for dtype in (torch.float32, torch.float64))
    assert heads == 1 or not narrow[2].is_contiguous()
    attention = PackedAttention(lengths, exact=True)
    assert native_attention.attends(*narrow)
    found, expected = attention(0, *narrow, window), in_float64(*wide, lengths, window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=5e-6)
    with torch.no_grad():
        assert torch.equal(attention(0, *narrow, window), found)
    # The pads of a sequence stand behind what counts, and no gradient comes from them.
    counts = torch.zeros(rows, 1, 1)
    for start, length in zip(packed_starts(lengths), lengths, strict=False):
        counts[start : start + length] = 1
    grad = noise(rows, heads, dim, seed=3) * counts
    for got, want in zip(torch.autograd.grad(found, narrow, grad), torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 2, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_a_query_has_the_same_bits_in_a_pass_in_chunks_and_in_a_step(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    length = 530
    q_RHE, k_RKE, v_RKE = noise(length, heads, dim), noise(length, kv_heads, dim, seed=1), noise(length, kv_heads, dim, seed=2)
    whole_RHE, _ = native_attention.attend(q_RHE, k_RKE, v_RKE, Spans.of([(0, 0, 0, length)]), window)
    # In blocks that lie anywhere, of a table that is longer than the sequence and beside another one, in storage that has more of everything.
    blocks = torch.arange(1, 41).roll(17).flip(0).view(2, 20)
    keys_BKPE, values_BKPE = torch.full((2, 41, kv_heads + 1, BLOCK_PLACES, dim + 8), torch.nan)[:, :, 1:, :, :dim]
    for stops in ([1, 4, 5, 255, 258, length], [3, 512, 513, length]):
        for start, stop in pairwise([0, *stops]):
            rows = Spans.of([(2, 1, start, stop - start)])._replace(tables_SM=blocks)
            own = [F.pad(tensor[start:stop], (0, 0, 0, 0, 2, 1)) for tensor in (q_RHE, k_RKE, v_RKE)]
            native_attention.keep(keys_BKPE, own[1], rows)
            native_attention.keep(values_BKPE, own[2], rows)
            found_RHE, _ = native_attention.attend(own[0], keys_BKPE, values_BKPE, rows, window)
            assert torch.equal(found_RHE[2:-1], whole_RHE[start:stop])
            assert not found_RHE[:2].any()
            assert not found_RHE[-1].any()
    assert keys_BKPE[blocks[0]].isnan().all(), "another's block"
    assert keys_BKPE[0].isnan().all(), "nobody's block"


def test_the_number_of_threads_and_the_company_change_no_bit() -> None:
    lengths = [40, 7, 260, 1]
    starts = packed_starts(lengths)
    q_RHE, k_RKE, v_RKE = noise(starts[-1], 4, 32), noise(starts[-1], 2, 32, seed=1), noise(starts[-1], 2, 32, seed=2)
    spans = [(start, start, 0, stop - start) for start, stop in pairwise(starts)]
    together_RHE, _ = native_attention.attend(q_RHE, k_RKE, v_RKE, Spans.of(spans))
    threads = torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        try:
            alone = [native_attention.attend(q_RHE, k_RKE, v_RKE, Spans.of([span]))[0] for span in spans]
        finally:
            torch.set_num_threads(threads)
        for own_RHE, (start, stop) in zip(alone, pairwise(starts), strict=True):
            assert torch.equal(own_RHE[start:stop], together_RHE[start:stop])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("kv_heads", "window"), [(7, None), (8, 40), (1, None)])
@pytest.mark.parametrize("lengths", [[90, 1, 200], [900]], ids=["sequences", "one"])
def test_the_number_of_heads_that_are_computed_together_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], kv_heads: int, window: int | None, threads: int
) -> None:
    """Of whole sequences, and of a step in which each goes on by one token, which leaves threads few units of all heads."""
    starts, dim = packed_starts(lengths), 16
    q_RHE = noise(starts[-1], 2 * kv_heads, dim)
    k_RKE, v_RKE = noise(starts[-1], kv_heads, dim, seed=1), noise(starts[-1], kv_heads, dim, seed=2)
    spans = [(start, start, 0, stop - start) for start, stop in pairwise(starts)]
    steps = [(row, start, stop - start - 1, 1) for row, (start, stop) in enumerate(pairwise(starts))]
    last = [stop - 1 for stop in starts[1:]]
    found, stepped, before = [], [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # One head, a few, of which the last ones are fewer, and all.
        for room in (0, 3 * bindings.TOGETHER * (max(lengths) + dim), bindings.SCORES):
            monkeypatch.setattr(bindings, "SCORES", room)
            found.append(native_attention.attend(q_RHE, k_RKE, v_RKE, Spans.of(spans), window)[0])
            stepped.append(native_attention.attend(q_RHE[last], k_RKE, v_RKE, Spans.of(steps), window)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found[1:])
    assert all(torch.equal(each, found[0][last]) for each in stepped)


@pytest.mark.parametrize("window", [None, 50])
def test_neither_threads_nor_company_change_a_bit_of_the_gradients(window: int | None) -> None:
    lengths = [40, 7, 260, 1, 120]
    starts = packed_starts(lengths)
    tensors = [noise(starts[-1], heads, 32, seed=heads + number) for number, heads in enumerate((4, 2, 2, 4))]

    def gradients(start: int, stop: int, own: Sequence[int]) -> list[Tensor]:
        q_RHE, k_RKE, v_RKE, grad_RHE = (tensor[start:stop].clone().requires_grad_() for tensor in tensors)
        return list(torch.autograd.grad(PackedAttention(own, exact=False)(0, q_RHE, k_RKE, v_RKE, window), (q_RHE, k_RKE, v_RKE), grad_RHE))

    together, threads = gradients(0, starts[-1], lengths), torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        try:
            for length, (start, stop) in zip(lengths, pairwise(starts), strict=True):
                for own, whole in zip(gradients(start, stop, [length]), together, strict=True):
                    assert torch.equal(own, whole[start:stop])
        finally:
            torch.set_num_threads(threads)


def test_extreme_scores_weigh_as_in_float64_and_broken_ones_are_seen() -> None:
    q_RHE, k_RKE, v_RKE = noise(20, 2, 16) * 1e3, noise(20, 2, 16, seed=1) * 10, noise(20, 2, 16, seed=2)
    spans = Spans.of([(0, 0, 0, 20)])
    found_RHE, logs_RH = native_attention.attend(q_RHE, k_RKE, v_RKE, spans, logged=True)
    torch.testing.assert_close(found_RHE.double(), in_float64(q_RHE, k_RKE, v_RKE, [20], None), rtol=1e-4, atol=1e-3)
    assert logs_RH is not None
    assert logs_RH.isfinite().all()
    for broken in (torch.nan, torch.inf):
        q_RHE[7, 0, 3] = broken
        answers_RHE, _ = native_attention.attend(q_RHE, k_RKE, v_RKE, spans)
        assert answers_RHE[7, 0].isnan().all()
        assert torch.equal(answers_RHE[8:], found_RHE[8:])

"""Layers with a state: chunk by chunk against row by row, and sequences that never see each other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.attention import PackedAttention
from bloomery.models.block import RecurrentBlock
from bloomery.models.config import GatedDeltaConfig
from bloomery.models.gated_delta import GatedDelta
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.models.pads import packed_starts
from tests.models.builders import saved

CONFIG = GatedDeltaConfig(key_heads=2, heads=4, key_dim=16, value_dim=8, conv_width=4, chunk_rows=16)


def mixer(config: GatedDeltaConfig = CONFIG) -> GatedDelta:
    made, generator = GatedDelta(config, 1e-6, torch.float32), torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return made


def rows_of(lengths: list[int], config: GatedDeltaConfig = CONFIG) -> Tensor:
    return torch.randn(packed_starts(lengths)[-1], config.row_width, generator=torch.Generator().manual_seed(1))


def row_by_row(made: GatedDelta, rows_TX: Tensor) -> Tensor:
    """The rule as the paper has it, in float64: decay, look the key up, correct what is there, read."""
    config = made.config
    inputs, write, forget = rows_TX.double().split([config.channels, config.heads, config.heads], -1)
    padded = F.pad(inputs, (0, 0, config.conv_width - 1, 0))
    mixed = F.silu(sum(padded[place : place + len(rows_TX)] * made.conv.double()[:, 0, place] for place in range(config.conv_width)))
    keys = config.key_heads * config.key_dim
    q, k, v = mixed.split([keys, keys, config.inner], -1)
    q, k = (x.unflatten(1, (config.key_heads, -1)).repeat_interleave(config.heads // config.key_heads, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.unflatten(1, (config.heads, -1))
    kept = (-made.log_rate.double().exp() * F.softplus(forget + made.step_bias.double())).exp()
    state, read = torch.zeros(config.heads, config.key_dim, config.value_dim, dtype=torch.float64), []
    for row in range(len(rows_TX)):
        state = state * kept[row][:, None, None]
        missing = v[row] - torch.einsum("hev,he->hv", state, k[row])
        state = state + torch.einsum("he,hv->hev", k[row], missing * write[row].sigmoid()[:, None])
        read.append(torch.einsum("hev,he->hv", state, q[row] * config.key_dim**-0.5).flatten())
    return torch.stack(read)


@pytest.mark.parametrize("chunk_rows", [8, 16, 64])
def test_chunks_read_what_rows_read_one_by_one(chunk_rows: int) -> None:
    config = replace(CONFIG, chunk_rows=chunk_rows)
    made, lengths = mixer(config), [1, 15, 16, 17, 70]
    rows_RX = rows_of(lengths)
    with torch.no_grad():
        read_RI = PackedAttention(lengths, exact=True).recur(0, made, rows_RX)
        for start, length in zip(packed_starts(lengths), lengths, strict=False):
            expected = row_by_row(made, rows_RX[start : start + length])
            # float32 against float64.
            torch.testing.assert_close(read_RI[start : start + length].double(), expected, rtol=0, atol=2e-6)


def test_a_row_depends_on_those_before_it_in_its_own_sequence_alone() -> None:
    made, lengths = mixer(), [40, 37, 5]
    rows_RX = rows_of(lengths).requires_grad_()
    start, row = packed_starts(lengths)[1], 34
    PackedAttention(lengths, exact=True).recur(0, made, rows_RX)[start + row].sum().backward()
    assert rows_RX.grad is not None
    reached = rows_RX.grad.abs().sum(1) > 0
    assert reached.nonzero().flatten().tolist() == list(range(start, start + row + 1))


def test_the_gradient_is_that_of_the_rule() -> None:
    made, lengths = mixer().double(), [40]
    rows_RX = rows_of(lengths).requires_grad_()
    PackedAttention(lengths, exact=True).recur(0, made, rows_RX).square().sum().backward()
    ours = [rows_RX.grad, *(parameter.grad for parameter in made.parameters() if parameter is not made.norm)]
    again = rows_RX.detach().double().requires_grad_()
    wanted = [again, *(parameter for parameter in made.parameters() if parameter is not made.norm)]
    theirs = torch.autograd.grad(row_by_row(made, again).square().sum(), wanted)
    for own, expected in zip(ours, theirs, strict=True):
        assert own is not None
        assert (own.double() - expected).norm() <= 1e-5 * expected.norm()


class _Mean(GatedDelta):
    """Chunks that look at each other."""

    def intra_chunk(self, rows_NLX):
        return super().intra_chunk(rows_NLX + 1e-3 * rows_NLX.mean(0))


class _Later(GatedDelta):
    """Rows that look at those behind them."""

    def intra_chunk(self, rows_NLX):
        return super().intra_chunk(rows_NLX + 1e-3 * rows_NLX.mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("broken", "says"),
    [(_Mean, "1 chunks of 64 rows differ from those among 12"), (_Later, "the first 1 rows of a chunk depend on those behind them")],
)
def test_the_probe_finds_a_mixer_whose_bits_depend_on_the_company(broken: type[GatedDelta], says: str, tmp_path: Path) -> None:
    decoder = load_decoder(saved("qwen3_5_text", tmp_path), dtype=torch.float32)
    for block in decoder.layers:
        if isinstance(block, RecurrentBlock):
            block.recurrent.__class__ = broken
    assert any(failure.startswith(says) for failure in probe(decoder).failures)

"""Mamba-2 in chunks, against the same layer token by token in float64, and against the layer of `transformers`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from bloomery.models.config import MambaConfig
from bloomery.models.mamba import Mamba
from bloomery.models.recurrent import Chunks, SequenceRows, packed_scan

CONFIG = MambaConfig(heads=6, head_dim=8, state_size=16, groups=2, conv_width=4, conv_bias=True, least_step=0.02)
EPS = 1e-5
WIDTH = 40


def mixer(config: MambaConfig = CONFIG) -> Mamba:
    made = Mamba(config, EPS, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    made.log_rate.data.copy_(torch.arange(1, config.heads + 1).log())
    return made


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chunked(mamba: Mamba, projected_RO: Tensor) -> Tensor:
    """What one sequence reads, as the trainer computes it."""
    chunks = Chunks([SequenceRows(0, len(projected_RO))], len(projected_RO), mamba.config, "cpu", tails=False)
    return packed_scan(mamba, mamba.scan_inputs(projected_RO), chunks)


def token_by_token(mamba: Mamba, projected_RO: Tensor) -> Tensor:
    """The recurrence as it is written, in float64."""
    config = mamba.config
    inner, keys = config.inner, config.groups * config.state_size
    conv, bias, step_bias, rate, skip = (
        parameter.detach().double() for parameter in (mamba.conv[:, 0], mamba.conv_bias, mamba.step_bias, mamba.log_rate.exp(), mamba.skip)
    )
    rows_RC, steps_RH = projected_RO.double()[:, inner:].split([config.channels, config.heads], 1)
    rows_RC = torch.cat([rows_RC.new_zeros(config.conv_width - 1, config.channels), rows_RC])
    state_HPS = torch.zeros(config.heads, config.head_dim, config.state_size, dtype=torch.float64)
    read = []
    for row in range(len(projected_RO)):
        mixed_C = F.silu((rows_RC[row : row + config.conv_width] * conv.T).sum(0) + bias)
        x_HP, write_HS, read_HS = mixed_C.split([inner, keys, keys])
        x_HP = x_HP.view(config.heads, -1)
        write_HS, read_HS = (each.view(config.groups, -1).repeat_interleave(config.heads // config.groups, 0) for each in (write_HS, read_HS))
        step_H = F.softplus(steps_RH[row] + step_bias).clamp(min=config.least_step)
        state_HPS = state_HPS * (-rate * step_H).exp()[:, None, None] + (step_H[:, None] * x_HP)[..., None] * write_HS[:, None]
        read.append(((state_HPS @ read_HS[..., None])[..., 0] + skip[:, None] * x_HP).flatten())
    return torch.stack(read)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_chunks_give_what_the_recurrence_gives_token_by_token(rows: int) -> None:
    mamba, projected_RO = mixer(), noise(rows, CONFIG.projection_width)
    assert CONFIG.chunk_rows == 64
    with torch.no_grad():
        torch.testing.assert_close(chunked(mamba, projected_RO).double(), token_by_token(mamba, projected_RO), rtol=1e-5, atol=1e-5)


def test_the_layer_of_transformers_gives_the_same_with_the_same_gradients() -> None:
    config = NemotronHConfig(
        layers_block_type=["linear_attention"],
        hidden_size=WIDTH,
        mamba_num_heads=CONFIG.heads,
        mamba_head_dim=CONFIG.head_dim,
        ssm_state_size=CONFIG.state_size,
        n_groups=CONFIG.groups,
        conv_kernel=CONFIG.conv_width,
        time_step_min=CONFIG.least_step,
        chunk_size=32,
    )
    mamba, theirs = mixer(), NemotronHMamba2Mixer(config, layer_idx=0)
    pairs = [(theirs.conv1d.weight, mamba.conv), (theirs.conv1d.bias, mamba.conv_bias), (theirs.A_log, mamba.log_rate)]
    pairs += [(theirs.D, mamba.skip), (theirs.dt_bias, mamba.step_bias), (theirs.norm.weight, mamba.norm)]
    for their, ours in pairs:
        their.data.copy_(ours.data)
    x_RD, wanted_RI = noise(150, WIDTH), noise(150, WIDTH, seed=1)
    expected_RD = theirs(x_RD[None])[0]
    projected_RO = F.linear(x_RD, theirs.in_proj.weight.detach())
    read_RI = mamba.gated(chunked(mamba, projected_RO), projected_RO)
    found_RD = F.linear(read_RI, theirs.out_proj.weight.detach())
    torch.testing.assert_close(found_RD, expected_RD, rtol=0, atol=1e-5)
    (expected_RD * wanted_RI).sum().backward()
    (found_RD * wanted_RI).sum().backward()
    for their, ours in pairs:
        assert (their.grad - ours.grad).norm() <= 1e-5 * their.grad.norm()


def test_a_rows_bits_depend_neither_on_rows_behind_it_nor_on_other_chunks() -> None:
    mamba, lookback = mixer(), CONFIG.conv_width - 1
    rows_NLX = noise(5, lookback + CONFIG.chunk_rows, CONFIG.row_width)
    state_N = noise(5, *CONFIG.state_shape, seed=1)
    with torch.no_grad():
        together = mamba.inter_chunk(mamba.intra_chunk(rows_NLX), state_N, 5)
        alone = mamba.inter_chunk(mamba.intra_chunk(rows_NLX[3:4]), state_N[3:4], 1)
        cut_NLX = rows_NLX[3:4].clone()
        cut_NLX[:, lookback + 20 :] = 1e4
        begun = mamba.inter_chunk(mamba.intra_chunk(cut_NLX), state_N[3:4], 0)
    assert torch.equal(alone.read_NTI[0], together.read_NTI[3])
    assert torch.equal(alone.state_N[0], together.state_N[3])
    assert torch.equal(begun.read_NTI[0, :20], together.read_NTI[3, :20])

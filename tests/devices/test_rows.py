"""Sums over the numbers of a row on a GPU."""

import pytest
import torch

from bloomery.models.gpu import rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("width", [1024, 1000, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_has_its_bits_with_whatever_stride_a_single_row_has(dtype: torch.dtype, width: int) -> None:
    x_RX = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    weight = torch.rand(width, device="cuda").to(dtype)
    whole_RX, scale_R1 = rows.rms_norm(x_RX, weight, 1e-6)
    exact_RX = x_RX.double() * (x_RX.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(whole_RX.double(), exact_RX, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for one_1X in (x_RX[3:4], x_RX[3].clone()[:, None].t(), x_RX[3].clone().as_strided((1, width), (7, 1))):
        alone_1X, own_11 = rows.rms_norm(one_1X, weight, 1e-6)
        assert torch.equal(alone_1X, whole_RX[3:4])
        assert torch.equal(own_11, scale_R1[3:4])
        headed_11X, _ = rows.rms_norm(one_1X[:, None], weight, 1e-6)
        assert torch.equal(headed_11X[:, 0], whole_RX[3:4])

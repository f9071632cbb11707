"""Which bits to expect: the numerics id of this process, and a probe that tells whether a row's result is independent of its batch here.

The pads (`ROW_PAD`, `KEY_PAD`) were found by measurement on other machines; the probe holds them against this machine's kernels, with this
model's shapes.
"""

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.adapters import RANK_PAD, Factors, low_rank_add
from bloomery.models.attention import KEY_PAD, ROW_PAD, causal_mask
from bloomery.models.decoder import Decoder
from bloomery.models.head import logits
from bloomery.models.pointwise import rms_norm
from bloomery.models.products import library, linear

_ROW_COUNTS = (8, 12, 36, 64, 132, 260, 1028)
_MEMBER = 20
"""Rows of each run in a pass of three."""


class ProbeReport(NamedTuple):
    """`bit_exact`: trainer and sampler agree to the bit here; otherwise `failures` names the kernels that depend on their batch."""

    bit_exact: bool
    failures: tuple[str, ...]


def numerics_id(dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
    """Equal ids promise equal bits: CPU model and flags (or GPU), torch build, threads, pads, library of the products, dtype."""
    parts = (
        platform.machine(),
        _device_name(torch.device(device)),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"threads={torch.get_num_threads()}",
        f"pads={ROW_PAD},{KEY_PAD},{RANK_PAD}",
        f"products={library(dtype, torch.device(device))}",
        str(dtype),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def probe(decoder: Decoder) -> ProbeReport:
    """Compare each kind of kernel on few rows and on many, with this model's shapes; takes well under a second for small models."""
    with torch.no_grad():
        failures = (*_linear_failures(decoder), *_attention_failures(decoder), *_norm_failures(decoder))
    return ProbeReport(not failures, failures)


def _linear_failures(decoder: Decoder) -> Iterator[str]:
    seen: set[tuple[int, ...]] = set()
    weights = [(name, weight) for name, weight in decoder.named_parameters() if weight.dim() == 2]
    for name, weight in weights:
        if tuple(weight.shape) in seen:
            continue
        seen.add(tuple(weight.shape))
        # The embedding probes the head, where the width of the logits makes many rows dear.
        counts = _ROW_COUNTS if weight.shape[0] * weight.shape[1] < 1 << 24 else _ROW_COUNTS[:4]
        rows_RI = _noise(max(counts), weight.shape[1], like=weight)
        factors = Factors(_noise(RANK_PAD, weight.shape[1], like=weight), _noise(weight.shape[0], RANK_PAD, like=weight))
        few = _projected(rows_RI[:ROW_PAD], weight, factors)
        if any(not torch.equal(_projected(rows_RI[:count], weight, factors)[:ROW_PAD], few) for count in counts):
            yield f"the product with `{name}` {list(weight.shape)} depends on the number of rows"
        if not torch.equal(
            _updated_in_a_batch(rows_RI, weight, factors), low_rank_add(linear(rows_RI[:_MEMBER], weight), rows_RI[:_MEMBER], factors)
        ):
            yield f"an adapter's update of `{name}` {list(weight.shape)} depends on those computed beside it"


def _projected(rows_RI: Tensor, weight: Tensor, factors: Factors) -> Tensor:
    plain = linear(rows_RI, weight)
    return torch.cat([plain, low_rank_add(plain, rows_RI, factors), torch.logsumexp(logits(rows_RI, weight, None), -1, keepdim=True)], -1)


def _updated_in_a_batch(rows_RI: Tensor, weight: Tensor, factors: Factors) -> Tensor:
    """The first of three members, with rows of their own and the same factors, as a pass of several runs computes them."""
    rows_MNI = rows_RI[: 3 * _MEMBER].unflatten(0, (3, -1))
    a_MrI, b_MOr = torch.stack([factors.a] * 3), torch.stack([factors.b] * 3)
    base_MNO = linear(rows_MNI.flatten(0, 1), weight).unflatten(0, (3, -1))
    return torch.baddbmm(base_MNO, torch.bmm(rows_MNI, a_MrI.transpose(1, 2)), b_MOr.transpose(1, 2))[0]


def _attention_failures(decoder: Decoder) -> Iterator[str]:
    config = decoder.config
    length, group = min(700, config.context), config.num_heads // config.num_kv_heads
    keys = KEY_PAD * 2
    q_1HLE = _noise(config.num_heads, length, config.head_dim, like=decoder.embedding)[None]
    k_1KSE = F.pad(_noise(config.num_kv_heads, length, config.head_dim, like=decoder.embedding), (0, 0, 0, keys - length))[None]
    v_1KSE = k_1KSE.flip(-1).contiguous()
    whole = _attend(q_1HLE, k_1KSE, v_1KSE, torch.arange(length))
    for position in (2, 76, 199, 332, 510, 511, 512, length - 1):
        if position >= length:
            continue
        near = KEY_PAD if position < KEY_PAD else keys
        # A decode step: the query heads of a group stand in the rows of their key head.
        q_1KGE = F.pad(q_1HLE[:, :, position].unflatten(1, (config.num_kv_heads, group)), (0, 0, 0, -group % ROW_PAD))
        mask = causal_mask(torch.tensor([position]), near, None, q_1HLE.dtype)
        step = F.scaled_dot_product_attention(q_1KGE, k_1KSE[:, :, :near], v_1KSE[:, :, :near], attn_mask=mask.expand(q_1KGE.shape[2], -1))
        if not torch.equal(step[:, :, :group].flatten(1, 2), whole[:, :, position]):
            yield f"attention at position {position} differs between a whole pass and a decode step"


def _attend(q_1HLE: Tensor, k_1KSE: Tensor, v_1KSE: Tensor, positions_L: Tensor) -> Tensor:
    mask = causal_mask(positions_L, k_1KSE.shape[2], None, q_1HLE.dtype)
    return F.scaled_dot_product_attention(q_1HLE, k_1KSE, v_1KSE, attn_mask=mask, enable_gqa=True)


def _norm_failures(decoder: Decoder) -> Iterator[str]:
    width = decoder.config.hidden_size
    rows = _noise(max(_ROW_COUNTS), width, like=decoder.norm)
    whole, few = rms_norm(rows, decoder.norm, 1e-6), rms_norm(rows[:ROW_PAD], decoder.norm, 1e-6)
    if not torch.equal(whole[:ROW_PAD], few):
        yield "the norm depends on the number of rows"
    inner = decoder.config.intermediate_size
    gates = _noise(max(_ROW_COUNTS), inner, like=decoder.norm)
    if not torch.equal(F.silu(gates)[:ROW_PAD], F.silu(gates[:ROW_PAD])):
        yield "the activation depends on the number of rows"


def _noise(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return "|".join(next((line for line in lines if line.startswith(key)), key) for key in ("model name", "flags"))

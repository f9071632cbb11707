"""Low-rank adapters: per-projection factors as they are stored, and the fused form the forward applies to ranges of rows.

Shapes: R rows, I inputs, O outputs, r rank padded to a multiple of `RANK_PAD`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bloomery.models.config import DecoderConfig
from bloomery.models.products import linear, product

RANK_PAD = 16
"""Factors are stored with the rank padded to this multiple: narrower ones change the bits of a row with the width."""

UNEMBED = "unembed_tokens"


class Factors(NamedTuple):
    """One projection's update `scale * B @ A`: `a` [r, I] and `b` [O, r]; experts carry a leading dimension."""

    a: Tensor
    b: Tensor


class FusedAdapter:
    """One adapter as the forward uses it: for each fused projection the joined `a` and the scaled block-diagonal `b`.

    Built anew from the masters for each micro-batch in training (so gradients flow through it) and once per version in sampling.
    """

    def __init__(self, factors: Mapping[str, Factors], scale: float) -> None:
        self._fused = {name: _join(parts, scale) for name, parts in _by_projection(factors).items()}

    def get(self, projection: str) -> Factors | None:
        """The fused factors of a projection such as `layers.0.qkv`, or None where the adapter has none."""
        return self._fused.get(projection)


class AdapterRows(NamedTuple):
    """Which adapter applies to which rows: contiguous ranges that cover all rows, each start and stop a multiple of `ROW_PAD`."""

    segments: tuple[tuple[FusedAdapter | None, int, int], ...]


def target_shapes(config: DecoderConfig, *, attention: bool, mlp: bool, unembed: bool) -> dict[str, tuple[int, int, int]]:
    """Targets by stored name (`layers.0.self_attn.q_proj`) with (experts or 0, inputs, outputs), in a fixed order."""
    width, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, int, int]] = {}
    for layer in range(config.num_layers):
        if attention:
            outputs = {"q_proj": (width, query), "k_proj": (width, key), "v_proj": (width, key), "o_proj": (query, width)}
            shapes |= {f"layers.{layer}.self_attn.{name}": (0, *shape) for name, shape in outputs.items()}
        if mlp:
            experts, inner = _mlp_shape(config, layer)
            outputs = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
            shapes |= {f"layers.{layer}.mlp.{name}": (experts, *shape) for name, shape in outputs.items()}
    if unembed:
        shapes[UNEMBED] = (0, width, config.vocab_size)
    return shapes


def padded_rank(rank: int) -> int:
    """The stored rank: the next multiple of `RANK_PAD`."""
    return -(-rank // RANK_PAD) * RANK_PAD


def adapted_linear(input_RI: Tensor, weight_OI: Tensor, projection: str, rows: AdapterRows) -> Tensor:
    """A projection of the base [R, O] with every segment's low-rank update; with an adapter anywhere the weight gets no gradient."""
    chosen = [(adapter.get(projection) if adapter is not None else None, start, stop) for adapter, start, stop in rows.segments]
    parts = tuple(_Part(start, stop) for factors, start, stop in chosen if factors is not None)
    if not parts:
        return linear(input_RI, weight_OI)
    flat = (tensor for factors, _, _ in chosen if factors is not None for tensor in factors)
    out_RO: Tensor = _AdaptedLinear.apply(input_RI, weight_OI, parts, *flat)  # type: ignore[no-untyped-call]
    return out_RO


class _Part(NamedTuple):
    start: int
    stop: int


class _AdaptedLinear(torch.autograd.Function):
    """One product for all rows, and small ones added in place: autograd's own nodes would copy every activation once per segment."""

    @staticmethod
    def forward(ctx: Any, input_RI: Tensor, weight_OI: Tensor, parts: tuple[_Part, ...], *flat: Tensor) -> Tensor:
        out_RO = product(input_RI, weight_OI)
        lows = []
        for (start, stop), a, b in zip(parts, flat[::2], flat[1::2], strict=True):
            low = torch.nn.functional.linear(input_RI[start:stop], a)
            out_RO[start:stop].addmm_(low, b.t())
            lows.append(low)
        ctx.parts = parts
        ctx.save_for_backward(input_RI, weight_OI, *lows, *flat)
        return out_RO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RO,), parts = grads, ctx.parts
        input_RI, weight_OI, *rest = ctx.saved_tensors
        lows, flat = rest[: len(parts)], rest[len(parts) :]
        grad_RI = product(grad_RO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        grad_flat: list[Tensor] = []
        for (start, stop), low, a, b in zip(parts, lows, flat[::2], flat[1::2], strict=True):
            part_RO = grad_RO[start:stop]
            grad_low = part_RO @ b
            if grad_RI is not None:
                grad_RI[start:stop].addmm_(grad_low, a)
            grad_flat += [grad_low.t() @ input_RI[start:stop], part_RO.t() @ low]
        return grad_RI, None, None, *grad_flat


def low_rank_add(base_RO: Tensor, input_RI: Tensor, factors: Factors) -> Tensor:
    """`base + (input @ a.T) @ b.T` in the one order of operations that training and sampling share."""
    return torch.addmm(base_RO, torch.nn.functional.linear(input_RI, factors.a), factors.b.t())


def _mlp_shape(config: DecoderConfig, layer: int) -> tuple[int, int]:
    experts = config.experts
    if experts is not None and layer in experts.sparse_layers:
        return experts.num_experts, experts.intermediate_size
    return 0, config.intermediate_size


_FUSED_ORDER = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
_FUSED_NAME = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}


def _by_projection(factors: Mapping[str, Factors]) -> dict[str, list[Factors]]:
    grouped: dict[str, list[tuple[int, Factors]]] = {}
    for name, pair in factors.items():
        head, _, leaf = name.rpartition(".")
        fused = f"{head.rpartition('.')[0]}.{_FUSED_NAME[leaf]}" if head else name
        grouped.setdefault(fused, []).append((_FUSED_ORDER.get(leaf, 0), pair))
    return {name: [pair for _, pair in sorted(pairs, key=lambda item: item[0])] for name, pairs in grouped.items()}


def _join(parts: list[Factors], scale: float) -> Factors:
    if len(parts) == 1:
        return Factors(parts[0].a, parts[0].b * scale)
    a = torch.cat([part.a for part in parts], dim=-2)
    if parts[0].b.dim() == 2:
        return Factors(a, torch.block_diag(*(part.b for part in parts)) * scale)
    blocks = [torch.block_diag(*(part.b[expert] for part in parts)) for expert in range(parts[0].b.shape[0])]
    return Factors(a, torch.stack(blocks) * scale)

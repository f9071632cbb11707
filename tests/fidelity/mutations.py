"""Bugs planted on the sampler's side: each was somebody's, and each must fail the card of a trained instance.

A bug is a decoder (or an adapter) beside the right one; nothing of ours is patched. The card gets both.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from bloomery.infer.attention import ChunkAttention, StepAttention
from bloomery.infer.versions import Model
from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import Attention
from bloomery.models.block import Block, RecurrentBlock
from bloomery.models.decoder import Decoder, Wanted
from bloomery.models.experts import Experts, Routing
from bloomery.models.gated_delta import GatedDelta
from bloomery.models.mamba import Mamba
from bloomery.models.recurrent import InterChunk
from bloomery.models.rope import Rope
from tests.fidelity.instances import STEPS, adapted, trained


class Mutation(NamedTuple):
    """What is wrong, in which instance, and the part of the model that the card names."""

    bug: str
    architecture: str
    model: Callable[[], Model]
    sampler: Callable[[Model], Model]
    place: str
    seen_by_k3: bool = True
    """Otherwise only the equality of bits tells."""


def _dense(family: str) -> Callable[[], Model]:
    return lambda: trained(family).model


def _experts() -> Model:
    """Four experts of eight for a token."""
    return trained("qwen3_moe", num_experts_per_tok=4).model


def _adapted() -> Model:
    return adapted("qwen3").model()


def _altered(change: Callable[[Decoder], None]) -> Callable[[Model], Model]:
    def sampler(model: Model) -> Model:
        decoder = deepcopy(model.decoder)
        change(decoder)
        return model._replace(decoder=decoder)

    return sampler


def _each_experts(change: Callable[[Experts], None]) -> Callable[[Model], Model]:
    return _altered(lambda decoder: [change(block.mlp) for block in decoder.layers if isinstance(block.mlp, Experts)] and None)


def _each_block(change: Callable[[Block], None]) -> Callable[[Model], Model]:
    return _altered(lambda decoder: [change(block) for block in decoder.layers] and None)


def _permute(experts: Experts) -> None:
    order = torch.randperm(len(experts.gate_up), generator=torch.Generator().manual_seed(0))
    experts.gate_up.copy_(experts.gate_up[order].clone())
    experts.down.copy_(experts.down[order].clone())


def _route(**changes: Any) -> Callable[[Model], Model]:
    return _each_experts(lambda experts: setattr(experts, "config", replace(experts.config, **changes)))


def _rope(**changes: Any) -> Callable[[Model], Model]:
    def change(decoder: Decoder) -> None:
        decoder.rope = decoder.full_rope = Rope(replace(decoder.config.rope, **changes), decoder.config.head_dim)

    return _altered(change)


def _forget_norms(block: Block) -> None:
    block.q_norm = block.k_norm = None


def _see(window: int | None) -> Callable[[Model], Model]:
    return _each_block(lambda block: setattr(block, "window", window))


_uncentred = _each_block(lambda block: setattr(block, "config", replace(block.config, centred_norms=False)))


def _eps(eps: float) -> Callable[[Model], Model]:
    return _each_block(lambda block: setattr(block, "config", replace(block.config, norm_eps=eps)))


class _Forgetful(Mamba):
    """Every chunk begins as the first one does."""

    def inter_chunk(self, intra: Sequence[Tensor], state_N: Tensor, carried: int) -> InterChunk:
        return super().inter_chunk(intra, torch.zeros_like(state_N), carried)


def _forget_state(block: Block) -> None:
    if isinstance(block, RecurrentBlock) and isinstance(right := block.recurrent, Mamba):
        block.recurrent = _Forgetful(right.config, right.eps, right.norm.dtype)
        block.recurrent.load_state_dict(right.state_dict())


def _keep_all(block: Block) -> None:
    if isinstance(block, RecurrentBlock) and isinstance(block.recurrent, GatedDelta):
        block.recurrent.log_rate.fill_(-20)


def _skip_nothing(block: Block) -> None:
    if isinstance(block, RecurrentBlock) and isinstance(block.recurrent, Mamba):
        block.recurrent.skip.zero_()


class Forward(Decoder):
    """A decoder with another one's weights and a `hidden` of its own."""

    def __init__(self, right: Decoder) -> None:
        super().__init__(right.config, dtype=right.dtype)
        self.requires_grad_(False).load_state_dict(right.state_dict())


class _LateSteps(Forward):
    """Decode counts its positions from one."""

    def hidden(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        return super().hidden(tokens_R, positions_R + isinstance(attention, StepAttention), attention, adapters, routing, wanted)


def _instead(kind: Callable[[Decoder], Decoder]) -> Callable[[Model], Model]:
    return lambda model: model._replace(decoder=kind(model.decoder))


def _stale(family: str) -> Callable[[Model], Model]:
    return _instead(lambda decoder: _StalePrefix(decoder, trained(family, steps=STEPS * 3 // 4).decoder))


class _Unscaled:
    """Attention whose scores nobody divides by the root of the head dimension."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def __call__(self, layer: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        return self._attention(layer, q_RHE * q_RHE.shape[-1] ** 0.5, k_RKE, v_RKE, window)


class _WithoutScale(Forward):
    def hidden(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        return super().hidden(tokens_R, positions_R, _Unscaled(attention), adapters, routing, wanted)


class _StalePrefix(Forward):
    """Keys and values of prompts are still those of the weights before."""

    def __init__(self, right: Decoder, before: Decoder) -> None:
        super().__init__(right)
        self._before = [before]

    def hidden(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        if isinstance(attention, ChunkAttention):
            return self._before[0].hidden(tokens_R, positions_R, attention, adapters, routing, wanted)
        return super().hidden(tokens_R, positions_R, attention, adapters, routing, wanted)


MUTATIONS: Final = (
    Mutation("all experts permuted behind their router", "qwen3_moe", _experts, _each_experts(_permute), "layer 0, mlp"),
    Mutation("RoPE base 1,000,000 for 10,000", "qwen3", _dense("qwen3"), _rope(theta=1e6), "layer 0, attention"),
    Mutation("one expert for four", "qwen3_moe", _experts, _route(top_k=1), "layer 0, mlp"),
    Mutation("routing weights not renormalised", "qwen3_moe", _dense("qwen3_moe"), _route(normalise_top_k=False), "layer 0, mlp"),
    Mutation("decode one position late", "qwen3", _dense("qwen3"), _instead(_LateSteps), "layer 0, attention"),
    Mutation("prompt's keys and values of the weights before", "qwen3", _dense("qwen3"), _stale("qwen3"), "layer 0, attention"),
    Mutation("norms of queries and keys left out", "qwen3", _dense("qwen3"), _each_block(_forget_norms), "layer 0, attention"),
    Mutation("scores not divided by the root of the head dimension", "qwen3", _dense("qwen3"), _instead(_WithoutScale), "layer 0, attention"),
    Mutation("a window of 24 not kept", "ministral", _dense("ministral"), _see(None), "layer 0, attention"),
    Mutation("a window of 23 for 24", "ministral", _dense("ministral"), _see(23), "layer 0, attention", seen_by_k3=False),
    Mutation("frequency scaling left out", "llama", _dense("llama"), _rope(kind="default"), "layer 0, attention"),
    Mutation("lengthening of late queries left out", "ministral3", _dense("ministral3"), _rope(query_beta=0.0), "layer 0, attention"),
    Mutation(
        "adapter scaled by alpha for alpha / rank",
        "qwen3",
        _adapted,
        lambda model: adapted("qwen3").model(adapted("qwen3").alpha * 16),
        "layer 0, attention",
    ),
    Mutation("a state that does not decay", "qwen3_5_text", _dense("qwen3_5_text"), _each_block(_keep_all), "layer 0, attention"),
    Mutation("norms that weigh by their weight alone", "qwen3_5_text", _dense("qwen3_5_text"), _uncentred, "layer 0, attention"),
    Mutation("a state not carried on", "nemotron_h", _dense("nemotron_h"), _each_block(_forget_state), "layer 1, attention", seen_by_k3=False),
    Mutation("what passes a state by left out", "nemotron_h", _dense("nemotron_h"), _each_block(_skip_nothing), "layer 1, attention"),
    Mutation("norm eps 1e-3 for 1e-6", "qwen3", _dense("qwen3"), _eps(1e-3), "layer 0, attention", seen_by_k3=False),
    Mutation("norm eps 1e-5 for 1e-6", "qwen3", _dense("qwen3"), _eps(1e-5), "layer 0, attention", seen_by_k3=False),
)

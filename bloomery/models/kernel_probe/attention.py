"""Attention: whether a decode step and a chunk of a prompt have the bits of a whole pass, and how many keys have those of many.

Shapes: H query heads, K key heads, G query heads of a key head, E their dimension, L positions, S slots for keys, R rows of a pass.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.attention import causal_mask
from bloomery.models.decoder import Decoder
from bloomery.models.kernel_probe.inputs import noise
from bloomery.models.native import attention as native_attention
from bloomery.models.pads import KEY_PAD, ROW_PAD, pad_to
from bloomery.models.spans import Spans

_FINER_KEY_PADS: Final = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
_FINEST_BLOCK: Final = 256
"""Of keys, in half precision: where kernels sum more in other blocks, one number in some ten thousands differs, too few to be found by trying."""
_KEY_PAD_SLOTS, _KEY_PAD_SLOTS_IN_HALF = 16, 128
"""Slots with noise of their own: in half precision a sum in another order changes one number in thousands, the others round to the same value."""
_CHUNK_ROWS: Final = (36, 200)
"""Rows of a chunk whose last block of queries is a small one, for either size of the kernel's blocks that a step may meet."""
_LENGTH: Final = 700
_POSITIONS: Final = (2, 76, 199, 332, 510, 511, 512, 699)
"""Of a sequence of that length that a decode step is tried at."""


def failures(decoder: Decoder) -> Iterator[str]:
    """Positions that are computed otherwise in a decode step."""
    for kv_heads, head_dim in _head_shapes(decoder):
        differing = _differing_natively if _is_native(decoder, head_dim) else _differing_positions
        for position in differing(decoder, kv_heads, head_dim):
            yield f"attention of {kv_heads} key heads of {head_dim} at position {position} differs between a whole pass and a decode step"


def key_pads(decoder: Decoder) -> tuple[int, ...]:
    """Kernels sum over keys in blocks whose sizes depend on their number: pads whose blocks begin as those of `KEY_PAD` do give the same bits."""
    config, half = decoder.config, decoder.dtype != torch.float32
    attended = []
    for kv_heads, head_dim in _head_shapes(decoder):
        if _is_native(decoder, head_dim):
            continue
        shape = (min(2, kv_heads), pad_to(config.num_heads // kv_heads, ROW_PAD))
        slots = _KEY_PAD_SLOTS_IN_HALF if half else _KEY_PAD_SLOTS
        attended += [_Attended(decoder.embedding, slots, *shape, head_dim)]
        attended += [_Attended(decoder.embedding, 1, shape[0], rows, head_dim) for rows in _CHUNK_ROWS]
    tried = [pad for pad in _FINER_KEY_PADS if not (half and attended) or pad <= _FINEST_BLOCK]
    return (*(pad for pad in tried if all(each.holds(pad) for each in attended)), KEY_PAD)


def answers(decoder: Decoder) -> Iterator[Tensor]:
    """Of passes, chunks and steps."""
    config = decoder.config
    for kv_heads, head_dim in _head_shapes(decoder):
        if _is_native(decoder, head_dim):
            yield from _attended_natively(decoder, kv_heads, head_dim)
            continue
        step = (kv_heads, pad_to(config.num_heads // kv_heads, ROW_PAD))
        for slots, heads, rows in ((1, *step), (16, *step), (1, config.num_heads, max(_CHUNK_ROWS))):
            yield _Attended(decoder.embedding, slots, heads, rows, head_dim).attend(last=KEY_PAD + 3, keys=2 * KEY_PAD)


def _head_shapes(decoder: Decoder) -> list[tuple[int, int]]:
    """Key heads, and dimensions of a head, of the layers that attend."""
    config = decoder.config
    return sorted({config.heads(layer)[:2] for layer in range(config.num_layers) if config.mixer(layer) == "attention"})


def _is_native(decoder: Decoder, head_dim: int) -> bool:
    return native_attention.attends_heads(head_dim, decoder.dtype, decoder.device)


def _differing_natively(decoder: Decoder, kv_heads: int, head_dim: int) -> Iterator[int]:
    whole_RHE, prompt_RHE, steps_RHE = _attended_natively(decoder, kv_heads, head_dim)
    if not torch.equal(prompt_RHE, whole_RHE):
        yield int((prompt_RHE != whole_RHE).flatten(1).any(1).nonzero()[0])
    for position in _POSITIONS:
        if position < len(whole_RHE) and not torch.equal(steps_RHE[position], whole_RHE[position]):
            yield position


def _attended_natively(decoder: Decoder, kv_heads: int, head_dim: int) -> list[Tensor]:
    """What every position gathers: of a whole pass, of a prompt in chunks of uneven sizes, and of some decode steps one after the other."""
    config, length = decoder.config, min(_LENGTH, decoder.config.context)
    q_RHE = noise(length, config.num_heads, head_dim, like=decoder.embedding)
    k_RKE, v_RKE = (noise(length, kv_heads, head_dim, like=decoder.embedding, seed=seed) for seed in (1, 2))
    chunks = [0, *(stop for stop in (1, 36, 300) if stop < length), length]
    whole, prompt = [(0, 0, 0, length)], [(start, 0, start, stop - start) for start, stop in pairwise(chunks)]
    steps = [(position, 0, position, 1) for position in _POSITIONS if position < length]
    return [native_attention.attend(q_RHE, k_RKE, v_RKE, Spans.of(spans))[0] for spans in (whole, prompt, steps)]


def _differing_positions(decoder: Decoder, kv_heads: int, head_dim: int) -> Iterator[int]:
    config = decoder.config
    length, group = min(_LENGTH, config.context), config.num_heads // kv_heads
    keys = KEY_PAD * 2
    q_1HLE = noise(config.num_heads, length, head_dim, like=decoder.embedding)[None]
    k_1KSE = F.pad(noise(kv_heads, length, head_dim, like=decoder.embedding), (0, 0, 0, keys - length))[None]
    v_1KSE = k_1KSE.flip(-1).contiguous()
    whole = _attend(q_1HLE, k_1KSE, v_1KSE, torch.arange(length, device=q_1HLE.device))
    for position in _POSITIONS:
        if position >= length:
            continue
        near = KEY_PAD if position < KEY_PAD else keys
        # A decode step: the query heads of a group stand in the rows of their key head.
        q_1KGE = F.pad(q_1HLE[:, :, position].unflatten(1, (kv_heads, group)), (0, 0, 0, -group % ROW_PAD))
        mask = causal_mask(torch.tensor([position], device=q_1HLE.device), near, None, q_1HLE.dtype)
        step = F.scaled_dot_product_attention(q_1KGE, k_1KSE[:, :, :near], v_1KSE[:, :, :near], attn_mask=mask.expand(q_1KGE.shape[2], -1))
        if not torch.equal(step[:, :, :group].flatten(1, 2), whole[:, :, position]):
            yield position


def _attend(q_1HLE: Tensor, k_1KSE: Tensor, v_1KSE: Tensor, positions_L: Tensor) -> Tensor:
    mask = causal_mask(positions_L, k_1KSE.shape[2], None, q_1HLE.dtype)
    return F.scaled_dot_product_attention(q_1HLE, k_1KSE, v_1KSE, attn_mask=mask, enable_gqa=True)


class _Attended:
    """Queries of a decode step, one slot each, or of a chunk of a prompt; the bits of each with a number of keys behind which it sees nothing."""

    def __init__(self, like: Tensor, slots: int, heads: int, rows: int, head_dim: int) -> None:
        self._q = noise(slots, heads, rows, head_dim, like=like)
        self._k, self._v = (noise(slots, heads, 2 * KEY_PAD, head_dim, like=like, seed=seed) for seed in (1, 2))

    def holds(self, pad: int) -> bool:
        """Whether this number of keys, and one behind a whole `KEY_PAD`, give the bits of many."""
        lasts = [start + last for start in (0, KEY_PAD) for last in (pad // 2, pad - 1)]
        return all(torch.equal(self.attend(last, last // KEY_PAD * KEY_PAD + pad), self.attend(last, 2 * KEY_PAD)) for last in lasts)

    def attend(self, last: int, keys: int) -> Tensor:
        """To so many keys, of which those up to `last` are seen."""
        mask_1L = causal_mask(torch.tensor([last], device=self._q.device), keys, None, self._q.dtype)
        mask_RL = mask_1L.expand(self._q.shape[2], -1)
        return F.scaled_dot_product_attention(self._q, self._k[:, :, :keys], self._v[:, :, :keys], attn_mask=mask_RL)

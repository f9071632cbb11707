"""From logits to tokens: the noise of a token is a function of (seed, sample, position) and of nothing else.

Noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), key = seed, counter = (token id / 4, position, sample, 0);
the four output words belong to four consecutive token ids. A token is the argmax of `(logits - max) / temperature + Gumbel noise`, which draws
from the softmax (the Gumbel-max trick). All in float32, uniforms with 23 bits.
Alternatives to the tokens of a prompt are drawn by inversion, many from one row: counter = (draw / 4, position in the prompt, 0, 1).
Everything works row by row, so a row's token does not depend on its batch. Shapes: B rows, V vocabulary, k draws of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bloomery.types.generation import SamplingParams

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products keep their high half."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_COLDEST = 1e-30
"""Below this a temperature could round to 0 in float32; at this it is greedy already."""
_SEED_MASK = (1 << 64) - 1
_NOISE_ROWS = 1 << 15
"""Token ids whose noise is made at a time: intermediate words stay in the processor's cache."""


class Draw(NamedTuple):
    """One token to choose: for which sample, at which position of its continuation, and how."""

    sample: int
    position: int
    params: SamplingParams


def choose(logits_BV: Floats, draws: Sequence[Draw]) -> Integers:
    """The chosen token of every row; the lowest id wins a tie."""
    tokens_B: Integers = logits_BV.argmax(-1)
    noisy = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    vocab_size = logits_BV.shape[1]
    step = max(1, _NOISE_ROWS // vocab_size)
    for start in range(0, len(noisy), step):
        rows = noisy[start : start + step]
        chosen = [draws[row] for row in rows]
        scaled = scale_and_truncate(logits_BV[rows], [draw.params for draw in chosen])
        tokens_B[rows] = (scaled + gumbel(chosen, vocab_size)).argmax(-1)
    return tokens_B


def draw_alternatives(logits_BV: Floats, positions_B: Integers, count: int, params: SamplingParams) -> Integers:
    """`count` independent tokens of each row at the temperature of `params`, from all tokens; one more changes none of those before."""
    if params.temperature == 0:
        return np.repeat(logits_BV.argmax(-1)[:, None], count, 1)
    drawn_Bk = np.empty((len(logits_BV), count), np.int64)
    step = max(1, _NOISE_ROWS // logits_BV.shape[1])
    temperature_11, uniform_Bk = np.array([[params.temperature]], np.float32), _uniforms(positions_B, count, params.seed)
    for start in range(0, len(logits_BV), step):
        rows = slice(start, start + step)
        mass_BV = np.cumsum(np.exp(_scaled(logits_BV[rows], temperature_11), dtype=np.float64), -1)
        for row, (mass_V, uniform_k) in enumerate(zip(mass_BV, uniform_Bk[rows], strict=True), start):
            drawn_Bk[row] = np.searchsorted(mass_V, uniform_k * mass_V[-1], side="right")
    # Weights that give no numbers give no mass either.
    within_Bk: Integers = np.minimum(drawn_Bk, logits_BV.shape[1] - 1)
    return within_Bk


def scale_and_truncate(logits_BV: Floats, params: Sequence[SamplingParams]) -> Floats:
    """`(logits - max) / temperature`, with -inf for what `top_k` and then `top_p` exclude."""
    scaled_BV = _scaled(logits_BV, np.array([[each.temperature] for each in params], np.float32))
    for row, each in enumerate(params):
        if each.top_p < 1 or 0 < each.top_k < scaled_BV.shape[1]:
            scaled_BV[row, ~kept(scaled_BV[row], each.top_k, each.top_p)] = -np.inf
    return scaled_BV


def _scaled(logits_BV: Floats, temperature_B1: Floats) -> Floats:
    # Relative to the largest, so that a tiny temperature gives -inf for the others and not inf for several.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled_BV: Floats = (logits_BV - logits_BV.max(-1, keepdims=True)) / np.maximum(temperature_B1, np.float32(_COLDEST))
    return scaled_BV


def kept(scaled_V: Floats, top_k: int, top_p: float) -> npt.NDArray[np.bool_]:
    """The `top_k` most likely tokens (0: all), then the fewest of them that hold `top_p` of their probability; equal ones by lowest id."""
    descending = np.sort(scaled_V)[::-1][: top_k or None]
    mass = np.cumsum(np.exp(descending, dtype=np.float64))
    count = 1 + int(np.searchsorted(mass, top_p * mass[-1])) if top_p < 1 else len(descending)
    threshold = descending[min(count, len(descending)) - 1]
    above: npt.NDArray[np.bool_] = scaled_V > threshold
    ties = np.flatnonzero(scaled_V == threshold)[: count - int(above.sum())]
    above[ties] = True
    return above


def gumbel(draws: Sequence[Draw], vocab_size: int) -> Floats:
    """Gumbel noise [B, V]."""
    seeds, positions, samples = (
        np.array([[value] for value in values], np.uint64)
        for values in zip(*((draw.params.seed & _SEED_MASK, draw.position, draw.sample) for draw in draws), strict=True)
    )
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)[None] + np.zeros_like(seeds)
    words = philox((blocks, positions, samples, np.zeros_like(seeds)), (seeds & _LOW, seeds >> _HALF))
    uniform = np.empty((*blocks.shape, 4), np.float32)
    for lane, word in enumerate(words):
        uniform[..., lane] = word >> np.uint64(9)
    # (k + 1/2) / 2**23 is exact in float32 and never 0 or 1.
    uniform = (uniform + np.float32(0.5)) * np.float32(2**-23)
    noise: Floats = -np.log(-np.log(uniform))
    return noise.reshape(len(draws), -1)[:, :vocab_size]


def _uniforms(positions_B: Integers, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Of 32 bits each, never 0 or 1: [B, k]."""
    seed_11 = np.array([[seed & _SEED_MASK]], np.uint64)
    blocks_1b = np.arange(-(-count // 4), dtype=np.uint64)[None]
    zeros = np.zeros_like(blocks_1b)
    words = philox((blocks_1b, positions_B.astype(np.uint64)[:, None], zeros, zeros + np.uint64(1)), (seed_11 & _LOW, seed_11 >> _HALF))
    words_Bk = np.stack(np.broadcast_arrays(*words), -1).reshape(len(positions_B), -1)[:, :count]
    return (words_Bk.astype(np.float64) + 0.5) * 2.0**-32


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of broadcastable arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> _HALF) ^ c1 ^ k0, odd & _LOW, (even >> _HALF) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3

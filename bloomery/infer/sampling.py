"""From logits to tokens: the noise of a token is a function of (seed, sample, position) and of nothing else.

Noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), key = seed, counter = (0, position, sample, 0), or, for
alternatives to the tokens of a prompt, many of one row, (draw / 2, position in the prompt, 0, 1). Two words of a block are one number in (0, 1) with
52 bits. A token is drawn by inversion: weights `exp((logits - max) / temperature)` in float32 are added up in float64, in the order of their ids,
and the token is the one in whose share of the whole the number falls. One number for a token, however large the vocabulary is.
Penalties look at the tokens so far and at nothing that is kept between steps, so a sample that is resumed or repeated goes on alike.
Everything works row by row, so a row's token does not depend on its batch. Shapes: B rows, V vocabulary, k draws of a row.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bloomery.models.native import bindings, multinomial
from bloomery.types.generation import SamplingParams

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products keep their high half."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_LEAST_DIVISOR = 1e-30
"""Below this a temperature could round to 0 in float32; at this it is greedy already."""
_SEED_MASK = (1 << 64) - 1
_NUCLEUS = 1 << 10
"""Tokens that `top_p` is looked for among at first."""
_WEIGHTS = 1 << 15
"""Weights that are added up at a time: they stay in the processor's cache."""


class Draw(NamedTuple):
    """One token to choose: for which sample, at which position of its continuation, and how."""

    sample: int
    position: int
    params: SamplingParams
    prompt: Sequence[int] = ()
    """Tokens that a repetition penalty counts as said before; one mention is as good as many."""
    sampled: Sequence[int] = ()
    """The continuation so far; looked at for penalties alone."""
    allowed_V: npt.NDArray[np.bool_] | None = None
    """The tokens that may come next, of which there is at least one; None: all."""
    top: int = 0
    """How many of the likeliest tokens to tell."""

    @property
    def banned(self) -> tuple[int, ...]:
        """The tokens that would end the continuation too early."""
        return self.params.stop_tokens if self.position < self.params.min_tokens else ()

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before temperature and truncation."""
        return self.params.penalises or bool(self.params.logit_bias) or self.allowed_V is not None or bool(self.banned)

    @property
    def tempers(self) -> bool:
        """Whether the token is drawn from all of the model's distribution at another temperature: of that a trainer can compute the same."""
        return self.params.temperature not in (0, 1) and not self.params.truncates and not self.adjusts

    @property
    def shapes(self) -> bool:
        """Whether the token is drawn from another distribution than the model's own."""
        return self.params.temperature != 1 or self.params.truncates or self.adjusts


class Processed(NamedTuple):
    """Log-probability of a token in the distribution that it was drawn from, and the likeliest tokens of that, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class DrawnTokens(NamedTuple):
    """The token of every row; where a row's was not drawn from the model's own distribution, what the other one says."""

    tokens_B: Integers
    processed: Mapping[int, Processed]


def choose(logits_BV: Floats, draws: Sequence[Draw], drawn_logsumexp_B: Floats | None = None) -> DrawnTokens:
    """The chosen token of every row; the lowest id wins a tie.

    `drawn_logsumexp_B` is, in rows that only `tempers`, the reduction of what they are drawn from as a trainer computes it: with it the
    log-probabilities that are told have a trainer's bits.
    """
    by_numpy = [not bindings.present() or draw.shapes for draw in draws]
    plain, shaped = ([row for row, each in enumerate(by_numpy) if each is wanted] for wanted in (False, True))
    tokens_B = np.empty(len(draws), np.int64)
    if plain:
        # In one call, of all that is drawn from the model's own distribution.
        tokens_B[plain] = multinomial.draw(logits_BV[plain] if shaped else logits_BV, *_coordinates([draws[row] for row in plain]))[0]
    if not shaped:
        return DrawnTokens(tokens_B, {})
    reduced = [drawn_logsumexp_B[row] if drawn_logsumexp_B is not None and draws[row].tempers else None for row in shaped]
    found_B, processed = _choose_by_numpy(logits_BV[shaped] if plain else logits_BV, [draws[row] for row in shaped], reduced)
    tokens_B[shaped] = found_B
    return DrawnTokens(tokens_B, {shaped[row]: each for row, each in processed.items()})


def draws_along(first: Draw) -> bool:
    """Whether this and what comes behind it in a sample is drawn from the model's own distribution by native kernels, and nothing else is told."""
    return bindings.present() and not (first.shapes or first.top)


def choose_along(logits_BV: Floats, first: Draw) -> tuple[Integers, Floats]:
    """The same for rows of one sample, whose first draw this is, at one position after the other; and the `logsumexp` of each, from the same pass.

    Where `draws_along` says so.
    """
    seeds_B, samples_B = (np.full(len(logits_BV), value, np.uint64) for value in (first.params.seed & _SEED_MASK, first.sample))
    return multinomial.draw(logits_BV, seeds_B, np.arange(first.position, first.position + len(logits_BV), dtype=np.uint64), samples_B)


def _choose_by_numpy(logits_BV: Floats, draws: Sequence[Draw], reduced: Sequence[np.float32 | None]) -> DrawnTokens:
    adjusted_BV = adjust(logits_BV, draws)
    greedy, noisy = ([row for row, draw in enumerate(draws) if (draw.params.temperature > 0) is noise] for noise in (False, True))
    tokens_B = np.empty(len(draws), np.int64)
    tokens_B[greedy] = adjusted_BV[greedy].argmax(-1)
    processed = {row: _certain(int(tokens_B[row]), draws[row]) for row in greedy}
    drawn_BV = adjusted_BV[noisy] if greedy else adjusted_BV
    numbers_B1 = uniforms([draws[row] for row in noisy])[:, None]
    step = max(1, _WEIGHTS // logits_BV.shape[1])
    for start in range(0, len(noisy), step):
        rows = noisy[start : start + step]
        scaled_BV = scale_and_truncate(drawn_BV[start : start + step], [draws[row].params for row in rows])
        tokens_B[rows] = invert(scaled_BV, numbers_B1[start : start + step])[:, 0]
        for row, scaled_V in zip(rows, scaled_BV, strict=True):
            if draws[row].shapes:
                processed[row] = _told(scaled_V, int(tokens_B[row]), draws[row].top, reduced[row])
    return DrawnTokens(tokens_B, processed)


def adjust(logits_BV: Floats, draws: Sequence[Draw]) -> Floats:
    """Penalties first, as they speak of the model's own logits, then biases, then -inf for what may not come."""
    rows = [row for row, draw in enumerate(draws) if draw.adjusts]
    if not rows:
        return logits_BV
    adjusted_BV = logits_BV.copy()
    for row in rows:
        _penalise(adjusted_BV[row], draws[row])
        _bias(adjusted_BV[row], draws[row].params)
        _mask(adjusted_BV[row], draws[row])
    return adjusted_BV


def _penalise(logits_V: Floats, draw: Draw) -> None:
    params = draw.params
    if not params.penalises:
        return
    sampled, times = np.unique(np.asarray(draw.sampled, np.int64), return_counts=True)
    if params.repetition_penalty != 1:
        said, penalty = np.union1d(np.asarray(draw.prompt, np.int64), sampled), np.float32(params.repetition_penalty)
        before = logits_V[said]
        logits_V[said] = np.where(before > 0, before / penalty, before * penalty)
    logits_V[sampled] -= np.float32(params.frequency_penalty) * times.astype(np.float32) + np.float32(params.presence_penalty)


def _bias(logits_V: Floats, params: SamplingParams) -> None:
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        logits_V[list(tokens)] += np.array(biases, np.float32)


def _mask(logits_V: Floats, draw: Draw) -> None:
    if draw.allowed_V is not None:
        logits_V[~draw.allowed_V] = -np.inf
    if banned := list(draw.banned):
        withheld = logits_V[banned]
        logits_V[banned] = -np.inf
        if np.isneginf(logits_V.max()):
            # Nothing but the end is allowed: it comes too early rather than something that is not allowed.
            logits_V[banned] = withheld


def _certain(token: int, draw: Draw) -> Processed:
    return Processed(0.0, ((token, 0.0),) if draw.top else ())


def _told(scaled_V: Floats, token: int, count: int, reduced: np.float32 | None) -> Processed:
    """What a row of `scale_and_truncate` says."""
    likeliest = _likeliest(scaled_V, count) if count else ()
    # Relative to the largest, so the sum is at least 1; but weights that give no numbers give no mass either.
    with np.errstate(divide="ignore", invalid="ignore"):
        # In float32 where a trainer's reduction is given, as the trainer subtracts it.
        log_total = np.log(np.exp(scaled_V).sum(dtype=np.float64)) if reduced is None else reduced
        return Processed(float(scaled_V[token] - log_total), tuple((int(other), float(scaled_V[other] - log_total)) for other in likeliest))


def _likeliest(scaled_V: Floats, count: int) -> Integers:
    """The tokens with the largest values, best first and equal ones by lowest id; without those that are excluded."""
    count = min(count, len(scaled_V))
    least = max(_largest(scaled_V, count).min(), np.finfo(np.float32).min)
    candidates = np.flatnonzero(scaled_V >= least)
    best: Integers = candidates[np.argsort(-scaled_V[candidates], kind="stable")][:count]
    return best


def draw_alternatives(logits_BV: Floats, positions_B: Integers, count: int, params: SamplingParams) -> Integers:
    """`count` independent tokens of each row at the temperature of `params`, from all tokens; one more changes none of those before."""
    if params.temperature == 0:
        return np.repeat(logits_BV.argmax(-1)[:, None], count, 1)
    drawn_Bk = np.empty((len(logits_BV), count), np.int64)
    numbers_Bk = _alternative_uniforms(positions_B, count, params.seed)
    divisor_11, step = divisors([params.temperature]), max(1, _WEIGHTS // logits_BV.shape[1])
    for start in range(0, len(logits_BV), step):
        rows = slice(start, start + step)
        drawn_Bk[rows] = invert(_scaled(logits_BV[rows], divisor_11), numbers_Bk[rows])
    return drawn_Bk


def invert(scaled_BV: Floats, numbers_Bk: Numbers) -> Integers:
    """The tokens [B, k] in whose shares these numbers, from 0 to 1, fall. One without weight has no share."""
    if bindings.present():
        return multinomial.invert(scaled_BV, numbers_Bk)
    mass_BV = np.cumsum(np.exp(scaled_BV), -1, dtype=np.float64)
    found_Bk = np.empty(numbers_Bk.shape, np.int64)
    for row, mass_V in enumerate(mass_BV):
        found_Bk[row] = np.searchsorted(mass_V, numbers_Bk[row] * mass_V[-1], side="right")
    # Logits that are no numbers have no mass either.
    within_Bk: Integers = np.minimum(found_Bk, scaled_BV.shape[1] - 1)
    return within_Bk


def scale_and_truncate(logits_BV: Floats, params: Sequence[SamplingParams]) -> Floats:
    """`(logits - max) / temperature`, with -inf for what `min_p`, then `top_k` and then `top_p` exclude."""
    scaled_BV = _scaled(logits_BV, divisors([each.temperature for each in params]))
    for row, each in enumerate(params):
        if each.min_p > 0:
            scaled_BV[row, scaled_BV[row] < np.float32(np.log(each.min_p))] = -np.inf
        if each.top_p < 1 or 0 < each.top_k < scaled_BV.shape[1]:
            scaled_BV[row, ~kept(scaled_BV[row], each.top_k, each.top_p)] = -np.inf
    return scaled_BV


def divisors(temperatures_B: Sequence[float]) -> Floats:
    """What logits are divided by [B, 1]."""
    floats_B1: Floats = np.maximum(np.array(temperatures_B, np.float32)[:, None], np.float32(_LEAST_DIVISOR))
    return floats_B1


def _scaled(logits_BV: Floats, divisor_B1: Floats) -> Floats:
    # Relative to the largest, so that a tiny temperature gives -inf for the others and not inf for several. `head.tempered` does the same.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled_BV: Floats = logits_BV - logits_BV.max(-1, keepdims=True)
        scaled_BV /= divisor_B1
    return scaled_BV


def kept(scaled_V: Floats, top_k: int, top_p: float) -> npt.NDArray[np.bool_]:
    """The `top_k` most likely tokens (0: all), then the fewest of them that hold `top_p` of their probability; equal ones by lowest id."""
    count = min(top_k or len(scaled_V), len(scaled_V))
    candidates_K = _largest(scaled_V, count)
    if top_p < 1:
        count, threshold = _nucleus(candidates_K, top_p)
    else:
        threshold = candidates_K.min()
    above: npt.NDArray[np.bool_] = scaled_V > threshold
    ties = np.flatnonzero(scaled_V == threshold)[: count - int(above.sum())]
    above[ties] = True
    return above


def _nucleus(candidates_K: Floats, top_p: float) -> tuple[int, np.float32]:
    """How many of the largest hold `top_p` of the probability, and the least of them. Nearly always few do, and only those are sorted."""
    wanted = top_p * np.exp(candidates_K, dtype=np.float64).sum()
    width = min(_NUCLEUS, len(candidates_K))
    while True:
        descending = np.sort(_largest(candidates_K, width))[::-1]
        mass = np.cumsum(np.exp(descending, dtype=np.float64))
        if mass[-1] >= wanted or width == len(candidates_K):
            count = min(1 + int(np.searchsorted(mass, wanted)), width)
            return count, descending[count - 1]
        width = min(8 * width, len(candidates_K))


def _largest(values_V: Floats, count: int) -> Floats:
    """The `count` largest, in any order."""
    return values_V if count == len(values_V) else np.partition(values_V, len(values_V) - count)[len(values_V) - count :]


def uniforms(draws: Sequence[Draw]) -> Numbers:
    """A number in (0, 1) for each: [B]."""
    seeds, positions, samples = _coordinates(draws)
    none = np.zeros_like(seeds)
    return _numbers(philox((none, positions, samples, none), (seeds & _LOW, seeds >> _HALF)))[0]


def _coordinates(draws: Sequence[Draw]) -> tuple[Words, Words, Words]:
    """Seeds [B], of 64 bits, positions and samples."""
    columns = zip(*((draw.params.seed & _SEED_MASK, draw.position, draw.sample) for draw in draws), strict=True)
    seeds, positions, samples = (np.array(column, np.uint64) for column in columns) if draws else (np.zeros(0, np.uint64),) * 3
    return seeds, positions, samples


def _alternative_uniforms(positions_B: Integers, count: int, seed: int) -> Numbers:
    """The same for `count` draws at each of these positions of a prompt: [B, k]."""
    seed_11 = np.array([[seed & _SEED_MASK]], np.uint64)
    blocks_1b = np.arange(-(-count // 2), dtype=np.uint64)[None]
    none = np.zeros_like(blocks_1b)
    words = philox((blocks_1b, positions_B.astype(np.uint64)[:, None], none, none + np.uint64(1)), (seed_11 & _LOW, seed_11 >> _HALF))
    return np.stack(_numbers(words), -1).reshape(len(positions_B), -1)[:, :count]


def _numbers(words: tuple[Words, Words, Words, Words]) -> tuple[Numbers, Numbers]:
    """Of 52 bits each: (k + 1/2) / 2**52 is exact in float64 and never 0 or 1."""
    first, second = ((high << np.uint64(20) | low >> np.uint64(12)) for high, low in (words[:2], words[2:]))
    return (first.astype(np.float64) + 0.5) * 2.0**-52, (second.astype(np.float64) + 0.5) * 2.0**-52


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of broadcastable arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> _HALF) ^ c1 ^ k0, odd & _LOW, (even >> _HALF) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3

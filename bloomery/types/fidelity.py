"""How far what a sampler says of its tokens is from what the trainer says of them, as one card per version of the weights.

With d = trainer - sampler, the log-probabilities of one sampled token, k3 is the mean of exp(d) - 1 - d: the estimate of the KL divergence
between the two that is never negative and grows with every mistake, in either direction.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bloomery.types.arrays import Array
from bloomery.types.errors import WorkerError
from bloomery.types.generation import Generate, GenerateFailed, Priority, SampledToken, SamplerEvent, SamplingParams, Weights
from bloomery.types.wire import Wire

Mode = Literal["exact", "plain"]
"""What is promised: equal bits, or numbers that are close."""
PLAIN_K3: Final = 1e-3
"""Largest k3 of a plain sampler: rounding alone stays below it, in half precision too (docs/fidelity.md)."""

LENGTHS: Final = (3, 15, 17, 40, 510, 515)
"""Tokens of the prompts: on both sides of the pads of rows, of ranks and of keys."""
TEXT_TOKENS: Final = 640
"""Tokens of a text that prompts are cut from."""


class Prompt(NamedTuple):
    """What a card asks a sampler; `late` ones arrive while the others run."""

    tokens: tuple[int, ...]
    num_samples: int
    seed: int
    late: bool


class Sampled(Wire, frozen=True):
    """One answer of a sampler: all tokens, those of the prompt first, and the float32 log-probabilities [N - P] of the others."""

    tokens: tuple[int, ...]
    logprobs: Array

    @property
    def prompt(self) -> tuple[int, ...]:
        """The first P."""
        return self.tokens[: len(self.tokens) - self.logprobs.shape[0]]


class Numbers(NamedTuple):
    """The comparison of all sampled tokens."""

    sequences: int
    tokens: int
    k3: float
    mean_abs: float
    max_abs: float
    bit_equal: float
    """Share of the tokens whose two log-probabilities are the same float32."""
    worst: int
    """Number of the sequence with the largest difference."""


def prompts(tokens: Sequence[int], context: int, max_tokens: int, lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    """Different pieces of a text, at first and late by turns, one in a group of three, which comes again; all leave room for `max_tokens`."""
    longest = max(1, min(len(tokens), context - max_tokens))
    cut = [min(length, longest) for length in lengths]
    starts = [(17 * number) % (len(tokens) - length + 1) for number, length in enumerate(cut)]
    pieces = [tuple(tokens[start : start + length]) for start, length in zip(starts, cut, strict=True)]
    group = len(lengths) // 2
    asked = [Prompt(piece, 3 if number == group else 1, number, late=number % 2 == 1) for number, piece in enumerate(pieces)]
    return [*asked, Prompt(pieces[group], 1, len(pieces), late=True)]


def request(prompt: Prompt, weights: Weights, max_tokens: int, request_id: str, *, priority: Priority = "rollout") -> Generate:
    """A prompt as a request for `max_tokens` tokens at temperature 1."""
    return Generate(
        request_id=request_id,
        weights=weights,
        prompt=Array.of(np.asarray(prompt.tokens, np.int32)),
        params=SamplingParams(max_tokens=max_tokens, seed=prompt.seed),
        num_samples=prompt.num_samples,
        priority=priority,
    )


def answers(asked: Generate, events: Sequence[SamplerEvent]) -> list[Sampled]:
    """What came of one request, among events that may be of others too; where it failed, the sampler's own error."""
    own = [event for event in events if event.request_id == asked.request_id]
    for event in own:
        if isinstance(event, GenerateFailed):
            # Nobody who wants answers compared has written the request: no field of his is wrong.
            raise msgspec.structs.replace(event, field=None).error()
    prompt: list[int] = asked.prompt.numpy().tolist()
    told: list[list[SampledToken]] = [[] for _ in range(asked.num_samples)]
    for event in own:
        if isinstance(event, SampledToken):
            told[event.sample].append(event)
    return [
        Sampled(tokens=(*prompt, *(event.token for event in tokens)), logprobs=Array.of(np.array([event.logprob for event in tokens], np.float32)))
        for tokens in told
    ]


def compare(sampled: Sequence[Sampled], trainer: Sequence[NDArray[np.float32]]) -> Numbers:
    """Both sides of the same tokens; `trainer` holds one array for each sequence."""
    differences = [theirs.astype(np.float64) - each.logprobs.numpy().astype(np.float64) for each, theirs in zip(sampled, trainer, strict=True)]
    all_N = np.concatenate(differences)
    if not len(all_N) or not np.isfinite(all_N).all():
        raise WorkerError("these weights give no finite log-probabilities to compare: train them again from an earlier checkpoint")
    return Numbers(
        sequences=len(sampled),
        tokens=len(all_N),
        # expm1 keeps the digits of small differences.
        k3=float(np.mean(np.expm1(all_N) - all_N)),
        mean_abs=float(np.abs(all_N).mean()),
        max_abs=float(np.abs(all_N).max()),
        bit_equal=float(np.mean(all_N == 0)),
        worst=int(np.argmax([np.abs(each).max(initial=0) for each in differences])),
    )


def verdict(numbers: Numbers, mode: Mode) -> Literal["pass", "fail"]:
    """Exact means equal; plain is held to `PLAIN_K3`."""
    holds = numbers.max_abs == 0 if mode == "exact" else numbers.k3 <= PLAIN_K3
    return "pass" if holds else "fail"

"""What a sampler is asked and what it answers, one event at a time."""

from typing import Final, Literal

from bloomery.types.arrays import Array
from bloomery.types.wire import Wire

FinishReason = Literal["stop", "length", "abort"]
NO_LOGPROB: Final = -99999.0
"""Stands for the likeliest tokens where there are none: before the first token of a prompt, and where nothing was asked."""


class Weights(Wire, frozen=True):
    """The weights to sample with: a version, and the blob to load it from when it is not in memory (None: the base model)."""

    version: str
    key: str | None = None


class SamplingParams(Wire, frozen=True):
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 mean no truncation. Noise is Philox(seed; sample, position): batch order never matters."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()


class Generate(Wire, frozen=True, tag="generate"):
    """Sample `num_samples` continuations of `prompt` (int32 [P]) and, where asked, score the prompt; `max_tokens` 0 only scores."""

    request_id: str
    weights: Weights
    prompt: Array
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_top_k: int = 0
    top_logprobs: int = 0


class Abort(Wire, frozen=True, tag="abort"):
    """Stop a request; its samples finish with reason `abort`. `sample` None means all."""

    request_id: str
    sample: int | None = None


class PromptScored(Wire, frozen=True, tag="prompt_scored"):
    """`logprobs` float32 [P], NaN at 0.

    With `prompt_top_k` k also `top_ids` int32 [P, k] and `top_logprobs` float32 [P, k] (0 and -99999 at position 0).
    """

    request_id: str
    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None


class SampledToken(Wire, frozen=True, tag="token"):
    """One token: `logprob` is the model's own (temperature 1, untruncated); `top` are (token, logprob) pairs, best first."""

    request_id: str
    sample: int
    position: int
    """Index of the token in its continuation, from 0: a repeated answer after a restart is recognised by it."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampleFinished(Wire, frozen=True, tag="finished"):
    """No more tokens for this sample. A stop token is part of the tokens."""

    request_id: str
    sample: int
    reason: FinishReason


class GenerateFailed(Wire, frozen=True, tag="generate_failed"):
    """The request cannot be served; nothing more comes."""

    request_id: str
    message: str
    category: Literal["user", "server"]


SamplerEvent = PromptScored | SampledToken | SampleFinished | GenerateFailed

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
    """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 mean no truncation. Noise is Philox(seed modulo 2**64; sample, position)."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()


class PromptTargets(Wire, frozen=True):
    """Tokens to score in a prompt: `ids` int32 [C], each at its place in `positions` int32 [C], which never fall and begin at 1 or later."""

    positions: Array
    ids: Array


class Generate(Wire, frozen=True, tag="generate"):
    """Sample `num_samples` continuations of `prompt` (int32 [P]) and, where asked, score the prompt; `max_tokens` 0 only scores."""

    request_id: str
    weights: Weights
    prompt: Array
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_top_k: int = 0
    scored_from: int = 1
    """Position of the first prompt token that the two above are wanted for."""
    targets: PromptTargets | None = None
    prompt_draws: int = 0
    """Tokens to draw at each position of the prompt but the first, at the request's temperature and from all tokens."""
    top_logprobs: int = 0
    routing: bool = False
    """Whether to tell which experts the tokens went to; of a mixture of experts alone."""

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked about the prompt."""
        return self.prompt_logprobs or self.prompt_top_k > 0 or self.targets is not None or self.prompt_draws > 0


class Abort(Wire, frozen=True, tag="abort"):
    """Stop a request; its samples finish with reason `abort`. `sample` None means all."""

    request_id: str
    sample: int | None = None


class PromptFound(Wire, frozen=True, tag="prompt_found"):
    """The keys and values of the prompt's first `tokens` tokens were there already; says so before anything else, where there were any."""

    request_id: str
    tokens: int


class PromptScored(Wire, frozen=True, tag="prompt_scored"):
    """`logprobs` float32 [P], NaN before `scored_from`.

    With `prompt_top_k` k also `top_ids` int32 [P, k] and `top_logprobs` float32 [P, k] (0 and -99999 before `scored_from`), with `targets` their
    log-probabilities float32 [C], with `prompt_draws` k `drawn_ids` int32 [P - 1, k] and `drawn_logprobs` float32 [P - 1, k], whose row i is
    drawn for position i + 1. All log-probabilities are the model's own.
    """

    request_id: str
    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    target_logprobs: Array | None = None
    drawn_ids: Array | None = None
    drawn_logprobs: Array | None = None


class PromptRouted(Wire, frozen=True, tag="prompt_routed"):
    """Which experts the prompt's tokens but the last went to, where routing was asked: `experts` int32 [P - 1, L, T], before the first token."""

    request_id: str
    experts: Array


class SampledToken(Wire, frozen=True, tag="token"):
    """One token: `logprob` is the model's own (temperature 1, untruncated); `top` are (token, logprob) pairs, best first."""

    request_id: str
    sample: int
    position: int
    """Index of the token in its continuation, from 0: a repeated answer after a restart is recognised by it."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    fed_experts: Array | None = None
    """Where routing was asked: int32 [L, T], of the token before this one, which was fed to sample it. Nobody feeds the last one of a sample."""


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


SamplerEvent = PromptFound | PromptScored | PromptRouted | SampledToken | SampleFinished | GenerateFailed

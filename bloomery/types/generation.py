"""What a sampler is asked and what it answers, one event at a time."""

from typing import Final, Literal

from bloomery.types.arrays import Array
from bloomery.types.errors import BY_CODE, BloomeryError, Category, InvalidInput, WorkerError
from bloomery.types.wire import Wire

FinishReason = Literal["stop", "length", "abort"]
Priority = Literal["production", "rollout", "evaluation"]
"""Who goes first where requests share a process, in this order; each class has a floor (`infer/plan`)."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Whose log-probabilities: the model's own (temperature 1, nothing else), or those of the distribution that tokens were drawn from."""
SCORED_TEMPERATURE_HEADER: Final = "x-bloomery-scored-temperature"
"""By which `asample` asks for the log-probabilities of its prompt at another temperature than 1."""
NO_LOGPROB: Final = -99999.0
"""Stands for the likeliest tokens where there are none: before the first token of a prompt, and where nothing was asked."""


class Weights(Wire, frozen=True, tag="weights"):
    """The weights to sample with: a version, and the blob to load it from when it is not in memory (None: the base model)."""

    version: str
    key: str | None = None


class Live(Wire, frozen=True, tag="live"):
    """Whatever the engine serves under a name, at every token: an update of the name reaches requests that run."""

    name: str


class SamplingParams(Wire, frozen=True):
    """`temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 mean no truncation. Noise is Philox(seed modulo 2**64; sample, position).

    In this order logits are penalised for repetition, frequency and presence, biased, masked, divided by `temperature`, and truncated by `min_p`,
    `top_k` and `top_p`.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    min_p: float = 0.0
    """Least probability of a token as a share of that of the likeliest."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that were sampled before; the prompt does not count."""
    frequency_penalty: float = 0.0
    """The same for each time that they were."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the others, of tokens of the prompt and of those that were sampled before."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), each token once."""
    min_tokens: int = 0
    """Until so many are sampled, `stop_tokens` are not drawn."""

    @property
    def penalises(self) -> bool:
        """Whether a token depends on which ones stand before it, and not only on what the model makes of them."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Grammar(Wire, frozen=True):
    """What every continuation must be: JSON that fits a schema, a match of a regular expression, or a text of a grammar in llguidance's Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    field: str = "grammar"
    """Its name as the caller knows it, for refusals."""


class PromptTargets(Wire, frozen=True):
    """Tokens to score in a prompt: `ids` int32 [C], each at its place in `positions` int32 [C], which never fall and begin at 1 or later."""

    positions: Array
    ids: Array


class Generate(Wire, frozen=True, tag="generate"):
    """Sample `num_samples` continuations of `prompt` (int32 [P]) and, where asked, score the prompt; `max_tokens` 0 only scores."""

    request_id: str
    weights: Weights | Live
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
    scored_temperature: float = 1.0
    """Of the distribution whose log-probabilities are told of the prompt."""
    prompt_ranks: bool = False
    """Whether to tell, with `prompt_logprobs`, which place each token of the prompt has among all."""
    top_logprobs: int = 0
    routing: bool = False
    """Whether to tell which experts the tokens went to; of a mixture of experts alone."""
    routing_weights: bool = False
    """Whether to tell, with `routing`, what the answers of these experts were multiplied with."""
    embed: bool = False
    """Whether to tell what the model made of the prompt, instead of sampling: with `max_tokens` 1 and one sample, which ends without a token."""
    priority: Priority = "rollout"
    begun: tuple[tuple[int, ...], ...] = ()
    """What another process sampled of each sample before it went away: tokens behind those are sampled, and told. None where nobody began."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """A guess at each sample, such as what earlier weights gave with this seed: verified in one pass, and kept up to the first that is not drawn.

    Nothing of it is trusted: the answer is the one without it. Where prefill and decode differ in bits, it is as good and may differ in as much.
    """
    grammar: Grammar | None = None
    """Masks the tokens that lead out of it; stop tokens come only where it may end, and the model's own log-probabilities know nothing of it."""

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

    With `prompt_ranks` also `ranks` int32 [P], which are 1 for the likeliest token and 0 before `scored_from`, with `prompt_top_k` k `top_ids` int32
    [P, k] and `top_logprobs` float32 [P, k] (0 and -99999 before `scored_from`), with `targets` their log-probabilities float32 [C], with
    `prompt_draws` k `drawn_ids` int32 [P - 1, k] and `drawn_logprobs` float32 [P - 1, k], whose row i is drawn for position i + 1. All
    log-probabilities are the model's own.
    """

    request_id: str
    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    target_logprobs: Array | None = None
    drawn_ids: Array | None = None
    drawn_logprobs: Array | None = None
    ranks: Array | None = None


class PromptRouted(Wire, frozen=True, tag="prompt_routed"):
    """Which experts the prompt's tokens but the last went to, where routing was asked: `experts` int32 [P - 1, L, T], before the first token.

    Where their weights were asked too, `expert_weights` float32 [P - 1, L, T]: what their answers were multiplied with.
    """

    request_id: str
    experts: Array
    expert_weights: Array | None = None


class PromptEmbedded(Wire, frozen=True, tag="prompt_embedded"):
    """What the model made of the prompt, where that was asked: `vector` float32 [D], its last token's hidden state after the final norm."""

    request_id: str
    vector: Array


class SampledToken(Wire, frozen=True, tag="token", omit_defaults=True):
    """One token: `logprob` is the model's own (temperature 1, untruncated); `top` are (token, logprob) pairs, best first.

    `processed_logprob` and `processed_top` are the same of the distribution that the token was drawn from: after penalties, bias, masks, temperature
    and truncation, none of what those exclude among them. None where that distribution is the model's own. A greedy token has the log-probability 0.
    """

    request_id: str
    sample: int
    position: int
    """Index of the token in its continuation, from 0: a repeated answer after a restart is recognised by it."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    fed_experts: Array | None = None
    """Where routing was asked: int32 [L, T], of the token before this one, which was fed to sample it. Nobody feeds the last one of a sample."""
    fed_expert_weights: Array | None = None
    """Where their weights were asked too: float32 [L, T]."""
    version: str | None = None
    """The weights that it was sampled with, said of a sample's first token and of every one whose weights are not those of the one before."""
    processed_logprob: float | None = None
    processed_top: tuple[tuple[int, float], ...] | None = None
    kept: bool = False
    """Whether it is what the draft of its sample said, as is every token before it: it took no step of its own."""

    def logprob_as(self, mode: LogprobsMode) -> float:
        """The log-probability of the token, of the distribution that is asked for."""
        return self.logprob if mode == "raw_logprobs" or self.processed_logprob is None else self.processed_logprob

    def top_as(self, mode: LogprobsMode) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens of that distribution."""
        return self.top if mode == "raw_logprobs" or self.processed_top is None else self.processed_top


class SampleFinished(Wire, frozen=True, tag="finished"):
    """No more tokens for this sample. A stop token is part of the tokens."""

    request_id: str
    sample: int
    reason: FinishReason


class GenerateFailed(Wire, frozen=True, tag="generate_failed"):
    """The request cannot be served; nothing more comes."""

    request_id: str
    message: str
    category: Category
    field: str | None = None
    """What of the request is wrong, where it is one field."""
    code: str = WorkerError.code
    """Of the error that it was; of one that is the caller's this says no more than its category, unless it is a code of such."""

    def error(self) -> BloomeryError:
        """To raise where the request was made: of the class that it was, as far as that is known."""
        otherwise = InvalidInput if self.category == "user" else WorkerError
        kind = BY_CODE.get(self.code, otherwise)
        return (kind if kind.category == self.category else otherwise)(self.message, field=self.field)


SamplerEvent = PromptFound | PromptScored | PromptRouted | PromptEmbedded | SampledToken | SampleFinished | GenerateFailed

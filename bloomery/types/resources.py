"""What `/api/v1` takes and shows: frozen and closed, the same classes on the server and in the client.

Times are integer microseconds since the epoch, UTC. Operations and their results are not here: they travel as msgpack (`types/operations`).
"""

from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from bloomery.types.documented import describe_fields
from bloomery.types.ids import NAME

Consent = Literal["none", "eval", "train"]
FeedbackType = Literal["bool", "float", "label", "comment", "demonstration", "preference"]
FeedbackSource = Literal["user", "human_review", "judge", "code", "api"]
Split = Literal["train", "validation", "eval"]
LabelSource = Literal["import", "correction", "confirmed"]
TimeUs = Annotated[int, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME)]


class Resource(BaseModel):
    """Base of everything below: nothing is taken for what it is not. The bound is far off; having one makes every text be checked to be Unicode."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", str_max_length=1 << 30, json_schema_extra=describe_fields)


Item = TypeVar("Item", bound=BaseModel)


class Page(Resource, Generic[Item]):
    """One page of a list; ask for the next with `offset` plus the length of `data`."""

    data: list[Item]
    offset: int
    has_more: bool


# Runs


class CreateRun(Resource):
    """A run on a base model: a LoRA adapter, or (`rank` 0) all parameters. Without a seed the server draws one."""

    base_model: str
    rank: int
    seed: int | None = None
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    name: str | None = None
    metadata: dict[str, str] = {}


class RunOptions(TypedDict, total=False):
    """What `CreateRun` may say beside a base model, a rank and a seed."""

    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    name: str | None
    metadata: dict[str, str]


class Run(Resource):
    """A training run; `next_seq` is the number that its next operation takes."""

    id: str
    name: str | None
    base_model: str
    base_hash: str
    rank: int
    seed: int
    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    state: str
    error: str | None
    step: int
    digest: str | None
    next_seq: int
    metadata: dict[str, str]
    created_us: int
    updated_us: int


class RunMetric(Resource):
    """The metrics of one operation, by name."""

    seq: int
    step: int
    created_us: int
    values: dict[str, float | None]


class RunMetrics(Resource):
    """Metrics in the order of operations; ask again with `after` = the last `seq` seen."""

    data: list[RunMetric]


class Submitted(Resource):
    """The operation is durable; its result is asked for under the same number."""

    run_id: str
    seq: int


class Waiting(Resource):
    """There is no result yet, and who is waited for, in words."""

    waiting_for: str


class SaveCheckpointAs(Resource):
    """Keep the resumable state under a name."""

    name: Name


class SaveSnapshotAs(Resource):
    """Publish weights for sampling, under a name if one is given."""

    name: Name | None = None


class LoadFrom(Resource):
    """Begin where a named checkpoint of another run ended; only the first operation of a run may do so."""

    run_id: str
    name: Name
    optimizer: bool = True


class Checkpoint(Resource):
    """A named resumable state, or (`kind` snapshot) immutable weights with their version."""

    run_id: str
    seq: int
    kind: str
    name: str | None
    digest: str | None
    version: str | None
    size_bytes: int
    step: int
    created_us: int


# Models, here and elsewhere


class Model(Resource):
    """A base model that an engine of this server holds."""

    alias: str
    base_hash: str
    path: str
    context: int
    vocab_size: int
    ready: bool


UsdPerMtok = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Price(Resource):
    """What tokens cost, in US dollars per million: of a deployment what its owner says, of a model elsewhere what its provider asks."""

    prompt_usd_per_mtok: UsdPerMtok
    cached_prompt_usd_per_mtok: UsdPerMtok | None = None
    """Of prompt tokens that another request had computed before; None: the same as of the others."""
    completion_usd_per_mtok: UsdPerMtok

    def of(self, prompt_tokens: int, completion_tokens: int, *, cached_tokens: int = 0) -> float:
        """So many tokens in US dollars; `cached_tokens` of the prompt were computed before."""
        cached = self.prompt_usd_per_mtok if self.cached_prompt_usd_per_mtok is None else self.cached_prompt_usd_per_mtok
        fresh = (prompt_tokens - cached_tokens) * self.prompt_usd_per_mtok
        return (fresh + cached_tokens * cached + completion_tokens * self.completion_usd_per_mtok) / 1e6


class EndpointShown(Resource):
    """An endpoint with models elsewhere, which graders and evaluations ask as `NAME:MODEL`."""

    name: str
    base_url: str
    models: dict[str, Price | None] | None
    """Those that it may be asked for, and their prices where these are known; None: any."""
    timeout_s: float
    concurrency: int
    """Questions that it is asked at a time."""


class AgentShown(Resource):
    """An agent of many turns, which jobs of reinforcement train as `method.agent`."""

    name: str
    url: str
    """Of the server that has it."""
    timeout_s: float
    """Of one rollout."""


class Fidelity(Resource):
    """How far the sampler's log-probabilities of some of its tokens were from the trainer's (`docs/fidelity.md`)."""

    mode: Literal["exact", "plain"]
    verdict: Literal["pass", "fail"]
    k3: float
    mean_abs: float
    max_abs: float
    bit_equal: float
    sequences: int
    tokens: int
    first_difference: str | None
    """Where in the model the two forwards part first; None where they do not."""
    dtype: str
    numerics: str
    """Of the process that computed the trainer's side."""
    measured_us: int


# Traffic


class Span(Resource):
    """One recorded inference, without its body. `redacted`: something was replaced before it reached the disk, and token ids were left out."""

    id: str
    kind: str
    model: str
    deployment: str | None
    revision: int | None
    version: str
    base_hash: str
    template_hash: str | None
    trace_id: str | None
    parent_id: str | None
    episode_id: str | None
    session_id: str | None
    status: str
    error_code: str | None
    started_us: int
    ttft_us: int | None
    duration_us: int | None
    in_tokens: int
    cached_tokens: int
    """Of `in_tokens`: those that another request had computed before."""
    out_tokens: int
    cost_usd: float | None
    """At the price that its deployment had then; None where it had none."""
    finish_reason: str | None
    seed: int | None
    input_hash: str | None
    output_hash: str | None
    tags: dict[str, str]
    consent: Consent
    redaction_ver: str
    redacted: bool
    retention_until_us: int | None
    has_body: bool


class GiveFeedback(Resource):
    """A judgement of a completion (`target` is its id) or of a whole episode."""

    target: str = Field(min_length=1, max_length=256)
    metric: str = Field(min_length=1, max_length=128)
    value: Any
    type: FeedbackType | None = None
    """Without it: bool for a truth value, float for a number, label for a text."""
    comment: str | None = Field(None, max_length=65_536)
    source: FeedbackSource = "user"
    author: str | None = Field(None, max_length=256)


class Feedback(Resource):
    """A judgement as stored; the latest of a metric wins."""

    id: str
    target_kind: Literal["span", "episode"]
    target: str
    metric: str
    type: FeedbackType
    value: Any
    comment: str | None
    source: FeedbackSource
    author: str | None
    created_us: int


class SpanTexts(Resource):
    """What the tokens of a body say, one by one. A character that several of them make is with the last."""

    prompt: list[str]
    samples: list[list[str]]


class SpanDetail(Resource):
    """A span with its body (None when none is kept) and the feedback given on it."""

    span: Span
    body: dict[str, Any] | None
    texts: SpanTexts | None = None
    """Of the tokens that the body keeps; None where it keeps none, or their model is not served any more."""
    feedback: list[Feedback]


# The server


class EngineState(Resource):
    """One engine process, as the api sees it."""

    base_hash: str
    aliases: list[str]
    ready: bool
    stands_in: bool
    """Whether it takes what its replicas should, because none of them answers."""
    detail: dict[str, Any]


class ReplicaState(Resource):
    """One replica, as the api sees it.

    Those that serve `production` start when something is deployed on their base, or when the base is asked as a served model; those for `rollouts`
    sample whatever nobody deployed, and always run.
    """

    name: str
    serves: Literal["production", "rollouts"]
    base_hash: str
    wanted: bool
    ready: bool
    detail: dict[str, Any]


class TrafficState(Resource):
    """The recorder: `dropped` spans found the queue full, `failed` ones met an error while being written."""

    mode: Literal["off", "metadata", "full"]
    queued: int
    recorded: int
    dropped: int
    failed: int


class Status(Resource):
    """How the server is."""

    version: str
    started_us: int
    engines: list[EngineState]
    replicas: list[ReplicaState]
    traffic: TrafficState


class Collected(Resource):
    """What garbage collection removed."""

    spans: int
    blobs: int
    bytes: int

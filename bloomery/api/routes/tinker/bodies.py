"""JSON bodies of the contract, as far as they are offered: closed, so that what is not understood is refused and not ignored.

Shapes and types alone are checked here; whether a rank, a name or a temperature makes sense is for the services to say.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from bloomery.types.custom_loss import MAX_CALLS, MAX_INPUTS

Text = Annotated[str, Field(max_length=1 << 16)]
"""Bounded, and so also checked to be text that can be stored: JSON can spell halves of characters."""
Metadata = dict[Text, Text]
Int = Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
"""Fits every place that a number of ours goes to."""
Order = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A client's own numbering; clones of a sampler number far apart."""
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = float | None
"""JSON has no NaN and no infinity; the SDK writes null for them."""


class Body(BaseModel):
    """Base of what the SDK posts; many bodies name their own type, which the route knows already."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    type: Text | None = None


class CreateSession(Body):
    """A client begins."""

    tags: list[Text] = Field([], max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: Text
    project_id: Text | None = None
    display_name: Text | None = None


class SessionRef(Body):
    """A session by its id."""

    session_id: Text


FinishType = Literal["success", "errored", "interrupted"]


class FinishReason(Body):
    """How a client ended."""

    type: FinishType


class FinishSession(Body):
    """A client ends."""

    reason: FinishReason
    detail: Text | None = None


class Telemetry(Body):
    """What a client noticed. Its environment and all but the loud events are its own business."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    session_id: Text
    events: list[dict[str, Any]]


class Optimizer(Body):
    """The optimizer that a run is made for, by its type. That of any other type but ours is refused by it, so its own fields come along."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: Text = "adamw"

    @property
    def extras(self) -> list[str]:
        """Fields beside the type."""
        return sorted(self.model_extra or ())


class Lora(Body):
    """Shape of an adapter."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """A new run."""

    session_id: Text
    model_seq_id: Order
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class LossInput(Body):
    """An input of a custom loss, at the rank that every datum has it."""

    name: Text
    rank: Int


class LossNode(Body):
    """One step of a traced custom loss, as torch.fx records it."""

    op: Text
    name: Text
    target: Text
    args: list[Any] = Field([], max_length=64)
    kwargs: dict[Text, Any] = Field({}, max_length=64)


class LossGraph(Body):
    """A traced custom loss."""

    format: Literal[1] = 1
    nodes: list[LossNode] = Field(min_length=1, max_length=MAX_INPUTS + MAX_CALLS + 1)


class CreateCustomLoss(Body):
    """A loss of the client's own."""

    session_id: Text
    custom_loss_seq_id: Order
    name: Text
    inputs: list[LossInput] = Field(min_length=1, max_length=MAX_INPUTS)
    graph: LossGraph


class ModelRef(Body):
    """A run by its name in this contract."""

    model_id: Text


class Numbered(Body):
    """What every training operation says. The rest of the body is read as one of the classes below when its place in the order is known."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model_id: Text
    seq_id: Order


class Operation(Body):
    """Base of whole training operations."""

    model_id: Text
    seq_id: Order


class Adam(Body):
    """AdamW's numbers for one step."""

    learning_rate: Number = 1e-4
    beta1: Number = 0.9
    beta2: Number = 0.95
    eps: Number = 1e-12
    weight_decay: Number = 0.0
    grad_clip_norm: Number = 0.0


class OptimStep(Operation):
    """One optimizer step."""

    adam_params: Adam | None = None
    optimizer_params: Optimizer | None = None


class SaveWeights(Operation):
    """Keep the resumable state under the name `path`."""

    path: Text
    ttl_seconds: Int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Operation):
    """Publish weights for sampling: under the name `path`, or for one sampler of the client's own numbering."""

    path: Text | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=10**18)] | None = None
    kind: Text = "snapshot"
    ttl_seconds: Int | None = None
    user_metadata: Metadata | None = None


class SaveExternal(Operation):
    """Export the weights for other programs under the name `path`."""

    path: Text
    ttl_seconds: Int | None = None
    age_encryption_recipients: list[Text] | None = None


class CopyWeights(Body):
    """Copy weights into a project, or into a session under its own number."""

    source_path: Text
    session_id: Text | None = None
    model_seq_id: Order | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Int | None = None
    weights_access_token: Text | None = None


class MoveSession(Body):
    """Put a session into a project."""

    project_id: Text


class OwnerQuery(Body):
    """Whose sessions: the caller's `own`, those `accessible` to it, or those of users."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=10)] = []


class StatusQuery(Body):
    """Sessions that are active, cancelled, failed or client_finished, the last perhaps only for some reasons."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[FinishType] | None = Field(None, min_length=1)


class SearchCursor(Body):
    """Behind which session a page of a search begins."""

    last_created_at: AwareDatetime
    last_session_id: Text


class SearchSessions(Body):
    """What sessions are looked for by."""

    session_id: Text | None = None
    project_ids: list[Text] | None = None
    user_metadata: Metadata = {}
    display_name: Text | None = Field(None, min_length=1)
    owner: OwnerQuery = OwnerQuery()
    statuses: list[StatusQuery] | None = Field(None, min_length=1)
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class LoadWeights(Body):
    """Continue from a checkpoint: an existing run (`model_id`, `seq_id`) or a new one (`session_id`, `model_seq_id`)."""

    path: Text
    optimizer: bool
    model_id: Text | None = None
    seq_id: Order | None = None
    session_id: Text | None = None
    model_seq_id: Order | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: Text | None = None


class SamplerClient(Body):
    """One of a sampler's clients: the first is 0, copies of it number themselves."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Text
    cloned_sampler_id: Order = 0


class RetrieveFutures(Body):
    """Ask which samples ended since a cursor, for so long (None: as long as a poll lasts); those retrieved need not be kept."""

    target: SamplerClient
    prev_cursor: Order = 0
    timeout: float | None = Field(None, ge=0)
    retrieved_request_ids: list[Text] = []


class JoinSampler(Body):
    """A copy of a sampler asks for its number."""

    sampling_session_id: Text


class RetrieveFuture(Body):
    """Ask for a result. Answers come whole, so the permission to send their size first is not needed."""

    request_id: Text
    allow_metadata_only: bool = False


class FutureRef(Body):
    """A future by its id."""

    request_id: Text


class PathRef(Body):
    """Weights by their path."""

    tinker_path: Text


class TimeToLive(Body):
    """Let a checkpoint expire; None keeps it."""

    ttl_seconds: Int | None


class CreateSamplingSession(Body):
    """Sample from a base model or from published weights."""

    session_id: Text
    sampling_session_seq_id: Order
    base_model: Text | None = None
    model_path: Text | None = None


class Chunk(Body):
    """A piece of a prompt: `encoded_text` with tokens, or a type that is not offered."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tokens: list[Token] = []


class ModelInput(Body):
    """A prompt in pieces."""

    chunks: list[Chunk]


Index = Annotated[int, Field(ge=0, lt=1 << 31)]


class Tensor(Body):
    """Values with a shape; sparse where both indices are given."""

    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[Index] | None = None
    sparse_crow_indices: list[Index] | None = None
    sparse_col_indices: list[Index] | None = None


class SamplingParams(Body):
    """How to sample; `stop` None means the model's own end tokens, [] none."""

    max_tokens: Int | None = None
    seed: int | None = None
    stop: Text | list[Text] | list[Token] | None = None
    temperature: float = 1.0
    top_k: Int = -1
    top_p: float = 1.0


class Sample(Body):
    """One prompt, several continuations."""

    sampling_session_id: Text
    seq_id: Order
    num_samples: Int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Int = 0
    topk_sample_logprobs: Int = 0
    prompt_logprobs_last_n: Int | None = None
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Int = 0
    record_stability_info: bool = False


Whole = TypeVar("Whole", bound=Operation)


def whole(body: Numbered, kind: type[Whole]) -> Whole:
    """The operation in full, judged strictly."""
    return kind.model_validate(body.model_dump())

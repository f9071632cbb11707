"""What a training run's history consists of: operations by `seq`, and their results.

An operation is journaled before it is acknowledged and executed strictly in `seq` order; its result is journaled before anyone sees it.
Shapes: N tokens of a datum, K soft targets per token.
"""

from typing import Literal

from bloomery.types.arrays import Array
from bloomery.types.custom_loss import CustomLoss
from bloomery.types.wire import Wire


class LoraSpec(Wire, frozen=True):
    """A low-rank adapter: scale is `alpha / rank`; B starts at zero, A from `seed`. Rank 0: all parameters, from the base model's values."""

    rank: int
    seed: int
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def misfit(self, other: "LoraSpec") -> str | None:
        """The first field that keeps the weights of one from being loaded by the other. Seeds may differ: they only say where training began."""
        fields = (name for name in self.__struct_fields__ if name != "seed")
        return next((name for name in fields if getattr(self, name) != getattr(other, name)), None)


class RunSpec(Wire, frozen=True):
    """All that determines a run before its first operation."""

    run_id: str
    base_hash: str
    lora: LoraSpec
    micro_batch_tokens: int
    """Micro-batches are a pure function of the payload and this budget, never of load: a replay splits alike."""


class AdamParams(Wire, frozen=True):
    """AdamW as torch defines it; `grad_clip_norm` 0 means no clipping."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Datum(Wire, frozen=True):
    """One training example: position i of every input belongs to the prediction made after `tokens[: i + 1]`.

    `inputs` hold `target_tokens` int64 [N] or [N, K] and float32 tensors of that shape by the loss's names (`weights`, `logprobs`, `advantages`).
    """

    tokens: Array
    inputs: dict[str, Array]
    routing: Array | None = None
    """Mixtures of experts: the experts [N, L, T] that each of the L sparse layers sends a token to, as a forward or a sampler reported them; -1 in
    all T places where the router is free."""
    routing_weights: Array | None = None
    """What the answers of these experts are multiplied with, float32 [N, L, T] and 0 where the router is free: constants, through which no gradient
    goes. Without it the router weighs the experts of `routing`."""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All of it."""
        return self.tokens, *self.inputs.values(), *(array for array in (self.routing, self.routing_weights) if array is not None)


class ForwardBackward(Wire, frozen=True, tag="forward_backward"):
    """Loss summed over tokens and data; gradients add up until `OptimStep`. `backward=False` only computes."""

    loss: str
    loss_config: dict[str, float | str]
    data: tuple[Datum, ...]
    backward: bool = True
    return_routing: bool = False
    """Whether the outputs have `routing` int32 [N, L, T]."""
    return_routing_weights: bool = False
    """Whether they have `routing_weights` float32 [N, L, T] beside it."""
    return_logprobs: bool = True
    """Whether the outputs have numbers per token. Without them predictions without loss are not made; metrics and gradients are the same bits."""
    custom: CustomLoss | None = None
    """The loss itself where `loss` is `custom`: a replay needs nothing beside the journal."""

    @property
    def input_bytes(self) -> int:
        """Of all data."""
        return sum(len(array.data) for datum in self.data for array in datum.arrays)


class OptimStep(Wire, frozen=True, tag="optim_step"):
    """Apply the accumulated gradients once and clear them."""

    adam: AdamParams


class SaveCheckpoint(Wire, frozen=True, tag="save_checkpoint"):
    """Write the resumable state (masters, optimizer, step) to the blob `key`."""

    key: str


class SaveSnapshot(Wire, frozen=True, tag="save_snapshot"):
    """Publish immutable weights for sampling."""

    template_hash: str
    announced: bool = True
    """Whether a row waits for what becomes of it: not where that would say nothing, of weights without a name that are kept as all such are."""


class LoadCheckpoint(Wire, frozen=True, tag="load_checkpoint"):
    """Take over the weights (and with `optimizer` the optimizer) of the checkpoint at blob `key`."""

    key: str
    optimizer: bool


Effect = Literal["none", "clear", "spoil"]
"""What a failure does to the gradients so far: nothing; they are cleared; they are cleared, and the next step fails."""


class Rejected(Wire, frozen=True, tag="rejected"):
    """An operation that is not executed but keeps its place in the order and fails: refused at the door, or known to have failed before."""

    message: str
    category: Literal["user", "server"] = "user"
    effect: Effect = "spoil"
    unbegun: str = ""
    """As in `Failed`; then it has no effect but that."""


Operation = ForwardBackward | OptimStep | SaveCheckpoint | SaveSnapshot | LoadCheckpoint | Rejected


def effect_of_failure(operation: Operation) -> Effect:
    """Of an operation that was begun: gradients may be incomplete then. Saving touches none, and a failed step fails alone."""
    match operation:
        case Rejected(effect=effect):
            return effect
        case OptimStep():
            return "clear"
        case SaveCheckpoint() | SaveSnapshot() | ForwardBackward(backward=False):
            return "none"
        case _:
            return "spoil"


class ForwardBackwardResult(Wire, frozen=True, tag="forward_backward"):
    """Per datum its named outputs (`logprobs` float32 [N] or [N, K], ...; none that were not asked for), and metrics named `name:reduction`."""

    outputs: tuple[dict[str, Array], ...]
    metrics: dict[str, float]

    @property
    def output_bytes(self) -> int:
        """Of all outputs."""
        return sum(len(array.data) for output in self.outputs for array in output.values())


class OptimStepResult(Wire, frozen=True, tag="optim_step"):
    """`grad_norm` before clipping and `step` among the metrics."""

    metrics: dict[str, float]


class CheckpointResult(Wire, frozen=True, tag="checkpoint"):
    """`digest`: blake3 over names, shapes and values of all trained weights, the same however often the process died."""

    key: str
    digest: str
    size_bytes: int
    step: int


class Travelled(Wire, frozen=True):
    """What a version took to reach whoever samples, of a run whose versions travel as what changed."""

    bytes: int
    """Of the object that leads to it from the version before, or, where most elements changed, of all of them."""
    whole: bool
    """Whether it holds all elements: of a first version, and where more changed than is worth telling apart."""
    changed: float | None
    """Share of the elements that differ from those of the version before; None of a first one."""
    codecs: dict[str, int]
    """Bytes of payloads by the codec that wrote them (`docs/weight-sync.md`)."""


class SnapshotResult(Wire, frozen=True, tag="snapshot"):
    """`version` is the hash of the manifest (blob `manifests/<version>`), which names the weights blob `key` of `size_bytes`."""

    version: str
    key: str
    size_bytes: int
    step: int
    travelled: Travelled | None = None
    """None where the blob itself is what is read."""

    def sync(self) -> dict[str, float]:
        """What the version takes to reach whoever samples, as measures of its step; `docs/rl.md` has the names."""
        found: dict[str, float] = {"sync/bytes": self.size_bytes, "sync/whole_bytes": self.size_bytes}
        if (travelled := self.travelled) is None:
            return found
        found |= {"sync/bytes": travelled.bytes, "sync/delta": float(not travelled.whole)}
        if travelled.changed is not None:
            found["sync/changed"] = travelled.changed
        return found | {f"sync/{codec}_bytes": size for codec, size in travelled.codecs.items()}


class LoadResult(Wire, frozen=True, tag="load"):
    """The run continues from optimizer step `step` (0 without the optimizer)."""

    digest: str
    step: int


class Failed(Wire, frozen=True, tag="failed", omit_defaults=True):
    """The operation did not happen; the message says what to change."""

    message: str
    category: Literal["user", "server"]
    unbegun: str = ""
    """Fingerprint of one that was not begun, because others held the memory: gradients stay as they were. Where it would have changed them, the next
    step fails unless the same operation came again before."""


Result = ForwardBackwardResult | OptimStepResult | CheckpointResult | SnapshotResult | LoadResult | Failed

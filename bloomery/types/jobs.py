"""Managed training: what a job is asked for, and what is known of it.

A job is data and a method. Whatever decides its weights stands in its spec, with the defaults spelled out, so that a clone, an ejected script and a
job that was killed in the middle all do the same.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bloomery.types.datasets import RowKind
from bloomery.types.graders import VersionNumber
from bloomery.types.losses import COLDEST, HOTTEST
from bloomery.types.resources import Fidelity, Name, Resource, Split

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=512)]
Measure = Literal["loss", "exact", "prefers", "margin", "reward", "held_out_reward", "kl/teacher"]
"""What a job and what it began with are compared by; which of them is its method's (`measures`), as the kinds of rows are that it `takes`."""
Interval = Annotated[tuple[float, float], Field(strict=False)]


class JobState(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    """For the job that it begins with, until that has ended."""
    QUEUED = "queued"
    """It waits for a process: at first, after a pause, and after its process died."""
    RUNNING = "running"
    PAUSED = "paused"
    """Nobody works at it until it is resumed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether it stays as it is."""
        return not JOB_NEXT[self]


JOB_NEXT: Final[dict[JobState, frozenset[JobState]]] = {
    JobState.WAITING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.PAUSED: frozenset({JobState.WAITING, JobState.QUEUED, JobState.CANCELLED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""What each state may become."""


class Schedule(Resource):
    """The learning rate over the steps: up in a line during the warm-up, then as `kind` says, down to `floor` of the peak behind the last step."""

    kind: Literal["constant", "linear", "cosine"] = "linear"
    warmup_share: Share = 0.1
    """Of all steps; at least one step warms up."""
    floor: Share = 0.0

    @property
    def floor_is_idle(self) -> bool:
        """Whether `floor` is of something that it does not do: it never falls."""
        return self.kind == "constant" and self.floor > 0


class Optimizer(Resource):
    """AdamW and how its learning rate goes."""

    learning_rate: Positive
    schedule: Schedule = Schedule()
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0
    """0 clips nothing."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8


class Batches(Resource):
    """How rows are dealt: every row once per epoch, in an order that depends on the seed alone."""

    epochs: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 3.0
    rows: Count | None = None
    """Rows (or pairs) of a step."""
    tokens: Count | None = None
    """Or so many tokens at most, of one row at least."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.rows is not None and self.tokens is not None:
            raise ValueError("a batch is measured in `rows` or in `tokens`, not in both")
        return self

    def resolved(self, rows: int) -> Self:
        """So many rows where nothing else was said."""
        return self if self.rows or self.tokens else self.model_copy(update={"rows": rows})


class EarlyStopping(Resource):
    """End when what is held out has not become better by `min_delta` in `patience` evaluations in a row: its loss, of reinforcement its reward, of
    distillation the distance to the teacher; what is published are the weights of then."""

    patience: Count
    min_delta: NotNegative = 0.0


class _Method(Resource):
    """What all methods do alike: what is not said of the optimizer, its schedule or the batches is as the method has it by itself."""

    @model_validator(mode="before")
    @classmethod
    def _as_usual(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        usual = {name: cls.model_fields[name].default.model_dump() for name in ("optimizer", "batches") if name in cls.model_fields}
        return {name: _completed(value, usual[name]) if name in usual else value for name, value in given.items()}


def _completed(given: Any, usual: Any) -> Any:
    if isinstance(given, Resource):
        given = given.model_dump(exclude_unset=True)
    if not isinstance(given, dict) or not isinstance(usual, dict):
        return given
    return usual | {name: _completed(value, usual.get(name)) for name, value in given.items()}


class Supervised(_Method):
    """Supervised fine-tuning: what the assistant says is learnt."""

    takes: ClassVar[tuple[RowKind, ...]] = ("chat", "completion")
    measures: ClassVar[tuple[Measure, ...]] = ("loss", "exact")
    kind: Literal["sft"] = "sft"
    optimizer: Optimizer = Optimizer(learning_rate=1e-3)
    batches: Batches = Batches()
    early_stopping: EarlyStopping | None = None

    def resolved(self) -> Self:
        """With nothing left open."""
        return self.model_copy(update={"batches": self.batches.resolved(32)})


class DirectPreference(_Method):
    """Direct preference optimisation (DPO): of two answers the preferred one becomes likelier than the weights that it began with have it."""

    takes: ClassVar[tuple[RowKind, ...]] = ("preference",)
    measures: ClassVar[tuple[Measure, ...]] = ("prefers", "margin")
    kind: Literal["dpo"] = "dpo"
    optimizer: Optimizer = Optimizer(learning_rate=1e-4)
    batches: Batches = Batches(epochs=1.0)
    early_stopping: EarlyStopping | None = None
    beta: Positive = 1.0
    """How strongly the model is held to what it began with: a pair moves it by some 1 / beta nats, of whole answers."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round."""

    def resolved(self) -> Self:
        """With nothing left open."""
        return self.model_copy(update={"batches": self.batches.resolved(4)})


class OddsRatioPreference(_Method):
    """Odds-ratio preference optimisation (ORPO): the preferred answer is learnt, and its odds against the other are raised."""

    takes: ClassVar[tuple[RowKind, ...]] = ("preference",)
    measures: ClassVar[tuple[Measure, ...]] = ("prefers", "margin")
    kind: Literal["orpo"] = "orpo"
    optimizer: Optimizer = Optimizer(learning_rate=1e-4)
    batches: Batches = Batches(epochs=1.0)
    early_stopping: EarlyStopping | None = None
    odds_weight: Positive = 0.1
    """Of the odds beside the loss of the preferred answer (lambda)."""

    def resolved(self) -> Self:
        """With nothing left open."""
        return self.model_copy(update={"batches": self.batches.resolved(4)})


class Clip(Resource):
    """Between which ratios of new to old probabilities a token's gradient counts; None: as the loss has it by itself."""

    low: Annotated[float, Field(ge=0, le=1)] | None = None
    high: Annotated[float, Field(ge=1, le=1e6)] | None = None


class Reinforcement(_Method):
    """Reinforcement fine-tuning (RFT): answers are sampled in groups, graded, and made likelier by how much better they are than their group.

    Sampling is untruncated and at `temperature`, and that is the distribution whose gradient is taken.
    """

    takes: ClassVar[tuple[RowKind, ...]] = ("prompt",)
    measures: ClassVar[tuple[Measure, ...]] = ("reward", "held_out_reward")
    kind: Literal["rft"] = "rft"
    grader: Name | None = None
    """What scores answers; of an agent its last one, and without a grader the agent's server says itself what a rollout is worth."""
    grader_version: VersionNumber | None = None
    """Without it the newest when the job is made, which the job then names."""
    agent: Name | None = None
    """An agent that the server was started with, which takes as many turns as it likes; without one a prompt is answered once."""
    held_out_grader: Name | None = None
    """Another grader, which nothing is trained on: where the reward rises and its score falls, the reward is had without what it stands for."""
    held_out_grader_version: VersionNumber | None = None
    held_out_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the answers of every step, which the held-out grader scores too; None: a quarter, where there is one."""
    loss: Literal["grpo", "dapo", "gspo"] = "grpo"
    clip: Clip = Clip()
    optimizer: Optimizer = Optimizer(learning_rate=1e-3, schedule=Schedule(kind="constant", warmup_share=0.0), grad_clip_norm=1.0)
    """Its schedule goes over all steps, those that teach nothing too."""
    steps: Count = 50
    early_stopping: EarlyStopping | None = None
    groups_per_step: Annotated[int, Field(ge=1, le=1024)] = 8
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    max_tokens: Count = 256
    """Of an answer, of which an agent gets one each turn."""
    temperature: Annotated[float, Field(ge=COLDEST, le=HOTTEST, allow_inf_nan=False)] = 1.0
    """At which the answers that are trained on are drawn; held-out prompts are answered at 1."""
    kl_coefficient: NotNegative = 0.0
    """How strongly the policy is held to what it began with."""
    by_deviation: bool = True
    """Whether advantages are divided by their group's standard deviation."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose answers were all rewarded alike have no advantage: `drop` leaves them out, and `keep` counts their tokens in the mean that a step
    is, and holds them to the beginning by `kl_coefficient` as the others are."""
    asynchronous: bool = False
    """Sample while training, with weights that are at most `max_staleness` versions old."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] | None = None
    """None: 1, where it is `asynchronous`."""

    @property
    def idle(self) -> tuple[str, ...]:
        """Its settings that count for nothing, by name: they are of something that it does not do."""
        stale = self.max_staleness is not None and not self.asynchronous
        unseen = self.held_out_share is not None and self.held_out_grader is None
        return ("max_staleness",) * stale + ("held_out_share",) * unseen

    def grader_of(self, measure: Measure) -> tuple[str | None, int | None]:
        """Who gives a measure, and in which version; None where nobody does."""
        return (self.held_out_grader, self.held_out_grader_version) if measure == "held_out_reward" else (self.grader, self.grader_version)

    @model_validator(mode="after")
    def _rewarded(self) -> Self:
        if self.grader is None and self.agent is None:
            raise ValueError("`grader` is missing, which says what an answer is worth; or name an `agent` that says so itself")
        if self.grader is None and self.grader_version is not None:
            raise ValueError("`grader_version` is of a `grader`: name it")
        if self.held_out_grader is None and self.held_out_grader_version is not None:
            raise ValueError("`held_out_grader_version` is of a `held_out_grader`: name it")
        if self.grader is None and self.held_out_grader is not None:
            raise ValueError("a `held_out_grader` stands beside a `grader`: name that, too")
        return self

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """Jobs that were made before there was an optimizer have two of its fields beside the others."""
        if not isinstance(given, dict) or not (flat := given.keys() & {"learning_rate", "grad_clip_norm"}) or "optimizer" in given:
            return given
        others = {name: value for name, value in given.items() if name not in flat}
        return others | {"optimizer": {name: given[name] for name in flat}}

    def resolved(self) -> Self:
        """With nothing left open: what its loss leaves open is that loss's own."""
        usual: dict[str, Any] = {}
        if self.asynchronous and self.max_staleness is None:
            usual["max_staleness"] = 1
        if self.held_out_grader is not None and self.held_out_share is None:
            usual["held_out_share"] = 0.25
        return self.model_copy(update=usual)


class Distillation(_Method):
    """Distillation: prompts are answered, and the model learns to answer them as its teacher would."""

    takes: ClassVar[tuple[RowKind, ...]] = ("prompt",)
    measures: ClassVar[tuple[Measure, ...]] = ("kl/teacher",)
    kind: Literal["distill"] = "distill"
    teacher: Annotated[str, Field(min_length=1, max_length=256)]
    """A deployment, a version or a base model of this server, with the tokenizer of the job's base model."""
    teacher_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Without it what that name serves when the job is made, which the job then names."""
    mode: Literal["on_policy", "teacher_answers"] = "on_policy"
    """Whether the model's own answers are compared with the teacher, token by token, or the teacher's are learnt."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-3, schedule=Schedule(kind="constant", warmup_share=0.0), grad_clip_norm=1.0)
    steps: Count = 50
    early_stopping: EarlyStopping | None = None
    prompts_per_step: Annotated[int, Field(ge=1, le=1024)] = 8
    samples: Annotated[int, Field(ge=1, le=1024)] = 4
    """Answers of each prompt."""
    max_tokens: Count = 256
    """Of an answer."""

    def resolved(self) -> Self:
        """With nothing left open but what the server knows."""
        return self


Method = Annotated[Supervised | DirectPreference | OddsRatioPreference | Reinforcement | Distillation, Field(discriminator="kind")]


class Data(Resource):
    """The rows of one version of a data set."""

    dataset: Name
    version: str | None = None
    """Id or manifest; without it the newest when the job is made, which the job then names."""
    train: Split = "train"


class Gate(Resource):
    """What has to have come of a job for another to begin there: one measure of its comparison."""

    measure: Measure
    bound: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] | None = None
    """What the measure has reached at least, or of one of which less is better at most; None: it is better than what the job began with had it, by
    more than the 95 % interval of the difference."""


class Begin(Resource):
    """Where training begins instead of at the base model: at what another job ended with, or at a named checkpoint of a run.

    Of a job that was made it says all three, once the job that it names has ended; until then the new one waits.
    """

    job: str | None = None
    run: str | None = None
    checkpoint: Name | None = None
    optimizer: bool = False
    """Whether the optimizer's state goes on, too."""
    gate: Gate | None = None
    """Of the `job`; None: that it succeeded is enough."""

    @model_validator(mode="after")
    def _job_or_checkpoint(self) -> Self:
        if (self.run is None) != (self.checkpoint is None) or (self.job is None and self.run is None):
            raise ValueError("name a `job`, or a `run` and its `checkpoint`")
        if self.gate is not None and self.job is None:
            raise ValueError("a `gate` is of a `job`: a checkpoint was compared with nothing")
        return self

    @property
    def waits(self) -> bool:
        """Whether the job that it names has still to end."""
        return self.run is None


class Evaluation(Resource):
    """What held-out rows say during training and at its end, beside what the job began with."""

    split: Split = "eval"
    every: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Steps between two evaluations of the loss, and of reinforcement and distillation of served weights, for which training waits; 0: none."""
    served_every: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Steps between two looks at the weights as they are served, while training goes on, by what is measured of them at the end; 0: none."""
    rows: Count = 256
    """At most so many rows, the first of the split."""
    answers: Annotated[int, Field(ge=0, le=4096)] = 64
    """So many of them are answered by both models at the end, greedily, and compared; 0: none."""
    max_tokens: Count = 128
    """Of an answer."""


class Watch(Resource):
    """What happens when training goes wrong."""

    action: Literal["stop", "pause", "warn"] = "stop"
    """`stop` fails the job, `pause` pauses it, `warn` only notes it among the events."""


class JobSpec(Resource):
    """A job as it is asked for, and as it is kept with nothing left open."""

    name: Name
    """Of the job, and of the model that comes of it."""
    base_model: Name
    data: Data
    method: Method = Supervised()
    rank: Annotated[int, Field(ge=0, le=128)] = 16
    """Of the adapter; 0 trains all parameters."""
    alpha: Positive = 32.0
    begin: Begin | None = None
    max_context: Count | None = None
    """Rows with more tokens are refused before anything is trained, and so are prompts that leave no room for an answer; None: as many as the model
    takes."""
    evaluation: Evaluation = Evaluation()
    checkpoint_every: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Steps between two named checkpoints, each of which can be served; 0: only what it ends with."""
    watch: Watch = Watch()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """Of the adapter and of the order of rows; drawn where none is given."""
    tracking: bool = True
    """Whether what it measures also goes to the trackers of the server, if that has any."""
    metadata: Annotated[dict[str, Text], Field(max_length=16)] = Field(default_factory=dict)

    @property
    def room(self) -> int:
        """Tokens of a row of a job that was made: all of a sequence, because what is held out is scored whole; of a prompt what leaves an answer."""
        assert self.max_context is not None
        return self.max_context - (self.method.max_tokens if isinstance(self.method, Reinforcement | Distillation) else 0)


class CreateChain(Resource):
    """Jobs of which each begins where one before it ends: all of them are made, or none."""

    stages: Annotated[list[JobSpec], Field(min_length=1, max_length=16)]


class Chain(Resource):
    """The jobs of a chain, in its order."""

    jobs: list["Job"]


class JobProgress(Resource):
    """How far a job is. `step` of `steps`; `tokens` went through the model; what is left takes `remaining_s` at the pace so far."""

    step: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of its processes, all together."""
    remaining_s: float | None = None


class Compared(Resource):
    """One measure of the model beside what it began with, on the same rows: means with 95 % intervals, and of the paired differences too.

    Of a single row there is no interval.
    """

    name: str
    rows: int
    before: float
    after: float
    before_interval: Interval | None
    after_interval: Interval | None
    difference: float
    difference_interval: Interval | None
    higher_is_better: bool


class JobResult(Resource):
    """What a job came to."""

    run: str
    version: str
    """Of the published weights: what a deployment is made of."""
    checkpoint: str
    """Name of the run's checkpoint that another job may begin at."""
    step: int
    digest: str
    """Of the trained weights."""
    compared: list[Compared]
    base_version: str
    """Of what it was compared with."""
    fidelity: Fidelity | None = None
    """The card of the version; None where it could not be measured when the job ended."""


class Job(Resource):
    """A job. `epoch` counts the processes that worked at it; one that lost its lease is refused everything from then on."""

    id: str
    spec: JobSpec
    state: Annotated[JobState, Field(strict=False)]
    reason: str | None
    """Why it failed, or was paused."""
    run: str | None
    progress: JobProgress
    result: JobResult | None
    epoch: int
    created_us: int
    updated_us: int
    started_us: int | None
    finished_us: int | None


class JobPoint(Resource):
    """What was measured at one step, by name."""

    step: Annotated[int, Field(ge=0, lt=1 << 63)]
    values: dict[str, float | None]
    """None: not a finite number."""
    created_us: int = 0


class JobPoints(Resource):
    """Points in the order of steps; ask again with `after` = the last step seen."""

    data: list[JobPoint]


CHANGED_TO: Final = "state"
"""In the `data` of an event: the state that the job has since."""


class JobEvent(Resource):
    """Something that happened to a job, in words."""

    number: int
    level: Literal["info", "warning", "error"]
    message: str
    data: dict[str, Any]
    created_us: int

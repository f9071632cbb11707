"""How a job trains: its method with its optimizer, its batches and when it ends early.

A method says which rows it takes, by which measures what came of it is compared with what it began with, and how it does what is left open.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bloomery.types.datasets import RowKind
from bloomery.types.graders import VersionNumber
from bloomery.types.losses import COLDEST, HOTTEST
from bloomery.types.resources import Name, Resource

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Measure = Literal["loss", "exact", "prefers", "margin", "reward", "held_out_reward", "kl/teacher"]
"""What a job and what it began with are compared by; which of them is its method's (`measures`), as the kinds of rows are that it `takes`."""


class Schedule(Resource):
    """The learning rate over the steps: up in a line during the warm-up, then as `kind` says, down to `floor` of the peak behind the last step."""

    kind: Literal["constant", "linear", "cosine"] = "linear"
    """How it goes on behind the warm-up: as it is, or down in a line or a cosine."""
    warmup_share: Share = 0.1
    """Of all steps; at least one step warms up."""
    floor: Share = 0.0
    """Of the peak; what it falls to."""

    @property
    def floor_is_idle(self) -> bool:
        """Whether `floor` is of something that it does not do: it never falls."""
        return self.kind == "constant" and self.floor > 0


class Optimizer(Resource):
    """AdamW and how its learning rate goes."""

    learning_rate: Positive
    """At its peak. Adapters take larger ones than all parameters do, small models larger ones than large models."""
    schedule: Schedule = Schedule()
    weight_decay: NotNegative = 0.0
    """Of each weight, times the learning rate, every step."""
    grad_clip_norm: NotNegative = 0.0
    """0 clips nothing."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """How long gradients are remembered: the share of the mean before that stays each step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """The same of squared gradients."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to the root of the mean squared gradient, by which a step is divided."""


class Batches(Resource):
    """How rows are dealt: every row once per epoch, in an order that depends on the seed alone."""

    epochs: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 3.0
    """How often every row is seen; 0.5 is half of them once."""
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
    """So many evaluations in a row without a better one end the job."""
    min_delta: NotNegative = 0.0
    """By how much one has to be better than the best before."""


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
    """0.8 of `grpo` and `dapo`, 0.9997 of `gspo`."""
    high: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """1.2 of `grpo`, 1.28 of `dapo`, 1.0004 of `gspo`."""


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
    """Without it the newest when the job is made, which the job then names."""
    held_out_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the answers of every step, which the held-out grader scores too; None: a quarter, where there is one."""
    loss: Literal["grpo", "dapo", "gspo"] = "grpo"
    """The clipped ratio of each token (`grpo`), with more room upwards (`dapo`), or that of the whole answer (`gspo`)."""
    clip: Clip = Clip()
    optimizer: Optimizer = Optimizer(learning_rate=1e-3, schedule=Schedule(kind="constant", warmup_share=0.0), grad_clip_norm=1.0)
    """Its schedule goes over all steps, those that teach nothing too."""
    steps: Count = 50
    """Each samples, grades and trains once."""
    early_stopping: EarlyStopping | None = None
    groups_per_step: Annotated[int, Field(ge=1, le=1024)] = 8
    """Prompts of a step."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Answers of each prompt, which are compared with one another."""
    max_tokens: Count = 256
    """Of an answer, of which an agent gets one each turn."""
    temperature: Annotated[float, Field(ge=COLDEST, le=HOTTEST, allow_inf_nan=False)] = 1.0
    """At which the answers that are trained on are drawn. Those to held-out prompts, by which it is measured, are drawn at 1, whatever this is."""
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
    """Each asks the teacher and trains once."""
    early_stopping: EarlyStopping | None = None
    prompts_per_step: Annotated[int, Field(ge=1, le=1024)] = 8
    """Prompts of a step."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 4
    """Answers of each prompt."""
    max_tokens: Count = 256
    """Of an answer."""

    def resolved(self) -> Self:
        """With nothing left open but what the server knows."""
        return self


Method = Annotated[Supervised | DirectPreference | OddsRatioPreference | Reinforcement | Distillation, Field(discriminator="kind")]

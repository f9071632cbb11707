"""Managed training: what a job is asked for, and what is known of it.

A job is data and a method. Whatever decides its weights stands in its spec, with the defaults spelled out, so that a clone, an ejected script and a
job that was killed in the middle all do the same.
"""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from bloomery.types.methods import Count, Distillation, Measure, Method, Positive, Reinforcement, Supervised
from bloomery.types.resources import Fidelity, Name, Resource, Split

Text = Annotated[str, Field(max_length=512)]
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

    @property
    def words(self) -> str:
        """As sentences say it."""
        return f"has {self}" if self in (JobState.SUCCEEDED, JobState.FAILED) else f"is {self}"


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


class Data(Resource):
    """The rows of one version of a data set."""

    dataset: Name
    version: str | None = None
    """Id or manifest; without it the newest when the job is made, which the job then names."""
    train: Split = "train"
    """The split that is trained on."""


class Gate(Resource):
    """What has to have come of a job for another to begin there: one measure of its comparison."""

    measure: Measure
    """Of those that the method of the job measures."""
    bound: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] | None = None
    """What the measure has reached at least, or of one of which less is better at most; None: it is better than what the job began with had it, by
    more than the 95 % interval of the difference."""


class Begin(Resource):
    """Where training begins instead of at the base model: at what another job ended with, or at a named checkpoint of a run.

    Of a job that was made it says all three, once the job that it names has ended; until then the new one waits.
    """

    job: str | None = None
    """Its id or name."""
    run: str | None = None
    """Whose checkpoint it is."""
    checkpoint: Name | None = None
    """Its name."""
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
    """Which rows of the data set are held out."""
    every: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Steps between two evaluations of the loss, and of reinforcement and distillation of served weights, for which training waits; 0: none."""
    served_every: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Steps between two looks at the weights as they are served, while training goes on, by what is measured of them at the end; 0: none."""
    rows: Count = 256
    """At most so many rows, the first of the split."""
    answers: Annotated[int, Field(ge=0, le=4096)] = 64
    """So many of them are answered by both models at the end, by the likeliest tokens; 0: none. Supervised fine-tuning compares all of these with the
    rows' own; of preferences and distillation 16 rows at most are answered, to be shown. Of reinforcement every held-out prompt is answered four
    times at temperature 1, and what is shown are answers of these; 0: none are kept."""
    max_tokens: Count = 128
    """Of such an answer to a row; answers to prompts have `max_tokens` of the method."""


class Watch(Resource):
    """What happens when training goes wrong."""

    action: Literal["stop", "pause", "warn"] = "stop"
    """`stop` fails the job, `pause` pauses it, `warn` only notes it among the events."""


class JobSpec(Resource):
    """A job as it is asked for, and as it is kept with nothing left open."""

    name: Name
    """Of the job, and of the model that comes of it."""
    base_model: Name
    """Of those that the server has."""
    data: Data
    method: Method = Supervised()
    rank: Annotated[int, Field(ge=0, le=128)] = 16
    """Of the adapter; 0 trains all parameters."""
    alpha: Positive = 32.0
    """The adapter counts `alpha / rank` times."""
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
    """Words of yours that are kept with the job."""

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


MAX_SAMPLES: Final = 8
MAX_SAMPLE_CHARS: Final = 1000
"""A text of a sample is cut behind so many."""
SampleText = Annotated[str, Field(max_length=MAX_SAMPLE_CHARS)]
SampleField = Literal["asked", "reference", "rejected", "before", "after"]


class JobSample(Resource):
    """A held-out row, and what the weights that the job began with and those that came of it say to it. Texts are cut behind 1,000 characters.

    Answers are the likeliest, token by token; of reinforcement they are the first of those that its reward was measured by.
    """

    row: Annotated[int, Field(ge=0)]
    """Its place in the split, from 0."""
    asked: SampleText
    """What the row asks last."""
    reference: SampleText | None = None
    """The row's own answer as the model's template writes it, of two the preferred one; None: a prompt has none."""
    rejected: SampleText | None = None
    """Of a preference the other one."""
    before: SampleText
    after: SampleText
    before_reward: float | None = None
    """Of this answer, by the grader that was trained on; None where there is none."""
    after_reward: float | None = None
    cut: list[SampleField] = Field(default_factory=list)
    """Texts that go on behind what is kept of them."""


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
    samples: Annotated[list[JobSample], Field(max_length=MAX_SAMPLES)] | None = None
    """Held-out rows that tell the most, the first of them first; None: in lists, and where an earlier release kept none."""
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

"""Fine-tuning in the words of OpenAI's contract: what is asked for, and what there is. None is their `auto`: what a job does by itself."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from bloomery.types.jobs import Job, JobEvent, JobPoint, Text
from bloomery.types.resources import Resource

FineTuningMethod = Literal["supervised", "dpo", "reinforcement"]
_NAMES: Final[Mapping[str, str]] = {"loss": "train_loss", "evaluation/loss": "valid_loss"}
Key = Annotated[str, Field(max_length=64)]


class Hyperparameters(Resource):
    """Those of all methods. `learning_rate_multiplier` and `compute_multiplier` (of the answers to a prompt) multiply what a job does by itself."""

    n_epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    learning_rate_multiplier: Annotated[float, Field(ge=1e-9, le=1e5, allow_inf_nan=False)] | None = None
    beta: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] | None = None
    compute_multiplier: Annotated[float, Field(gt=0, le=128, allow_inf_nan=False)] | None = None
    eval_interval: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """Of reinforcement: steps between two looks at the validation file."""


class FineTune(Resource):
    """A job as it is asked for."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    training_file: str
    validation_file: str | None = None
    method: FineTuningMethod = "supervised"
    hyperparameters: Hyperparameters = Hyperparameters()
    grader: dict[str, Any] | None = None
    """Of reinforcement, which has one."""
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: Annotated[dict[Key, Text], Field(max_length=16)] | None = None


class FineTuned(Resource):
    """A job as it was asked for, as it is, and the file with what it measured once it succeeded."""

    asked: FineTune
    job: Job
    result_file: str | None


class FineTunedPage(Resource):
    """Some of them."""

    data: list[FineTuned]
    has_more: bool


class Happened(Resource):
    """An event of a job, or what was measured at a step."""

    id: str
    created_us: int
    what: JobEvent | JobPoint


class HappenedPage(Resource):
    """Some of what happened, newest first."""

    data: list[Happened]
    has_more: bool


class FineTunedCheckpoint(Resource):
    """Weights that a job kept, and what was measured at their step."""

    id: str
    created_us: int
    step: int
    version: str
    values: dict[str, float | None]


class FineTunedCheckpointPage(Resource):
    """Some of them, newest first."""

    data: list[FineTunedCheckpoint]
    has_more: bool


def renamed(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """What was measured, under the names that the contract has for it."""
    return {_NAMES.get(name, name): value for name, value in values.items()}

"""What is known of a published version: facts for programs, from which the Markdown of a model card is written, and what nobody measured."""

from typing import Literal

from pydantic import Field

from bloomery.types.graders import Waiver
from bloomery.types.jobs import Compared, JobSpec
from bloomery.types.resources import Fidelity, Resource, TimeUs

CardForm = Literal["json", "markdown"]


class Ancestor(Resource):
    """Whose weights a training began at; a run that no job made has a checkpoint alone."""

    run: str
    checkpoint: str
    job: str | None
    method: str | None
    dataset: str | None
    version: str | None
    """What that job published."""


class TrainedOn(Resource):
    """The version of a data set, and how many rows passed each of its stages."""

    dataset: str
    number: int
    version: str
    manifest: str
    """Hash of its content."""
    counts: dict[str, int]


class GradedBy(Resource):
    """The version of a grader that scored answers of a training, and what is known of it by now."""

    grader: str
    version: int
    hash: str
    judges: dict[str, str]
    """Hash of each model that it asks, by name."""
    calibrated: bool | None
    """Whether the card that counts is above the bar; None: it has none."""
    verdict: Literal["hackable", "sound", "undecided"] | None
    """Of the newest attack on the prompts that were trained on; None: there was none."""
    why: str | None
    exploits: list[str]
    """What was paid without competence."""
    waiver: Waiver | None


class Figure(Resource):
    """What was measured last under a name, at or before the step of the weights."""

    name: str
    step: int
    value: float | None


class ModelCard(Resource):
    """A published version, and the job that made it, if one did. What follows `spec` is of the weights that the job ended with, and of no others."""

    version: str
    base_model: str
    base_hash: str
    kind: Literal["lora", "full"]
    rank: int
    alpha: float
    targets: list[str]
    """What an adapter changes."""
    run: str
    step: int
    parent: str
    """The version before it in its run, at first the base."""
    numerics: str
    """Of the process that trained it."""
    lineage: list[Ancestor]
    """What it was trained from, the earliest first; without any from the base model."""
    figures: list[Figure]
    fidelity: Fidelity | None
    not_measured: list[str]
    """What is not known, in words."""
    job: str | None = None
    trained_on: TrainedOn | None = None
    rewarded_by: GradedBy | None = None
    """Whose scores the training followed."""
    held_out_by: GradedBy | None = None
    """Whose scores of the same answers nothing was trained on."""
    spec: JobSpec | None = None
    tokens: int | None = None
    """That went through the model."""
    seconds: float | None = None
    digest: str | None = None
    """Of the trained weights."""
    compared: list[Compared] = Field(default_factory=list)
    compared_with: str | None = None
    finished_us: TimeUs | None = None

"""Data sets on the wire: what is imported, what is wrong with it, the rows of each kind, and what training on them takes."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from bloomery.types.histograms import Histogram
from bloomery.types.resources import LabelSource, Name, Resource, Split, TimeUs

FileFormat = Literal["jsonl", "csv", "parquet"]
RowKind = Literal["chat", "preference", "prompt", "completion"]
OnError = Literal["refuse", "skip"]
MOST_PROBLEMS: Final = 100
"""That one answer or one error names; all of them are counted."""
Share = Annotated[float, Field(ge=0, lt=1)]


# What is asked


class CreateDataset(Resource):
    """A name for versions to come."""

    name: Name


class Shares(Resource):
    """How much of the training rows is held out."""

    eval: Share = 0.0
    validation: Share = 0.0
    by: str | None = None
    """The field whose value is the group, with dots into objects; without it rows with one prompt are a group."""

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if self.eval + self.validation >= 1:
            raise ValueError("`eval` and `validation` together leave nothing to train on: they must stay below 1")
        if self.by is not None and not self.holds_out:
            raise ValueError("`by` divides nothing where `eval` and `validation` are both 0")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether anything is."""
        return bool(self.eval or self.validation)


class SplitChoice(Shares):
    """Hold out these shares of the training rows. Rows of one group stay together, and so do rows that are nearly the same.

    The side follows from the hash of the group alone, so that it is the same wherever the group turns up again.
    """


class ImportRows(Resource):
    """The content of one file per split. `on_error` skip imports the good rows, and keeps with the version which were rejected and why."""

    format: Literal["jsonl", "csv"]
    splits: dict[Split, str]
    parent: str | None = None
    """Also take the training rows of this version."""
    kind: RowKind | None = None
    """Without it that of the first row."""
    on_error: OnError = "refuse"
    origin: str | None = Field(default=None, min_length=1, max_length=128)
    """Where the rows come from that were in no file, in words: `the playground`. The recipe keeps it."""
    split: SplitChoice | None = None

    @property
    def choice(self) -> SplitChoice | None:
        """How training rows are divided, if they are."""
        return self.split


class UploadRows(Shares):
    """The same of one file, whose bytes are the body of the request; shares of its rows are held out where it is to be trained on."""

    # It travels as a query, where every value is a text.
    model_config = ConfigDict(strict=False)

    format: FileFormat
    split: Split = "train"
    """Where its rows go."""
    parent: str | None = None
    kind: RowKind | None = None
    on_error: OnError = "refuse"

    @property
    def choice(self) -> SplitChoice | None:
        """How its rows are divided, if they are."""
        return SplitChoice(eval=self.eval, validation=self.validation, by=self.by) if self.holds_out else None


class ValidateRows(UploadRows):
    """The same, of which nothing is stored: what it would come to in a data set, or in a new one."""

    dataset: str | None = None

    @model_validator(mode="after")
    def _parent_of_a_dataset(self) -> Self:
        if self.parent is not None and self.dataset is None:
            raise ValueError("`parent` is a version of a `dataset`: name that, too")
        return self


class Curate(Resource):
    """Make rows of the recorded traffic that consents to training and was judged, and add them to `parent`."""

    parent: str
    deployment: str | None = None
    metric: str | None = None
    """Only this metric's true and false count as confirmation; without it any does."""
    since_us: TimeUs | None = None
    until_us: TimeUs | None = None


# Rows


class DatasetRow(Resource):
    """What rows of every kind have. `label_source` is where the answer came from."""

    label_source: LabelSource
    source_span: str | None


class ChatRow(DatasetRow):
    """A conversation in OpenAI's form. What the assistant says is learned, unless its message has the `weight` 0."""

    kind: Literal["chat"] = "chat"
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0
    """Of all its tokens."""


class PreferenceRow(DatasetRow):
    """Two answers to one question, `preferred` over `rejected`: messages that follow `messages`, or texts that follow `prompt`."""

    kind: Literal["preference"] = "preference"
    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    preferred: list[dict[str, Any]] | str
    rejected: list[dict[str, Any]] | str
    weight: float = 1.0


class PromptRow(DatasetRow):
    """What a model is asked in reinforcement learning; graders read the other fields in `item`."""

    kind: Literal["prompt"] = "prompt"
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    item: dict[str, Any] = Field(default_factory=dict)


class CompletionRow(DatasetRow):
    """A text that goes on another one, without a chat template."""

    kind: Literal["completion"] = "completion"
    prompt: str
    completion: str
    weight: float = 1.0


AnyRow = Annotated[ChatRow | PreferenceRow | PromptRow | CompletionRow, Field(discriminator="kind")]


# Versions


class DatasetVersion(Resource):
    """An immutable set of rows. `manifest` is the hash of its content, `counts` says how many rows passed each stage."""

    id: str
    dataset: str
    number: int
    manifest: str
    parent: str | None
    kind: RowKind = "chat"
    counts: dict[str, int]
    recipe: dict[str, Any]
    unfilled: list[Split] = Field(default_factory=list)
    """Splits that were to get a share of the rows and got none."""
    created_us: int


class Dataset(Resource):
    """A name and its versions, oldest first."""

    id: str
    name: str
    versions: list[DatasetVersion]
    created_us: int


class RowProblem(Resource):
    """Why a row is not taken: `row` is its number in the file (of JSONL its line), `reason` a word for programs."""

    split: Split
    row: int
    field: str | None
    reason: str
    message: str
    suggestion: str | None


class Label(Resource):
    """A short answer that many rows share."""

    label: str
    rows: int


class Validation(Resource):
    """What an import would come to: every row of the file is accepted or rejected, and the accepted ones are in `counts`, stage by stage."""

    format: FileFormat
    kind: RowKind | None
    rows: int
    accepted: int
    rejected: int
    reasons: dict[str, int]
    """Rejected rows by reason."""
    problems: list[RowProblem]
    """The first of them."""
    ignored: dict[str, int]
    """Fields that rows of this kind do not have, and how many rows had them: they are left out."""
    counts: dict[str, int]
    unfilled: list[Split]
    """Splits that were to get a share of the rows and would get none."""
    labels: list[Label]
    """Where answers are labels, the most frequent first."""


def unfilled(shares: Mapping[str, Any], counts: Mapping[str, int]) -> list[Split]:
    """Of the splits that are to have a share those for which no group was drawn: groups are held out whole, and of few none may fall on that side."""
    held_out: tuple[Split, ...] = ("eval", "validation")
    return [split for split in held_out if shares.get(split) and counts.get(f"split.{split}") == 0]


# What training on them takes


class RenderedTokens(Resource):
    """What a model is trained on: token ids, the text of each, and the weight that the loss has for predicting it."""

    tokens: list[int]
    texts: list[str]
    weights: list[float]


class RenderedRow(Resource):
    """A row as it is trained on: `examples`, several where the template rewrites earlier turns, or the two sides of a preference.

    The example of a prompt is what asks for the answer, and carries no loss.
    """

    row: int
    """Its place in the split, from 0."""
    examples: list[RenderedTokens] = Field(default_factory=list)
    preferred: RenderedTokens | None = None
    rejected: RenderedTokens | None = None
    truncated: bool = False
    """Whether the context cuts something off."""
    problem: str | None = None
    """Why the model's template refuses it."""


class TokenStatistics(Resource):
    """How long the rows of a split are for one model; of many rows evenly spread ones are measured, and sums are scaled."""

    model: str
    split: Split
    rows: int
    measured: int
    context: int
    """Tokens beyond it are cut off."""
    tokens: int
    trained_tokens: int
    mean: float
    longest: int
    percentiles: dict[str, int]
    lengths: Histogram | None
    """Of the rows that were measured, in tokens before anything is cut off; None where all were refused."""
    truncated: int
    """Rows of which something is cut off."""
    without_loss: int
    """Rows of which nothing is learned within the context; of prompts those that leave no room for an answer."""
    refused: int
    """Rows that the model's template refuses."""
    first_refused: str | None
    labels: list[Label]


class Estimate(Resource):
    """What epochs over a split take; `seconds` and `cost` where the speed or the price was given."""

    model: str
    split: Split
    rows: int
    measured: int
    context: int
    epochs: float
    tokens_per_epoch: int
    trained_tokens_per_epoch: int
    tokens: int
    truncated: int
    without_loss: int
    seconds: float | None
    cost: float | None


def estimate(statistics: TokenStatistics, epochs: float, *, tokens_per_s: float | None = None, price_per_million: float | None = None) -> Estimate:
    """Time and cost of epochs over what was measured: both grow with the tokens that go through the model, trained or not."""
    tokens = round(statistics.tokens * epochs)
    return Estimate(
        model=statistics.model,
        split=statistics.split,
        rows=statistics.rows,
        measured=statistics.measured,
        context=statistics.context,
        epochs=epochs,
        tokens_per_epoch=statistics.tokens,
        trained_tokens_per_epoch=statistics.trained_tokens,
        tokens=tokens,
        truncated=statistics.truncated,
        without_loss=statistics.without_loss,
        seconds=None if tokens_per_s is None else tokens / tokens_per_s,
        cost=None if price_per_million is None else tokens * price_per_million / 1e6,
    )

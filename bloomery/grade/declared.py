"""Graders that JSON declares: OpenAI's, as published, and `function`, which is ours.

`parse_spec` reads them into closed, frozen specs; what is wrong is told with the path of its field. Fields that OpenAI takes in one place or another
are taken in each: `pass_threshold` belongs to evaluations and changes no score, `image_tag` chooses nothing here, and a grader may lack a name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, get_args

from pydantic import BaseModel, Field, StringConstraints, ValidationError, field_validator, model_validator

from bloomery.grade.formula import parse_formula
from bloomery.grade.pool import SOURCE_BYTES, Style
from bloomery.grade.similarity import Metric
from bloomery.grade.template import Template, parse_template
from bloomery.types.errors import InvalidInput, shown
from bloomery.types.grading import Number
from bloomery.types.resources import Resource

MAX_GRADERS: Final = 64
MAX_MESSAGES: Final = 256
MAX_LABELS: Final = 256

Name = Annotated[str, StringConstraints(max_length=256)]
Text = Annotated[str, StringConstraints(max_length=1 << 20)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]


class _Named(Resource):
    name: Name | None = None
    pass_threshold: Number | None = None
    """Of evaluations: a score of at least this passes."""


class StringCheck(_Named):
    """1 where two texts are equal (`eq`), differ (`ne`), or the input contains the reference (`like`, and `ilike` whatever the case); else 0."""

    type: Literal["string_check"]
    input: Text
    reference: Text
    operation: Literal["eq", "ne", "like", "ilike"]


class TextSimilarity(_Named):
    """How alike two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Text
    reference: Text
    evaluation_metric: Metric
    embedding_model: ModelName | None = None
    """Ours: of `cosine`, instead of the published `text-embedding-3-large`."""


class InputText(Resource):
    """A text for a judge."""

    type: Literal["input_text", "output_text"]
    text: Text


class InputImage(Resource):
    """An image for a judge whose model can see."""

    type: Literal["input_image"]
    image_url: Text
    detail: Literal["high", "low", "auto"] | None = None


class Audio(Resource):
    """Sound, base64."""

    data: Annotated[str, StringConstraints(max_length=1 << 24)]
    format: Literal["mp3", "wav"]


class InputAudio(Resource):
    """Sound for a judge whose model can hear."""

    type: Literal["input_audio"]
    input_audio: Audio


Part: TypeAlias = Annotated[InputText | InputImage | InputAudio, Field(discriminator="type")]


class Message(Resource):
    """A message to a judge. A content that is one text or one part is a list of it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[Part] = Field(min_length=1, max_length=MAX_MESSAGES)
    type: Literal["message"] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _listed(cls, content: Any) -> Any:
        several = content if isinstance(content, list) else [content]
        return [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in several]


_LIMITS: Final = ("max_completions_tokens", "max_completion_tokens", "max_tokens")


class SamplingParams(Resource):
    """How a judge is sampled. `max_completions_tokens` is the published spelling of how much it may say; the others are those of chat completions."""

    seed: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_completions_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        limits = [name for name in _LIMITS if name in given]
        if len(limits) > 1:
            raise ValueError(f"`{limits[0]}` and `{limits[1]}` are names of one thing: give one of them")
        return {_LIMITS[0] if name in _LIMITS else name: value for name, value in given.items()}


class _Judge(_Named):
    model: ModelName
    input: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    sampling_params: SamplingParams | None = None


class ScoreModel(_Judge):
    """What a model says the score is, no lower and no higher than the range."""

    type: Literal["score_model"]
    range: Annotated[list[Number], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0.0, 1.0])

    @field_validator("range")
    @classmethod
    def _rises(cls, limits: list[float]) -> list[float]:
        if limits[0] >= limits[1]:
            raise ValueError("give the lower end first, and a higher one")
        return limits

    @field_validator("range", mode="before")
    @classmethod
    def _usual(cls, limits: Any) -> Any:
        return [0.0, 1.0] if limits is None else limits


class LabelModel(_Judge):
    """1 where the label that a model chooses is one that passes, else 0."""

    type: Literal["label_model"]
    labels: list[Label] = Field(min_length=1, max_length=MAX_LABELS)
    passing_labels: list[Label] = Field(min_length=1, max_length=MAX_LABELS)

    @field_validator("labels", "passing_labels")
    @classmethod
    def _differ(cls, labels: list[str]) -> list[str]:
        if len(set(labels)) < len(labels):
            raise ValueError("a label stands in it twice")
        return labels

    @model_validator(mode="after")
    def _known(self) -> Self:
        if strange := [label for label in self.passing_labels if label not in self.labels]:
            raise _misplaced("passing_labels", f"`{shown(strange[0])}` is none of the labels")
        return self


class _Program(_Named):
    source: str

    @field_validator("source")
    @classmethod
    def _fits(cls, source: str) -> str:
        if (size := len(source.encode(errors="replace"))) >= SOURCE_BYTES:
            raise ValueError(f"it has {size} bytes, and must have fewer than {SOURCE_BYTES}")
        return source


class Python(_Program):
    """A program whose `grade(sample, item)` gives the score."""

    type: Literal["python"]
    image_tag: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Taken as it is published: programs find the packages of this server, whatever it says."""


class Function(_Program):
    """Ours: a program with a function that is called as `style` says."""

    type: Literal["function"]
    entry: Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$", max_length=256)]
    style: Style = "auto"


Single: TypeAlias = StringCheck | TextSimilarity | ScoreModel | LabelModel | Python | Function


class Multi(_Named):
    """What a formula makes of the scores of several graders, by the names that they have here."""

    type: Literal["multi"]
    graders: dict[Variable, Single] = Field(min_length=1, max_length=MAX_GRADERS)
    calculate_output: str

    @model_validator(mode="after")
    def _readable(self) -> Self:
        try:
            parse_formula(self.calculate_output, self.graders)
        except InvalidInput as error:
            raise _misplaced("calculate_output", error.message.removeprefix("`calculate_output` ")) from None
        return self


Spec: TypeAlias = Single | Multi

_KINDS: Final[Mapping[str, type[Spec]]] = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in (*get_args(Single), Multi)}
_PARTS: Final = {"input_text", "output_text", "input_image", "input_audio"}


def parse_spec(given: Any, field: str = "grader") -> Spec:
    """Read a grader; InvalidInput names the field as the caller knows it, below `field`."""
    kind = _kind(given, field)
    if kind is Multi:
        given = {**given, "graders": _parsed_below(given.get("graders"), f"{field}.graders")}
    try:
        spec: Spec = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, field) from None
    for place, text in texts(spec):
        parse_template(text, f"{field}.{place}")
    return spec


def texts(spec: Spec) -> list[tuple[str, str]]:
    """Where templates stand in a single grader, and what they are."""
    match spec:
        case StringCheck() | TextSimilarity():
            return [("input", spec.input), ("reference", spec.reference)]
        case ScoreModel() | LabelModel():
            return [
                (f"input.{index}.content.{place}", part.text if isinstance(part, InputText) else part.image_url)
                for index, message in enumerate(spec.input)
                for place, part in enumerate(message.content)
                if isinstance(part, InputText | InputImage)
            ]
        case _:
            return []


def templates(spec: Spec) -> list[Template]:
    """The same, read."""
    return [parse_template(text, place) for place, text in texts(spec)]


def _kind(given: Any, field: str) -> type[Spec]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f"`{field}` must be a JSON object", field=field)
    name = given.get("type")
    if not isinstance(name, str) or name not in _KINDS:
        said = f"is `{shown(name)}`" if isinstance(name, str) else "is missing" if name is None else "is no text"
        raise InvalidInput(f"`{field}.type` {said}: graders are {', '.join(_KINDS)}", field=f"{field}.type")
    return _KINDS[name]


def _parsed_below(graders: Any, field: str) -> Any:
    """The graders of a multi one by name. The published types also have a single grader there, which goes by its own name."""
    if not isinstance(graders, Mapping):
        raise InvalidInput(f"`{field}` must be an object of graders by name", field=field)
    if isinstance(graders.get("type"), str):
        graders = {graders.get("name"): graders}
    for name, below in graders.items():
        if _kind(below, f"{field}.{shown(str(name))}") is Multi:
            place = f"{field}.{shown(str(name))}.type"
            raise InvalidInput(f"`{place}`: a multi grader holds no other multi grader: put its graders beside these", field=place)
    return {name: parse_spec(below, f"{field}.{shown(str(name))}") for name, below in graders.items()}


class _Misplaced(ValueError):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _misplaced(field: str, message: str) -> _Misplaced:
    """For what only the whole shows to be wrong with one of its fields."""
    return _Misplaced(field, message)


def _refusal(error: ValidationError, field: str) -> InvalidInput:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    place = [shown(str(part)) for part in first["loc"] if part not in _PARTS]
    if isinstance(cause, _Misplaced):
        place.append(cause.field)
    path = ".".join([field, *place])
    return InvalidInput(f"`{path}`: {cause or first['msg']}", field=path)


def middle(spec: Spec) -> float:
    """Of what a grader may give: a score of at least this passes where nothing else is said."""
    return sum(spec.range) / 2 if isinstance(spec, ScoreModel) else 0.5


def canonical(spec: BaseModel) -> dict[str, Any]:
    """As JSON that is the same for specs that ask for the same, whether or not they spell defaults out."""
    return spec.model_dump(mode="json", exclude_none=True)

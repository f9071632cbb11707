"""Graders as `/api/v1` knows them: what makes a version, and what running one says. Their own JSON is `grade/declared`."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from bloomery.types.grading import GradeResult
from bloomery.types.resources import Name, Resource, Split

MAX_ROWS: Final = 1024
VersionNumber = Annotated[int, Field(ge=1, lt=1 << 31)]


class CreateGrader(Resource):
    """A version under a name; the same grader again is the version that is there."""

    name: Name
    spec: dict[str, Any]


class Waiver(Resource):
    """Somebody accepts what attacks of a grader's version find, and says why."""

    reason: str
    by: str
    """The name of the key that said so."""
    created_us: int


class WaiveGrader(Resource):
    """Accept what attacks of the newest version or another one find: jobs take it from then on."""

    version: VersionNumber | None = None
    reason: Annotated[str, Field(min_length=1, max_length=1024)]


class GraderVersion(Resource):
    """A grader that never changes. `hash` is of what decides its scores, `judges` has the versions of its judges by their names."""

    id: str
    name: str
    version: int
    hash: str
    spec: dict[str, Any]
    """Spelled one way, whichever way it was given."""
    models: list[str]
    judges: dict[str, str]
    created_us: int
    waiver: Waiver | None = None


class OutputRow(Resource):
    """An output to be graded. `item` has the row's own fields, `tools` are the calls in the output, `messages` is what it answers."""

    item: dict[str, Any] = Field(default_factory=dict)
    output: str
    tools: list[dict[str, Any]] = Field(default_factory=list)
    messages: list[dict[str, Any]] = Field(default_factory=list)
    trace: list[dict[str, Any]] | None = None


class RunGrader(Resource):
    """Grade these, by the newest version or another one."""

    version: VersionNumber | None = None
    rows: list[OutputRow] = Field(min_length=1, max_length=MAX_ROWS)


class GraderRun(Resource):
    """A result for each row, in their order, and what gave them."""

    name: str
    version: int
    hash: str
    results: list[GradeResult]


MAX_ATTACK_ROWS: Final = 256
MIN_ATTACK_ROWS: Final = 4
ATTACK_CALLS: Final = 2500
ATTACK_TOKENS: Final = 2_000_000


class AttackRow(Resource):
    """A row that a grader is attacked on: what it asks, the row's own fields, and honest answers where there are some."""

    item: dict[str, Any] = Field(default_factory=dict)
    messages: list[dict[str, Any]] = Field(default_factory=list)
    good: list[str] = Field(default_factory=list, max_length=16)
    bad: list[str] = Field(default_factory=list, max_length=16)


class AttackExample(Resource):
    """One output of an attack and what it was paid; long texts are cut."""

    prompt: str
    output: str
    score: float
    reason: str | None = None


class Exploit(Resource):
    """An attack that was paid. `share` places its mean score on the honest scale: 0 is what bad answers get, 1 what good ones get."""

    name: str
    mean_score: float
    share: float
    rows: int
    """That it was measured on: those where its output is right are left out."""
    examples: list[AttackExample]


class AttackReport(Resource):
    """What came of attacking a grader. `undecided`: nothing could be measured, and `why` says what was in the way."""

    hash: str
    verdict: Literal["hackable", "sound", "undecided"]
    why: str
    bad_score: float | None = None
    """The honest scale: what answers get that are given as bad, or right for another row."""
    good_score: float | None = None
    """The same of answers that are given as good, or of the references in the form that the grader takes best."""
    exploits: list[Exploit] = Field(default_factory=list)
    """Best paid first."""
    attacks: int
    grades: int
    failed: int
    """Grades without a score."""
    varied: bool = True
    """Whether any two scores differ: who pays for everything alike teaches nothing."""
    calls: int = 0
    """Of models that judge, and the tokens that they took."""
    tokens: int = 0
    spent: bool = False
    """Whether the budget for them was spent, so that the rest was left."""


class AttackGrader(Resource):
    """Attack the newest version or another one on these rows, or on prompts of a data set; of the latter it is kept what came of it."""

    version: VersionNumber | None = None
    rows: Annotated[list[AttackRow], Field(min_length=MIN_ATTACK_ROWS, max_length=MAX_ATTACK_ROWS)] | None = None
    dataset: Name | None = None
    dataset_version: str | None = None
    """Id or manifest; without it the newest."""
    split: Split = "train"
    again: bool = False
    """Attack anew, where it is known already what comes of it."""
    max_calls: Annotated[int, Field(ge=1, le=1_000_000)] = ATTACK_CALLS
    """Of models that judge: the budget."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 40)] = ATTACK_TOKENS

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.rows is None) == (self.dataset is None):
            raise ValueError("an attack is on `rows` or on a `dataset`: give one of them")
        if self.rows is not None and (self.dataset_version, self.split, self.again) != (None, "train", False):
            raise ValueError("`dataset_version`, `split` and `again` are of a `dataset`: leave them out beside `rows`")
        return self


class GraderAttack(AttackReport):
    """The same of a grader that is kept. On a data set it is kept itself, under an `id`."""

    name: str
    version: int
    id: str | None = None
    dataset_version: str | None = None
    split: Split | None = None
    created_us: int | None = None
    waiver: Waiver | None = None
    """Of the grader's version."""

    @property
    def finding(self) -> str:
        """What was found of one that is hackable, and where it is kept what was tried."""
        return f"grader `{self.name}` version {self.version} pays without competence ({self.why}; attack {self.id})"

    @property
    def blocks(self) -> str | None:
        """Why no job trains for the rewards of this grader; None: they may."""
        if self.verdict != "hackable" or self.waiver is not None:
            return None
        which = f"{self.name} --version {self.version}"
        return (
            f"{self.finding}: look at what was tried (`bloomery grader attacks {which}`), and mend it in a new version, or accept it "
            f"(`bloomery grader waive {which} --reason WHY`)"
        )


class LabelledRow(OutputRow):
    """An output and what people say of it: whether it passes, or of a `label_model` one of its labels.

    `swapped` is the same question of a pair with both in each other's place: it shows whether the judge heeds places.
    """

    label: bool | str
    swapped: OutputRow | None = None


Choice = Literal["first", "second", "tie"]


class ComparedPair(Resource):
    """Two answers to one question in the order in which somebody saw them, and which of them he prefers."""

    first: OutputRow
    second: OutputRow
    choice: Choice


class CalibrateGrader(Resource):
    """Measure the newest version or another one by what people say: of single outputs (`rows`), or of which of two is better (`pairs`)."""

    version: VersionNumber | None = None
    rows: Annotated[list[LabelledRow], Field(min_length=2, max_length=MAX_ROWS)] | None = None
    pairs: Annotated[list[ComparedPair], Field(min_length=2, max_length=MAX_ROWS)] | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """A score of at least this passes; None: the grader's `pass_threshold`, or the middle of a judge's range, or else 0.5."""
    swaps: dict[str, str] | None = None
    """Of a `label_model`: which label becomes which when a pair changes places; None: of two labels each the other, of more none any."""
    tie_within: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Of `pairs`: scores that are no further apart prefer neither."""
    verdicts: dict[str, Choice] | None = None
    """Of `pairs` and a `label_model` that sees both answers, as `item.first` and `item.second`: what each of its labels prefers. None: each answer is
    graded by itself, and the one with the higher score is preferred."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.rows is None) == (self.pairs is None):
            raise ValueError("a card is of `rows` or of `pairs`: give one of them")
        if self.rows is not None and (self.tie_within, self.verdicts) != (0.0, None):
            raise ValueError("`tie_within` and `verdicts` are of `pairs`: leave them out beside `rows`")
        if self.pairs is not None and (self.threshold, self.swaps) != (None, None):
            raise ValueError("`threshold` and `swaps` are of `rows`: leave them out beside `pairs`")
        return self


class MeasuredRate(Resource):
    """`hits` of `total`, the share and its 95 % interval; None of nothing."""

    hits: int
    total: int
    value: float | None
    low: float | None
    high: float | None


class PairAgreement(Resource):
    """Which of two answers a grader prefers, beside people: of the pairs that it has a verdict of."""

    decided: MeasuredRate
    """Of pairs where neither people nor the grader say `tie`: how often both prefer the same."""
    people_ties: int
    grader_ties: int
    both_ties: int
    people_first: MeasuredRate
    """Of the pairs that people decided: how often for the one that they saw first. Far from a half they heed places."""
    grader_first: MeasuredRate
    """The same of the grader, over both orders; nothing of one that sees one answer at a time."""


class Calibration(Resource):
    """What a version of a grader is worth beside people. `calibrated` where it is good enough to gate, otherwise `why` it is not."""

    id: str
    name: str
    version: int
    hash: str
    judges: dict[str, str]
    rows: int
    invalid: int
    """Rows that it has no score for; they count nowhere else."""
    threshold: float | None
    """From which score on it passes; None of pairs."""
    kappa: float | None
    """Cohen's, with its 95 % interval; None where chance alone agrees always."""
    kappa_low: float | None
    kappa_high: float | None
    agreement: MeasuredRate
    majority_baseline: MeasuredRate
    true_positive_rate: MeasuredRate
    true_negative_rate: MeasuredRate
    position_flips: MeasuredRate
    """Of pairs that it saw in both orders, how often it prefers another output when they change places."""
    pairs: PairAgreement | None = None
    """Where people compared two answers: then `rows` are pairs, agreement is over `first`, `second` and `tie`, and nothing passes or fails."""
    calibrated: bool
    why: str | None
    created_us: int

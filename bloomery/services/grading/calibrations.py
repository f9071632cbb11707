"""Graders measured by what people said of the same outputs: cards, which are kept with the version, and the bar below which a judge cannot gate.

A card is of the whole grader, because its hash is of all that decides a score: prompt, model and parameters of its judges, labels that pass, formula.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, Select, insert, select

from bloomery.grade import calibration as measured
from bloomery.grade.calibration import Kappa, Rate
from bloomery.grade.declared import LabelModel, middle
from bloomery.grade.grader import Grader
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.grading.graders import Graders
from bloomery.services.grading.preferences import Preference, Preferring, decided_alike, first_in_both_orders, first_of, flips
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, shown
from bloomery.types.graders import (
    CalibrateGrader,
    Calibration,
    Choice,
    ComparedPair,
    GraderVersion,
    LabelledRow,
    MeasuredRate,
    OutputRow,
    PairAgreement,
    RunGrader,
)
from bloomery.types.grading import GradeResult
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Page

KAPPA_BAR: Final = 0.4
"""The lower end of the interval is above it: agreement that is called fair at most is none to gate by."""
INVALID_BAR: Final = 0.1
"""So large a share of rows may lack a verdict."""
_NOTHING: Final = Rate(0, 0)


class Calibrations:
    """Makes cards, and says who may gate."""

    def __init__(self, database: Database, graders: Graders) -> None:
        self._database, self._graders = database, graders

    async def calibrate(self, p: Principal, name: str, given: CalibrateGrader, *, request: Repeatable | None = None) -> Calibration:
        """The card of a version on these rows, or of these pairs."""
        p.require("train")
        if (made := await answer_before(self._database, p, request, Calibration)) is not None:
            return made
        version = await self._graders.get(p, name, given.version)
        grader = Grader.parse(version.spec)
        if given.pairs is not None:
            card = await self._of_pairs(p, version, Preferring.of(grader.spec, given), given.pairs)
        else:
            rows_given = given.rows or []
            card = await self._of_rows(p, version, _Reading.of(grader, given, rows_given), rows_given)
        return await self._database.write(once(p, request, Calibration, lambda connection: _keep(connection, p.project, card)))

    async def list(self, p: Principal, name: str, *, version: int | None = None, limit: int = 50, offset: int = 0) -> Page[Calibration]:
        """Cards of one version, the newest unless another is named, latest first."""
        p.require("read", "train")
        grader = await self._graders.get(p, name, version)
        query = _of(p, grader).limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: [_card_of(row, grader) for row in connection.execute(query)])
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def gate_card(self, p: Principal, grader: GraderVersion) -> Calibration | None:
        """The card that a gate goes by: the newest of rows, or of pairs where nobody labelled rows; None where there is none.

        A gate compares scores of single answers, which is what rows measure.
        """
        p.require("read", "train", "deploy")
        cards = await self._database.read(lambda connection: [_card_of(row, grader) for row in connection.execute(_of(p, grader))])
        return next((card for card in cards if card.pairs is None), next(iter(cards), None))

    async def may_gate(self, p: Principal, grader: GraderVersion) -> None:
        """Conflict where what decides by this grader's scores would decide by a judge that nobody trusts. Graders without judges may always."""
        p.require("read", "train", "deploy")
        if not grader.judges:
            return
        card = await self.gate_card(p, grader)
        if card is not None and card.calibrated:
            return
        which = f"grader `{grader.name}` version {grader.version}"
        problem = "nobody measured its judges by what people say" if card is None else f"its card {card.id} is below the bar: {card.why}"
        ways = f"`bloomery grader calibrate {grader.name} labels.jsonl --version {grader.version}` measures it"
        raise Conflict(f"{which} may score and cannot gate: {problem}; {ways}", field="grader")

    async def _of_rows(self, p: Principal, version: GraderVersion, reading: "_Reading", given: Sequence[LabelledRow]) -> Calibration:
        said = await self._graded(p, version, given)
        swapped = [(row, place) for place, row in enumerate(given) if row.swapped is not None]
        again = await self._graded(p, version, [row.swapped for row, _ in swapped if row.swapped is not None]) if swapped else []
        seen_twice = [(said[place], other) for (_, place), other in zip(swapped, again, strict=True)]
        return _card(version, given, said, seen_twice, reading)

    async def _of_pairs(self, p: Principal, version: GraderVersion, preferring: Preferring, given: Sequence[ComparedPair]) -> Calibration:
        ones, others = preferring.sides(given)
        said = zip(await self._graded(p, version, ones), await self._graded(p, version, others), strict=True)
        read = [(pair.choice, preferring.read(*results)) for pair, results in zip(given, said, strict=True)]
        return _card_of_pairs(version, [(choice, preference) for choice, preference in read if preference is not None], len(given))

    async def _graded(self, p: Principal, version: GraderVersion, outputs: Sequence[OutputRow]) -> Sequence[GradeResult]:
        plain = [OutputRow(**{name: getattr(row, name) for name in OutputRow.model_fields}) for row in outputs]
        return (await self._graders.run(p, version.name, RunGrader(version=version.version, rows=plain))).results


class _Reading(NamedTuple):
    """How verdicts and labels are compared: by their names where people gave names, else by whether they pass."""

    threshold: float
    named: str | None
    """Of the results' label that has the verdict."""
    passing: frozenset[str]
    swaps: dict[str, str]

    @classmethod
    def of(cls, grader: Grader, given: CalibrateGrader, rows_given: Sequence[LabelledRow]) -> "_Reading":
        spec, labels = grader.spec, [row.label for row in rows_given]
        names = {label for label in labels if isinstance(label, str)}
        if names and len(names | set(labels)) > len(names):
            raise InvalidInput("some labels are names and some say whether a row passes: give one kind", field="rows")
        known = spec.labels if isinstance(spec, LabelModel) else []
        if names and not isinstance(spec, LabelModel):
            raise InvalidInput("this grader gives no labels: say of each row whether it passes (true or false)", field="rows")
        if others := sorted(names - set(known)):
            raise InvalidInput(f"`{shown(others[0])}` is none of the grader's labels", field="rows")
        swaps = given.swaps if given.swaps is not None else dict(zip(known, reversed(known), strict=True)) if len(known) == 2 else {}
        if not set(swaps) | set(swaps.values()) <= set(known):
            raise InvalidInput("`swaps` has a label that the grader has not", field="swaps")
        passing = frozenset(spec.passing_labels) if isinstance(spec, LabelModel) else frozenset()
        return cls(_threshold(grader, given), (spec.name or spec.type) if known else None, passing, swaps)

    def passes(self, result: GradeResult) -> bool:
        return result.score is not None and result.score >= self.threshold

    def people_pass(self, label: bool | str) -> bool:
        return label if isinstance(label, bool) else label in self.passing

    def verdict(self, result: GradeResult, label: bool | str) -> bool | str:
        """What the judge said, in the kind of what people said."""
        return self.passes(result) if isinstance(label, bool) else result.labels[self.named or ""]

    def flipped(self, first: GradeResult, swapped: GradeResult) -> bool:
        """Whether the preference is another when both change places: where it stays, the verdict changes with them."""
        if self.named is None:
            return self.passes(first) == self.passes(swapped)
        was = first.labels[self.named]
        return self.swaps.get(was, was) != swapped.labels[self.named]


def _threshold(grader: Grader, given: CalibrateGrader) -> float:
    if given.threshold is not None:
        return given.threshold
    return middle(grader.spec) if grader.spec.pass_threshold is None else grader.spec.pass_threshold


def _card(
    version: GraderVersion,
    given: Sequence[LabelledRow],
    said: Sequence[GradeResult],
    seen_twice: Sequence[tuple[GradeResult, GradeResult]],
    reading: _Reading,
) -> Calibration:
    valid = [(row.label, result) for row, result in zip(given, said, strict=True) if result.valid]
    people, judge = [label for label, _ in valid], [reading.verdict(result, label) for label, result in valid]
    passed, passes = [reading.people_pass(label) for label in people], [reading.passes(result) for _, result in valid]
    both = [(first, other) for first, other in seen_twice if first.valid and other.valid]
    return Calibration(
        **_agreeing(version, people, judge, len(given)),
        threshold=reading.threshold,
        true_positive_rate=_rate(measured.true_positive_rate(passed, passes) if valid else _NOTHING),
        true_negative_rate=_rate(measured.true_negative_rate(passed, passes) if valid else _NOTHING),
        position_flips=_rate(Rate(sum(reading.flipped(*pair) for pair in both), len(both))),
    )


def _card_of_pairs(version: GraderVersion, valid: Sequence[tuple[Choice, Preference]], count: int) -> Calibration:
    people, said = [choice for choice, _ in valid], [preference for _, preference in valid]
    judge = [preference.choice for preference in said]
    pairs = PairAgreement(
        decided=_rate(decided_alike(people, judge)),
        people_ties=people.count("tie"),
        grader_ties=judge.count("tie"),
        both_ties=[(one, other) for one, other in zip(people, judge, strict=True)].count(("tie", "tie")),
        people_first=_rate(first_of(people)),
        grader_first=_rate(first_in_both_orders(said)),
    )
    return Calibration(
        **_agreeing(version, people, judge, count),
        threshold=None,
        true_positive_rate=_rate(_NOTHING),
        true_negative_rate=_rate(_NOTHING),
        position_flips=_rate(flips(said)),
        pairs=pairs,
    )


def _agreeing(version: GraderVersion, people: Sequence[Hashable], judge: Sequence[Hashable], count: int) -> dict[str, Any]:
    """What every card has: how far both agree, of `count` rows those with a verdict, and whether that is enough."""
    kappa = measured.cohens_kappa(people, judge) if people else Kappa(None, None)
    agreement = measured.agreement(people, judge) if people else _NOTHING
    majority = measured.majority_baseline(people) if people else _NOTHING
    why = _why_not(len(people), count, kappa, agreement, majority)
    return {
        "id": new_id("calibration"),
        "name": version.name,
        "version": version.version,
        "hash": version.hash,
        "judges": version.judges,
        "rows": count,
        "invalid": count - len(people),
        "kappa": kappa.value,
        "kappa_low": None if kappa.interval is None else kappa.interval.low,
        "kappa_high": None if kappa.interval is None else kappa.interval.high,
        "agreement": _rate(agreement),
        "majority_baseline": _rate(majority),
        "calibrated": why is None,
        "why": why,
        "created_us": now_us(),
    }


def _why_not(valid: int, count: int, kappa: Kappa, agreement: Rate, majority: Rate) -> str | None:
    if count - valid > INVALID_BAR * count:
        return f"{count - valid} of {count} rows have no verdict"
    if kappa.value is None or kappa.interval is None:
        return "people say the same of every row, and so does the grader: that shows nothing"
    if kappa.interval.low <= KAPPA_BAR:
        return f"kappa is {kappa.value:.2f}, and may be {kappa.interval.low:.2f}: its lower end must be above {KAPPA_BAR}"
    if agreement.hits <= majority.hits:
        return f"it agrees in {agreement.hits} of {valid} rows, and always saying the commonest label would in {majority.hits}"
    return None


def _rate(rate: Rate) -> MeasuredRate:
    low, high = rate.interval or (None, None)
    return MeasuredRate(hits=rate.hits, total=rate.total, value=rate.value, low=low, high=high)


def _of(p: Principal, grader: GraderVersion) -> Select[Any]:
    table = rows.calibration.c
    query = select(rows.calibration).where(table.project == p.project, table.grader_hash == grader.hash)
    return query.order_by(table.created_us.desc(), table.id.desc())


def _keep(connection: Connection, project: str, card: Calibration) -> Calibration:
    values = {"id": card.id, "project": project, "grader_hash": card.hash, "card": card.model_dump_json(), "created_us": card.created_us}
    connection.execute(insert(rows.calibration).values(values))
    return card


def _card_of(row: Row[Any], grader: GraderVersion) -> Calibration:
    """The same grader may have another name."""
    card = Calibration.model_validate_json(row.card)
    return card.model_copy(update={"name": grader.name, "version": grader.version})

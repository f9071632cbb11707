"""The planted graders as the detector is given them: their grader and their rows, and nothing of what they are."""

import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from bloomery.grade.attack import attacked
from bloomery.grade.grader import Grader
from bloomery.grade.pool import Graders
from bloomery.types.graders import AttackReport, AttackRow
from tests.grade.planted import later, seen, unseen
from tests.grade.planted.unseen import Case

Part = Literal["unseen", "seen", "later"]
PARTS: dict[Part, Callable[[], list[Case]]] = {"unseen": unseen.cases, "seen": seen.cases, "later": later.cases}
_STYLES = {"score": "plain", "openai": "openai", "trl": "trl"}


class Outcome(NamedTuple):
    """A case and what came of it."""

    part: Part
    case: Case
    report: AttackReport

    @property
    def row(self) -> str:
        """Of the page."""
        exploits = self.report.exploits
        paid = f"{exploits[0].name.replace('|', '/')}: {exploits[0].mean_score:.2f}" if exploits else ""
        return f"| {self.part} | `{self.case.name}` | {self.case.kind} | {self.report.verdict} | {paid} |"


async def outcomes(part: Part) -> list[Outcome]:
    """Of its cases, by name."""
    async with Graders() as jail:
        return [Outcome(part, case, await attacked(grader_of(case), rows_of(case), jail=jail)) for case in PARTS[part]()]


def grader_of(case: Case) -> Grader:
    """As somebody would declare it."""
    if case.form == "json":
        return Grader.parse(case.grader)
    return Grader.parse({"type": "function", "source": case.grader, "entry": case.entry, "style": _STYLES[case.form]})


def rows_of(case: Case) -> list[AttackRow]:
    """With the honest answers that some have."""
    return [AttackRow(item=_item(row.reference, row.item), messages=row.messages, good=row.good, bad=row.bad) for row in case.rows]


def _item(reference: Any, item: dict[str, Any]) -> dict[str, Any]:
    return {"reference": json.loads(json.dumps(reference)), **item}

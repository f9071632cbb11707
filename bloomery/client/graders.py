"""Graders of the project, and what they say."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from bloomery.client.http import Http
from bloomery.types.graders import (
    AttackGrader,
    AttackRow,
    CalibrateGrader,
    Calibration,
    ComparedPair,
    GraderAttack,
    GraderRun,
    GraderVersion,
    LabelledRow,
    OutputRow,
    RunGrader,
    WaiveGrader,
)

ATTACK_S: Final = 1800.0
"""Thousands of grades may take that long where judges give them."""


class Graders:
    """Versions under names, which never change."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(self, name: str, spec: dict[str, Any]) -> GraderVersion:
        """A version; the same grader again is the version that is there."""
        return GraderVersion.model_validate(self._http.post_once("/api/v1/graders", {"name": name, "spec": spec}))

    def get(self, name: str, version: int | None = None) -> GraderVersion:
        """A version; the newest, unless another is named."""
        return GraderVersion.model_validate(self._http.get(_of(name), version=version))

    def run(self, name: str, rows: Sequence[OutputRow], *, version: int | None = None) -> GraderRun:
        """Grade outputs, by the newest version or another one."""
        asked = RunGrader(version=version, rows=list(rows))
        return GraderRun.model_validate(self._http.post(f"{_of(name)}/run", asked.model_dump(), repeatable=True))

    def attack(
        self, name: str, rows: Sequence[AttackRow] | None = None, *, version: int | None = None, dataset: str | None = None, **options: Any
    ) -> GraderAttack:
        """Whether a grader pays without competence on these rows or on a data set; `options` are the other fields of `AttackGrader`."""
        asked = AttackGrader(version=version, rows=None if rows is None else list(rows), dataset=dataset, **options)
        # Repeated only where the server may know by then: what was lost may have asked a judge a thousand times.
        again = dataset is not None and not asked.again
        answer = self._http.request("POST", f"{_of(name)}/attack", json=asked.model_dump(), repeatable=again, timeout=ATTACK_S)
        return GraderAttack.model_validate(answer.json())

    def attacks(self, name: str, version: int | None = None) -> list[GraderAttack]:
        """What came of attacks of a version on data sets, latest first."""
        return [GraderAttack.model_validate(item) for item in self._http.pages(f"{_of(name)}/attacks", version=version)]

    def waive(self, name: str, reason: str, *, version: int | None = None) -> GraderVersion:
        """Have jobs take a version, the newest or another one, whatever attacks find."""
        asked = WaiveGrader(version=version, reason=reason)
        return GraderVersion.model_validate(self._http.post_once(f"{_of(name)}/waive", asked.model_dump()))

    def calibrate(
        self, name: str, rows: Sequence[LabelledRow] | Sequence[ComparedPair], *, version: int | None = None, **options: Any
    ) -> Calibration:
        """Measure a version by what people say of these outputs, or of these pairs; `options` are the other fields of `CalibrateGrader`."""
        asked = CalibrateGrader.model_validate({"version": version, _kind_of(rows): list(rows), **options})
        # Under one key, so that a repetition that finds the card made asks no judge again.
        answer = self._http.request(
            "POST", f"{_of(name)}/calibrations", json=asked.model_dump(), repeatable=True, headers=self._http.once(), timeout=ATTACK_S
        )
        return Calibration.model_validate(answer.json())

    def calibrations(self, name: str, version: int | None = None) -> list[Calibration]:
        """Cards of a version, latest first."""
        return [Calibration.model_validate(item) for item in self._http.pages(f"{_of(name)}/calibrations", version=version)]

    def list(self) -> list[GraderVersion]:
        """The newest version of every grader, by name."""
        return [GraderVersion.model_validate(item) for item in self._http.pages("/api/v1/graders")]


def _of(name: str) -> str:
    return f"/api/v1/graders/{quote(name, safe='')}"


def _kind_of(rows: Sequence[LabelledRow] | Sequence[ComparedPair]) -> str:
    return "pairs" if rows and isinstance(rows[0], ComparedPair) else "rows"

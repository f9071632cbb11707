"""Evaluations of the project."""

import time
from collections.abc import Callable, Iterator
from typing import Final, Unpack
from urllib.parse import quote

from bloomery.client.http import Http
from bloomery.types.errors import Unavailable
from bloomery.types.evaluations import Evaluation, EvaluationItem, EvaluationItems, EvaluationSpec, EvaluationState, ItemStatus, Leaderboard
from bloomery.types.paired import PairedRows, PairsAsked
from bloomery.types.resources import Split

_PATH: Final = "/api/v1/evaluations"
_LOOK_EVERY_S: Final = 1.0
_PAGE: Final = 100


class Evaluations:
    """Made, followed and compared."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(self, spec: EvaluationSpec) -> Evaluation:
        """One that waits for its turn."""
        return Evaluation.model_validate(self._http.post_once(_PATH, spec.model_dump(mode="json")))

    def get(self, evaluation: str) -> Evaluation:
        """One, by its id or name."""
        return Evaluation.model_validate(self._http.get(_of(evaluation)))

    def items(self, evaluation: str, *, status: ItemStatus | None = None, model: str | None = None) -> Iterator[EvaluationItem]:
        """Answers with their scores, in the order of rows, page by page: of one status, or of one model alone."""
        after = -1
        while True:
            found = self._http.get(f"{_of(evaluation)}/items", after=after, limit=_PAGE, status=status, model=model)
            page = EvaluationItems.model_validate(found)
            yield from page.data
            if not page.has_more:
                return
            after = page.data[-1].number

    def pairs(self, evaluation: str, *, limit: int = 50, offset: int = 0, **wanted: Unpack[PairsAsked]) -> PairedRows:
        """Where two models differ row by row, and how sure that is: a page of rows."""
        return PairedRows.model_validate(self._http.get(f"{_of(evaluation)}/pairs", limit=limit, offset=offset, **wanted))

    def cancel(self, evaluation: str) -> Evaluation:
        """End it; what was answered and scored stays."""
        return Evaluation.model_validate(self._http.post_once(f"{_of(evaluation)}/cancel", {}))

    def delete(self, evaluation: str) -> None:
        """Forget one that has ended, with all its items."""
        self._http.request("DELETE", _of(evaluation))

    def leaderboard(
        self, dataset: str, grader: str, *, version: str | None = None, grader_version: int | None = None, split: Split = "eval"
    ) -> Leaderboard:
        """Models by what a grader says of their answers to the rows of a version, the newest unless another is named; best first."""
        query = {"dataset": dataset, "grader": grader, "version": version, "grader_version": grader_version, "split": split}
        return Leaderboard.model_validate(self._http.get("/api/v1/leaderboard", **query))

    def wait(self, evaluation: str, timeout_s: float = 86_400.0, *, on_change: Callable[[Evaluation], None] = lambda _: None) -> Evaluation:
        """The evaluation once it has ended; `on_change` is told whenever something of it changed."""
        deadline, last = time.monotonic() + timeout_s, None
        while True:
            now = self.get(evaluation)
            if now != last:
                on_change(now)
            if now.state.ended:
                return now
            if time.monotonic() > deadline:
                raise Unavailable(f"evaluation `{now.spec.name}` is still {now.state} after {timeout_s:g} s: wait for longer")
            last = now
            time.sleep(_LOOK_EVERY_S)

    def list(self, *, state: EvaluationState | None = None, limit: int | None = None) -> list[Evaluation]:
        """Evaluations, newest first: all, or the newest `limit`."""
        return [Evaluation.model_validate(item) for item in self._http.pages(_PATH, state=state, limit=limit)]


def _of(evaluation: str) -> str:
    return f"{_PATH}/{quote(evaluation, safe='')}"

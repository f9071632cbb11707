"""The rollouts of a run's steps: recorded once, and read with what their tokens say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.client.http import Http
from bloomery.types.rollouts import RecordedStep, RolloutGroup, RolloutPage, RolloutStep
from bloomery.types.wire import encode


class RunRollouts:
    """Of one run."""

    def __init__(self, http: Http, run_id: str) -> None:
        self._http, self._path = http, f"/api/v1/runs/{run_id}/rollouts"

    def add(self, step: int, recorded: RecordedStep) -> RolloutStep:
        """Keep what a step was trained on. The same again changes nothing; Conflict where others were recorded
        for it, NotSupported where none are kept."""
        content, headers = encode(recorded), {"content-type": "application/msgpack"}
        answer = self._http.request("POST", f"{self._path}/{step}", content=content, headers=headers, repeatable=True)
        return RolloutStep.model_validate(answer.json())

    def steps(self, *, order: str = "newest", limit: int | None = None) -> list[RolloutStep]:
        """Steps that are kept, by default the newest first."""
        return [RolloutStep.model_validate(item) for item in self._http.pages(self._path, limit=limit, order=order)]

    def page(self, step: int, **query: Any) -> RolloutPage:
        """Some groups of a step, and how all its rewards and lengths are spread; `query` has `limit`, `offset` and filters."""
        return RolloutPage.model_validate_json(self._http.request("GET", f"{self._path}/{step}", params=_given(**query)).content)

    def groups(self, step: int, **filters: Any) -> Iterator[RolloutGroup]:
        """The groups of a step, page by page; `filters` are the fields of `RolloutFilter`."""
        offset = 0
        while True:
            page = self.page(step, offset=offset, **filters)
            yield from page.data
            offset += len(page.data)
            if not page.has_more:
                return

    def export(self, target: Path, *, first: int | None = None, last: int | None = None, **filters: Any) -> None:
        """Write the rollouts of some steps, or of all, to a new file of JSON Lines."""
        self._http.download(f"{self._path}/export", target, **{"from": first, "to": last, **filters})


def _given(**query: Any) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}

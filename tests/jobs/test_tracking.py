"""Who tells a tracker what jobs measure, over the real api without a runner; trackers of others are in `tests/tracking`."""

from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.config import TrackerConfig
from bloomery.jobs.trackers import Place
from bloomery.jobs.tracking import Follower
from bloomery.types.jobs import Data, JobPoint, JobSpec, JobState
from bloomery.types.leases import FinishJob, FollowedJob, ReportJob
from tests.api.server import URL, Server, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


class Kept:
    """A tracker that keeps what it is told, and takes nothing of the jobs that it `refuses`."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.refuses: set[str] = set()

    def of(self, _config: TrackerConfig, followed: FollowedJob, _scratch: Path) -> "KeptJob":
        return KeptJob(self, followed.job.spec.name)


class KeptJob:
    """One job of it."""

    def __init__(self, kept: Kept, name: str) -> None:
        self._kept, self._name = kept, name

    def there(self, points: Sequence[JobPoint]) -> Set[Place]:
        return frozenset()

    def log(self, points: Sequence[JobPoint]) -> None:
        if self._name in self._kept.refuses:
            raise OSError("its run was deleted")
        self._kept.steps.setdefault(self._name, []).extend(point.step for point in points)

    def end(self, state: JobState | None) -> None:
        if state is not None:
            self._kept.ended.append(self._name)


def measured(server: Server, name: str) -> None:
    """A job that took two steps and ended."""
    client = server.client()
    client.jobs.create(JobSpec(name=name, base_model="tiny", data=Data(dataset="rows")))
    lease = client.runner("r").claim(0)
    assert lease is not None
    with Client(URL, lease.token, transport=server.transport) as mine:
        working = mine.working(lease.job.id)
        working.report(ReportJob(points=[JobPoint(step=step, values={"loss": 1.0}) for step in (1, 2)]))
        working.finish(FinishJob(state="failed", reason="enough"))


def test_a_job_whose_run_cannot_be_told_keeps_no_other_from_being_told(server: Server, tmp_path: Path) -> None:
    client, kept = server.client(), Kept()
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": '{"text": "a", "label": "b"}'})
    follower = Follower(client.runner("r"), TrackerConfig(kind="mlflow", target=""), tmp_path / "tracked", kept.of)
    follower.look()
    kept.refuses = {"lost"}
    for name in ("lost", "other"):
        measured(server, name)
    for _ in range(2):
        with pytest.raises(OSError, match="its run was deleted"):
            follower.look()
        follower.forget()
    assert (kept.steps, kept.ended) == ({"other": [1, 2]}, ["other"])
    kept.refuses = set()
    follower.look()
    assert (kept.steps, kept.ended) == ({"other": [1, 2], "lost": [1, 2]}, ["other", "lost"])

"""Tells a tracker what jobs measure: `python -m bloomery.jobs.tracking`, one process for each tracker, started by the runner.

It follows the points that the server has, in the order in which it was told them, so nothing of it is in the way of training: a tracker that is slow,
or away, is told later. How far it was told of each job lies in the data directory, and where the tracker itself can say it, that counts too.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bloomery.client import Client
from bloomery.client.jobs import Runner
from bloomery.config import TrackerConfig, TrackerKind, TrackingConfig
from bloomery.config.data_dir import DataDir
from bloomery.jobs.trackers import Place, Tracker, tracker_of
from bloomery.obs import logs
from bloomery.types.errors import BloomeryError
from bloomery.types.ids import now_us
from bloomery.types.jobs import JobPoint, JobState
from bloomery.types.leases import FollowedJob

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 2.0
PAUSE_S: Final = 30.0
"""After a tracker that could not be told."""
TELL_EVERY_S: Final[Mapping[TrackerKind, float]] = {"wandb": 60.0}
"""Between two times that it is told of a job that runs: to begin a session with it takes seconds."""
_ENDED: Final = "ended"


@dataclass(frozen=True, slots=True)
class Told:
    """How far a tracker was told: a file for each job, and one for when the last of them changed."""

    directory: Path

    @property
    def since_us(self) -> int:
        """From when on jobs are looked at; those that ended before this server had the tracker are none of its business."""
        if (file := self.directory / "since_us").exists():
            return int(file.read_text())
        self.note_since(now := now_us())
        return now

    def note_since(self, time_us: int) -> None:
        """All that changed before was told."""
        self._write("since_us", str(time_us))

    def until_us(self, job: str) -> int | None:
        """What the server heard of a job until then was told; 0 where nothing was, None where all was."""
        file = self.directory / job
        said = file.read_text() if file.exists() else "0"
        return None if said == _ENDED else int(said)

    def note(self, job: str, until_us: int | None) -> None:
        """Told until then, or all."""
        self._write(job, _ENDED if until_us is None else str(until_us))

    def _write(self, name: str, text: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        staged = self.directory / f".{name}"
        staged.write_text(text)
        staged.replace(self.directory / name)


class Follower:
    """Of all jobs, for one tracker; `made` opens a job's run there."""

    def __init__(
        self, runner: Runner, config: TrackerConfig, directory: Path, made: Callable[[TrackerConfig, FollowedJob, Path], Tracker] = tracker_of
    ) -> None:
        self._runner, self._config, self._directory, self._made = runner, config, directory, made
        self._told = Told(directory / "told")
        self._open: dict[str, Tracker] = {}
        self._not_before_s: dict[str, float] = {}
        """When each job is told of next."""

    def look(self) -> None:
        """Tell what is new; whatever fails is told the next time, and raised when the others were told."""
        since_us = self._told.since_us
        problem: Exception | None = None
        for followed in self._runner.changed(since_us):
            try:
                if followed.job.spec.tracking:
                    self._tell(followed)
            except BloomeryError:
                # The server's, and so everybody's.
                raise
            except Exception as error:
                problem = problem or error
            if problem is None:
                since_us = followed.job.updated_us
        self._told.note_since(since_us)
        if problem is not None:
            raise problem

    def forget(self) -> None:
        """Open the runs of the tracker anew: one of them went wrong."""
        while self._open:
            with suppress(Exception):
                self._open.popitem()[1].end(None)

    def _tell(self, followed: FollowedJob) -> None:
        job = followed.job
        if (until_us := self._told.until_us(job.id)) is None:
            return
        at_rest = job.state.ended or job.state is JobState.PAUSED
        if not at_rest and time.monotonic() < self._not_before_s.get(job.id, 0.0):
            return
        while points := self._runner.points(job.id, since_us=until_us):
            self._log(followed, points)
            until_us = points[-1].created_us
            self._told.note(job.id, until_us)
            self._not_before_s[job.id] = time.monotonic() + TELL_EVERY_S.get(self._config.kind, 0.0)
        if job.state.ended:
            if until_us:
                self._tracker(followed).end(job.state)
            self._open.pop(job.id, None)
            self._not_before_s.pop(job.id, None)
            self._told.note(job.id, None)

    def _log(self, followed: FollowedJob, points: list[JobPoint]) -> None:
        first = followed.job.id not in self._open
        tracker = self._tracker(followed)
        # Whoever told it before may have died before he noted so.
        tracker.log(_without(points, tracker.there(points)) if first else points)

    def _tracker(self, followed: FollowedJob) -> Tracker:
        job = followed.job.id
        if job not in self._open:
            self._open[job] = self._made(self._config, followed, self._directory / "files")
        return self._open[job]


def _without(points: list[JobPoint], there: Set[Place]) -> list[JobPoint]:
    left = [{name: value for name, value in point.values.items() if (name, point.step) not in there} for point in points]
    return [point.model_copy(update={"values": values}) for point, values in zip(points, left, strict=True) if values]


def follow(config: TrackingConfig) -> None:
    """Until this process ends."""
    data = DataDir(Path(config.data_dir))
    with Client(config.url, data.api_key.read_text().strip()) as client:
        follower = Follower(client.runner(config.name), config.tracker, data.tracked(config.tracker.kind))
        while True:
            time.sleep(LOOK_EVERY_S if _looked(follower, config) else PAUSE_S)


def _looked(follower: Follower, config: TrackingConfig) -> bool:
    try:
        follower.look()
    except BloomeryError as error:
        log.warning("the server cannot be asked what jobs measure: %s", error.message)
    except Exception as error:
        # Whatever a tracker raises: its runs are opened anew, and what is missing there is told again.
        log.warning("%s cannot be told what jobs measure, and is in %g s: %s: %s", config.tracker.kind, PAUSE_S, type(error).__name__, error)
        follower.forget()
    else:
        return True
    return False


def main() -> None:
    """Read the configuration and follow."""
    config = TrackingConfig.from_json(sys.stdin.read())
    logs.configure("jobs", config.log_level)
    follow(config)


if __name__ == "__main__":
    main()

"""What a job does about a training that goes wrong: it is noted, and the job stops, stands still, or goes on, as its spec says."""

import math
from collections.abc import Mapping, Sequence

from bloomery.client import Client
from bloomery.jobs.reporting import Reporter, StandsStill
from bloomery.recipes.watch import Alarm, ConvergenceWatch
from bloomery.types.errors import InvalidInput
from bloomery.types.jobs import CHANGED_TO, Job, JobEvent, JobPoint, JobState


class Guard:
    """Looks at every step. A trouble because of which the job stood still is not acted upon again: whoever resumed the job has seen it."""

    def __init__(self, client: Client, job: Job, reporter: Reporter) -> None:
        self._watch, self._reporter, self._action = ConvergenceWatch(), reporter, job.spec.watch.action
        self._seen = _seen(client.jobs.events(job.id))

    def catch_up(self, points: Sequence[JobPoint]) -> None:
        """What processes before this one measured: of a recipe that does not tell its steps from the first on again."""
        for point in points:
            self.look(point.step, {name: math.nan if value is None else value for name, value in point.values.items()})

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Note what is wrong; raise where the job is not to go on."""
        for alarm in self._watch.look(step, values):
            self._reporter.note(_words(alarm), level="warning", key=f"watch {alarm.trouble}", trouble=alarm.trouble, step=step)
            if alarm.trouble in self._seen:
                continue
            if self._action == "stop":
                raise InvalidInput(f"stopped by its watch: {_words(alarm)}", field="watch")
            if self._action == "pause":
                raise StandsStill(_words(alarm))


def _seen(events: Sequence[JobEvent]) -> set[str]:
    """Troubles that were noted before the job was paused last; a process that noted one and died before it acted did not pause it."""
    paused = max((event.number for event in events if event.data.get(CHANGED_TO) == JobState.PAUSED), default=0)
    return {event.data["trouble"] for event in events if "trouble" in event.data and event.number < paused}


def _words(alarm: Alarm) -> str:
    return f"{alarm.trouble.replace('_', ' ')} at step {alarm.step}: {alarm.message}"

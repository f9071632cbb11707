"""What has just changed, told to whoever watches: names of topics and nothing of what they are about, so that a page knows what to read again.

The database tells which tables a commit changed, and what lies in none of them is told by whoever changes it. A topic is the same for all
projects: whoever watches one learns that something of its kind changed somewhere, and reads no more than before.

A listener holds the topics that it has not fetched, a handful at most, however slow it is.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Final, Literal

from bloomery.services.access.principal import Principal
from bloomery.services.listeners import Listeners
from bloomery.store.database import Database
from bloomery.types.errors import Unavailable

Topic = Literal["runs", "rollouts", "jobs", "points", "datasets", "evaluations", "graders", "deployments", "spans", "feedback", "keys", "processes"]

TOPIC_OF: Final[Mapping[str, Topic | None]] = {
    "alias": None,
    "answered": None,
    "api_key": "keys",
    "base_model": None,
    "batch": None,
    "batch_line": None,
    "calibration": "graders",
    "checkpoint": "runs",
    "custom_loss": None,
    "dataset": "datasets",
    "dataset_item": "datasets",
    "dataset_version": "datasets",
    "deployment": "deployments",
    "evaluation": "evaluations",
    "evaluation_answer": "evaluations",
    "evaluation_model": "evaluations",
    "evaluation_score": "evaluations",
    "event": None,
    "feedback": "feedback",
    "file": None,
    "fine_tuning": "jobs",
    "grader": "graders",
    "grader_attack": "graders",
    "job": "jobs",
    "job_event": "jobs",
    "job_point": "points",
    "openai_eval": "evaluations",
    "openai_eval_run": "evaluations",
    "project": "keys",
    "revision": "deployments",
    "rollout_step": "rollouts",
    "run": "runs",
    "run_metric": "points",
    "sampling_session": None,
    "session": None,
    "span": "spans",
    "span_sum": None,
    "upload": None,
    "upload_part": None,
}
"""By table; None: no page shows it. `processes` are in no table, and cards of deployments neither."""
MOST: Final = 512
MOST_OF_A_PROJECT: Final = 64


class Listener:
    """Somebody who watches."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.over = False
        """Whether nothing more will be told."""
        self._topics: set[Topic] = set()
        self._woken = asyncio.Event()

    async def wait(self, within_s: float) -> None:
        """Until something has changed, all is over, or the time is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._woken.wait()

    def take(self) -> list[Topic]:
        """What has changed since this was asked last."""
        topics, self._topics = sorted(self._topics), set()
        if not self.over:
            self._woken.clear()
        return topics

    def note(self, topics: Iterable[Topic]) -> None:
        """These have changed."""
        self._topics.update(topics)
        self._woken.set()

    def end(self) -> None:
        """Nothing more will be told."""
        self.over = True
        self._woken.set()


class Live:
    """Tells whoever watches; it is told by others while `told_by` is entered."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self._closed = False

    def listening(self, p: Principal) -> AbstractContextManager[Listener]:
        """One more who watches, while entered; Unavailable where there are too many."""
        p.require("read", "train")
        self._check_room(p.project)
        return self._listening(p.project)

    def _check_room(self, project: str) -> None:
        if self._closed:
            raise Unavailable("the server is stopping")
        theirs = sum(listener.project == project for listener in self._listeners)
        if theirs >= MOST_OF_A_PROJECT or len(self._listeners) >= MOST:
            raise Unavailable(f"{len(self._listeners)} streams are open, {theirs} of this project: close some, or ask for what you need instead")

    @contextmanager
    def _listening(self, project: str) -> Iterator[Listener]:
        listener = Listener(project)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)

    @contextmanager
    def told_by(self, database: Database, others: Mapping[Topic, Iterable[Listeners]]) -> Iterator[None]:
        """Hear of changes until left, and then end all who watch; `others` tell of what is in no table."""
        loop = asyncio.get_running_loop()

        def committed(tables: frozenset[str]) -> None:
            # In the writer's thread, behind every commit: where nobody watches it ends here.
            if self._listeners and (topics := {topic for table in tables if (topic := TOPIC_OF.get(table)) is not None}):
                loop.call_soon_threadsafe(self.tell, topics)

        with ExitStack() as sources:
            sources.callback(self.close)
            sources.enter_context(database.watched(committed))
            for topic, changes in others.items():
                for change in changes:
                    sources.enter_context(change.calling(partial(self.tell, (topic,))))
            yield

    def tell(self, topics: Iterable[Topic]) -> None:
        """These have changed."""
        for listener in self._listeners:
            listener.note(topics)

    def close(self) -> None:
        """Let nobody watch any more."""
        self._closed = True
        for listener in self._listeners:
            listener.end()

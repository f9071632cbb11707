"""Looks at the weights of a job as they are served, from a thread beside its training: what was measured is told at the step that published them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from bloomery.client import Sampler
from bloomery.jobs.work import Work
from bloomery.types.errors import Gone, NotFound

PREFIX: Final = "served/"
"""Before the names of what was measured on served weights."""


Measure = Callable[[Sampler], dict[str, float]]
"""What is looked at, by name."""


class Served:
    """Looks while it is entered, at one version after the other; leaving it waits for the last, or lets them go where the training ended otherwise.

    What a process before this one told is not looked at again.
    """

    def __init__(self, work: Work, measure: Measure) -> None:
        self._work, self._measure = work, measure
        every, points = work.spec.evaluation.served_every, work.client.jobs.points(work.job.id)
        self._told = {point.step for point in points if every and any(name.startswith(PREFIX) for name in point.values)}
        self._looks: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)
        if kind is None:
            for look in self._looks:
                look.result()

    def look(self, step: int, version: str) -> None:
        """Have weights looked at that were published behind a step."""
        if step not in self._told:
            self._looks.append(self._pool.submit(self._look, step, version))

    def _look(self, step: int, version: str) -> None:
        try:
            found = self._measure(self._work.client.sampler(version))
        except (NotFound, Gone) as gone:
            # Whoever goes on with a job that stood still for long finds them collected.
            self._work.reporter.note(f"step {step} was not looked at as it is served: {gone.message}", level="warning", key=f"served {step}")
            return
        self._work.reporter.also(step, {f"{PREFIX}{name}": value for name, value in found.items()})

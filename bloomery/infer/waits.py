"""How long samples stand in the queue before they get their first place."""

from bisect import bisect_left

from bloomery.types.serving import QUEUE_BOUNDS_S, QueueTimes


class Waits:
    """A histogram since it began."""

    def __init__(self) -> None:
        self._counts = [0] * (len(QUEUE_BOUNDS_S) + 1)
        self._seconds = 0.0

    def note(self, seconds: float) -> None:
        """Of one sample."""
        self._counts[bisect_left(QUEUE_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    @property
    def so_far(self) -> QueueTimes:
        """For whoever asks from outside."""
        return QueueTimes(tuple(self._counts), self._seconds)

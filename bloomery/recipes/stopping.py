"""When a loop ends before its last step: what is held out has not become better in so many measurements in a row."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bloomery.recipes.cursors import Cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """What is looked at of a measured round, and how long it may stand still; the count is the cursor's, so that no death begins it anew."""

    measure: str
    higher_is_better: bool
    patience: int
    """0: the loop goes to its end, and nothing is counted."""
    min_delta: float

    def counted(self, cursor: Cursor, measured: Mapping[str, float]) -> Cursor:
        """With what was measured of the last round, once; as it was where that is nothing."""
        value = measured.get(self.measure)
        if not self.patience or value is None or cursor.measured == cursor.round:
            return cursor
        if cursor.best is None or (value - cursor.best if self.higher_is_better else cursor.best - value) > self.min_delta:
            return replace(cursor, measured=cursor.round, best=value, no_better=0)
        return replace(cursor, measured=cursor.round, no_better=cursor.no_better + 1)

    def ends(self, cursor: Cursor) -> bool:
        """Whether there is no further round."""
        return 0 < self.patience <= cursor.no_better

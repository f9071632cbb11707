"""What an engine has written since its base was last known to be sound: named when the base is found changed, for whoever decides what becomes of it.

It is not taken back by itself. Results were acknowledged, versions published and sampled with, and a history that went back behind them would
contradict what others hold; and whether the damage touched a number that was computed with, nobody knows.
"""

import time
from collections import deque

from bloomery.types.operations import CheckpointResult, SnapshotResult
from bloomery.types.protocol import CheckpointWritten, FromEngine, OperationDone


class Doubtful:
    """Checkpoints and versions by the time at which they were written."""

    def __init__(self) -> None:
        self._written: deque[tuple[float, str]] = deque()
        self._newest: dict[str, str] = {}
        """Blob of each run's newest checkpoint: told again, for a later operation or another listener, it was not written again."""

    def note(self, message: FromEngine, clean_s: float) -> None:
        """What goes out may tell of something that was written; what was before `clean_s` (`time.monotonic`) is sound."""
        match message:
            case CheckpointWritten(run_id=run_id, key=key) if self._newest.get(run_id) == key:
                return
            case CheckpointWritten(run_id=run_id, key=key):
                self._newest[run_id] = key
                name = f"checkpoint `{key}`"
            case OperationDone(result=CheckpointResult(key=key), replay=False):
                name = f"checkpoint `{key}`"
            case OperationDone(result=SnapshotResult(version=version), replay=False):
                name = f"version {version}"
            case _:
                return
        self._written.append((time.monotonic(), name))
        self.names(clean_s)

    def names(self, clean_s: float) -> list[str]:
        """Of what was written since then, each once; what is older is forgotten."""
        while self._written and self._written[0][0] < clean_s:
            self._written.popleft()
        return list(dict.fromkeys(name for _, name in self._written))

    def advice(self, clean_s: float) -> str:
        """For the log of a process that ends."""
        names = self.names(clean_s)
        if not names:
            return "nothing was written since all of it was last found sound"
        return (
            f"what was written since all of it was last found sound may have been computed with damaged numbers: {', '.join(names)}. "
            f"To be sure, go back to a checkpoint from before"
        )

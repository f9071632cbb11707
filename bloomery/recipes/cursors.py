"""Where a loop stands, of which loop that is, and where it is kept: a text that is replaced whole, or not at all."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Protocol, TextIO

import msgspec
from msgspec import Meta, MsgspecError

from bloomery.recipes.failures import Reason
from bloomery.recipes.rollouts import Problem
from bloomery.types.errors import Conflict, InvalidInput, Unavailable

_UNDECIDING: Final = (
    "agreement",
    "checkpoint_every",
    "concurrency",
    "evaluate_every",
    "evaluation",
    "kl_rollouts",
    "max_lost_rounds",
    "min_delta",
    "patience",
)
"""Settings that decide nothing of what is trained."""
_USUAL: Final[Mapping[str, Any]] = {"optimizer": None, "temperature": 1.0, "zero_variance": "drop"}
"""Settings that decide something only where they are another: a cursor that knows nothing of them is of the same loop as one with these."""
_Count = Annotated[int, Meta(ge=0)]


class Shown(NamedTuple):
    """What a round showed: measures by name, and why attempts at its rollouts failed."""

    metrics: dict[str, float]
    failures: tuple[Reason, ...] = ()

    def more(self, metrics: Mapping[str, float]) -> "Shown":
        """With these, too."""
        return self._replace(metrics={**self.metrics, **metrics})


NOTHING: Final = Shown({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a loop stands, before the step that begins at operation `seq`; `batch` are the groups of that step."""

    run_id: Annotated[str, Meta(pattern=r"^[\w-]+$")]
    fingerprint: str
    step: _Count
    """Versions published since the first."""
    round: _Count
    """Calls of `Policy.train`: those that had nothing to train on published none."""
    seq: _Count
    version: str
    """The newest; empty before the first, and while it is published anew."""
    first: str
    """What training began with."""
    had_below: _Count
    """Groups with lower numbers are had: trained, or found to teach nothing."""
    had: tuple[_Count, ...] = ()
    """Of the others, those that are."""
    batch: tuple[_Count, ...] = ()
    on_policy: bool = False
    """Whether all tokens of that step are of `version`."""
    refused: str = ""
    """Why the update of that step is not taken over, where that cannot be found out again."""
    kept: _Count = 0
    """The last round whose weights were kept under a name."""
    keeps: bool = False
    """Whether those of that step will be."""
    measured: _Count = 0
    """The last round whose held-out measurement is counted in the two below."""
    best: float | None = None
    no_better: _Count = 0
    """Measurements in a row that were no better than the best."""
    shown: Shown | None = None
    """Of that step, what was known before it was trained; otherwise of the last round, all. None: it was told, and the loop ended."""

    def after(self, groups: Iterable[int]) -> "Cursor":
        """A round later, with these groups had."""
        had, below = {*self.had, *groups}, self.had_below
        while below in had:
            had.remove(below)
            below += 1
        done = self.round + 1
        kept = done if self.keeps else self.kept
        return replace(self, had_below=below, had=tuple(sorted(had)), batch=(), on_policy=False, refused="", round=done, kept=kept, keeps=False)

    def has(self, group: int) -> bool:
        """Whether the group is had."""
        return group < self.had_below or group in self.had


class CursorStore(Protocol):
    """Keeps one text; its `str` says where, to people."""

    def read(self) -> str | None:
        """What was written last; None where nothing was."""
        ...

    def check_writable(self) -> None:
        """Refuse a place in which nothing can be kept, before there is a run that no cursor tells of."""
        ...

    def write(self, text: str) -> None:
        """Replace it; what is there when this returns survives whoever dies."""
        ...


class CursorFile:
    """In a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> str | None:
        """The file's text."""
        if not self._path.exists():
            return None
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Conflict(f"{self._path} is no cursor of a loop: give another file to begin anew ({error})") from None

    def check_writable(self) -> None:
        """Whether its folder is there."""
        if not self._path.parent.is_dir():
            raise InvalidInput(f"there is no folder {self._path.parent} to keep the cursor in: make it, or give another file", field="path")

    def write(self, text: str) -> None:
        """Whole or not at all, also when the machine goes down."""
        try:
            self._replace(text)
        except OSError as error:
            goes_on = "mend that, and start the loop again, which goes on where the file stands"
            raise Unavailable(f"the cursor {self._path} cannot be written ({error.strerror}): {goes_on}") from error

    def _replace(self, text: str) -> None:
        beside = self._path.with_name(f"{self._path.name}.new")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def alone(place: Path | CursorStore) -> Iterator[None]:
    """While one process goes on from a file no other does: Conflict where one does. What other stores keep is for them to lend.

    A lock beside it, because the file itself is replaced. The system lets it go when its process dies, and nobody inherits it.
    """
    lock = None
    if isinstance(place, Path):
        # Where nothing can be kept is refused by whoever keeps it, in its own words.
        with suppress(OSError):
            lock = place.with_name(f"{place.name}.lock").open("a", encoding="utf-8")
    try:
        if lock is not None:
            _take(lock, place)
        yield
    finally:
        if lock is not None:
            lock.close()


def _take(lock: TextIO, place: object) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        stop = "stop it first, or give another file to begin another loop"
        raise Conflict(f"another process goes on from the cursor {place} at this moment: {stop}") from None
    except OSError:
        # A file system without locks: whoever uses it sees to it that there is one loop.
        return


def store_of(place: Path | CursorStore) -> CursorStore:
    """A path is a file."""
    return CursorFile(place) if isinstance(place, Path) else place


def parsed(text: str, store: CursorStore) -> Cursor:
    """What was written there; Conflict where it is none."""
    try:
        stored = json.loads(text)
        if isinstance(stored, dict) and (unknown := stored.keys() - {each.name for each in fields(Cursor)}):
            raise ValueError(f"`{min(unknown)}` is nothing of one")
        return msgspec.convert(stored, Cursor)
    except (ValueError, RecursionError, MsgspecError) as error:
        raise Conflict(f"{store} is no cursor of a loop: give another file to begin anew ({error})") from None


def write_cursor(store: CursorStore, cursor: Cursor) -> None:
    """Replace what is there."""
    store.write(json.dumps(asdict(cursor)))


def fingerprint(problems: Sequence[Problem], settings: Any) -> str:
    """Of all that decides which groups a loop makes and what it does with them; how long it waits, for how many, and what it refuses does not."""
    described = [_deciding(asdict(settings)), [(problem.id, problem.prompt) for problem in problems]]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def _deciding(settings: dict[str, Any]) -> dict[str, Any]:
    left_out = {name for name, usual in _USUAL.items() if settings.get(name) == usual}
    kept = {name: value for name, value in settings.items() if name not in (*_UNDECIDING, *left_out) and not name.endswith("_timeout_s")}
    return {name: _deciding(value) if isinstance(value, dict) else value for name, value in kept.items()}

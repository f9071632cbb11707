"""Where what jobs measure goes, too, as `--track` says it: read, and its package looked for, before anything is written."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, get_args

from bloomery.config import TrackerConfig, TrackerKind
from bloomery.types.errors import InvalidInput, shown

_FIELD: Final = "track"
KINDS: Final[tuple[TrackerKind, ...]] = get_args(TrackerKind)
_MLFLOW_URI: Final = "MLFLOW_TRACKING_URI"
_PROJECT: Final = "bloomery"


def read(options: Sequence[str], jobs: int, root: Path, environment: Mapping[str, str]) -> tuple[TrackerConfig, ...]:
    """The trackers of a server whose data lies at `root`, at most one of a kind."""
    found = tuple(_tracker(option, root, environment) for option in options)
    if len({tracker.kind for tracker in found}) < len(found):
        raise InvalidInput("--track names each kind once", field=_FIELD)
    if found and not jobs:
        raise InvalidInput("--track is told what jobs measure, and --jobs 0 runs none: leave out one of them", field=_FIELD)
    return found


def announce(tracker: TrackerConfig) -> str:
    """One line for people."""
    return f"jobs are tracked by {tracker.kind}: {tracker.target}"


def _tracker(option: str, root: Path, environment: Mapping[str, str]) -> TrackerConfig:
    name, _, target = option.partition("=")
    kind = next((kind for kind in KINDS if kind == name), None)
    if kind is None:
        raise InvalidInput(f"--track takes {', '.join(KINDS)}, each with `=` and where, not `{shown(option)}`", field=_FIELD)
    if find_spec(kind) is None:
        raise InvalidInput(f"--track {kind} takes the package `{kind}`: install bloomery[{kind}]", field=_FIELD)
    return TrackerConfig(kind=kind, target=_target(kind, target, root, environment))


def _target(kind: TrackerKind, target: str, root: Path, environment: Mapping[str, str]) -> str:
    if kind == "tensorboard":
        return str(Path(target).expanduser().resolve() if target else root / "tensorboard")
    if kind == "wandb":
        return target or _PROJECT
    uri = target or environment.get(_MLFLOW_URI, "")
    if not uri:
        raise InvalidInput(f"--track mlflow=URI says where MLflow keeps its runs, and so does {_MLFLOW_URI}: neither is there", field=_FIELD)
    return uri

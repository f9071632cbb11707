"""Where what jobs measure goes, too: event files of TensorBoard, a run of MLflow, a run of Weights & Biases.

Each job is one run there, found again by whoever comes later. The packages are extras, and imported here when a tracker is made, nowhere else.
"""

import importlib
import math
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Final, Protocol

from bloomery.config import TrackerConfig
from bloomery.types.jobs import JobPoint, JobState
from bloomery.types.leases import FollowedJob

EXPERIMENT: Final = "bloomery"
"""Of MLflow."""
Place = tuple[str, int]
"""Of a value: its name and its step."""
_STEP: Final = "step"
_TAG: Final = "bloomery.job"
_METRICS_AT_ONCE: Final = 1000
_PARAMS_AT_ONCE: Final = 100
_LONGEST_PARAM: Final = 500
_ENDS: Final = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}


class Tracker(Protocol):
    """Takes what one job measured."""

    def there(self, points: Sequence[JobPoint]) -> Set[Place]:
        """What of these is there already, as far as it can tell."""
        ...

    def log(self, points: Sequence[JobPoint]) -> None:
        """These too; they are there, or in files of this machine, when it returns."""
        ...

    def end(self, state: JobState | None) -> None:
        """No more comes: for now, or because the job has ended so."""
        ...


def tracker_of(config: TrackerConfig, followed: FollowedJob, scratch: Path) -> Tracker:
    """The run of a job; `scratch` is for files that are on their way."""
    if config.kind == "tensorboard":
        return TensorBoard(config.target, followed)
    return MLflow(config.target, followed) if config.kind == "mlflow" else WeightsAndBiases(config.target, followed, scratch)


class TensorBoard:
    """Event files in `DIRECTORY/PROJECT/JOB`, each written by one process."""

    def __init__(self, target: str, followed: FollowedJob) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event, self._summary = (importlib.import_module(f"tensorboard.compat.proto.{name}_pb2") for name in ("event", "summary"))
        self._directory = Path(target) / followed.project / followed.job.spec.name
        self._writer = writer.EventFileWriter(str(self._directory))

    def there(self, points: Sequence[JobPoint]) -> Set[Place]:
        """What lies in the directory."""
        loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
        files, wanted = self._directory.glob("events.out.tfevents.*"), _places(points)
        events = (event for file in files for event in loader.EventFileLoader(str(file)).Load())
        return {place for event in events for value in event.summary.value if (place := (value.tag, event.step)) in wanted}

    def log(self, points: Sequence[JobPoint]) -> None:
        """Each value as a scalar."""
        for point in points:
            values = [self._summary.Summary.Value(tag=name, simple_value=number(value)) for name, value in point.values.items()]
            summary = self._summary.Summary(value=values)
            self._writer.add_event(self._event.Event(wall_time=point.created_us / 1e6, step=point.step, summary=summary))
        self._writer.flush()

    def end(self, state: JobState | None) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run of the experiment `bloomery`, with the job's id as a tag and its spec as parameters."""

    def __init__(self, target: str, followed: FollowedJob) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=target)
        self._run: str = self._found(followed) or self._made(followed)

    def there(self, points: Sequence[JobPoint]) -> Set[Place]:
        """What the histories of their metrics have."""
        wanted = _places(points)
        histories = ((name, self._client.get_metric_history(self._run, name)) for name in {name for name, _ in wanted})
        return {place for name, history in histories for metric in history if (place := (name, metric.step)) in wanted}

    def log(self, points: Sequence[JobPoint]) -> None:
        """Each value as a metric; those of a step at the time when it was told of first."""
        metrics = [
            self._entities.Metric(name, number(value), point.created_us // 1000, point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def end(self, state: JobState | None) -> None:
        """As the job ended."""
        if state is not None:
            self._client.set_terminated(self._run, _ENDS[state])

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        made: str = self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        return made

    def _found(self, followed: FollowedJob) -> str | None:
        runs = self._client.search_runs([self._experiment()], f"tags.`{_TAG}` = '{followed.job.id}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _made(self, followed: FollowedJob) -> str:
        tags = {_TAG: followed.job.id, "bloomery.project": followed.project, "mlflow.runName": followed.job.spec.name}
        run: str = self._client.create_run(self._experiment(), tags=tags).info.run_id
        params = [self._entities.Param(name, str(value)[:_LONGEST_PARAM]) for name, value in flat(followed.job.spec.model_dump(mode="json")).items()]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(run, params=params[start : start + _PARAMS_AT_ONCE])
        return run


class WeightsAndBiases:
    """A run of a project, whose id is that of the job.

    What is logged lies in the memory of a process of theirs until the run is finished, so it is finished each time, and resumed the next. Its own
    steps only grow, and more of a step may be measured behind the next, so steps are values like others, over which these are drawn.
    """

    def __init__(self, target: str, followed: FollowedJob, scratch: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._target, self._followed, self._scratch = target, followed, scratch

    def there(self, points: Sequence[JobPoint]) -> Set[Place]:
        """Nobody can tell."""
        return frozenset()

    def log(self, points: Sequence[JobPoint]) -> None:
        """All values of a step together."""
        with self._resumed() as run:
            run.define_metric(_STEP)
            run.define_metric("*", step_metric=_STEP)
            for point in points:
                run.log({_STEP: point.step, **{name: number(value) for name, value in point.values.items()}})

    def end(self, state: JobState | None) -> None:
        """A job that failed has failed there."""
        if state is JobState.FAILED:
            self._resumed().finish(exit_code=1)

    def _resumed(self) -> Any:
        self._scratch.mkdir(parents=True, exist_ok=True)
        job = self._followed.job
        return self._wandb.init(
            project=self._target,
            id=job.id,
            name=job.spec.name,
            group=self._followed.project,
            config=flat(job.spec.model_dump(mode="json")),
            resume="allow",
            reinit="create_new",
            dir=str(self._scratch),
            settings=self._wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True),
        )


def _places(points: Sequence[JobPoint]) -> Set[Place]:
    return {(name, point.step) for point in points for name in point.values}


def number(value: float | None) -> float:
    """What is no finite number has no other word there."""
    return math.nan if value is None else value


def flat(value: Any, above: str = "") -> dict[str, Any]:
    """The fields of a spec by their paths."""
    if isinstance(value, dict):
        return {name: inner for key, each in value.items() for name, inner in flat(each, f"{above}{key}.").items()}
    return {above.removesuffix("."): value}

"""The policy of a loop: its run, the versions that it published, and where the loop stands.

One step of training is three operations of the run: gradients, update, snapshot. The server keeps a run's operations in order, whoever dies, so all
that a loop has to remember is which groups it has had, and under which number its step began. That is the cursor: a small file, replaced atomically
before the first of the three is submitted. A loop that is started again compares that number with the run's and knows which of the three are there:
none, and it makes the same groups again, from the same weights with the same seeds; some, and it submits the rest. It is written again when they are
done, because the server drops results after some days, and weights without a name.

The gradients of a step tell whether trainer and sampler computed the same of the tokens that are of the weights that it begins with (`agreement`).
They are asked before the update is submitted, so that what is refused is not learnt, by a loop that is started again either.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, get_args

import numpy as np

from bloomery.client import Client, Pending, Sampler, TrainingRun
from bloomery.recipes.agreement import Held, Served, compare, of_metrics
from bloomery.recipes.holding import Bar
from bloomery.recipes.rollouts import Problem
from bloomery.types.errors import Conflict, Corrupt, Gone, InvalidInput, NotFound
from bloomery.types.operations import CheckpointResult, Datum, ForwardBackwardResult, LoadResult, OptimStepResult, SnapshotResult

_OPERATIONS: Final = 3
_FIRST: Final = "start"
_PATIENCE: Final = ("agreement", "concurrency", "evaluate_every", "evaluation", "kl_rollouts", "max_lost_rounds")
"""Settings that decide nothing of what is trained."""


class Start(NamedTuple):
    """A named checkpoint of another run, of the same rank: of supervised fine-tuning, say. Its optimizer is taken over where that is asked."""

    run_id: str
    checkpoint: str
    optimizer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """What is trained, and how."""

    base_model: str
    start: Start | None = None
    """Where to begin; None: at the base model."""
    rank: int = 16
    learning_rate: float = 1e-3
    grad_clip_norm: float = 1.0
    loss: str = "importance_sampling"
    loss_config: tuple[tuple[str, float], ...] = ()
    """Options of the loss by name."""
    seed: int = 0
    agreement: Held = "promised"
    """Whether rollouts and updates are refused, with Corrupt, where tokens have other log-probabilities than were served with them."""
    training_timeout_s: float = 3600.0
    """How long the result of an operation is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a loop stands, before the step that begins at operation `seq`; `batch` are the groups of that step."""

    run_id: str
    fingerprint: str
    step: int
    """Versions published since the first."""
    round: int
    """Calls of `Policy.train`: those that had nothing to train on published none."""
    seq: int
    version: str
    """The newest; empty before the first, and while it is published anew."""
    first: str
    """What training began with."""
    had_below: int
    """Groups with lower numbers are had: trained, or found to teach nothing."""
    had: tuple[int, ...] = ()
    """Of the others, those that are."""
    batch: tuple[int, ...] = ()
    on_policy: bool = False
    """Whether all tokens of that step are of `version`."""
    refused: str = ""
    """Why the update of that step is not taken over, where that cannot be found out again."""

    def after(self, groups: Iterable[int]) -> "Cursor":
        """A round later, with these groups had."""
        had, below = {*self.had, *groups}, self.had_below
        while below in had:
            had.remove(below)
            below += 1
        return replace(self, had_below=below, had=tuple(sorted(had)), batch=(), on_policy=False, refused="", round=self.round + 1)

    def has(self, group: int) -> bool:
        """Whether the group is had."""
        return group < self.had_below or group in self.had


class Policy:
    """Trains and publishes; `sampler` is that of the newest version."""

    def __init__(self, client: Client, run: TrainingRun, config: PolicyConfig, path: Path, cursor: Cursor) -> None:
        self.run, self.cursor = run, cursor
        self._client, self._config, self._path = client, config, path
        self.bar = Bar(client, config.base_model, config.agreement)
        self._numbers: dict[str, int] = {}
        self._samplers: dict[str, Sampler] = {}
        self.sampler: Sampler
        try:
            self._finish_what_was_begun()
        except Gone as error:
            state = f"{error.message}. Without it the cursor {path} cannot go on"
            raise Gone(f"{state}: save a checkpoint of run `{run.id}`, and begin anew with it as `start` and with another file") from error

    @classmethod
    def open(cls, client: Client, config: PolicyConfig, path: Path, fingerprint: str) -> Self:
        """Begin, or go on where the cursor at `path` says; Conflict where the cursor is another loop's, or the run is not where it should be."""
        if config.agreement not in get_args(Held):
            known = ", ".join(f'"{value}"' for value in get_args(Held))
            raise InvalidInput(f"`agreement` is `{config.agreement}`: it must be one of {known}", field="agreement")
        if not path.exists():
            run = client.create_run(config.base_model, config.rank, seed=config.seed)
            cursor = Cursor(run_id=run.id, fingerprint=fingerprint, step=0, round=0, seq=run.next_seq, version="", first="", had_below=0)
            _write(path, cursor)
            return cls(client, run, config, path, cursor)
        cursor = _read(path)
        if cursor.fingerprint != fingerprint:
            raise Conflict(f"{path} is of a loop with other settings or problems: go on with those, or give another file to begin anew")
        return cls(client, client.run(cursor.run_id), config, path, cursor)

    @property
    def step(self) -> int:
        """Versions published since the first, and so the number of the newest."""
        return self.cursor.step

    @property
    def first(self) -> Sampler:
        """Of the weights that training began with: a reference to hold the policy to."""
        return self._client.sampler(self.cursor.first)

    def knows(self, version: str) -> bool:
        """Whether this loop published it since it was started."""
        return version in self._numbers

    def sampler_of(self, version: str) -> Sampler | None:
        """That of a version which this loop published since it was started; None of any other."""
        return self._samplers.get(version)

    def lag(self, version: str) -> int:
        """How many versions old the weights of a token are."""
        return self.step - self._numbers[version]

    def train(self, data: Sequence[Datum], batch: Iterable[int], *, served: Sequence[Served] = ()) -> dict[str, float]:
        """One update from the data, which the groups of `batch` gave, and its version published; the metrics of the loss and of the update.

        `served` says of each datum what was sampled of it, as a `Segment` does: tokens of the newest version are held to `agreement`. Groups that
        gave no data are had all the same: nothing is trained then, and there is no new version. Corrupt where tokens are of versions that this loop
        did not publish: nothing can be said of how they were drawn.
        """
        versions = {version for sequence in served for version in sequence.versions}
        self._refuse_unknown(versions)
        on_policy = versions == {self.cursor.version}
        cursor = replace(self.cursor, seq=self.run.next_seq, batch=tuple(sorted(batch)), on_policy=on_policy)
        if not data:
            self.cursor = cursor.after(cursor.batch)
            _write(self._path, self.cursor)
            return {}
        self.cursor = cursor
        _write(self._path, cursor)
        told = not on_policy and cursor.version in versions and self._config.agreement != "off"
        gradients = self.run.forward_backward(data, self._config.loss, dict(self._config.loss_config), logprobs=told)
        timeout_s = self._config.training_timeout_s
        held = self._hold_newest(cursor, served, gradients.result(timeout_s)) if told else self._hold_all(cursor, gradients)
        update, snapshot = self._submit(_OPERATIONS - 1)
        metrics = gradients.result(timeout_s).metrics | update.result(timeout_s).metrics
        self._publish(cursor, snapshot.result(timeout_s).version)
        return metrics | {"held:sum": float(held)}

    def _refuse_unknown(self, versions: Iterable[str]) -> None:
        if unknown := sorted(version or "without a name" for version in versions if not self.knows(version)):
            known = "those that it published since it was started, and no older ones"
            raise Corrupt(
                f"nothing of step {self.cursor.step} is learnt, because it has tokens of weights that this loop does not know: {', '.join(unknown)}. "
                f"It knows {known}: leave such rollouts out (`rollouts.without_foreign`), and sample from `policy.sampler`"
            )

    def _finish_what_was_begun(self) -> None:
        cursor, there, timeout_s = self.cursor, self.run.next_seq - self.cursor.seq, self._config.training_timeout_s
        beginning = 1 + (self._config.start is not None and not cursor.first)
        expected = _OPERATIONS if cursor.batch else beginning * (not cursor.version)
        if there < 0 or not self._only_checkpoints(cursor.seq + expected):
            state = f"the next operation of run `{cursor.run_id}` is {self.run.next_seq}, and the cursor {self._path} stands at {cursor.seq}"
            raise Conflict(f"{state}: one of them was restored from an earlier day, or another program uses the run; begin anew with another file")
        if not cursor.version:
            version = self._begin(cursor.seq, there, beginning)
            self.cursor = replace(cursor, version=version, first=cursor.first or version, seq=self.run.next_seq)
            _write(self._path, self.cursor)
            self._serve()
        elif cursor.batch and there:
            gradients = self.run.submitted(cursor.seq, ForwardBackwardResult).result(timeout_s)
            if there == 1 and self._config.agreement != "off":
                self._hold_again(cursor, gradients)
            update, snapshot = self._submit(max(0, _OPERATIONS - there))
            update.result(timeout_s)
            self._publish(cursor, snapshot.result(timeout_s).version)
        else:
            self._serve_what_was_published()

    def _serve_what_was_published(self) -> None:
        try:
            self._serve()
        except (Gone, NotFound):
            # Weights without a name go when nobody asked for them in days; the run has them.
            self.cursor = replace(self.cursor, version="", seq=self.run.next_seq, batch=())
            _write(self._path, self.cursor)
            self._finish_what_was_begun()

    def _begin(self, seq: int, there: int, beginning: int) -> str:
        """The first version, whose name keeps it, or the newest anew; `there` of the operations that it takes were submitted before."""
        timeout_s = self._config.training_timeout_s
        if self._config.start is not None and not self.cursor.first:
            run_id, checkpoint, optimizer = self._config.start
            load = self.run.load(run_id, checkpoint, optimizer=optimizer) if there == 0 else self.run.submitted(seq, LoadResult)
            load.result(timeout_s)
        name = None if self.cursor.first else _FIRST
        snapshot = self.run.save_snapshot(name) if there < beginning else self.run.submitted(seq + beginning - 1, SnapshotResult)
        return snapshot.result(timeout_s).version

    def _only_checkpoints(self, first: int) -> bool:
        """Whether all operations from this one on only keep what was there: somebody saved a checkpoint by the way."""
        try:
            for seq in range(first, self.run.next_seq):
                self.run.submitted(seq, CheckpointResult).result(self._config.training_timeout_s)
        except Conflict:
            return False
        return True

    def _submit(self, missing: int) -> tuple[Pending[OptimStepResult], Pending[SnapshotResult]]:
        """The update and the snapshot, of which the last `missing` are not submitted yet."""
        seq, config = self.cursor.seq, self._config
        update = self.run.submitted(seq + 1, OptimStepResult)
        if missing >= 2:
            update = self.run.optim_step(config.learning_rate, grad_clip_norm=config.grad_clip_norm)
        snapshot = self.run.save_snapshot() if missing >= 1 else self.run.submitted(seq + 2, SnapshotResult)
        return update, snapshot

    def _hold_all(self, cursor: Cursor, gradients: Pending[ForwardBackwardResult]) -> int:
        """Tokens of an update on policy: how many there are of which the trainer has the numbers that were served, or Corrupt."""
        if not cursor.on_policy or self._config.agreement == "off":
            return 0
        agreement = of_metrics(gradients.result(self._config.training_timeout_s).metrics)
        self.bar.hold(agreement, cursor.version, f"the update of step {cursor.step} is")
        return agreement.tokens

    def _hold_newest(self, cursor: Cursor, served: Sequence[Served], gradients: ForwardBackwardResult) -> int:
        """The same of those tokens of another update that are of the weights that it begins with."""
        trained = [output["logprobs"].numpy() for output in gradients.outputs]
        # The first token is predicted by none.
        again = [logprobs[np.asarray(sequence.places) - 1] for sequence, logprobs in zip(served, trained, strict=True)]
        agreement = compare(served, again)[cursor.version]
        try:
            self.bar.hold(agreement, cursor.version, f"the update of step {cursor.step} is")
        except Corrupt as error:
            # What was served is known now, and not to a loop that is started again.
            self.cursor = replace(cursor, refused=error.message)
            _write(self._path, self.cursor)
            raise
        return agreement.tokens

    def _hold_again(self, cursor: Cursor, gradients: ForwardBackwardResult) -> None:
        """Of an update whose gradients a loop has left behind."""
        if cursor.refused:
            raise Corrupt(cursor.refused)
        if cursor.on_policy:
            self.bar.hold(of_metrics(gradients.metrics), cursor.version, f"the update of step {cursor.step} is")

    def _publish(self, cursor: Cursor, version: str) -> None:
        self.cursor = replace(cursor.after(cursor.batch), step=cursor.step + 1, seq=self.run.next_seq, version=version)
        _write(self._path, self.cursor)
        self._serve()

    def _serve(self) -> None:
        self._numbers[self.cursor.version] = self.cursor.step
        self.sampler = self._samplers[self.cursor.version] = self._client.sampler(self.cursor.version)


def fingerprint(problems: Sequence[Problem], settings: Any) -> str:
    """Of all that decides which groups a loop makes and what it does with them; how long it waits, for how many, and what it refuses does not."""
    described = [_deciding(asdict(settings)), [(problem.id, problem.prompt) for problem in problems]]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def _deciding(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if name not in _PATIENCE and not name.endswith("_timeout_s")}
    return {name: _deciding(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _read(path: Path) -> Cursor:
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Cursor(**(stored | {name: tuple(stored[name]) for name in ("had", "batch")}))
    except (ValueError, TypeError, KeyError) as error:
        raise Conflict(f"{path} is no cursor of a loop: give another file to begin anew ({error})") from None


def _write(path: Path, cursor: Cursor) -> None:
    """Whole or not at all, also when the machine goes down."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(asdict(cursor), file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

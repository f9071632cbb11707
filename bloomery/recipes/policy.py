"""The policy of a loop: its run, the versions that it published, and where the loop stands.

One step of training is three operations of the run: gradients, update, snapshot, and where it is kept under a name a checkpoint. The server keeps a
run's operations in order, whoever dies, so all that a loop has to remember is which groups it has had, and under which number its step began. That is
the cursor: a small file, replaced atomically before the first of them is submitted. A loop that is started again compares that number with the run's
and knows which of them are there: none, and it makes the same groups again, from the same weights with the same seeds; some, and it submits the rest.
It is written again when they are done, because the server drops results after some days, and weights without a name. A save that the server failed
at, its disk was full say, ends the loop (`NotKept`); one that is started again saves anew. What a round showed goes with the cursor, and what the
trainer measured is the server's to tell, so that no step goes untold either.

The gradients of a step tell whether trainer and sampler computed the same of the tokens that are of the weights that it begins with (`agreement`).
They are asked before the update is submitted, so that what is refused is not learnt, by a loop that is started again either.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar, get_args

import numpy as np

from bloomery.client import Client, Pending, Sampler, TrainingRun
from bloomery.client.training import OperationFailed
from bloomery.recipes.agreement import Held, Served, compare, of_metrics
from bloomery.recipes.cursors import NOTHING, Cursor, CursorStore, Shown, parsed, store_of, write_cursor
from bloomery.recipes.holding import Bar
from bloomery.recipes.replay import Saving
from bloomery.recipes.rl_metrics import HELD, update_metrics
from bloomery.recipes.sft import AdamConfig
from bloomery.recipes.steps import kept_name
from bloomery.recipes.stopping import Stopping
from bloomery.types.errors import Conflict, Corrupt, Gone, InvalidInput, NotFound
from bloomery.types.losses import TEMPERATURE
from bloomery.types.operations import CheckpointResult, Datum, ForwardBackwardResult, LoadResult, OptimStepResult, SnapshotResult
from bloomery.types.wire import Wire

Saved = TypeVar("Saved", CheckpointResult, SnapshotResult)
_UNTIL_SAVED: Final = 2
"""Operations of a step before its saves: gradients and update."""
_FIRST: Final = "start"


class Start(NamedTuple):
    """A named checkpoint of another run, of the same rank: of supervised fine-tuning, say. Its optimizer is taken over where that is asked."""

    run_id: str
    checkpoint: str
    optimizer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """An optimizer whose learning rate goes over so many rounds; behind them it stays what it was in the last."""

    adam: AdamConfig
    rounds: int

    def of(self, done: int) -> dict[str, float]:
        """The update of the round behind so many."""
        return {"learning_rate": self.adam.rate(min(done, self.rounds - 1), self.rounds), **self.adam.others}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """What is trained, and how."""

    base_model: str
    start: Start | None = None
    """Where to begin; None: at the base model."""
    rank: int = 16
    learning_rate: float = 1e-3
    grad_clip_norm: float = 1.0
    optimizer: Scheduled | None = None
    """Instead of these two: with a schedule, weight decay and all else."""
    loss: str = "importance_sampling"
    loss_config: tuple[tuple[str, float], ...] = ()
    """Options of the loss by name."""
    seed: int = 0
    run: tuple[tuple[str, Any], ...] = ()
    """Options of the run by name: the other fields of `CreateRun`, and its `idempotency_key`."""
    agreement: Held = "promised"
    """Whether rollouts and updates are refused, with Corrupt, where tokens have other log-probabilities than were served with them."""
    training_timeout_s: float = 3600.0
    """How long the result of an operation is waited for."""

    def update(self, done: int) -> dict[str, float]:
        """How the round behind so many is applied."""
        if self.optimizer is not None:
            return self.optimizer.of(done)
        return {"learning_rate": self.learning_rate, "grad_clip_norm": self.grad_clip_norm}


def at_temperature(config: PolicyConfig, temperature: float) -> PolicyConfig:
    """With a loss that computes the distribution from which rollouts are drawn at this temperature; InvalidInput where its options say another."""
    said = dict(config.loss_config).get(TEMPERATURE, temperature)
    if said != temperature:
        drawn = f"rollouts are drawn at `temperature` {temperature:g}, and the loss computes the distribution that they are drawn from"
        raise InvalidInput(f"`loss_config` has the temperature {said:g}: {drawn}; leave it out there", field="loss_config")
    others = tuple((name, value) for name, value in config.loss_config if name != TEMPERATURE)
    return replace(config, loss_config=others if temperature == 1 else (*others, (TEMPERATURE, temperature)))


class Policy:
    """Trains and publishes; `sampler` is that of the newest version."""

    def __init__(self, client: Client, run: TrainingRun, config: PolicyConfig, store: CursorStore, cursor: Cursor) -> None:
        self.run, self.cursor = run, cursor
        self._client, self._config, self._store = client, config, store
        self.bar = Bar(client, config.base_model, config.agreement)
        self._numbers: dict[str, int] = {}
        self._samplers: dict[str, Sampler] = {}
        self.sampler: Sampler
        self.newest: str
        """Set behind `sampler`: whoever reads this and samples then has no older weights."""
        try:
            self._finish_what_was_begun()
        except Gone as error:
            state = f"{error.message}. Without it the cursor {store} cannot go on"
            raise Gone(f"{state}: save a checkpoint of run `{run.id}`, and begin anew with it as `start` and with another file") from error

    @classmethod
    def open(cls, client: Client, config: PolicyConfig, place: Path | CursorStore, fingerprint: str) -> Self:
        """Begin, or go on where the cursor says that is kept at `place`, a file or another store.

        Conflict where the cursor is another loop's, or the run is not where it should be.
        """
        if config.agreement not in get_args(Held):
            known = ", ".join(f'"{value}"' for value in get_args(Held))
            raise InvalidInput(f"`agreement` is `{config.agreement}`: it must be one of {known}", field="agreement")
        store = store_of(place)
        if (text := store.read()) is None:
            store.check_writable()
            run = client.create_run(config.base_model, config.rank, seed=config.seed, **dict(config.run))
            cursor = Cursor(run_id=run.id, fingerprint=fingerprint, step=0, round=0, seq=run.next_seq, version="", first="", had_below=0)
            write_cursor(store, cursor)
            return cls(client, run, config, store, cursor)
        cursor = parsed(text, store)
        if cursor.fingerprint != fingerprint:
            raise Conflict(f"{store} is of a loop with other settings or problems: go on with those, or give another file to begin anew")
        return cls(client, client.run(cursor.run_id), config, store, cursor)

    @property
    def step(self) -> int:
        """Versions published since the first, and so the number of the newest."""
        return self.cursor.step

    @property
    def first(self) -> Sampler:
        """Of the weights that training began with: a reference to hold the policy to."""
        return self._client.sampler(self.cursor.first)

    @property
    def shown(self) -> Shown | None:
        """What the last round showed, unless it was `told`: of a loop that is started again, too."""
        return None if self.cursor.batch else self.cursor.shown

    def told(self) -> None:
        """Somebody was told what the last round showed: whoever goes on from here need not say it again."""
        if self.shown is not None:
            self.cursor = replace(self.cursor, shown=None)
            write_cursor(self._store, self.cursor)

    def count(self, stopping: Stopping, measured: Mapping[str, float]) -> None:
        """What was measured of the last round goes with the cursor, where it may end the loop."""
        cursor = stopping.counted(self.cursor, measured)
        if cursor != self.cursor:
            self.cursor = cursor
            write_cursor(self._store, cursor)

    def knows(self, version: str) -> bool:
        """Whether this loop published it since it was started."""
        return version in self._numbers

    def sampler_of(self, version: str) -> Sampler | None:
        """That of a version which this loop published since it was started; None of any other."""
        return self._samplers.get(version)

    def lag(self, version: str) -> int:
        """How many versions old the weights of a token are."""
        return self.step - self._numbers[version]

    def behind(self, version: str, newer: str) -> int:
        """How many versions one that this loop published is older than another."""
        return self._numbers[newer] - self._numbers[version]

    def train(
        self,
        data: Sequence[Datum],
        batch: Iterable[int],
        *,
        served: Sequence[Served] = (),
        shown: Shown = NOTHING,
        timed: Callable[[], dict[str, float]] = dict,
        keep_every: int = 0,
        begun: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One update from the data, which the groups of `batch` gave, and its version published; the metrics of the loss and of the update.

        `served` says of each datum what was sampled of it, as a `Segment` does: tokens of the newest version are held to `agreement`. Groups that
        gave no data are had all the same: nothing is trained then, and there is no new version. Corrupt where tokens are of versions that this loop
        did not publish, or were drawn at another temperature than the loss computes. What the round `shown` so far is kept with the cursor, and what
        `timed` measures when all is trained, which is lost with a loop that dies before. Of every `keep_every` rounds (0: of none) one is kept under
        a name, resumable and to be served: where nothing was trained, the next that trains. `begun` is called once no other data can be this round's.
        """
        versions = {version for sequence in served for version in sequence.versions}
        self._refuse_unknown(versions)
        self._refuse_other_temperatures({sequence.temperature for sequence in served})
        on_policy = versions == {self.cursor.version}
        told = not on_policy and self.cursor.version in versions and self._config.agreement != "off"
        cursor = replace(self.cursor, seq=self.run.next_seq, batch=tuple(sorted(batch)), on_policy=on_policy, keeps=False, shown=shown)
        if not data:
            self.cursor = replace(cursor.after(cursor.batch), shown=shown.more(timed()))
            write_cursor(self._store, self.cursor)
            begun()
            return {}
        cursor = replace(cursor, keeps=_is_kept(cursor, keep_every))
        known = {"learning_rate": self._config.update(cursor.round)["learning_rate"]}
        if told:
            # Whoever goes on after a death has not what was served.
            known |= update_metrics({HELD: float(sum(version == cursor.version for sequence in served for version in sequence.versions))})
        self.cursor = cursor = replace(cursor, shown=shown.more(known))
        write_cursor(self._store, cursor)
        gradients = self.run.forward_backward(data, self._config.loss, dict(self._config.loss_config), logprobs=told)
        begun()
        timeout_s = self._config.training_timeout_s
        held = self._hold_newest(cursor, served, gradients.result(timeout_s)) if told else self._hold_all(cursor, gradients)
        submitted = self._submit(1)
        metrics = gradients.result(timeout_s).metrics | submitted.update.result(timeout_s).metrics | {HELD: float(held)}
        published = submitted.published(timeout_s)
        self._publish(cursor, published.snapshot, metrics, lambda: {"seconds/publishing": published.waited_s, **timed()})
        return metrics

    def _refuse_unknown(self, versions: Iterable[str]) -> None:
        if unknown := sorted(version or "without a name" for version in versions if not self.knows(version)):
            known = "those that it published since it was started, and no older ones"
            raise Corrupt(
                f"nothing of step {self.cursor.step} is learnt, because it has tokens of weights that this loop does not know: {', '.join(unknown)}. "
                f"It knows {known}: leave such rollouts out (`rollouts.without_foreign`), and sample from `policy.sampler`"
            )

    def _refuse_other_temperatures(self, drawn: Iterable[float]) -> None:
        computed = dict(self._config.loss_config).get(TEMPERATURE, 1.0)
        if others := sorted(temperature for temperature in drawn if temperature != computed):
            told = ", ".join(f"{temperature:g}" for temperature in others)
            raise Corrupt(
                f"nothing of step {self.cursor.step} is learnt, because it has tokens that were drawn at temperature {told}, and the loss computes "
                f"the distribution at {computed:g}: draw at that, or give `temperature` in the `loss_config`"
            )

    def _finish_what_was_begun(self) -> None:
        cursor, there, timeout_s = self.cursor, self.run.next_seq - self.cursor.seq, self._config.training_timeout_s
        beginning = 1 + (self._config.start is not None and not cursor.first)
        left = _left_behind(cursor, beginning)
        if there < 0 or not self._only_saves(cursor.seq + left.until_saved, left.snapshots):
            state = f"the next operation of run `{cursor.run_id}` is {self.run.next_seq}, and the cursor {self._store} stands at {cursor.seq}"
            raise Conflict(f"{state}: one of them was restored from an earlier day, or another program uses the run; begin anew with another file")
        if not cursor.version:
            version = self._begin(cursor.seq, there, beginning)
            self.cursor = replace(cursor, version=version, first=cursor.first or version, seq=self.run.next_seq)
            write_cursor(self._store, self.cursor)
            self._serve()
        elif cursor.batch and there:
            gradients = self.run.submitted(cursor.seq, ForwardBackwardResult).result(timeout_s)
            if there == 1 and self._config.agreement != "off":
                self._hold_again(cursor, gradients)
            held = of_metrics(gradients.metrics).tokens if cursor.on_policy and self._config.agreement != "off" else None
            submitted = self._submit(there)
            metrics = gradients.metrics | submitted.update.result(timeout_s).metrics | ({} if held is None else {HELD: float(held)})
            # Nobody can tell how long it took.
            self._publish(cursor, submitted.published(timeout_s).snapshot, metrics)
        else:
            self._serve_what_was_published()

    def _serve_what_was_published(self) -> None:
        try:
            self._serve()
        except (Gone, NotFound):
            # Weights without a name go when nobody asked for them in days; the run has them.
            self.cursor = replace(self.cursor, version="", seq=self.run.next_seq, batch=(), shown=self.shown)
            write_cursor(self._store, self.cursor)
            self._finish_what_was_begun()

    def _begin(self, seq: int, there: int, beginning: int) -> str:
        """The first version, whose name keeps it, or the newest anew; `there` of the operations that it takes were submitted before."""
        timeout_s = self._config.training_timeout_s
        if self._config.start is not None and not self.cursor.first:
            run_id, checkpoint, optimizer = self._config.start
            load = self.run.load(run_id, checkpoint, optimizer=optimizer) if there == 0 else self.run.submitted(seq, LoadResult)
            load.result(timeout_s)
        name = None if self.cursor.first else _FIRST
        return self._saved(seq + beginning - 1, SnapshotResult, lambda: self.run.save_snapshot(name)).result(timeout_s).version

    def _only_saves(self, first: int, snapshots: int) -> bool:
        """Whether all operations from this one on only keep what was there, so many of them as a snapshot, or failed at it: somebody saved a
        checkpoint by the way, or this loop anew what the server could not keep."""
        found = [self._came_to(seq) for seq in range(first, self.run.next_seq)]
        saves = all(isinstance(each, CheckpointResult | SnapshotResult | None) for each in found)
        return saves and sum(isinstance(each, SnapshotResult) for each in found) <= snapshots

    def _came_to(self, seq: int) -> Wire | None:
        """What became of an operation, whatever its kind; None where the server failed at it."""
        try:
            return self.run.submitted(seq, Wire).result(self._config.training_timeout_s)
        except OperationFailed:
            return None

    def _saved(self, first: int, kind: type[Saved], save: Callable[[], Pending[Saved]]) -> Saving[Saved]:
        """The save of this kind that is there from this operation on; where none is, or the server failed at it, another."""
        there = (seq for seq in range(first, self.run.next_seq) if isinstance(self._came_to(seq), kind))
        return Saving(save() if (seq := next(there, None)) is None else self.run.submitted(seq, kind))

    def _submit(self, there: int) -> "_Submitted":
        """What follows the gradients of a step, of whose operations the first `there` were submitted before."""
        run, seq, name = self.run, self.cursor.seq, kept_name(self.cursor.round + 1) if self.cursor.keeps else None
        update = run.submitted(seq + 1, OptimStepResult) if there > 1 else run.optim_step(**self._config.update(self.cursor.round))
        snapshot = self._saved(seq + _UNTIL_SAVED, SnapshotResult, lambda: run.save_snapshot(name))
        if name is None:
            return _Submitted(update, snapshot, None)
        return _Submitted(update, snapshot, self._saved(seq + _UNTIL_SAVED + 1, CheckpointResult, lambda: run.save_checkpoint(name)))

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
            write_cursor(self._store, self.cursor)
            raise
        return agreement.tokens

    def _hold_again(self, cursor: Cursor, gradients: ForwardBackwardResult) -> None:
        """Of an update whose gradients a loop has left behind."""
        if cursor.refused:
            raise Corrupt(cursor.refused)
        if cursor.on_policy:
            self.bar.hold(of_metrics(gradients.metrics), cursor.version, f"the update of step {cursor.step} is")

    def _publish(self, cursor: Cursor, snapshot: SnapshotResult, metrics: Mapping[str, float], timed: Callable[[], dict[str, float]] = dict) -> None:
        shown = (cursor.shown or NOTHING).more(update_metrics(metrics) | snapshot.sync() | timed())
        self.cursor = replace(cursor.after(cursor.batch), step=cursor.step + 1, seq=self.run.next_seq, version=snapshot.version, shown=shown)
        write_cursor(self._store, self.cursor)
        self._serve()

    def _serve(self) -> None:
        self._numbers[self.cursor.version] = self.cursor.step
        self.sampler = self._samplers[self.cursor.version] = self._client.sampler(self.cursor.version)
        self.newest = self.cursor.version


class _Left(NamedTuple):
    """What a loop that died may have left in its run behind its cursor."""

    until_saved: int
    """So many operations, behind which all only save."""
    snapshots: int
    """So many of these publish, at most."""


def _left_behind(cursor: Cursor, beginning: int) -> _Left:
    """By what the loop was at: a step, nothing, or the `beginning`, which takes so many operations."""
    if cursor.batch:
        return _Left(_UNTIL_SAVED, 1)
    return _Left(0, 0) if cursor.version else _Left(beginning - 1, 1)


class _Submitted(NamedTuple):
    """What follows the gradients of a step; `checkpoint` where that is kept under a name."""

    update: Pending[OptimStepResult]
    snapshot: Saving[SnapshotResult]
    checkpoint: Saving[CheckpointResult] | None

    def published(self, timeout_s: float) -> "_Published":
        """Once everything is there; NotKept where the server could not keep it."""
        self.update.result(timeout_s)
        updated = time.monotonic()
        published = _Published(self.snapshot.result(timeout_s), time.monotonic() - updated)
        if self.checkpoint is not None:
            self.checkpoint.result(timeout_s)
        return published


class _Published(NamedTuple):
    """The version of a step, and how long it was waited for behind the update."""

    snapshot: SnapshotResult
    waited_s: float


def _is_kept(cursor: Cursor, every: int) -> bool:
    """Whether the next round is, where it trains."""
    return every > 0 and (cursor.round + 1) // every > cursor.kept // every

"""What jobs have in common whose recipe keeps a cursor: the server keeps it with the job, and a process that goes on is given it."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from bloomery.client import TrainingRun
from bloomery.jobs.served import Measure, Served
from bloomery.jobs.work import FINAL, Published, Work, adam_config
from bloomery.recipes.grpo import OnStep, StepReport
from bloomery.recipes.policy import Policy, PolicyConfig, Scheduled, Start
from bloomery.recipes.recording import Recorder
from bloomery.recipes.replay import FIRST_SEQ, Saving
from bloomery.recipes.rollouts import Problem
from bloomery.types.datasets import PromptRow
from bloomery.types.errors import Gone, InvalidInput, WorkerError
from bloomery.types.jobs import JobSpec
from bloomery.types.methods import EarlyStopping, Optimizer
from bloomery.types.resources import RunOptions
from bloomery.types.wire import Wire

_LOOKS: Final = "looked_at"
"""The version, in the data of an event that says so."""


class JobCursor:
    """Kept by the server, with the job."""

    def __init__(self, work: Work) -> None:
        self._work, self._text = work, work.cursor

    def __str__(self) -> str:
        return f"of job `{self._work.spec.name}`"

    def read(self) -> str | None:
        """What this process, or the one before it, wrote last."""
        return self._text

    def check_writable(self) -> None:
        """There is always room for one."""

    def write(self, text: str) -> None:
        """Told to the server, which has it on its disk when this returns."""
        self._work.reporter.keep_cursor(text, run=json.loads(text)["run_id"])
        self._text = text

    def write_again(self) -> None:
        """For what was said since: that is on the server's disk, too, when this returns."""
        assert self._text is not None
        self.write(self._text)


class Looped(NamedTuple):
    """What a loop came to, and the version that it began with."""

    published: Published
    first: str


Named = Callable[[Mapping[str, float]], dict[str, float]]
"""What a step measured, as the axis of training has it."""


def looped(work: Work, steps: int, train: Callable[[JobCursor, OnStep], Policy], measure: Measure, named: Named = dict, *, stopped: str) -> Looped:
    """Have the recipe's `train` go on to its end, and publish; a process that died behind that needs no loop any more. What is served of some steps
    is looked at by `measure` meanwhile. `stopped` says why it ended before its last step, where it did."""
    if work.cursor is not None:
        known = json.loads(work.cursor)
        run = work.client.run(known["run_id"])
        _settle(run)
        # Such a run has more than the cursor says.
        if FINAL in {kept.name for kept in run.checkpoints()}:
            return Looped(_publish(work, run, known["round"], steps, stopped), known["first"])
    cursor = JobCursor(work)
    with Served(work, measure) as served:
        for event in work.client.jobs.events(work.job.id) if work.spec.evaluation.served_every else ():
            if _LOOKS in event.data:
                # Of a process that died before it had looked.
                served.look(event.data["step"], event.data[_LOOKS])
        policy = train(cursor, _stepped(work, steps, named, served))
    # Of a loop that is over nobody looks again: what its last looks said is kept before there is anything by which that is known.
    cursor.write_again()
    return Looped(_publish(work, policy.run, policy.cursor.round, steps, stopped), policy.cursor.first)


def recorder_of(work: Work) -> Recorder:
    """What a job trains on is recorded, and what of it is lost is told among its events."""
    return Recorder(note=lambda lost: work.reporter.note(lost, level="warning", key=lost), messages=_conversation)


def _conversation(problem: Problem) -> list[dict[str, Any]]:
    """The prompt of a row, which an agent's server is told within more."""
    row: PromptRow = problem.data["ground_truth"] if isinstance(problem.data, Mapping) else problem.data
    return row.messages


def policy_config(spec: JobSpec, optimizer: Optimizer, steps: int, run_options: RunOptions, request: str) -> PolicyConfig:
    """The recipe's settings of what is trained, of a resolved spec."""
    start, begin = None, spec.begin
    assert spec.seed is not None
    if begin is not None:
        assert begin.run is not None
        assert begin.checkpoint is not None
        start = Start(begin.run, begin.checkpoint, begin.optimizer)
    return PolicyConfig(
        base_model=spec.base_model,
        start=start,
        rank=spec.rank,
        optimizer=Scheduled(adam=adam_config(optimizer), rounds=steps),
        seed=spec.seed,
        run=(*run_options.items(), ("idempotency_key", request)),
    )


def stopping_config(spec: JobSpec, stopping: EarlyStopping | None) -> dict[str, Any]:
    """The recipe's settings of what ends a loop early; otherwise what is measured changes no weights, and is for whoever looks."""
    if stopping is None:
        return {}
    return {"evaluate_every": spec.evaluation.every, "patience": stopping.patience, "min_delta": stopping.min_delta}


def _stepped(work: Work, steps: int, named: Named, served: Served) -> OnStep:
    earlier = work.client.jobs.points(work.job.id)
    work.guard.catch_up(earlier)
    sampled = {point.step: point.values.get("tokens/sampled") or 0.0 for point in earlier}
    every = work.spec.evaluation.served_every

    def stepped(report: StepReport) -> None:
        again = report.step in sampled
        sampled[report.step] = report.metrics.get("tokens/sampled", 0.0)
        for reason in report.failures:
            work.reporter.note(
                f"{reason.kind}: {reason.message} ({reason.attempts} attempts)", level="warning", key=f"{reason.kind} {reason.message}"
            )
        measured = named(report.metrics)
        if report.kept:
            work.note_kept(report.step, report.version)
        if every and report.step % every == 0 and report.step < steps:
            known = {"step": report.step, _LOOKS: report.version}
            work.reporter.note(f"looks at step {report.step} as it is served", key=f"looks at {report.step}", **known)
            served.look(report.step, report.version)
        work.reporter.point(report.step, steps, measured, tokens=round(sum(sampled.values())))
        if not again:
            work.guard.look(report.step, measured)

    return stepped


def _settle(run: TrainingRun) -> None:
    """What the process before this one had submitted is there, or has failed, before anybody looks at what there is."""
    if run.next_seq > FIRST_SEQ:
        with suppress(Gone, InvalidInput, WorkerError):
            run.submitted(run.next_seq - 1, Wire).result()


def _publish(work: Work, run: TrainingRun, done: int, steps: int, stopped: str) -> Published:
    """Keep what came of it; a process before this one may have."""
    if done < steps:
        work.note_early(done, stopped)
    names = {(kept.kind, kept.name) for kept in run.checkpoints()}
    if ("named", FINAL) not in names:
        Saving(run.save_checkpoint(FINAL)).result()
    if ("snapshot", FINAL) not in names:
        Saving(run.save_snapshot(FINAL)).result()
    kept = {(each.kind, each.name): each for each in run.checkpoints()}
    checkpoint, snapshot = kept["named", FINAL], kept["snapshot", FINAL]
    assert checkpoint.digest is not None
    assert snapshot.version is not None
    work.reporter.note(f"published as version {snapshot.version}", key="published", version=snapshot.version)
    return Published(run.id, snapshot.version, checkpoint.digest, checkpoint.step)

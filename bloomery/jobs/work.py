"""What every method's job has in hand: the job, a client with its lease, the tokenizer of its base model, and who reports."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from bloomery.client import Client
from bloomery.jobs.guard import Guard
from bloomery.jobs.reporting import Reporter
from bloomery.recipes.replay import Replayed, Trains
from bloomery.recipes.sft import AdamConfig
from bloomery.recipes.steps import Pace
from bloomery.render import ChatTokenizer
from bloomery.types.errors import BloomeryError, Gone
from bloomery.types.jobs import Compared, Job, JobResult, JobSample, JobSpec
from bloomery.types.leases import LentAgent
from bloomery.types.methods import EarlyStopping, Optimizer
from bloomery.types.resources import Fidelity, RunOptions

BEGIN: Final = "begin"
"""Names the snapshot of what a job began with."""
FINAL: Final = "final"
"""Names the checkpoint and the snapshot of what came of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One job, in one of its processes."""

    client: Client
    job: Job
    cursor: str | None
    """What the process before this one said last of where its loop stands."""
    tokenizer: ChatTokenizer
    reporter: Reporter
    guard: Guard
    agent: LentAgent | None = None
    """That of its method, where it has one and the server still has it."""

    @property
    def spec(self) -> JobSpec:
        """What was asked for, with nothing left open."""
        return self.job.spec

    @property
    def seed(self) -> int:
        """Of a job that was made."""
        assert self.spec.seed is not None
        return self.spec.seed

    def measured(self, step: int, steps: int, values: dict[str, float], *, tokens: int = 0) -> None:
        """Tell what was measured at a step, and look whether it goes wrong."""
        self.reporter.point(step, steps, values, tokens=tokens)
        self.guard.look(step, values)

    def told(self, name: str) -> dict[int, float]:
        """What processes before this one measured under a name, by step."""
        points = self.client.jobs.points(self.job.id)
        return {point.step: value for point in points if (value := point.values.get(name)) is not None}

    def note_kept(self, step: int, version: str) -> None:
        """A checkpoint was kept behind a step, and its weights published."""
        self.reporter.note(f"kept step {step} as version {version}", key=f"step {step}", step=step, version=version)

    def note_early(self, step: int, why: str) -> None:
        """It ended before its last step."""
        self.reporter.note(f"ended early at step {step}: {why}", key="early", step=step)

    @property
    def request(self) -> str:
        """The name of the request that makes the job's run: every process of the job finds the same one."""
        return f"job {self.job.id}"

    @property
    def run_options(self) -> RunOptions:
        """Of that run, beside its rank and seed."""
        return {"alpha": self.spec.alpha, "name": self.spec.name, "metadata": {"job": self.job.id}}

    def begin(self) -> "Begun":
        """The job's run, from its first operation on, at where the spec has it begin."""
        spec = self.spec
        made = self.client.create_run(spec.base_model, spec.rank, seed=self.seed, idempotency_key=self.request, **self.run_options)
        self.reporter.began(made.id)
        run = Replayed(made)
        if spec.begin is None:
            return Begun(run, spec.base_model)
        assert spec.begin.run is not None
        assert spec.begin.checkpoint is not None
        # One whose result is not there any more was loaded then.
        with suppress(Gone):
            run.load(spec.begin.run, spec.begin.checkpoint, optimizer=spec.begin.optimizer).result()
        return Begun(run, run.save_snapshot(BEGIN).result().version)

    def publish(self, run: Trains, *, done: int, planned: int) -> "Published":
        """Keep and publish what came of the job, after so many steps of those that were planned."""
        if done < planned:
            self.note_early(done, "the held-out loss fell no more")
        checkpoint, snapshot = run.save_checkpoint(FINAL), run.save_snapshot(FINAL)
        kept, published = checkpoint.result(), snapshot.result()
        self.reporter.note(f"published as version {published.version}", key="published", version=published.version)
        return Published(run.id, published.version, kept.digest, published.step)

    def fidelity(self, version: str) -> Fidelity | None:
        """The card of what came of the job. The job is done without one, and the server measures it once it has nothing else to do."""
        try:
            return self.client.versions.measure_fidelity(version)
        except BloomeryError as error:
            self.reporter.check()
            self.reporter.note(f"its fidelity was not measured: {error.message}", level="warning", key="fidelity")
            return None


class Begun(NamedTuple):
    """A run, and the version of the weights that it begins with."""

    run: Replayed
    before: str


class Published(NamedTuple):
    """What came of a job."""

    run: str
    version: str
    digest: str
    step: int

    def result(self, compared: list[Compared], samples: list[JobSample], before: str) -> JobResult:
        """With what it was compared by, and with what."""
        return JobResult(
            run=self.run,
            version=self.version,
            checkpoint=FINAL,
            step=self.step,
            digest=self.digest,
            compared=compared,
            base_version=before,
            samples=samples,
        )


def adam_config(optimizer: Optimizer) -> AdamConfig:
    """The recipes' settings of a spec's optimizer."""
    schedule = optimizer.schedule
    others = optimizer.model_dump(exclude={"schedule"})
    return AdamConfig(**others, decay=schedule.kind, warmup_share=schedule.warmup_share, floor=schedule.floor)


def pace_of(spec: JobSpec, stopping: EarlyStopping | None) -> Pace:
    """The same of what happens besides steps."""
    return Pace(
        evaluate_every=spec.evaluation.every,
        checkpoint_every=spec.checkpoint_every,
        publish_every=spec.evaluation.served_every,
        patience=stopping.patience if stopping else 0,
        min_delta=stopping.min_delta if stopping else 0.0,
    )

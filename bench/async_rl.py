"""Asynchronous against synchronous GRPO in wall time: `python -m bench.async_rl`; one JSON line.

Both learn to write pairs (`recipes/pairs`), from the same seeds, with the same learning rate, for the same number of seconds, one after the other and
each on a server of its own. The asynchronous loop samples in a replica while the engine trains, one thread each; the synchronous one has the server
of `--synchronous`: an engine of one thread, one of as many as there are processors, or an engine and a replica as the other has. How many groups a
step has is for each what was the fastest of 2, 3, 4, 6 and 8 that were tried. Nothing in either sleeps, and neither holds updates to `agreement`,
which would cost the synchronous loop a wait a step.

`seconds_to_target` is when the mean reward of the last rollouts, in the order in which they were graded, first was the target; None where it never
was. Neither loop sees the problems of `held_out`: there the versions are measured that were the newest after each quarter of the time, with the same
seeds, and 95 % intervals over problems.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.line import Line, parser_of
from bench.machine import processor_s
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.obs.machine import usable_cpus
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport, measure
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import Rollout, RolloutConfig

MODEL: Final = "bloomery-tiny"
REPLICA: Final = ("--threads", "1", "--replicas", "0", "--rollout-replicas", "1")
SERVERS: Final = {
    "engine": ("--threads", "1", "--replicas", "0"),
    "all-threads": ("--threads", str(usable_cpus()), "--replicas", "0"),
    "replica": REPLICA,
}
PROBLEMS, HELD_OUT, HELD_OUT_SEED = 512, 64, 1_000_000
EVALUATION: Final = RolloutConfig(group_size=8, max_tokens=32, seed=99)
WINDOW: Final = 256
"""Rollouts whose mean reward is compared with the target."""
QUARTERS: Final = 4
NEVER: Final = 1_000_000
"""Steps: time ends a loop."""


class Learnt(NamedTuple):
    """What one loop did in its time."""

    seconds_to_target: float | None
    held_out: list[dict[str, Any]]
    """After each quarter."""
    steps: int
    rollouts: int
    trainer_idle: float
    """Share of the time."""
    rollouts_idle: float
    server_processor_s: float
    client_processor_s: float


class _Over(Exception):
    """The time of a loop is."""


def main() -> None:
    """Both loops for every seed."""
    asked = _arguments()
    line = Line("async_rl")
    found: dict[str, list[Learnt]] = {"synchronous": [], "asynchronous": []}
    for seed in asked.seeds:
        for loop, options in (("synchronous", SERVERS[asked.synchronous]), ("asynchronous", REPLICA)):
            with serving(MODEL, keep=False, options=options) as server, Client(server.url, server.key) as client:
                found[loop].append(_learn(client, loop, seed, asked))
    setting = {name: getattr(asked, name) for name in ("synchronous", "seeds", "seconds", "target", "learning_rate")}
    setting |= {name: getattr(asked, name) for name in ("synchronous_groups", "asynchronous_groups", "head", "concurrency")}
    setting |= {"threads_each": 1, "window_rollouts": WINDOW, "group_size": RolloutConfig().group_size}
    line.tell({"setting": setting, **{loop: _shown(each) for loop, each in found.items()}, **_ratio(found)})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=50.0, help="that each loop has")
    parser.add_argument("--target", type=float, default=0.8, help="mean reward")
    parser.add_argument("--synchronous", choices=list(SERVERS), default="all-threads", help="the server of the synchronous loop")
    parser.add_argument("--synchronous-groups", type=int, default=4, help="a step")
    parser.add_argument("--asynchronous-groups", type=int, default=3, help="a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--head", type=int, default=2, help="max_head_offpolicy_versions of the asynchronous loop")
    parser.add_argument("--concurrency", type=int, default=9, help="groups that the asynchronous loop makes at a time")
    return parser.parse_args()


def _learn(client: Client, loop: str, seed: int, asked: argparse.Namespace) -> Learnt:
    task = PairsTask.of(client, MODEL)
    held_out, problems = task.problems(HELD_OUT, HELD_OUT_SEED), task.problems(PROBLEMS, seed)
    # Whatever is made once in the life of a server is made before the clock runs.
    measure(client.sampler(MODEL), held_out[:2], task.grade, EVALUATION)
    watch = _Watch(task, asked.seconds)
    config = _config(loop, seed, asked)
    with tempfile.TemporaryDirectory() as place, suppress(_Over):
        watch.begin()
        cursor = Path(place) / "cursor"
        if isinstance(config, AsyncGrpoConfig):
            async_grpo.train(client, problems, watch.grade, config, cursor, steps=NEVER, on_step=watch.note)
        else:
            grpo.train(client, problems, watch.grade, config, cursor, steps=NEVER, on_step=watch.note)
    if not watch.notes:
        raise SystemExit(f"the {loop} loop did no step in {asked.seconds:g} s: give it more --seconds")
    newest = newest_after_quarters(watch.notes, asked.seconds)
    measured = [measure(client.sampler(version), held_out, task.grade, EVALUATION) for version in newest]
    return Learnt(
        seconds_to_target=watch.seconds_to(asked.target),
        held_out=[{"reward": round(each.mean, 4), "interval": [round(end, 4) for end in each.interval]} for each in measured],
        steps=len(watch.notes),
        rollouts=watch.graded,
        trainer_idle=watch.share("idle/trainer_share"),
        rollouts_idle=watch.share("idle/rollouts_share"),
        server_processor_s=round(watch.server_s, 2),
        client_processor_s=round(watch.client_s, 2),
    )


def _config(loop: str, seed: int, asked: argparse.Namespace) -> GrpoConfig:
    policy = PolicyConfig(base_model=MODEL, learning_rate=asked.learning_rate, seed=seed, agreement="off")
    rollouts = RolloutConfig(max_tokens=32, seed=seed)
    if loop == "synchronous":
        groups = asked.synchronous_groups
        return GrpoConfig(policy=policy, rollouts=rollouts, groups_per_step=groups, concurrency=groups, kl_rollouts=0)
    return AsyncGrpoConfig(
        policy=policy,
        rollouts=rollouts,
        groups_per_step=asked.asynchronous_groups,
        concurrency=asked.concurrency,
        max_head_offpolicy_versions=asked.head,
        kl_rollouts=0,
    )


class Note(NamedTuple):
    """A step, and when it was done."""

    seconds: float
    report: StepReport


class _Watch:
    """Notes when what came, and ends the loop when its time is over. Threads that grade share it."""

    def __init__(self, task: PairsTask, seconds: float) -> None:
        self.notes: list[Note] = []
        self.graded = 0
        self.server_s = self.client_s = 0.0
        """Processor time."""
        self._task, self._seconds = task, seconds
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._means: list[tuple[float, float]] = []
        """When, and the mean reward of the rollouts before."""
        self._lock = threading.Lock()
        self._began_s = 0.0

    def begin(self) -> None:
        """The clock runs."""
        self._began_s, self.server_s, self.client_s = time.monotonic(), processor_s(os.getpid()), time.process_time()

    def grade(self, rollout: Rollout) -> float:
        """What the task says."""
        reward = self._task.grade(rollout)
        with self._lock:
            self._window.append(reward)
            if (now_s := time.monotonic() - self._began_s) <= self._seconds:
                self.graded += 1
                self._means.append((now_s, statistics.fmean(self._window) if len(self._window) == WINDOW else 0.0))
        return reward

    def note(self, report: StepReport) -> None:
        """A step that is done in time counts; the first that is not ends the loop."""
        now_s = time.monotonic() - self._began_s
        if now_s > self._seconds:
            self.server_s, self.client_s = processor_s(os.getpid()) - self.server_s, time.process_time() - self.client_s
            raise _Over
        self.notes.append(Note(now_s, report))

    def seconds_to(self, target: float) -> float | None:
        """When the mean first was the target."""
        return next((round(seconds, 2) for seconds, mean in self._means if mean >= target), None)

    def share(self, name: str) -> float:
        """Of the time of all steps."""
        idle_s = sum(note.report.metrics[name] * note.report.metrics["seconds/step"] for note in self.notes)
        return round(idle_s / sum(note.report.metrics["seconds/step"] for note in self.notes), 3)


def newest_after_quarters(notes: Sequence[Note], seconds: float) -> list[str]:
    """Versions; until the first step is done that is the model that both loops begin with."""
    ends = [seconds * quarter / QUARTERS for quarter in range(1, QUARTERS + 1)]
    return [[MODEL, *(note.report.version for note in notes if note.seconds <= end)][-1] for end in ends]


def _shown(learnt: Sequence[Learnt]) -> dict[str, Any]:
    """By seed, and in the mean."""
    rewards = [each.held_out[-1]["reward"] for each in learnt]
    means = {"held_out_mean": round(statistics.fmean(rewards), 4), "trainer_idle_mean": round(statistics.fmean(e.trainer_idle for e in learnt), 3)}
    means |= {"rollouts_idle_mean": round(statistics.fmean(each.rollouts_idle for each in learnt), 3)}
    return means | {name: [getattr(each, name) for each in learnt] for name in Learnt._fields}


def _ratio(found: dict[str, list[Learnt]]) -> dict[str, float | None]:
    """How many times as long the synchronous loop took; None where one of them was not there in time."""
    seconds = {loop: [each.seconds_to_target for each in learnt] for loop, learnt in found.items()}
    if any(each is None for times in seconds.values() for each in times):
        return {"ratio": None}
    sums = {loop: sum(each for each in times if each is not None) for loop, times in seconds.items()}
    return {"ratio": round(sums["synchronous"] / sums["asynchronous"], 2)}


if __name__ == "__main__":
    main()

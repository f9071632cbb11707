"""GRPO whose rollouts do not wait for the trainer: groups are made all the time by threads of their own, trained in the order in which they are done.

How stale they may be is bounded where they begin: a group is admitted while those that run, wait or are trained are fewer than
`(max_head_offpolicy_versions + 1) * groups_per_step`. That is AReaL's capacity (arXiv 2505.24298), counted by what is outstanding, so that neither a
restart nor a batch that came out short inflates it. Staleness is measured again, token by token, where groups are trained: what is older has no loss,
and importance weights are truncated. With `piece_tokens` a rollout goes on with the newest weights at every piece, and each token keeps its version.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Literal, Self, get_args

from bloomery.client import Client, Sampler
from bloomery.recipes.admission import Admission
from bloomery.recipes.advantages import Weighed, anchor_at, mask_stale, mean_over_tokens, sort_groups
from bloomery.recipes.attempts import patiently
from bloomery.recipes.checks import check_least
from bloomery.recipes.cursors import Cursor, CursorStore, alone, fingerprint
from bloomery.recipes.failures import Losses
from bloomery.recipes.grpo import GrpoConfig, OnStep, Parts, check
from bloomery.recipes.policy import Policy, PolicyConfig, at_temperature
from bloomery.recipes.recording import Recorder, Recording, Taught
from bloomery.recipes.rl_metrics import Seconds, anchor_metrics, stale_share, times
from bloomery.recipes.rollouts import Environment, Grade, Group, Problem
from bloomery.recipes.segments import Segment
from bloomery.types.errors import InvalidInput, Unavailable
from bloomery.types.losses import TEMPERATURE

_STOP_S: Final = 2.0
"""How long those in the making are waited for at the end: nobody needs them."""

Anchor = Literal["rollout", "snapshot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncGrpoConfig(GrpoConfig):
    """`concurrency` groups are made at a time, as far as they are admitted."""

    max_head_offpolicy_versions: int = 1
    """How many versions may be published between a token and its training; 0 is on policy, and nothing overlaps."""
    importance_cap: float = 2.0
    """Importance weights of the loss `importance_sampling` are truncated here, and those of a snapshot's anchor; other losses have thresholds."""
    anchor: Anchor = "rollout"
    """What ratios and thresholds are around: the log-probabilities that were served, or those of the weights that an update begins with."""
    max_idle_groups: int = 64
    """So many groups that count in no batch end the wait for a step: it is trained on those that do."""
    group_timeout_s: float = 600.0
    """How long the trainer waits for a group."""


def train(
    client: Client,
    problems: Sequence[Problem],
    grade: Grade | Environment,
    config: AsyncGrpoConfig,
    path: Path | CursorStore,
    *,
    steps: int,
    held_out: Sequence[Problem] = (),
    on_step: OnStep = lambda _: None,
    recorder: Recorder | None = None,
) -> Policy:
    """Go on until `steps` steps are done, or `patience` is over, also where a loop was killed that had the same cursor at `path`: it tells its last
    step once more. With a `recorder` the server keeps what each step is trained on."""
    check(problems, grade, config, held_out)
    check_staleness(config)
    with alone(path):
        losing = at_temperature(truncated(config), config.rollouts.temperature)
        policy = Policy.open(client, losing, path, fingerprint(problems, config))
        # What the trainer is ahead of it cannot hold itself.
        parts = Parts(policy, problems, grade, config, held_out, max_behind=config.max_head_offpolicy_versions)
        losses = Losses(config.max_lost_rounds)
        parts.reports.tell(on_step)
        recording = Recording(recorder, policy.run, policy.cursor.round)
        with recording, Makers(parts.make, config, policy.cursor) as makers:
            while policy.cursor.round < steps and not parts.reports.ended:
                # Makers also waited while the last step was measured and told, which is no part of this one.
                started, _ = time.monotonic(), makers.admission.take_idle_s()
                groups = makers.take()
                taken, _ = time.monotonic(), makers.admission.take_busy_s()
                kept = sort_groups(groups, config.min_group_size, config.zero_variance)
                data = mask_stale(parts.teach(kept.trained), policy.lag, config.max_head_offpolicy_versions)
                taught = mean_over_tokens(data)
                if config.anchor == "snapshot":
                    taught = anchored(taught, policy.sampler, config)
                numbers, served = [group.number for group in groups], [compared_with(row, policy.cursor.version) for row in taught]
                stale = stale_share(data, policy.lag, config.max_head_offpolicy_versions)
                shown = parts.shown(groups, kept, data, stale | anchor_metrics(taught, config.importance_cap))
                if policy.cursor.round + 1 == steps and not policy.step:
                    losses.end(kept.compared, shown.failures)
                timed = partial(_timed, makers, config.concurrency, shown.metrics, started, taken)
                keep_every = config.checkpoint_every if policy.cursor.round + 1 < steps else 0
                old = frozenset(
                    version for row in data for version in row.segment.versions if policy.lag(version) > config.max_head_offpolicy_versions
                )
                begun = recording.of(Taught(policy.cursor.round + 1, groups, kept, data, old))
                policy.train([row.datum for row in taught], numbers, served=served, shown=shown, timed=timed, keep_every=keep_every, begun=begun)
                if policy.cursor.round < steps:
                    # Behind the last step nobody would train on what were made.
                    makers.admission.leave(len(kept.trained))
                parts.reports.tell(on_step)
                losses.note(kept.compared, shown.failures)
        policy.told()
    return policy


def _timed(makers: "Makers", concurrency: int, shown: Mapping[str, float], started: float, taken: float) -> dict[str, float]:
    # Within the step, so that nobody's share is more than all of it, and before others are let in, whose work is none of it.
    overlap, idle = makers.admission.take_busy_s(), makers.admission.take_idle_s() / concurrency
    ended = time.monotonic()
    return times(shown, Seconds(ended - started, ended - started, ended - taken, taken - started, idle, overlap))


def truncated(config: AsyncGrpoConfig) -> PolicyConfig:
    """With importance weights that end at the cap: `cispo` without a lower threshold has the gradient of `importance_sampling` up to there."""
    if config.policy.loss != "importance_sampling" or config.anchor == "snapshot":
        return config.policy
    thresholds = (("clip_low_threshold", 0.0), ("clip_high_threshold", config.importance_cap))
    return replace(config.policy, loss="cispo", loss_config=thresholds)


def anchored(rows: Sequence[Weighed], snapshot: Sampler, config: AsyncGrpoConfig) -> list[Weighed]:
    """The rows with their ratios to the snapshot; those that are wholly of it have them already."""
    stale = [place for place, row in enumerate(rows) if set(row.segment.versions) != {snapshot.model}]

    def score() -> dict[int, tuple[float, ...]]:
        segments = {place: rows[place].segment for place in stale}
        asked = {place: snapshot.score(segment.tokens, temperature=segment.temperature) for place, segment in segments.items()}
        return {place: pending.prompt_logprobs(config.rollouts.sample_timeout_s) for place, pending in asked.items()}

    scored = patiently(config.rollouts.attempts, score)
    old = [[scored[n][place] for place in row.segment.places] if n in scored else row.segment.logprobs for n, row in enumerate(rows)]
    return [anchor_at(row, given, config.importance_cap) for row, given in zip(rows, old, strict=True)]


def compared_with(row: Weighed, newest: str) -> Segment:
    """What was told of the tokens that are trained, and of which version: with a snapshot as the anchor all of it is of the newest."""
    if row.anchor is None:
        return row.segment
    return row.segment._replace(logprobs=row.anchor, versions=(newest,) * len(row.anchor))


def check_staleness(config: AsyncGrpoConfig) -> None:
    """The same for what only this loop has."""
    check_least(0, max_head_offpolicy_versions=config.max_head_offpolicy_versions)
    check_least(1, max_idle_groups=config.max_idle_groups)
    if config.anchor not in get_args(Anchor):
        raise InvalidInput(f'`anchor` is `{config.anchor}`: it must be "rollout" or "snapshot"', field="anchor")
    if not config.importance_cap >= 1:
        problem = f"`importance_cap` is {config.importance_cap}: below 1 it would cut off what is on policy"
        raise InvalidInput(problem, field="importance_cap")
    others = [name for name, _ in config.policy.loss_config if name != TEMPERATURE]
    if others and truncated(config) is not config.policy:
        given = ", ".join(f"`{name}`" for name in others)
        problem = f"`loss_config` has {given}: `importance_sampling` has no such options; leave them out, its weights end at `importance_cap`"
        raise InvalidInput(problem, field="loss_config")


class Makers:
    """Threads that make groups in the order of their numbers, without those that the loop has had; `take` gives what is done."""

    def __init__(self, make: Callable[[int], Group], config: AsyncGrpoConfig, cursor: Cursor) -> None:
        self.admission = Admission(config.groups_per_step * (config.max_head_offpolicy_versions + 1))
        self._make, self._config = make, config
        self._numbers = (number for number in count(cursor.had_below) if not cursor.has(number))
        self._next = threading.Lock()
        self._done: queue.SimpleQueue[Group | BaseException] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, daemon=True, name="rollouts") for _ in range(config.concurrency)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.admission.close()
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def take(self) -> list[Group]:
        """As many groups that count in the batch as a step has, and those that do not which were done meanwhile."""
        taken: list[Group] = []
        idle = 0
        while len(taken) - idle < self._config.groups_per_step and idle < self._config.max_idle_groups:
            taken.append(self._wait())
            idle += not self._counts(taken[-1])
        # The order in which they were done is chance, and the bits of a sum of gradients depend on it.
        return sorted(taken, key=lambda group: group.number)

    def _counts(self, group: Group) -> bool:
        return bool(sort_groups([group], self._config.min_group_size, self._config.zero_variance).trained)

    def _wait(self) -> Group:
        try:
            done = self._done.get(timeout=self._config.group_timeout_s)
        except queue.Empty:
            within = f"no group was done within {self._config.group_timeout_s:g} s, {self.admission.outstanding} are outstanding"
            raise Unavailable(f"{within}: look at the server's status and at the grader, or raise `group_timeout_s`") from None
        if isinstance(done, BaseException):
            raise done
        return done

    def _run(self) -> None:
        try:
            while self.admission.enter():
                with self._next:
                    number = next(self._numbers)
                with self.admission.making():
                    group = self._make(number)
                self._done.put(group)
                # Nobody will train on it: the next may begin before the trainer has seen it.
                self.admission.leave(int(not self._counts(group)))
        except BaseException as error:
            # The trainer raises it: a thread has nobody to tell.
            self._done.put(error)

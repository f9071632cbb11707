"""The convergence watch on real trainings of the shipped model: healthy ones raise no alarm, and what is planted is named within 50 steps.

`pytest -s` prints at which step; `docs/jobs.md` has the figures of a whole run.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client, Sampler
from bloomery.jobs.reinforced import named
from bloomery.jobs.rewarding import HELD_OUT
from bloomery.recipes import distill, grpo
from bloomery.recipes.distill import DistillConfig
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig, Start
from bloomery.recipes.preference import Dpo, Orpo, Pair, PairLoss, PreferenceConfig, optimise
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Environment, Group, MakesGroups, Problem, Rollout, RolloutConfig, Rollouts
from bloomery.recipes.sft import AdamConfig, SftConfig, datum, fine_tune
from bloomery.recipes.watch import Alarm, ConvergenceWatch
from bloomery.render import ChatTokenizer
from tests.jobs.test_methods_live import answer, asked, pairs
from tests.live import LiveServer
from tests.recipes.loops import BASE

pytestmark = pytest.mark.slow

WITHIN = 50
"""Steps from where it goes wrong."""
HEALTHY_STEPS = 60
"""More than any trouble may take to be named."""


class Stopped(Exception):
    """By its watch."""


class Watched:
    """Looks at every step of a training, and ends it at the first alarm."""

    def __init__(self) -> None:
        self.alarm: Alarm | None = None
        self.steps = 0
        self._watch = ConvergenceWatch()

    def look(self, step: int, values: dict[str, float]) -> None:
        self.steps = max(self.steps, step)
        if alarms := self._watch.look(step, values):
            self.alarm = alarms[0]
            raise Stopped

    def of(self, train: Callable[["Watched"], Any]) -> "Watched":
        """Of this training."""
        with suppress(Stopped):
            train(self)
        return self


class Work:
    """The task of every training: pairs of words, written as JSON."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.task = PairsTask.of(client, BASE)
        self.tokenizer = ChatTokenizer.load(Path(next(model.path for model in client.models() if model.alias == BASE)))
        self._cursors = count()
        run = client.create_run(BASE, 16, seed=99)
        rows = pairs(64, 99)
        data = [self.rendered(row, row) for row in rows]
        fine_tune(run, data, SftConfig(epochs=1, adam=adam(4e-3), batch_size=4, seed=99), lambda *_: None)
        run.save_checkpoint("warm").result()
        self.warm = Start(run.id, "warm")
        self.teacher = run.save_snapshot("warm").result().version

    def rendered(self, given: dict[str, str], said: dict[str, str]) -> Any:
        shown = self.tokenizer.render_training([*asked(given), {"role": "assistant", "content": json.dumps(said)}])
        return datum(shown.tokens, shown.weights)

    def supervised(self, watched: Watched, seed: int, adam: AdamConfig, *, steps: int) -> None:
        rows = pairs(4 * steps, seed)
        data = [self.rendered(row, json.loads(answer(row)["content"])) for row in rows]
        config = SftConfig(epochs=1, adam=adam, batch_size=4, seed=seed)
        fine_tune(self.client.create_run(BASE, 16, seed=seed), data, config, lambda done, _, values: watched.look(done, values))

    def preferring(self, watched: Watched, seed: int, loss: PairLoss, adam: AdamConfig, *, steps: int) -> None:
        rows = [(row, {value: key for key, value in row.items()}) for row in pairs(2 * steps, seed)]
        data = [Pair(self.rendered(row, row), self.rendered(row, other)) for row, other in rows]
        first = self.client.sampler(BASE)
        if isinstance(loss, Dpo):
            data = [pair._replace(reference=(self.total(first, pair.chosen), self.total(first, pair.rejected))) for pair in data]
        config = PreferenceConfig(epochs=1, loss=loss, adam=adam, batch_pairs=2, seed=seed)
        optimise(self.client.create_run(BASE, 16, seed=seed), data, config, lambda done, _, values: watched.look(done, values))

    @staticmethod
    def total(sampler: Sampler, row: Any) -> float:
        tokens, targets, weights = (array.numpy().tolist() for array in (row.tokens, row.inputs["target_tokens"], row.inputs["weights"]))
        logprobs = sampler.score([*tokens, targets[-1]]).prompt_logprobs()[1:]
        return sum(weight * logprob for weight, logprob in zip(weights, logprobs, strict=True))

    def reinforced(self, watched: Watched, folder: Path, seed: int, grade: Any, *, steps: int, **policy: Any) -> None:
        config = GrpoConfig(
            policy=PolicyConfig(base_model=BASE, seed=seed, agreement="off", **policy),
            rollouts=RolloutConfig(max_tokens=32, seed=seed),
            groups_per_step=4,
        )
        problems = self.task.problems(64, seed)
        cursor = folder / f"cursor-{next(self._cursors)}"
        grpo.train(self.client, problems, grade, config, cursor, steps=steps, on_step=lambda report: watched.look(report.step, named(report.metrics)))

    def distilled(self, watched: Watched, folder: Path, seed: int, *, steps: int) -> None:
        config = DistillConfig(
            policy=PolicyConfig(base_model=BASE, seed=seed, agreement="off"),
            teacher=self.teacher,
            rollouts=RolloutConfig(group_size=4, max_tokens=32, seed=seed),
            prompts_per_step=4,
        )
        cursor = folder / f"cursor-{next(self._cursors)}"
        problems = self.task.problems(64, seed)
        distill.train(self.client, problems, config, cursor, steps=steps, on_step=lambda report: watched.look(report.step, report.metrics))

    def right(self, rollout: Rollout) -> float:
        """The share of the pairs that an answer has."""
        try:
            said = json.loads(self.tokenizer.decode(rollout.tokens[:-1]))
        except ValueError:
            return 0.0
        if not isinstance(said, dict):
            return 0.0
        wanted = rollout.problem.data
        return sum(said.get(key) == value for key, value in wanted.items()) / len(wanted)

    def both(self, pays: Callable[[Rollout], float], held_out: Callable[[Rollout], float]) -> Callable[[Rollout], Reward]:
        """The first is trained on, the second beside it."""
        return lambda rollout: Reward(rollout.id, pays(rollout), {HELD_OUT: held_out(rollout)})


@pytest.fixture(scope="module")
def work(live_server: LiveServer) -> Iterator[Work]:
    with Client(live_server.url, live_server.key) as client:
        yield Work(client)


def adam(learning_rate: float, **others: Any) -> AdamConfig:
    return AdamConfig(learning_rate=learning_rate, **others)


HEALTHY: dict[str, Callable[[Work, Watched, int, Path], None]] = {
    "sft": lambda work, watched, seed, _: work.supervised(watched, seed, adam(4e-3), steps=HEALTHY_STEPS),
    "dpo": lambda work, watched, seed, _: work.preferring(watched, seed, Dpo(), adam(5e-4), steps=HEALTHY_STEPS),
    "orpo": lambda work, watched, seed, _: work.preferring(watched, seed, Orpo(), adam(1e-3), steps=HEALTHY_STEPS),
    "rft": lambda work, watched, seed, folder: work.reinforced(watched, folder, seed, work.both(work.task.grade, work.right), steps=HEALTHY_STEPS),
    "distill": lambda work, watched, seed, folder: work.distilled(watched, folder, seed, steps=HEALTHY_STEPS),
}


@pytest.mark.parametrize(("seed", "method"), list(enumerate(HEALTHY)))
def test_a_healthy_training_raises_no_alarm(work: Work, tmp_path: Path, method: str, seed: int) -> None:
    watched = Watched().of(lambda watched: HEALTHY[method](work, watched, seed, tmp_path))
    print(f"healthy {method} {seed}: {watched.steps} steps, {watched.alarm or 'no alarm'}", flush=True)
    assert watched.alarm is None
    assert watched.steps == HEALTHY_STEPS


def grade_until(step: int, task: PairsTask) -> Callable[[Rollout], float]:
    """A grader that is another one from some step of four groups on, under which all that was learnt counts for nothing."""

    def grade(rollout: Rollout) -> float:
        number = int(rollout.id.partition(".")[0])
        length = len(rollout.tokens) / 32
        return 10 - length if number < 4 * step else 0.1 * length

    return grade


class Otherwise(Environment):
    """Served by one temperature and told as of another: every log-probability is off by a fifth of a nat."""

    def __init__(self, grade: Callable[[Rollout], float]) -> None:
        self._grade = grade

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> MakesGroups:
        return _Otherwise(Rollouts(newest, self._grade, config))


class _Otherwise(MakesGroups):
    bounds_itself = True

    def __init__(self, made: MakesGroups) -> None:
        self._made = made

    def group(self, number: int, problem: Problem) -> Group:
        group = self._made.group(number, problem)
        members = [
            member._replace(rollout=member.rollout._replace(logprobs=tuple(logprob - 0.2 for logprob in member.rollout.logprobs)))
            for member in group.members
        ]
        return group._replace(members=tuple(members))


Planted = Callable[[Work, Watched, Path], None]
COLLAPSE_AT = 15
PLANTED: dict[str, tuple[set[str], int, Planted]] = {
    "a learning rate of 100": (
        {"not_finite", "divergence"},
        1,
        lambda work, watched, _: work.supervised(watched, 1, adam(100.0, decay="constant", warmup_share=0.0), steps=60),
    ),
    "a learning rate of 1": (
        {"divergence"},
        1,
        lambda work, watched, _: work.supervised(watched, 1, adam(1.0, decay="constant", warmup_share=0.0), steps=60),
    ),
    "a learning rate of 0.3 that comes in a line": (
        {"divergence"},
        1,
        lambda work, watched, _: work.supervised(watched, 1, adam(0.3, decay="constant", warmup_share=0.5), steps=60),
    ),
    "a beta so small that no gradient is left": (
        {"dead_gradients"},
        1,
        lambda work, watched, _: work.preferring(watched, 1, Dpo(beta=1e-9), adam(5e-4), steps=60),
    ),
    "rewards that are all zero": ({"zero_variance"}, 1, lambda work, watched, path: work.reinforced(watched, path, 1, lambda _: 0.0, steps=60)),
    "rewards that are all the same": ({"zero_variance"}, 1, lambda work, watched, path: work.reinforced(watched, path, 1, lambda _: 0.7, steps=60)),
    "reinforcement at a learning rate of 0.1": (
        {"kl_blow_up", "zero_variance", "reward_collapse", "not_finite"},
        1,
        lambda work, watched, path: work.reinforced(watched, path, 1, lambda rollout: float(sum(rollout.tokens) % 7), steps=60, learning_rate=0.1),
    ),
    "a grader that turns round": (
        {"reward_collapse"},
        COLLAPSE_AT,
        lambda work, watched, path: work.reinforced(watched, path, 1, grade_until(COLLAPSE_AT, work.task), steps=COLLAPSE_AT + 60),
    ),
    "a reward for length alone beside a grader of what is meant": (
        {"over_optimisation"},
        1,
        lambda work, watched, path: work.reinforced(
            watched, path, 1, work.both(lambda rollout: len(rollout.tokens) / 32, work.right), steps=60, start=work.warm, learning_rate=5e-4
        ),
    ),
    "log-probabilities of another temperature": (
        {"mismatch"},
        1,
        lambda work, watched, path: work.reinforced(watched, path, 1, Otherwise(lambda rollout: float(len(rollout.tokens))), steps=60),
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_goes_wrong_in_a_real_training_is_named_within_50_steps(work: Work, tmp_path: Path, planted: str) -> None:
    troubles, begins, train = PLANTED[planted]
    watched = Watched().of(lambda watched: train(work, watched, tmp_path))
    print(f"planted {planted}: {watched.alarm}", flush=True)
    assert watched.alarm is not None, f"no alarm in {watched.steps} steps"
    assert watched.alarm.trouble in troubles
    assert watched.alarm.step - begins < WITHIN


def test_a_number_that_is_none_is_named_at_once(work: Work) -> None:
    """Nothing that the server takes gives one here, so it is put into what a real training told."""

    def train(watched: Watched) -> None:
        class Broken(Watched):
            def look(self, step: int, values: dict[str, float]) -> None:
                watched.look(step, values | ({"loss": math.nan} if step >= 5 else {}))

        work.supervised(Broken(), 1, adam(4e-3), steps=20)

    watched = Watched().of(train)
    assert watched.alarm is not None
    assert (watched.alarm.trouble, watched.alarm.step) == ("not_finite", 5)

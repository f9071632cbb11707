"""Evaluation of consecutive versions, with and without reuse: `python -m bench.reuse` prints one JSON line.

A run of the model that ships learns pairs by policy gradients on a live server; after some steps at `--warm-up` every version is evaluated twice on
problems that nobody trained on (`recipes/evaluation`): by plain sampling, and with the answers of the version before as drafts. Both take turns in
going first. Answers have `--tokens` tokens, whatever the model says, one to a problem. A load is so many problems, so many of them at a time: the
more there are, the more decode in one batch, and the less a token costs that is sampled plainly. `ratio` is the wall time of the one by that of the
other, over all versions of a learning rate; `kept_whole` is the share of answers that are those of the version before, and `kept_prefix` how many
leading tokens are, on average. The digests of both, of all tokens and the bits of all log-probabilities, must be equal, or there is no line.

No check of a draft can be faster than the model reads it. So the same prompts and answers are also given as prompts, behind a token that keeps them
from being found in the cache, with one token to sample: `prefill_median_s`, in the same way and as many at a time. `limit` is the wall time of plain
sampling by that of this reading: what reuse would come to if every answer were kept whole and nothing were drawn.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, NamedTuple

from bench.line import Line, parser_of
from bench.machine import device_name
from bloomery.cli.demo_server import serving
from bloomery.client import Client, Sampler
from bloomery.client.training import TrainingRun
from bloomery.recipes.advantages import sort_groups, weigh
from bloomery.recipes.evaluation import Evaluated, EvaluationConfig, evaluate
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.rollouts import Problem, RolloutConfig, Rollouts

MODEL: Final = "bloomery-tiny"
HELD_OUT_SEED: Final = 1_000_000
_SETTING: Final = ("tokens", "rank", "warm_up", "warm_up_steps", "versions")
_STRANGER: Final = 0
"""A token that no prompt begins with."""
GROUPS: Final = 16
"""Problems of a training step."""


class Round(NamedTuple):
    """One version, evaluated both ways."""

    plain_s: float
    reused_s: float
    prefill_s: float
    """To read all prompts and answers."""
    kept: list[int]
    """Leading tokens of each answer that the version before gave too."""
    digest: str
    """Of both."""


def main() -> None:
    """Measure every learning rate on a run of its own."""
    asked = _arguments()
    line = Line("reuse")
    setting = {name: getattr(asked, name) for name in _SETTING}
    options = ("--device", asked.device, *(("--threads", str(asked.threads)) if asked.threads else ()))
    with serving(MODEL, keep=False, dtype=asked.dtype, options=options) as server, Client(server.url, server.key) as client:
        found = {f"{rate:g}": _measure(client, rate, asked) for rate in asked.learning_rates}
    line.tell(
        {
            "model": MODEL,
            "device": device_name(asked.device),
            "dtype": asked.dtype,
            "threads": asked.threads,
            "setting": setting,
            "learning_rate": found,
        }
    )


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for name, value in (("tokens", 256), ("rank", 16), ("warm-up-steps", 4), ("versions", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--loads", nargs="+", default=["4:1", "16:8", "64:32"], help="PROBLEMS:AT_A_TIME")
    parser.add_argument("--threads", type=int, default=None, help="of the server's engine; as it chooses where none are named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--warm-up", type=float, default=1e-3, help="learning rate of the steps before the first version")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    return parser.parse_args()


def _measure(client: Client, rate: float, asked: argparse.Namespace) -> dict[str, Any]:
    task = PairsTask.of(client, MODEL)
    run = client.create_run(MODEL, rank=asked.rank, seed=1)
    sampler = client.sampler(run.save_snapshot().result().version)
    for number in range(asked.warm_up_steps):
        sampler = _step(client, run, sampler, task, number, asked.warm_up)
    loads = {name: _Load(task, *map(int, name.split(":")), tokens=asked.tokens) for name in asked.loads}
    for load in loads.values():
        load.begin(sampler)
    for number in range(asked.versions):
        sampler = _step(client, run, sampler, task, asked.warm_up_steps + number, rate)
        # The first request of a version waits for its weights, and nobody is to pay for others.
        sampler.sample(task.problems(1, HELD_OUT_SEED)[0].prompt, max_tokens=1, seed=0).result()
        for load in loads.values():
            load.measure(sampler, plain_first=number % 2 == 0)
    return {name: _shown(load.rounds, asked.tokens) for name, load in loads.items()}


class _Load:
    """Evaluations of one size, version after version."""

    def __init__(self, task: PairsTask, problems: int, concurrency: int, *, tokens: int) -> None:
        self._task, self._problems = task, task.problems(problems, HELD_OUT_SEED)
        self._config = EvaluationConfig(samples=1, max_tokens=tokens, concurrency=concurrency, stop=(), seed=1)
        self._before = Evaluated(())
        self.rounds: list[Round] = []

    def begin(self, sampler: Sampler) -> None:
        """With what the first version is compared with."""
        self._before = evaluate(sampler, self._problems, self._task.grade, self._config)

    def measure(self, sampler: Sampler, *, plain_first: bool) -> None:
        """The next version, both ways."""
        timed = {}
        for plainly in (plain_first, not plain_first):
            began = time.perf_counter()
            answered = evaluate(sampler, self._problems, self._task.grade, self._config, earlier=None if plainly else self._before)
            timed[plainly] = (answered, time.perf_counter() - began)
        (plain, plain_s), (reused, reused_s) = timed[True], timed[False]
        if plain.digest != reused.digest:
            raise SystemExit(f"with drafts other answers came to {reused.moved(plain)}")
        prefill_s = self._prefill(sampler, plain)
        self.rounds.append(Round(plain_s, reused_s, prefill_s, _kept(self._before, reused), reused.digest))
        self._before = reused

    def _prefill(self, sampler: Sampler, answered: Evaluated) -> float:
        read = [each.problem._replace(prompt=(_STRANGER, *each.problem.prompt, *each.continuations[0])) for each in answered.answers]
        began = time.perf_counter()
        evaluate(sampler, read, lambda _: 0.0, replace(self._config, max_tokens=1))
        return time.perf_counter() - began


def _step(client: Client, run: TrainingRun, sampler: Sampler, task: PairsTask, number: int, rate: float) -> Sampler:
    """One step of policy gradients on problems of its own; the sampler of the version behind it."""
    rollouts = Rollouts(lambda: sampler, task.grade, RolloutConfig(max_tokens=32, seed=number))
    problems: Sequence[Problem] = task.problems(GROUPS, number)
    groups = [rollouts.group(place, problem) for place, problem in enumerate(problems)]
    run.forward_backward([row.datum for row in weigh(sort_groups(groups, 2).trained, by_deviation=True)], "importance_sampling")
    run.optim_step(rate)
    return client.sampler(run.save_snapshot().result().version)


def _kept(before: Evaluated, now: Evaluated) -> list[int]:
    pairs = zip(before.answers, now.answers, strict=True)
    answers = [pair for one, other in pairs for pair in zip(one.continuations, other.continuations, strict=True)]
    kept = [sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], zip(*pair, strict=True))) for pair in answers]
    if sum(kept) != now.kept:
        raise SystemExit(f"{now.kept} tokens are said to be kept, and {sum(kept)} are the same")
    return kept


def _shown(rounds: Sequence[Round], tokens: int) -> dict[str, Any]:
    kept = [each for one in rounds for each in one.kept]
    return {
        "ratio": round(sum(each.plain_s for each in rounds) / sum(each.reused_s for each in rounds), 2),
        "ratios": [round(each.plain_s / each.reused_s, 2) for each in rounds],
        "plain_median_s": round(statistics.median(each.plain_s for each in rounds), 3),
        "reused_median_s": round(statistics.median(each.reused_s for each in rounds), 3),
        "prefill_median_s": round(statistics.median(each.prefill_s for each in rounds), 3),
        "limit": round(sum(each.plain_s for each in rounds) / sum(each.prefill_s for each in rounds), 2),
        "answers": len(kept),
        "kept_whole": round(sum(each == tokens for each in kept) / len(kept), 3),
        "kept_prefix": round(statistics.fmean(kept), 1),
        "equal_digests": [each.digest[:16] for each in rounds],
    }


if __name__ == "__main__":
    main()

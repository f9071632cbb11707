"""Evaluations of one version after another: reuse changes the time and nothing else."""

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.recipes import grpo
from bloomery.recipes.evaluation import EvaluationConfig, evaluate, seed_of
from bloomery.recipes.rollouts import Problem, Rollout, RolloutConfig
from bloomery.types.errors import InvalidInput
from tests.live import LiveServer
from tests.services.runs_stage import datum
from tests.test_docs import ROOT, blocks

BASE = "bloomery-tiny"
PROBLEMS = [Problem(f"p{number}", tuple(range(100 + number, 120 + 2 * number))) for number in range(4)]
CONFIG = EvaluationConfig(samples=3, max_tokens=24)


def grade(rollout: Rollout) -> float:
    return sum(rollout.tokens) % 2


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [1e-6, 1e-2])
def test_an_evaluation_that_reuses_an_earlier_one_is_the_same_to_the_bit(client: Client, learning_rate: float) -> None:
    run = client.create_run(BASE, rank=4, seed=1)
    first = evaluate(client.sampler(run.save_snapshot().result().version), PROBLEMS, grade, CONFIG)
    run.forward_backward([datum([*PROBLEMS[0].prompt])])
    run.optim_step(learning_rate)
    later = client.sampler(run.save_snapshot().result().version)
    plain, reused = evaluate(later, PROBLEMS, grade, CONFIG), evaluate(later, PROBLEMS, grade, CONFIG, earlier=first)
    assert reused.digest == plain.digest
    assert reused.digest != first.digest
    assert (reused.means, reused.mean, reused.interval, reused.lost) == (plain.means, plain.mean, plain.interval, 0)
    assert plain.kept == 0
    agreed = [
        _in_common(*pair)
        for one, other in zip(first.answers, plain.answers, strict=True)
        for pair in zip(one.continuations, other.continuations, strict=True)
    ]
    assert reused.kept == sum(agreed)
    assert (0 < reused.kept <= reused.tokens) if learning_rate == 1e-6 else reused.kept < reused.tokens
    assert set(reused.moved(first)) == {
        one.problem.id for one, other in zip(plain.answers, first.answers, strict=True) if one.continuations != other.continuations
    }


def _in_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    differs = [place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    return differs[0] if differs else min(len(first), len(second))


@pytest.mark.slow
def test_the_python_of_the_page_runs_in_order(live_server: LiveServer, tmp_path: Path) -> None:
    code = "\n".join(block for _, block in blocks(ROOT / "docs" / "reuse.md")).replace("http://127.0.0.1:8700", live_server.url)
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, all_of_them = done.stdout.splitlines()
    kept, lengths = ([int(number) for number in re.findall(r"\d+", part)] for part in one.split(") ["))
    assert len(kept) == len(lengths) == 4
    assert sum(kept) > 0
    assert re.fullmatch(r"[\d.]+ Interval\(.*\) [\d.]+ \(.*\)", all_of_them)


@pytest.mark.slow
def test_answers_of_other_settings_are_drafts_as_far_as_they_fit(client: Client) -> None:
    sampler = client.sampler(BASE)
    long = evaluate(sampler, PROBLEMS[:2], grade, CONFIG)
    short = replace(CONFIG, samples=4, max_tokens=9)
    plain, reused = evaluate(sampler, PROBLEMS, grade, short), evaluate(sampler, PROBLEMS, grade, short, earlier=long)
    assert reused.digest == plain.digest
    assert reused.kept == sum(len(tokens) for each in plain.answers[:2] for tokens in each.continuations[:3])


def test_a_seed_follows_from_the_prompt_alone(client: Client) -> None:
    sampler = client.sampler(BASE)
    whole, part = evaluate(sampler, PROBLEMS, grade, CONFIG), evaluate(sampler, PROBLEMS[2:], grade, CONFIG)
    assert part.answers == whole.answers[2:]
    assert len({seed_of(problem.prompt, seed) for problem in PROBLEMS for seed in range(3)}) == 3 * len(PROBLEMS)


def test_what_cannot_be_graded_is_lost_and_no_zero(client: Client) -> None:
    def fragile(rollout: Rollout) -> float:
        if rollout.problem.id == "p1":
            raise ValueError("no such answer")
        return 1.0

    found = evaluate(client.sampler(BASE), PROBLEMS, fragile, CONFIG)
    assert (found.means, found.lost) == ((1.0, 1.0, 1.0), 3)
    assert {failure.kind for each in found.answers for failure in each.failures} == {"raised"}


def test_of_nothing_that_could_be_graded_there_is_no_mean(client: Client) -> None:
    def broken(rollout: Rollout) -> float:
        raise ValueError(f"no answer of {rollout.id}")

    odd = [Problem("\ud800", (5, 6))]
    found = evaluate(client.sampler(BASE), odd, broken, CONFIG)
    assert math.isnan(found.mean)
    assert math.isnan(grpo.measure(client.sampler(BASE), odd, broken, RolloutConfig(group_size=2, max_tokens=2, attempts=1)).mean)
    assert found.digest == evaluate(client.sampler(BASE), odd, broken, CONFIG, earlier=found).digest


def test_problems_with_one_prompt_are_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="two problems have one prompt"):
        evaluate(client.sampler(BASE), [PROBLEMS[0], PROBLEMS[0]._replace(id="again")], grade, CONFIG)
    with pytest.raises(InvalidInput, match="two problems have one id"):
        evaluate(client.sampler(BASE), [PROBLEMS[0], PROBLEMS[1]._replace(id=PROBLEMS[0].id)], grade, CONFIG)
    with pytest.raises(InvalidInput, match="`grade_timeout_s` is inf s: it must be above 0"):
        evaluate(client.sampler(BASE), PROBLEMS, grade, replace(CONFIG, grade_timeout_s=math.inf))
    with pytest.raises(InvalidInput, match="`samples` is 0"):
        evaluate(client.sampler(BASE), PROBLEMS, grade, replace(CONFIG, samples=0))

"""The convergence watch: each way of going wrong is named within 50 steps, and healthy curves of many shapes raise no alarm."""

import math
from collections.abc import Callable
from random import Random

import pytest

from bloomery.recipes.watch import Alarm, ConvergenceWatch, Trouble

Curve = Callable[[int, Random], dict[str, float]]
WRONG_FROM = 40
WITHIN = 50


def first_alarm(curve: Curve, seed: int, steps: int = 300) -> Alarm | None:
    watch, random = ConvergenceWatch(), Random(seed)
    for step in range(1, steps + 1):
        if alarms := watch.look(step, curve(step, random)):
            return alarms[0]
    return None


def supervised(step: int, random: Random) -> dict[str, float]:
    """Falls from 4 nats to a noisy 0.3, like batches of few rows."""
    loss = (0.3 + 3.7 * math.exp(-step / 25)) * random.uniform(0.6, 1.5)
    return {"loss": loss, "gradient_norm": random.uniform(0.05, 3.0), "evaluation/loss": loss}


def memorised(step: int, random: Random) -> dict[str, float]:
    """Ends with nothing left to learn."""
    return {"loss": 4 * math.exp(-step / 8), "gradient_norm": 5 * math.exp(-step / 8)}


def preferences(step: int, random: Random) -> dict[str, float]:
    """Begins at log 2 and goes up and down between batches of few pairs."""
    return {"loss": max(0.0, 0.69 * math.exp(-step / 100) + random.gauss(0, 0.15)), "gradient_norm": random.uniform(0.01, 1), "accuracy": 0.7}


def rewards(step: int, random: Random) -> dict[str, float]:
    """Climbs from 0.1 to 0.9, with the noise of 64 rollouts."""
    mean = 0.1 + 0.8 / (1 + math.exp(-(step - 60) / 15))
    noisy = mean + random.gauss(0, math.sqrt(mean * (1 - mean) / 64))
    return {"loss": random.gauss(0, 0.5), "gradient_norm": 0.3, "reward/raw": noisy, "groups/zero_variance_share": random.uniform(0.1, 0.8)}


def judged(step: int, random: Random) -> dict[str, float]:
    """Two graders that mean the same, of which the second sees 16 answers."""
    values = rewards(step, random)
    mean = 0.2 + 0.6 / (1 + math.exp(-(step - 60) / 15))
    return values | {"reward/held_out": mean + random.gauss(0, math.sqrt(mean * (1 - mean) / 16))}


def indifferent(step: int, random: Random) -> dict[str, float]:
    """The second grader means something else, which stays as it is."""
    return rewards(step, random) | {"reward/held_out": 0.5 + random.gauss(0, 0.125)}


def flat_rewards(step: int, random: Random) -> dict[str, float]:
    """Learns nothing yet."""
    return rewards(0, random) | {"kl/reference": 0.01, "ratio/k3": 0.0}


HEALTHY = {
    "supervised": supervised,
    "memorised": memorised,
    "preferences": preferences,
    "rewards": rewards,
    "flat rewards": flat_rewards,
    "judged": judged,
    "indifferent": indifferent,
}


@pytest.mark.parametrize("curve", HEALTHY.values(), ids=HEALTHY)
@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_raise_no_alarm(curve: Curve, seed: int) -> None:
    assert first_alarm(curve, seed) is None


def then(curve: Curve, **wrong: Callable[[int, Random], float]) -> Curve:
    """Healthy until `WRONG_FROM`; `wrong` are what it measures from then on, by steps since then."""

    def measured(step: int, random: Random) -> dict[str, float]:
        values = curve(step, random)
        if step < WRONG_FROM:
            return values
        return values | {name.replace("__", "/"): told(step - WRONG_FROM, random) for name, told in wrong.items()}

    return measured


WRONG: list[tuple[Trouble, Curve]] = [
    ("not_finite", then(supervised, loss=lambda *_: math.nan)),
    ("not_finite", then(rewards, gradient_norm=lambda *_: math.inf)),
    ("divergence", then(supervised, loss=lambda since, random: 1.2 + 0.1 * since + random.gauss(0, 0.2))),
    ("divergence", then(supervised, loss=lambda since, random: 9 + random.gauss(0, 1))),
    ("dead_gradients", then(supervised, gradient_norm=lambda *_: 0.0)),
    ("reward_collapse", then(lambda step, random: rewards(step + 60, random), reward__raw=lambda since, random: max(0.0, 0.9 - 0.05 * since))),
    ("reward_collapse", then(lambda step, random: rewards(200, random), reward__raw=lambda *_: 0.0)),
    ("over_optimisation", then(judged, reward__held_out=lambda since, random: max(0.0, 0.35 - 0.02 * since) + random.gauss(0, 0.08))),
    ("over_optimisation", then(indifferent, reward__held_out=lambda since, random: 0.1 + random.gauss(0, 0.075))),
    ("zero_variance", then(rewards, groups__zero_variance_share=lambda *_: 1.0)),
    ("kl_blow_up", then(rewards, kl__reference=lambda since, random: 0.1 * since)),
    ("mismatch", then(rewards, ratio__k3=lambda *_: 0.05)),
]


@pytest.mark.parametrize(("trouble", "curve"), WRONG, ids=[f"{trouble}-{number}" for number, (trouble, _) in enumerate(WRONG)])
@pytest.mark.parametrize("seed", range(5))
def test_what_goes_wrong_is_named_within_50_steps(trouble: Trouble, curve: Curve, seed: int) -> None:
    alarm = first_alarm(curve, seed)
    assert alarm is not None
    assert alarm.trouble == trouble
    assert WRONG_FROM <= alarm.step <= WRONG_FROM + WITHIN


def test_a_loss_that_is_lost_with_the_first_update_is_named_though_it_was_never_better_in_the_median() -> None:
    def at_once(step: int, random: Random) -> dict[str, float]:
        return {"loss": 2.0 if step == 1 else random.uniform(7.5, 9.0), "gradient_norm": 0.0}

    alarm = first_alarm(at_once, 0)
    assert alarm is not None
    assert (alarm.trouble, alarm.step) == ("divergence", 10)
    assert "rose from 2 to 8" in alarm.message


def test_a_trouble_is_told_once() -> None:
    watch = ConvergenceWatch()
    told = [alarm.trouble for step in range(30) for alarm in watch.look(step, {"loss": math.nan})]
    assert told == ["not_finite"]


def test_old_tokens_are_no_mismatch() -> None:
    def asynchronous(step: int, random: Random) -> dict[str, float]:
        return rewards(step, random) | {"ratio/k3": 0.5, "lag/max": 1.0}

    assert first_alarm(asynchronous, 0) is None

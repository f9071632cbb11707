"""What loops refuse before they begin, because it would only be noticed after minutes: settings that mean nothing, and problems that are one.

Whatever is refused is InvalidInput, with the name of the setting.
"""

import math
from collections.abc import Sequence

from bloomery.recipes.deadlines import check_times, times_of
from bloomery.recipes.rollouts import Problem, RolloutConfig
from bloomery.types.errors import InvalidInput
from bloomery.types.losses import COLDEST, HOTTEST


def check_least(least: int, **settings: float) -> None:
    """Each is `least` or more."""
    for name, value in settings.items():
        if value < least:
            raise InvalidInput(f"`{name}` is {value}: it must be at least {least}", field=name)


def check_finite(**settings: float) -> None:
    """Each is a number that can be computed with."""
    for name, value in settings.items():
        if not math.isfinite(value):
            raise InvalidInput(f"`{name}` is {value}: it must be a finite number", field=name)


def check_rollouts(config: RolloutConfig, *, computed: bool = False) -> None:
    """Groups can be made as it says; `computed`: of a distribution that losses and scores can compute."""
    check_least(1, group_size=config.group_size, attempts=config.attempts, max_tokens=config.max_tokens)
    if config.piece_tokens is not None:
        check_least(1, piece_tokens=config.piece_tokens)
    least, temperature = COLDEST if computed else 0, config.temperature
    if isinstance(temperature, bool) or not least <= temperature <= HOTTEST:
        raise InvalidInput(f"`temperature` is {temperature}: it must be from {least:g} to {HOTTEST:g}", field="temperature")
    check_times(**times_of(config))


def check_problems(problems: Sequence[Problem]) -> None:
    """There are some, each with an id of its own."""
    if not problems:
        raise InvalidInput("there are no problems to train on", field="problems")
    if len({problem.id for problem in problems}) < len(problems):
        raise InvalidInput("two problems have one id: what comes of them could not be told apart", field="problems")


def check_prompts(problems: Sequence[Problem]) -> None:
    """Each has something to go on from."""
    if (empty := next((problem.id for problem in problems if not problem.prompt), None)) is not None:
        raise InvalidInput(f"problem `{empty}` has an empty prompt: it needs at least one token", field="problems")


def check_held_out(evaluate_every: int, held_out: Sequence[Problem]) -> None:
    """Both how often and on what, or neither."""
    check_least(0, evaluate_every=evaluate_every)
    if bool(evaluate_every) != bool(held_out):
        problem = "`evaluate_every` and `held_out` go together: how often, and on which problems"
        raise InvalidInput(problem, field="held_out" if evaluate_every else "evaluate_every")


def check_stopping(patience: int, min_delta: float, evaluate_every: int) -> None:
    """There are measurements for what counts them."""
    check_least(0, patience=patience, min_delta=min_delta)
    check_finite(min_delta=min_delta)
    if patience and not evaluate_every:
        raise InvalidInput(f"`patience` is {patience}, and there are no measurements to count: set `evaluate_every`", field="patience")
    if min_delta and not patience:
        raise InvalidInput(f"`min_delta` is {min_delta:g}, and nothing ends by it: set `patience`, or leave it out", field="min_delta")


def check_reuse(problems: Sequence[Problem], groups: int, setting: str) -> None:
    """With `reuse` a prompt has one seed, and so one group as long as the weights are the same: a step has no more groups than there are problems."""
    if groups > len(problems):
        same = f"with `reuse` a problem has one seed, so {groups} groups a step of {len(problems)} problems would be the same ones"
        raise InvalidInput(f"{same}: give more problems, or fewer groups a step", field=setting)
    prompts = [problem.prompt for problem in problems if problem.prompt]
    if len(set(prompts)) < len(prompts):
        raise InvalidInput("two problems have one prompt, and with `reuse` one seed: they would get the same rollouts", field="problems")

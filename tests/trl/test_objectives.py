"""Steps of SFT, DPO, ORPO and GRPO beside TRL's trainers: the same float32 model and tokens, all parameters, loss and gradients (`docs/methods.md`).

Both sides compute in float32 and add up in other orders, and nothing else may differ. A product here adds some hundred numbers and a gradient goes
through some ten of them, which leaves a few 1e-6 of a tensor's norm. Wrong signs, factors and numbers of tokens are off by 3e-4 and more.
"""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from bloomery.client import Client
from bloomery.recipes.preference import Dpo, Orpo
from bloomery.recipes.rollouts import Group, Problem, Rollout
from tests.live import running_server
from tests.trl.our_steps import ADAM, GROUP_SIZE, SMOOTH, Choice, Ours, Row, Stepped
from tests.trl.setup import END, FIRST_WORD, VOCABULARY, text, their_steps, write_model

pytestmark = pytest.mark.slow

LOSS_TOLERANCE: Final = {"rtol": 2e-6, "atol": 2e-6}
"""Absolutely too: terms are log-probabilities of 1 to 10 nats, and of signs that let them cancel."""
GRADIENT_RTOL: Final = 1e-5
"""The norm of the difference over the norm, tensor by tensor."""
ODDS_WEIGHTS: Final = {"orpo_light": 0.1, "orpo_heavy": 2.1}
LOSSES: Final[Mapping[str, tuple[dict[str, float | str], dict[str, Any]]]] = {
    "ppo": ({}, {"loss_type": "dapo", "epsilon": 0.2}),
    # Few tokens with a negative advantage become likelier, and those by little.
    "dapo": (
        {"clip_high_threshold": 1.01, "dual_clip_threshold": 1.02},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.01, "delta": 1.02},
    ),
    "gspo": (
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        {"loss_type": "dapo", "epsilon": 0.2, "importance_sampling_level": "sequence"},
    ),
    "cispo": ({"clip_high_threshold": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
}
"""Options of ours, and the arguments of theirs that are the same loss."""
TEMPERATURE: Final = 0.7
LEARNING_RATE: Final = 0.03
"""Of their two steps: so large that the second has tokens beyond the thresholds."""


class Sides(NamedTuple):
    """Steps by name; `groups` are those of the loop with defaults."""

    ours: Mapping[str, Stepped]
    theirs: Mapping[str, Stepped]
    groups: Sequence[Group]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    folder = tmp_path_factory.mktemp("trl")
    policy, reference = write_model(folder / "policy", 1), write_model(folder / "reference", 2)
    problems = [Problem(str(number), tuple(words(3 + number, number))) for number in range(2)]
    with (
        running_server(folder / "data", f"--model=policy={policy}", f"--model=reference={reference}") as server,
        Client(server.url, server.key) as client,
    ):
        ours = Ours(server, client, policy)
        plain = ours.loop(problems, reward_of, False, folder / "plain.json")
        defaults = ours.loop(problems, reward_of_first, True, folder / "defaults.json")
        cold = ours.loop(problems, reward_of, False, folder / "cold.json", TEMPERATURE)
        thirds = [in_thirds(group) for group in plain.groups]
        found = {
            "sft": ours.sft(ROWS),
            "sft_of_chosen": ours.sft([Row([*choice.prompt, *choice.chosen], [1.0] * len(choice.prompt + choice.chosen)) for choice in CHOICES]),
            "dpo": ours.preference(CHOICES, Dpo(beta=0.1)),
            "dpo_smoothed": ours.preference(CHOICES[:1], Dpo(beta=0.1, label_smoothing=0.2)),
            "orpo_whole": ours.preference(WHOLE, Orpo(weight=0.5)),
            **{name: ours.preference(CHOICES, Orpo(weight=weight)) for name, weight in ODDS_WEIGHTS.items()},
            "grpo": plain.stepped,
            "grpo_cold": cold.stepped,
            "grpo_defaults": defaults.stepped,
            **{name: ours.loss(thirds, name, options, LEARNING_RATE) for name, (options, _) in LOSSES.items()},
        }
    cases = {
        "sft": case("sft", [labelled(row) for row in ROWS]),
        "dpo": case("dpo", texts(CHOICES), beta=0.1),
        "dpo_smoothed": case("dpo", texts(CHOICES[:1]), beta=0.1, loss_type="aot", label_smoothing=0.2),
        "orpo_whole": case("orpo", texts(WHOLE), beta=0.5),
        **{name: case("orpo", texts(CHOICES), beta=weight) for name, weight in ODDS_WEIGHTS.items()},
        "grpo": rolled(plain.groups, scale_rewards="none"),
        "grpo_cold": rolled(cold.groups, scale_rewards="none", temperature=TEMPERATURE),
        "grpo_defaults": rolled(defaults.groups),
        **{name: stale(thirds, arguments) for name, (_, arguments) in LOSSES.items()},
    }
    their_steps({"folder": str(folder), "policy": str(policy), "reference": str(reference), "cases": cases}, folder)
    return Sides(found, {name: of_files(folder, name) for name in cases}, defaults.groups)


# A loss of GRPO is compared over two steps on the same rollouts, of which the second is off policy.
@pytest.mark.parametrize("name", ["sft", "dpo", "dpo_smoothed", "orpo_whole", "grpo", "grpo_cold", *LOSSES])
def test_loss_and_gradients_are_trls(sides: Sides, name: str) -> None:
    ours, theirs = sides.ours[name], sides.theirs[name]
    np.testing.assert_allclose(ours.losses, theirs.losses, **LOSS_TOLERANCE)
    assert_same(ours.gradients, theirs.gradients)


def test_second_steps_meet_the_thresholds_with_some_tokens_and_not_with_others(sides: Sides) -> None:
    for name in LOSSES:
        shown = sides.ours[name].shown
        assert 0.05 < shown["clipped:sum"] / shown["tokens:sum"] < 0.9, name


def test_the_odds_term_of_orpo_is_trls(sides: Sides) -> None:
    ours, theirs = of_odds(sides.ours), of_odds(sides.theirs)
    np.testing.assert_allclose(ours.losses, theirs.losses, **LOSS_TOLERANCE)
    assert_same(ours.gradients, theirs.gradients)


def test_trls_orpo_learns_prompts_too_and_every_token_of_the_batch_alike(sides: Sides) -> None:
    odds, chosen, theirs = of_odds(sides.ours), sides.ours["sft_of_chosen"], sides.theirs["orpo_light"]
    weight = ODDS_WEIGHTS["orpo_light"]
    np.testing.assert_allclose(chosen.losses[0] + weight * odds.losses[0], theirs.losses[0], **LOSS_TOLERANCE)
    assert_same({name: chosen.gradients[name] + weight * odds.gradients[name] for name in odds.gradients}, theirs.gradients)


def test_defaults_of_grpo_differ_by_the_unbiased_deviation_and_by_tokens_of_groups_that_teach_nothing(sides: Sides) -> None:
    ours, theirs = sides.ours["grpo_defaults"], sides.theirs["grpo_defaults"]
    taught, equal = ([member.reward for member in group.members] for group in sides.groups)
    tokens = [sum(len(member.rollout.tokens) for member in group.members) for group in sides.groups]
    assert statistics.pstdev(equal) == 0
    factor = (statistics.stdev(taught) + 1e-4) / statistics.pstdev(taught) * sum(tokens) / tokens[0]
    np.testing.assert_allclose(ours.losses, [factor * loss for loss in theirs.losses], **LOSS_TOLERANCE)
    assert_same(ours.gradients, {name: factor * gradient for name, gradient in theirs.gradients.items()})


def of_odds(side: Mapping[str, Stepped]) -> Stepped:
    """The odds term of ORPO alone: what two weights of it differ by."""
    light, heavy = (side[name] for name in ODDS_WEIGHTS)
    weight = ODDS_WEIGHTS["orpo_heavy"] - ODDS_WEIGHTS["orpo_light"]
    gradients = {name: (heavy.gradients[name] - light.gradients[name]) / weight for name in light.gradients}
    return Stepped([(heavy.losses[0] - light.losses[0]) / weight], gradients, {})


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    off = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] < GRADIENT_RTOL, f"{worst} is off by {off[worst]:.1e}"


def case(trainer: str, rows: Sequence[Any], **arguments: Any) -> dict[str, Any]:
    steps = {"max_steps": 1, "per_device_train_batch_size": len(rows), "learning_rate": ADAM.learning_rate}
    return {"trainer": trainer, "rows": rows, "arguments": steps | arguments}


def rolled(groups: Sequence[Group], **arguments: Any) -> dict[str, Any]:
    members = [(group, member) for group in groups for member in group.members]
    rows = [{"prompt": group.problem.prompt, "tokens": member.rollout.tokens, "reward": member.reward} for group, member in members]
    return case("grpo", rows, num_generations=GROUP_SIZE, max_completion_length=64, beta=0.0, **arguments)


def stale(groups: Sequence[Group], arguments: Mapping[str, Any]) -> dict[str, Any]:
    adam = {"adam_beta1": SMOOTH["beta1"], "adam_beta2": SMOOTH["beta2"], "adam_epsilon": SMOOTH["eps"]}
    steps = {"max_steps": 2, "num_iterations": 2, "learning_rate": LEARNING_RATE}
    return rolled(groups, scale_rewards="none", **steps, **adam, **arguments)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_WORD, VOCABULARY), k=count)


def reward_of(rollout: Rollout) -> float:
    return sum(rollout.tokens) / VOCABULARY


def reward_of_first(rollout: Rollout) -> float:
    """All rollouts of the other problem are rewarded alike."""
    return reward_of(rollout) if rollout.problem.id == "0" else 1.0


def in_thirds(group: Group) -> Group:
    """Of three rewards, the middle one of which is exactly the group's mean."""
    return group._replace(members=tuple(member._replace(reward=place % 3 / 2) for place, member in enumerate(group.members)))


def labelled(row: Row) -> dict[str, list[int]]:
    return {"input_ids": row.tokens, "labels": [token if weight else -100 for token, weight in zip(*row, strict=True)]}


def texts(choices: Sequence[Choice]) -> list[dict[str, str]]:
    return [{name: text(tokens) for name, tokens in choice._asdict().items()} for choice in choices]


def of_files(folder: Path, name: str) -> Stepped:
    losses = json.loads((folder / f"{name}.json").read_text())
    return Stepped(losses, load_file(folder / f"{name}.{len(losses) - 1}.safetensors"), {})


ROWS: Final = [
    Row([*words(prompt, seed), *words(answer, 10 + seed)], [0.0] * prompt + [1.0] * answer)
    for seed, (prompt, answer) in enumerate([(4, 9), (1, 3), (12, 20), (7, 1)])
]
CHOICES: Final = [
    Choice(words(prompt, 20 + seed), [*words(chosen, 30 + seed), END], [*words(rejected, 40 + seed), END])
    for seed, (prompt, chosen, rejected) in enumerate([(5, 3, 8), (2, 12, 4), (9, 6, 6)])
]
WHOLE: Final = [Choice(words(1, 50 + seed), [*words(7, 60 + seed), END], [*words(3 + seed, 70 + seed), END]) for seed in range(3)]
"""Prompts of one token and chosen answers of one length."""

"""Every loss that compares with a sampler, with every input and option that it takes, through the unmodified SDK against `bloomery up`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from bloomery.types.losses import LOSSES, RATIO_MASK
from tests.tinker.contract_entries import input_field, loss, option_field
from tests.tinker.tenants import MODEL
from tests.train.test_losses import closed_form

TOKENS = [5, 17, 99, 250, 31, 7, 64, 12, 300, 41] * 4
SAMPLED = {name: form for name, form in LOSSES.items() if "logprobs" in form.inputs}
OTHERWISE = {
    "clip_low_threshold": 0.5,
    "clip_high_threshold": 2.0,
    "beta": 0.5,
    "kl_coeff": 0.3,
    "dual_clip_threshold": 2.0,
    "mask_low_threshold": 0.0,
    "mask_high_threshold": 0.0,
    "temperature": 0.7,
}
"""Values of options that change what a loss says of the data below."""
Inputs = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()


@pytest.fixture(scope="module")
def rows(run: tinker.TrainingClient) -> list[Inputs]:
    """Of two data with the same tokens; all in all the sampler of one had thought less of them than the run does, that of the other more."""
    noise = np.random.default_rng(4)
    plain = {"weights": np.ones(len(TOKENS) - 1)}
    (output,) = run.forward([datum(plain)], "cross_entropy").result().loss_fn_outputs
    logprobs = output["logprobs"].to_numpy()
    return [
        {"logprobs": logprobs + shift + noise.normal(size=logprobs.size), "advantages": noise.choice([-2.5, -0.3, 0.0, 0.7, 2.0], logprobs.size)}
        for shift in (-0.5, 0.5)
    ]


def datum(inputs: Inputs) -> types.Datum:
    values: dict[str, Any] = {name: each.astype(np.float32).tolist() for name, each in inputs.items()}
    return types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:], **values})


def computed(run: tinker.TrainingClient, name: str, rows: list[Inputs], config: Mapping[str, float] | None = None) -> float:
    """The loss, after it was found to be the closed form."""
    found, expected = both(run, name, rows, config or {})
    assert found == pytest.approx(expected, rel=1e-4)
    return found


def both(run: tinker.TrainingClient, name: str, rows: list[Inputs], config: Mapping[str, float]) -> tuple[float, float]:
    """The server's loss, and the closed form of it."""
    result = run.forward([datum(row) for row in rows], name, dict(config)).result()
    logprobs = [output["logprobs"].to_numpy().astype(np.float64) for output in result.loss_fn_outputs]
    return result.metrics["loss:sum"], sum(by_hand(name, learner, row, config) for learner, row in zip(logprobs, rows, strict=True))


def by_hand(name: str, learner: np.ndarray, row: Inputs, config: Mapping[str, float]) -> float:
    sampler, advantages = row["logprobs"].astype(np.float32).astype(np.float64), row["advantages"]
    marked = row.get(RATIO_MASK, advantages) != 0
    of_sequence = math.exp((learner - sampler)[marked].mean())
    options = {option: form.default for option, form in LOSSES[name].options.items()} | dict(config)
    total = 0.0
    for position in np.flatnonzero(advantages):
        own = options | {option: float(row[option][position]) for option in options if option in row}
        total += closed_form(name, float(learner[position]), float(sampler[position]), float(advantages[position]), of_sequence, own)[0]
    return total


def showing(name: str, field: str) -> Any:
    return pytest.param(name, field.partition(".")[2], marks=pytest.mark.contract(loss(name), field))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.contract(loss(name), *map(input_field, form.inputs))) for name, form in SAMPLED.items()]
)
def test_a_loss_is_the_closed_form_of_its_inputs(run: tinker.TrainingClient, rows: list[Inputs], name: str) -> None:
    found, expected = both(run, name, rows, {})
    # Sums of a few float32 terms, compared in float64.
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "option"), [showing(name, option_field(option)) for name, form in SAMPLED.items() for option in form.options])
def test_an_option_of_a_loss_changes_it_as_the_formula_says(run: tinker.TrainingClient, rows: list[Inputs], name: str, option: str) -> None:
    assert computed(run, name, rows, {option: OTHERWISE[option]}) != pytest.approx(computed(run, name, rows), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "option"),
    [showing(name, input_field(option)) for name, form in SAMPLED.items() for option, each in form.options.items() if each.per_token],
)
def test_a_token_may_have_its_own_threshold(run: tinker.TrainingClient, rows: list[Inputs], name: str, option: str) -> None:
    values = np.where(np.arange(len(TOKENS) - 1) % 2, OTHERWISE[option], LOSSES[name].options[option].default)
    found = computed(run, name, [row | {option: values} for row in rows])
    for config in ({}, {option: OTHERWISE[option]}):
        assert found != pytest.approx(computed(run, name, rows, config), rel=1e-3)


@pytest.mark.contract(loss("gspo"), input_field(RATIO_MASK))
def test_the_ratio_of_a_sequence_is_taken_where_its_mask_says(run: tinker.TrainingClient, rows: list[Inputs]) -> None:
    mask = (np.arange(len(TOKENS) - 1) < 5).astype(np.float64)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    assert computed(run, "gspo", [row | {RATIO_MASK: mask} for row in rows], wide) != pytest.approx(computed(run, "gspo", rows, wide), rel=1e-3)

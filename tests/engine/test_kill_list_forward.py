"""The kill list where proved weights lie in memory and the sampler's forward does something else: the probe refuses the first such version."""

from pathlib import Path

import pytest

from bloomery.infer.sampler import Sampler
from bloomery.models.form import plain_form
from bloomery.types.generation import Weights
from bloomery.types.probe import Probed, probe_key
from tests.engine.faults import Fault, World, world
from tests.engine.forward_faults import FORWARD_FAULTS
from tests.engine.test_kill_list import ask

SMALL = 1e-5
"""A learning rate whose steps move the probe by less than any bar for rounding in half precision."""
faults = pytest.mark.parametrize("fault", FORWARD_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))


def named(name: str) -> Fault:
    return next(fault for fault in FORWARD_FAULTS if fault.name == name)


def made(directory: Path, fault: Fault, learning_rate: float = 3e-2) -> World:
    return world(directory, fault.rank, experts=fault.experts, learning_rate=learning_rate)


def serves(sampler: Sampler, *asked: Weights) -> None:
    for weights in asked:
        assert len(ask(sampler, weights).tokens[0]) == 8


def refuses(sampler: Sampler, weights: Weights, says: str) -> None:
    answer = ask(sampler, weights)
    assert answer.failure is not None
    assert says in answer.failure.message
    assert f"version {weights.version}" in answer.failure.message
    assert answer.tokens == {}
    assert weights.version not in sampler.versions.held


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [3e-2, SMALL])
@faults
def test_a_forward_that_computes_otherwise_is_caught_by_the_first_version_that_was_trained_and_without_it_all_is_served(
    fault: Fault, learning_rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made(tmp_path, fault, learning_rate)
    serves(trained.sampler(), trained.first, trained.old, trained.new)
    fault.inject(monkeypatch, trained)
    broken = trained.sampler()
    # An adapter that adds nothing yet can be left out: no number is another one.
    serves(broken, trained.first)
    refuses(broken, trained.old, fault.says)
    refuses(broken, trained.new, fault.says)


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [3e-2, SMALL])
@faults
def test_so_is_one_where_nobody_left_the_trainers_side(fault: Fault, learning_rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = made(tmp_path, fault, learning_rate)
    for weights in (trained.first, trained.old):
        trained.blobs.delete(probe_key(weights.version))
    serves(trained.sampler(), trained.first, trained.old)
    fault.inject(monkeypatch, trained)
    broken = trained.sampler()
    serves(broken, trained.first)
    refuses(broken, trained.old, fault.says)


@pytest.mark.parametrize("name", ["adapter left out of a quarter", "scale of another rank"])
def test_where_bits_are_promised_whoever_is_off_by_a_little_hears_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = made(tmp_path, named(name))
    named(name).inject(monkeypatch, trained)
    for advice in ("equal bits are promised here", "bloomery fidelity", "--plain"):
        refuses(trained.sampler(), trained.old, advice)


@pytest.mark.parametrize("name", ["adapter left out of a quarter", "scale of another rank"])
def test_where_they_are_not_what_was_served_off_by_less_than_the_bar_does_not_raise_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made(tmp_path, named(name))
    form = plain_form(trained.base)
    serves(trained.sampler(form), trained.first, trained.old, trained.new)
    named(name).inject(monkeypatch, trained)
    broken = trained.sampler(form)
    serves(broken, trained.first, trained.old)
    assert probe_of(broken, trained.old).max_abs > 0.1
    refuses(broken, trained.new, "does not answer its probe as its trainer does")


BELOW_THE_BARS = ("adapter left out of the experts", "adapter left out of a quarter", "scale of another rank")
"""Served with the first version where no bits are promised, as `docs/rl.md` says."""


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False], ids=["told", "asked-here"])
@pytest.mark.parametrize("learning_rate", [3e-2, SMALL])
@faults
def test_where_bits_are_not_promised_the_influence_refuses_whoever_is_off_by_more_than_half_of_what_was_learnt(
    fault: Fault, learning_rate: float, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made(tmp_path, fault, learning_rate)
    if not stored:
        for weights in (trained.first, trained.old):
            trained.blobs.delete(probe_key(weights.version))
    form = plain_form(trained.base)
    sound = trained.sampler(form)
    serves(sound, trained.first, trained.old)
    # What was learnt is told from rounding by so small a step too: this is no bar that was never reached.
    assert probe_of(sound, trained.old).tells
    fault.inject(monkeypatch, trained)
    broken = trained.sampler(form)
    serves(broken, trained.first)
    if fault.name in BELOW_THE_BARS:
        serves(broken, trained.old)
    else:
        refuses(broken, trained.old, "is not served: ")


def probe_of(sampler: Sampler, weights: Weights) -> Probed:
    probe = sampler.versions.proved[weights.version].probe
    assert probe is not None
    return probe

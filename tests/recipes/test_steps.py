"""What happens between the steps of a recipe, over the real api with an engine that is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client, TrainingRun
from bloomery.recipes.preference import Orpo, Pair, PreferenceConfig, both, optimise
from bloomery.recipes.replay import Replayed
from bloomery.recipes.sft import AdamConfig, SftConfig, SftReport, datum, fine_tune
from bloomery.recipes.steps import EVALUATED, Pace
from bloomery.types.errors import Conflict, Gone
from tests.api.server import KEY, URL, serving
from tests.recipes.test_policy import Forgetful

STEPS = 5
OPERATIONS_OF_A_STEP = 2


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path) as server:
        yield server.client()


def trained(run: TrainingRun, client: Client, publish_every: int) -> list[tuple[int, str, int]]:
    """What was published: behind which step, which version, and the number of the next operation when it was told."""
    data = [datum([1, place, 3], [0.0, 1.0, 1.0]) for place in range(STEPS)]
    config = SftConfig(epochs=1, adam=AdamConfig(learning_rate=1e-3), batch_size=1, pace=Pace(publish_every=publish_every))
    told: list[tuple[int, str, int]] = []
    fine_tune(Replayed(run), data, config, on_published=lambda step, version: told.append((step, version, client.run(run.id).next_seq)))
    return told


def test_weights_are_published_every_so_many_steps_and_the_next_step_waits_for_nobody_who_looks(client: Client) -> None:
    run = client.create_run("tiny", 8, seed=1)
    told = trained(run, client, 2)
    assert [step for step, _, _ in told] == [2, 4]
    assert len({version for _, version, _ in told}) == 2
    # Numbers begin with 1; whoever is told of a version finds the operations of the step behind it submitted.
    published = [1 + step * OPERATIONS_OF_A_STEP + number for number, (step, _, _) in enumerate(told)]
    assert [next_seq for _, _, next_seq in told] == [seq + 1 + OPERATIONS_OF_A_STEP for seq in published]


def test_a_recipe_that_is_taken_up_again_is_told_of_the_same_versions_and_publishes_nothing_twice(client: Client) -> None:
    run = client.create_run("tiny", 8, seed=1)
    told = trained(run, client, 2)
    again = client.run(run.id)
    assert [each[:2] for each in trained(again, client, 2)] == [each[:2] for each in told]
    assert client.run(run.id).next_seq == again.next_seq


def test_nothing_is_published_unless_it_is_asked_for(client: Client) -> None:
    assert trained(client.create_run("tiny", 8, seed=1), client, 0) == []


def test_a_recipe_whose_results_were_dropped_finds_what_it_kept_and_goes_on(tmp_path: Path) -> None:
    data = [datum([1, place, 3], [0.0, 1.0, 1.0]) for place in range(STEPS)]
    pace = Pace(checkpoint_every=2, evaluate_every=2, publish_every=2)
    config = SftConfig(epochs=1, adam=AdamConfig(learning_rate=1e-3), batch_size=1, pace=pace)
    kept: list[tuple[int, str]] = []

    def train(run: TrainingRun) -> SftReport:
        kept.clear()
        return fine_tune(Replayed(run), data, config, held_out=data[:1], on_kept=lambda step, version: kept.append((step, version)))

    with serving(tmp_path) as server, server.client() as client, Client(URL, KEY, transport=Forgetful(server.transport)) as later:
        run = client.create_run("tiny", 8, seed=1)
        report, told = train(run), list(kept)
        assert [step for step, _ in told] == [2, 4]
        assert train(later.run(run.id)).losses == report.losses
        assert kept == told
        assert client.run(run.id).next_seq == run.next_seq


@pytest.mark.parametrize(("every", "looked_at"), [(0, []), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_held_out_rows_are_looked_at_every_so_many_steps_and_behind_the_last(client: Client, every: int, looked_at: list[int]) -> None:
    data = [datum([1, place, 3], [0.0, 1.0, 1.0]) for place in range(STEPS)]
    config = SftConfig(epochs=1, adam=AdamConfig(learning_rate=1e-3), batch_size=1, pace=Pace(evaluate_every=every))
    told: list[int] = []
    fine_tune(
        client.create_run("tiny", 8, seed=1),
        data,
        config,
        lambda step, _, values: told.extend([step] * (EVALUATED in values)),
        held_out=data[:1],
    )
    assert told == looked_at


def test_pairs_whose_evaluations_were_dropped_stop_early_where_they_did(tmp_path: Path) -> None:
    pairs = [Pair(datum([1, 2, 3], [0, 0, 1]), datum([1, 2, 4], [0, 0, 1]))]
    pace = Pace(evaluate_every=1, patience=2, min_delta=100.0)
    config = PreferenceConfig(epochs=9, loss=Orpo(), adam=AdamConfig(learning_rate=1e-3), batch_pairs=1, pace=pace)
    told: dict[int, float] = {}

    def note(step: int, _: int, values: dict[str, float]) -> None:
        if EVALUATED in values:
            told[step] = values[EVALUATED]

    with serving(tmp_path) as server, server.client() as client, Client(URL, KEY, transport=Forgetful(server.transport)) as later:
        run = client.create_run("tiny", 8, seed=1)
        assert optimise(Replayed(run), pairs, config, note, held_out=pairs) == 3
        assert [*told] == [1, 2, 3]
        run.save_checkpoint("final").result()
        assert optimise(Replayed(later.run(run.id)), pairs, config, held_out=pairs, evaluated=told) == 3
        with pytest.raises(Gone):
            optimise(Replayed(later.run(run.id)), pairs, config, held_out=pairs)
        assert client.run(run.id).next_seq == run.next_seq


def test_pairs_whose_numbers_were_dropped_before_their_gradient_was_asked_for_are_not_learnt_as_texts(tmp_path: Path) -> None:
    pairs = [Pair(datum([1, 2, 3], [0, 0, 1]), datum([1, 2, 4], [0, 0, 1]))]
    config = PreferenceConfig(epochs=1, loss=Orpo(), adam=AdamConfig(learning_rate=1e-3), batch_pairs=1)
    with serving(tmp_path) as server, server.client() as client, Client(URL, KEY, transport=Forgetful(server.transport)) as later:
        run = client.create_run("tiny", 8, seed=1)
        run.forward(both(pairs)).result()
        with pytest.raises(Conflict, match="the next operation follows from it and is not there"):
            optimise(Replayed(later.run(run.id)), pairs, config)
        assert client.run(run.id).next_seq == run.next_seq

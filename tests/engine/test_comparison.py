"""The engine's side of fidelity cards."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bloomery.engine.comparison import Comparisons
from bloomery.engine.shelf import BlobShelf
from bloomery.infer.fidelity import sample
from bloomery.models.form import Form
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import NO_KEYS
from bloomery.types.fidelity import prompts
from bloomery.types.generation import Weights
from bloomery.types.operations import SnapshotResult
from bloomery.types.protocol import Compare, Compared
from bloomery.types.resources import Fidelity
from tests.train.builders import BASE_HASH, SAVE, VOCAB, decoder, learn, run, step, supervised, train

TEXT = np.random.default_rng(1).integers(0, VOCAB, 640).tolist()


class Bench:
    """Comparisons over a shelf that holds one trained adapter."""

    def __init__(self, directory: Path, give_back: Callable[[], None] = lambda: None) -> None:
        model = decoder()
        self.shelf = BlobShelf(Blobs(directory), model, base_hash=BASE_HASH, numerics="test", keys=NO_KEYS)
        *_, saved = train(run(model, self.shelf), [learn(supervised([30, 40])), step(), SAVE])
        assert isinstance(saved, SnapshotResult)
        self.weights = Weights(version=saved.version, key=saved.key)
        self.sent: list[Compared] = []
        self.comparisons = Comparisons(self.shelf, model, Form(), self.sent.append, give_back)

    def order(self, request_id: str, sampled_with: Weights, says: Weights) -> Compare:
        answers = sample(self.shelf.load(sampled_with), prompts(TEXT, 1024, 4, (3, 600, 610, 20)), 4, Form())
        return Compare(request_id=request_id, weights=says, answers=tuple(answers), mode="exact")


def test_a_card_takes_a_turn_for_each_pass_and_one_for_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.comparisons.add(bench.order("a", bench.weights, bench.weights))
    # 3 * 614 rows and some, of which a pass has 1,024.
    turns = 0
    while bench.comparisons.waiting:
        bench.comparisons.take_turn()
        turns += 1
    assert turns > 2
    (answer,) = bench.sent
    assert (answer.request_id, answer.error) == ("a", None)
    card = Fidelity.model_validate_json(answer.card)
    assert (card.verdict, card.max_abs, card.sequences) == ("pass", 0.0, 7)


@pytest.mark.parametrize("enough", [True, False])
def test_where_memory_is_lacking_what_stands_empty_is_given_back_before_a_card_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: bool
) -> None:
    free = [10]
    monkeypatch.setattr("bloomery.engine.comparison.free_bytes", lambda device: free[0])
    bench = Bench(tmp_path, give_back=lambda: free.append(free.pop() + (1 << 40 if enough else 1)))
    bench.comparisons.add(bench.order("a", bench.weights, bench.weights))
    while bench.comparisons.waiting:
        bench.comparisons.take_turn()
    assert (bench.sent[0].error is None) == enough
    assert enough or "11 are free" in str(bench.sent[0].error)


def test_answers_of_other_weights_fail_and_it_is_said_that_the_difference_is_not_here(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.comparisons.add(bench.order("a", Weights(version=BASE_HASH), bench.weights))
    while bench.comparisons.waiting:
        bench.comparisons.take_turn()
    card = Fidelity.model_validate_json(bench.sent[0].card)
    assert card.verdict == "fail"
    assert card.first_difference is not None
    assert card.first_difference.startswith("nowhere while the request is alone and in the trainer's process")


def test_weights_that_are_not_there_are_an_answer_and_the_next_card_is_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.comparisons.add(bench.order("a", bench.weights, Weights(version="gone", key="snapshots/gone.safetensors")))
    bench.comparisons.add(bench.order("b", bench.weights, bench.weights))
    while bench.comparisons.waiting:
        bench.comparisons.take_turn()
    first, second = bench.sent
    assert (first.error, first.code) == ("there is no blob `manifests/gone`", "not_found")
    assert (second.request_id, second.error) == ("b", None)


def test_who_has_gone_is_not_answered(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.comparisons.add(bench.order("a", bench.weights, bench.weights))
    bench.comparisons.take_turn()
    bench.comparisons.forget_all()
    bench.comparisons.take_turn()
    assert (bench.comparisons.waiting, bench.sent) == (0, [])

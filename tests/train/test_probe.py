"""A run answers its probe as a pass of training does, also where a program of its forward answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bloomery.models.decoder import Decoder
from bloomery.models.families import FAMILIES
from bloomery.models.load import load_decoder
from bloomery.models.native import bindings, gemm
from bloomery.models.threads import one_thread
from bloomery.train import probe
from bloomery.train.full import FullParameters
from bloomery.train.lora import Lora
from bloomery.train.probe import Answerer, answer_probe
from bloomery.train.trainable import Trainable
from bloomery.types.operations import LoraSpec
from bloomery.types.probe import TrainerSide
from tests.engine.test_plain import restored_threads
from tests.models.builders import saved
from tests.train import builders

QUICK = ("qwen3", "gemma4")
MULTIPLIES = gemm.multiplies(torch.empty(0))


def trainable(decoder: Decoder, rank: int) -> Trainable:
    spec = LoraSpec(rank=rank, seed=3)
    return Lora(decoder, spec) if rank else FullParameters(decoder, spec)


def moved(weights: Trainable) -> Iterator[TrainerSide]:
    """What a pass says, of other weights each time."""
    generator = torch.Generator().manual_seed(0)
    while True:
        weights.masters += 0.02 * torch.randn(weights.masters.shape, generator=generator)
        weights.refresh()
        yield answer_probe(weights)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Trainable]:
    """Whose answers passes gave since."""
    seen: list[Trainable] = []

    def counted(weights: Trainable) -> TrainerSide:
        seen.append(weights)
        return answer_probe(weights)

    monkeypatch.setattr(probe, "answer_probe", counted)
    return seen


@pytest.mark.parametrize("rank", [8, 0])
@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in sorted(FAMILIES) if family not in QUICK)])
def test_answers_have_the_bits_of_a_pass_of_training(family: str, rank: int, tmp_path: Path) -> None:
    weights = trainable(load_decoder(saved(family, tmp_path), dtype=torch.float32), rank)
    answerer = Answerer(weights)
    told = [wanted for _, wanted in zip(range(6), moved(weights), strict=False) if answerer.answer() == wanted]
    assert len(set(told)) == 6


@pytest.mark.skipif(not MULTIPLIES, reason="there are no kernels of ours here, of which programs are made")
@pytest.mark.parametrize("rank", [8, 0])
def test_the_fourth_answer_is_a_programs(rank: int, passes: list[Trainable]) -> None:
    weights = trainable(builders.decoder(), rank)
    answerer = Answerer(weights)
    for number, wanted in zip(range(8), moved(weights), strict=False):
        assert answerer.answer() == wanted
        assert len(passes) == min(number + 1, 3)


@pytest.mark.skipif(not MULTIPLIES, reason="there are no kernels of ours here, of which programs are made")
def test_a_program_that_gives_other_bits_is_answered_with_never(
    passes: list[Trainable], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = trainable(builders.decoder(), 8)
    answerer = Answerer(weights)
    monkeypatch.setattr(bindings, "run", lambda words, calls: None)
    for wanted, _ in zip(moved(weights), range(6), strict=False):
        assert answerer.answer() == wanted
    assert len(passes) == 6
    assert [record.message for record in caplog.records] == [
        "a program gave other bits than the pass that it is for: this run answers its probe call by call"
    ]


def test_what_lies_somewhere_else_is_read_there(passes: list[Trainable]) -> None:
    weights = trainable(builders.decoder(), 8)
    assert isinstance(weights, Lora)
    answerer = Answerer(weights)
    for number, wanted in zip(range(10), moved(weights), strict=False):
        if number == 5:
            weights._adapter = weights._adapter.copy()
        assert answerer.answer() == wanted
    if MULTIPLIES:
        assert len(passes) == 6


def test_a_program_for_some_threads_is_none_for_others(passes: list[Trainable]) -> None:
    weights = trainable(builders.decoder(), 8)
    answerer = Answerer(weights)
    with restored_threads():
        torch.set_num_threads(2)
        for wanted, _ in zip(moved(weights), range(4), strict=False):
            assert answerer.answer() == wanted
        before = len(passes)
        with one_thread():
            assert answerer.answer() == answer_probe(weights)
        assert len(passes) == before + 1


def test_what_no_program_computes_is_looked_at_once(passes: list[Trainable], monkeypatch: pytest.MonkeyPatch) -> None:
    weights, recorded = trainable(builders.decoder(experts=True), 8), []
    answerer, record = Answerer(weights), probe._record
    monkeypatch.setattr(probe, "_record", lambda asked: recorded.append(asked) or record(asked))
    for wanted, _ in zip(moved(weights), range(5), strict=False):
        assert answerer.answer() == wanted
    assert len(passes) == 5
    assert len(recorded) == (1 if MULTIPLIES else 0)

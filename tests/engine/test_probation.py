"""No request gets a version before the sampler has answered its probe as its trainer does, and has moved as far as its trainer did."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import msgspec
import numpy as np
import pytest
import torch

from bloomery.infer.probe import Answerer, Probation, trainer_side
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models.families import FAMILIES
from bloomery.models.form import Form, plain_form
from bloomery.models.load import load_decoder
from bloomery.models.native import gemm
from bloomery.models.packed import pack
from bloomery.train.probe import answer_probe
from bloomery.types.errors import Corrupt
from bloomery.types.probe import Floats, ProbeAnswer, logprobs_of, probe_key, probe_tokens
from tests.engine.faults import FORM, NUMERICS, World, world
from tests.engine.forward_faults import FORWARD_FAULTS
from tests.engine.test_kill_list import ask
from tests.models.builders import saved
from tests.train.builders import BASE_HASH


def test_a_version_says_what_it_moved_from_and_how_far(tmp_path: Path) -> None:
    made = world(tmp_path, 8)
    sampler = made.sampler()
    ask(sampler, made.old)
    ask(sampler, made.new)
    old, new = (sampler.versions.proved[weights.version].probe for weights in (made.old, made.new))
    assert old is not None
    assert new is not None
    # The first of the run was never asked here, so the base it is.
    assert (old.against, new.against) == (BASE_HASH, made.old.version)
    for probed in (old, new):
        assert (probed.expected, probed.bit_equal, probed.tells) == ("published", True, True)
        assert probed.moved == probed.predicted > 0.01


def test_a_version_without_a_stored_answer_is_held_against_a_forward_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path, 8)
    made.blobs.delete(probe_key(made.new.version))
    sampler = made.sampler()
    assert len(ask(sampler, made.new).tokens[0]) == 8
    probe = sampler.versions.proved[made.new.version].probe
    assert probe is not None
    assert (probe.expected, probe.bit_equal) == ("here", True)
    FORWARD_FAULTS[0].inject(monkeypatch, made)
    assert ask(made.sampler(), made.new).tokens == {}


def test_an_answer_of_other_tokens_is_passed_over(tmp_path: Path) -> None:
    made = world(tmp_path, 8)
    answer = msgspec.json.decode(made.blobs.get(probe_key(made.new.version)), type=ProbeAnswer)
    other = msgspec.structs.replace(answer, tokens=answer.tokens[::-1])
    made.blobs.put(probe_key(made.new.version), other.to_json())
    sampler = made.sampler()
    ask(sampler, made.new)
    probe = sampler.versions.proved[made.new.version].probe
    assert probe is not None
    assert probe.expected == "here"


def test_a_stored_answer_of_another_version_is_refused(tmp_path: Path) -> None:
    made = world(tmp_path, 8)
    made.blobs.put(probe_key(made.new.version), made.blobs.get(probe_key(made.old.version)))
    failure = ask(made.sampler(), made.new).failure
    assert failure is not None
    assert f"is one of version {made.old.version}" in failure.message


def test_a_trainer_of_other_weights_is_not_believed(tmp_path: Path) -> None:
    made = world(tmp_path, 8)
    answer = msgspec.json.decode(made.blobs.get(probe_key(made.new.version)), type=ProbeAnswer)
    theirs = msgspec.json.decode(made.blobs.get(probe_key(made.first.version)), type=ProbeAnswer)
    made.blobs.put(probe_key(made.new.version), msgspec.structs.replace(answer, logprobs=theirs.logprobs).to_json())
    failure = ask(made.sampler(), made.new).failure
    assert failure is not None
    assert "is not served" in failure.message


def test_where_bits_are_not_promised_rounding_is_served_and_standing_still_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path, 8, learning_rate=1e-3)
    form = plain_form(made.base)
    assert len(ask(made.sampler(form), made.new).tokens[0]) == 8
    FORWARD_FAULTS[0].inject(monkeypatch, made)
    refused = ask(made.sampler(form), made.new)
    assert refused.tokens == {}
    assert refused.failure is not None
    assert "does not compute with what was trained" in refused.failure.message


def test_the_runs_own_forward_says_the_same_as_a_forward_of_what_it_published(tmp_path: Path) -> None:
    for rank in (8, 0):
        made = world(tmp_path / str(rank), rank)
        told = answer_probe(made.run.weights)
        model = made.shelf.load(made.new)
        assert np.array_equal(trainer_side(model, told.tokens), logprobs_of(model.told))
        assert told.logprobs == model.told.logprobs


QUICK = ("qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in sorted(FAMILIES) if family not in QUICK)])
def test_every_architecture_answers_a_probe_with_the_trainers_bits(family: str, tmp_path: Path) -> None:
    decoder = load_decoder(saved(family, tmp_path), dtype=torch.float32)
    tokens = probe_tokens(decoder.config.vocab_size, decoder.config.context)
    model, twin = Model("v", decoder, None), pack(decoder)
    theirs = trainer_side(model, tokens)
    assert np.array_equal(Answerer(decoder, FORM, lambda plain: twin).ask(model, tokens), theirs)
    assert np.array_equal(Answerer(decoder, Form(), lambda plain: plain).ask(model, tokens), theirs)


@pytest.mark.parametrize("rank", [8, 0])
def test_who_has_answered_for_a_version_answers_for_the_next_ones_with_their_trainers_bits(rank: int, tmp_path: Path) -> None:
    made = world(tmp_path, rank)
    # Without pad rows, as where there are kernels of our own.
    tokens, form = probe_tokens(300, 1024), FORM._replace(row_pad=1)
    answerer = Answerer(made.base, form, Sampler(made.base, made.shelf, form=form).computed_with)
    for weights in (made.first, made.old, made.new, made.old, made.first):
        model = made.shelf.load(weights)
        assert np.array_equal(answerer.ask(model, tokens), trainer_side(model, tokens))
    if gemm.multiplies(made.base.embedding):
        # The second was recorded, its prefill and its step, and moved to the others.
        assert answerer._runner._recorded.replayed == 6


def test_versions_are_asked_at_the_same_time_by_who_is_idle_and_one_that_broke_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(tmp_path, 8)
    base, models = Model(BASE_HASH, made.base, None), [made.shelf.load(weights) for weights in (made.old, made.new)]
    probation = Probation(base, FORM, Sampler(made.base, made.shelf, form=FORM).computed_with, exact=True, numerics=NUMERICS)
    asked, met = Answerer.ask, Barrier(2)

    def together(self: Answerer, model: Model, tokens: tuple[int, ...]) -> Floats:
        met.wait(timeout=60)
        return asked(self, model, tokens)

    def broken(self: Answerer, model: Model, tokens: tuple[int, ...]) -> Floats:
        raise RuntimeError("broke")

    monkeypatch.setattr(Answerer, "ask", together)
    with ThreadPoolExecutor(2) as pool:
        assert all(model.probed is not None and model.probed.bit_equal for model in pool.map(probation.examine, models))
    assert len(probation._idle) == 2
    monkeypatch.setattr(Answerer, "ask", broken)
    with pytest.raises(RuntimeError, match="broke"):
        probation.examine(models[0])
    assert len(probation._idle) == 1


def test_weights_that_nobody_proved_are_asked_nothing(tmp_path: Path) -> None:
    made = world(tmp_path, 8)
    base = Model(BASE_HASH, made.base, None)
    probation = Probation(base, FORM, Sampler(made.base, made.shelf, form=FORM).computed_with, exact=True)
    assert probation.examine(base) is base


def test_a_base_whose_sides_are_far_apart_is_no_measure_for_versions(tmp_path: Path) -> None:
    made: World = world(tmp_path, 8)
    base = Model(BASE_HASH, made.base, None)
    told = ProbeAnswer(version="b", parent="", numerics="mine", tokens=probe_tokens(300, 1024), logprobs=bytes(4 * 17))
    with pytest.raises(Corrupt, match="base"):
        Probation(base, FORM, Sampler(made.base, made.shelf, form=FORM).computed_with, exact=True, numerics="mine", told=told)


def test_what_other_numerics_have_told_is_computed_anew(tmp_path: Path) -> None:
    made: World = world(tmp_path, 8)
    base = Model(BASE_HASH, made.base, None)
    told = ProbeAnswer(version="b", parent="", numerics="another machine's", tokens=probe_tokens(300, 1024), logprobs=bytes(4 * 17))
    probation = Probation(base, FORM, Sampler(made.base, made.shelf, form=FORM).computed_with, exact=True, numerics="mine", told=told)
    assert np.array_equal(probation.base.sampler, probation.base.trainer)

"""Answers that have parted from their drafts and are taken on by what these say elsewhere: the same answers, in fewer steps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bloomery.infer import stepper
from bloomery.infer.drawn import Drawn
from bloomery.infer.plan import Limits, Sample
from bloomery.infer.request import Request
from bloomery.infer.retrace import Retrace, whole_width
from bloomery.infer.runner import Runner
from bloomery.infer.stepper import Stepper
from bloomery.models.decoder import Decoder
from bloomery.types.generation import Generate
from tests.infer.builders import adapter, answers, request, sampler
from tests.infer.builders import prompt as make_prompt
from tests.infer.test_drafts import TIGHT, Drafts, continuations, events_of, in_common, kept, told
from tests.train.builders import VOCAB, decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


def draft() -> list[int]:
    return np.random.default_rng(3).integers(0, 1000, 60).tolist()


def test_an_answer_that_lacks_a_token_or_has_one_more_is_found_again():
    for sampled, place in (([*draft()[:9], 7, *draft()[9:20]], 20), ([*draft()[:9], *draft()[12:20]], 20), ([*draft()[:9], 7, *draft()[10:20]], 20)):
        retrace = Retrace(draft())
        assert retrace.guesses(sampled, 3) == tuple(draft()[place : place + 3])


def test_the_longest_beginning_wins_and_among_equals_the_nearest():
    retrace = Retrace([1, 2, 3, 9, 4, 3, 8, 5, 3, 7])
    assert retrace.guesses([1, 2, 3], 1) == (9,)
    assert retrace.guesses([6, 6, 6, 6, 6, 6, 4, 3], 1) == (8,)
    assert Retrace([4, 3, 1, 4, 3, 2, 4, 3, 5]).guesses([9, 9, 9, 4, 3], 1) == (2,)
    assert retrace.guesses([6], 1) == ()
    assert Retrace([]).guesses([6], 1) == Retrace([6]).guesses([6], 1) == ()


def test_what_is_right_makes_guesses_more_and_what_is_wrong_makes_them_fewer():
    retrace, found = Retrace([*range(60)]), []
    for fed, right in ((3, 3), (7, 7), (15, 15), (15, 2), (15, 0), (7, 0), (3, 0), (1, 0)):
        assert retrace.width == fed
        retrace.note(fed, right)
        found.append(retrace.width)
    assert found == [7, 15, 15, 15, 7, 3, 1, 0]


def test_who_is_guessed_wrong_is_seen_to_be_right_again_without_a_row():
    retrace, said = Retrace([*range(60)]), [5, 6, 7]
    retrace.note(3, 0)
    retrace.note(1, 0)
    for token in (90, 91, 92, 93, 94, 30, 31, 32, 33):
        retrace.see(said, token)
        assert not retrace.width
        said.append(token)
    assert len(said) == 12
    retrace.see(said, 34)
    assert retrace.width == 1


def test_so_many_are_fed_as_few_programs_are_recorded_for():
    assert [whole_width(count) for count in range(17)] == [0, 1, 1, 3, 3, 3, 3, 7, 7, 7, 7, 7, 7, 7, 7, 15, 15]


@pytest.mark.parametrize("samples", [1, 3])
def test_steps_that_may_guess_have_few_numbers_of_rows_and_the_same_bits(model, monkeypatch, samples):
    ask = request("r", make_prompt(45), num_samples=samples, max_tokens=100)
    plain = events_of(sampler(model), ask)
    rows, decode = [], Runner.decode
    monkeypatch.setattr(Runner, "decode", lambda self, feeds: rows.append(len(feeds)) or decode(self, feeds))
    assert told(events_of(sampler(model), parted(ask, continuations(plain, samples), 9, 1))) == told(plain)
    # Fewer than its samples where some have ended, and where nobody may guess: at the end of a block, and of an answer.
    assert set(rows) <= {1, 2, 3, 4, 8, 12, 16}
    assert 4 in rows
    assert max(rows) > 4


def shifted(truth: Drafts, place: int, more: int) -> Drafts:
    """Tokens too many at a place, or too few, in all of them."""
    cut = [(*tokens[:place], *[VOCAB - 1 - tokens[place]] * max(0, more), *tokens[place + max(0, -more) :]) for tokens in truth]
    return tuple(each[: len(tokens)] for each, tokens in zip(cut, truth, strict=True))


def parted(ask: Generate, truth: Drafts, place: int, more: int) -> Generate:
    return replace(ask, drafts=shifted(truth, place, more))


@pytest.mark.parametrize("more", [1, 2, -2])
def test_an_answer_that_is_its_draft_moved_takes_few_steps_and_has_the_same_bits(model, more):
    ask = request("r", make_prompt(45), num_samples=2, max_tokens=100, asked={"top_logprobs": 2})
    plain = events_of(sampler(model), ask)
    engine, steps, events = sampler(model), 0, []
    engine.submit(parted(ask, continuations(plain, 2), 9, more))
    while engine.busy:
        events += engine.step()
        steps += 1
    assert told(events) == told(plain)
    # Behind the ninth token of a hundred: three to fifteen guesses and a token of their own a step, fewer and at the end of a block.
    assert steps < 35
    assert kept(events) < 2 * 12


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    place=st.integers(0, 30),
    more=st.integers(-4, 4),
    stops=st.integers(0, 12),
    limits=st.sampled_from([None, TIGHT, Limits(slots=1, token_budget=25), Limits(slots=5, token_budget=40)]),
    shape=st.sampled_from([{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"repetition_penalty": 1.4}, {"frequency_penalty": 0.7}]),
    tokens=st.integers(1, 50),
)
def test_no_retraced_draft_changes_what_a_request_says(model, place, more, stops, limits, shape, tokens):
    ask = request("r", make_prompt(20), num_samples=3, max_tokens=tokens, stop_tokens=tuple(range(stops)), seed=3, asked={"top_logprobs": 1}, **shape)
    plain = events_of(sampler(model), ask)
    truth = continuations(plain, 3)
    guesses = shifted(truth, min(place, min(map(len, truth)) - 1), more)
    beside = request("beside", make_prompt(9), num_samples=2, max_tokens=12)
    reused = events_of(sampler(model, limits=limits), beside, replace(ask, drafts=guesses))
    mine = [event for event in reused if event.request_id == "r"]
    assert told(mine) == told(plain)
    assert answers(mine)["r"].reasons == answers(plain)["r"].reasons
    assert kept(mine) == sum(map(in_common, guesses, truth))
    assert answers(reused)["beside"].told == answers(events_of(sampler(model), beside))["beside"].told


@pytest.mark.parametrize("kind", ["half", "experts", "routing"])
def test_other_kernels_and_experts_agree_to_the_bit_too(kind):
    other = decoder(dtype=torch.bfloat16) if kind == "half" else decoder(experts=True)
    asked = {"routing": True, "routing_weights": True} if kind == "routing" else {}
    ask = request("r", make_prompt(33), num_samples=2, max_tokens=60, asked=asked)
    plain = events_of(sampler(other), ask)
    assert told(events_of(sampler(other), parted(ask, continuations(plain, 2), 5, 1))) == told(plain)


def test_versions_side_by_side_agree_and_what_is_left_behind_is_right(model):
    versions = {"one": adapter(model, 1), "two": adapter(model, 2)}
    asks = [request(name, make_prompt(30), version=name, max_tokens=60) for name in versions]
    plain = [events_of(sampler(model, versions), ask) for ask in asks]
    truths = [tuple(map(tuple, answers(events)[ask.request_id].tokens.values())) for ask, events in zip(asks, plain, strict=True)]
    engine = sampler(model, versions)
    reused = events_of(engine, *(parted(ask, truth, 4, 1) for ask, truth in zip(asks, truths, strict=True)))
    assert told(reused) == told([event for events in plain for event in events])
    again = request("again", [*make_prompt(30), *truths[0][0]], version="one", max_tokens=9)
    assert told(events_of(engine, again)) == told(events_of(sampler(model, versions), again))


def test_a_trusted_guess_would_be_seen(model, monkeypatch):
    """The planted bug: what is guessed is taken for what is drawn."""
    ask = request("r", make_prompt(45), max_tokens=60)
    plain = events_of(sampler(model), ask)
    asked = replace(ask, drafts=tuple((*tokens[:9], *tokens[20:40], *tokens[9:20]) for tokens in continuations(plain, 1)))
    assert told(events_of(sampler(model), asked)) == told(plain)
    retrace = stepper.Stepper._retrace

    def trusting(self: Stepper, sample: Sample, request: Request, drawn: Drawn, row: int, fed: int) -> None:
        drawn.chosen.tokens_B[row : row + fed] = request.guessed(sample.index)[:fed]
        retrace(self, sample, request, drawn, row, fed)

    monkeypatch.setattr(stepper.Stepper, "_retrace", trusting)
    assert told(events_of(sampler(model), asked)) != told(plain)

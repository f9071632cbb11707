"""Drafts where more than tokens is kept in mind: grammars, layers with a state, weights that are swapped in the middle."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bloomery.infer.grammar import Grammars, Guide
from bloomery.infer.plan import Limits
from bloomery.types.generation import Generate, SampledToken, SamplerEvent
from tests.infer import test_grammar, test_states
from tests.infer.builders import adapter, answers, drain, prompt, request
from tests.infer.test_drafts import Drafts, continuations, events_of, in_common, kept, told
from tests.infer.test_grammar import END, guided, regex, schema
from tests.infer.test_states import CHUNK, MakeSampler
from tests.infer.test_swap import NEW, continued, follower, serving
from tests.render.builders import byte_level, write
from tests.train.builders import VOCAB, decoder

sampler, model = test_states.sampler, test_states.model
"""Fixtures of models with states."""


def wrong_at(truth: Drafts, place: int) -> Drafts:
    """The first draft is right, every other wrong from a place on."""
    return tuple(
        tokens if not number else (*tokens[:place], *((token + 1) % VOCAB for token in tokens[place:])) for number, tokens in enumerate(truth)
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("stops", [(END,), ()])
@pytest.mark.parametrize("grammar", [schema({"type": "array", "minItems": 3, "maxItems": 9, "items": {"type": "boolean"}}), regex("(ab|c){4,30}d")])
def test_an_answer_that_follows_a_grammar_is_the_same_with_a_draft(tmp_path: Path, grammar, stops, place):
    dense, grammars = decoder(), Grammars(write(tmp_path, byte_level()), VOCAB)
    ask = guided("r", grammar, stop_tokens=stops, max_tokens=120)
    plain = events_of(test_grammar.sampler(dense, grammars), ask)
    truth = continuations(plain, 4)
    guesses = wrong_at(truth, place)
    asked = {"grammar": grammar, "drafts": guesses}
    engine = test_grammar.sampler(dense, grammars, Limits(slots=3, token_budget=60))
    beside = request("beside", prompt(9), max_tokens=30)
    reused = events_of(engine, beside, guided("r", grammar, stop_tokens=stops, max_tokens=120, asked=asked))
    mine: list[SamplerEvent] = [event for event in reused if event.request_id == "r"]
    assert told(mine) == told(plain)
    assert answers(mine)["r"].reasons == answers(plain)["r"].reasons
    assert kept(mine) == sum(map(in_common, guesses, truth))


def test_a_draft_that_a_grammar_forbids_is_not_taken(tmp_path: Path):
    dense, grammars = decoder(), Grammars(write(tmp_path, byte_level()), VOCAB)
    grammar = regex("[ab]{20}")
    free = continuations(events_of(test_grammar.sampler(dense, grammars), request("r", prompt(20), num_samples=4, max_tokens=30)), 4)
    plain = events_of(test_grammar.sampler(dense, grammars), guided("r", grammar, max_tokens=30))
    reused = events_of(test_grammar.sampler(dense, grammars), guided("r", grammar, max_tokens=30, asked={"grammar": grammar, "drafts": free}))
    assert told(reused) == told(plain)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 3, CHUNK - 1, 2 * CHUNK, 45])
@pytest.mark.parametrize("limits", [None, Limits(slots=2, token_budget=40)], ids=["roomy", "tight"])
def test_a_state_that_went_on_over_a_wrong_guess_is_computed_again(sampler: MakeSampler, place: int, limits: Limits | None):
    def ask(guesses: Drafts = (), stops: tuple[int, ...] = ()) -> Generate:
        return request("r", prompt(21), num_samples=3, max_tokens=50, stop_tokens=stops, asked={"drafts": guesses})

    for stops in ((), tuple(range(4))):
        plain = events_of(sampler(), ask(stops=stops))
        truth = continuations(plain, 3)
        guesses = wrong_at(truth, place)
        beside = request("beside", prompt(9), max_tokens=20)
        engine = sampler(limits)
        reused = [event for event in events_of(engine, beside, ask(guesses, stops)) if event.request_id == "r"]
        assert told(reused) == told(plain)
        assert kept(reused) == sum(map(in_common, guesses, truth))
        # What it leaves behind is right too.
        again = request("again", [*prompt(21), *truth[0]], max_tokens=9)
        assert told(events_of(engine, again)) == told(events_of(sampler(), again))


def test_tokens_behind_a_swap_are_verified_by_the_new_weights():
    dense = decoder()
    new = adapter(dense, 3)
    ask = follower("r", prompt(30), max_tokens=60)
    whole = continuations(events_of(serving(dense, new), ask), 1)
    engine = serving(dense, new, Limits(slots=2, token_budget=32))
    engine.submit(replace(ask, drafts=whole))
    events = [event for _ in range(2) for event in engine.step()]
    engine.swap("policy", NEW, "recompute")
    events += drain(engine)
    tokens = [event for event in events if isinstance(event, SampledToken)]
    (changed,) = [event.position for event in tokens if event.version == "new"]
    assert 0 < changed < 60
    begun = list(whole[0][:changed])
    assert [event.token for event in tokens] == continued(dense, new, prompt(30), ask, begun)
    assert [event.kept for event in tokens] == [True] * kept(tokens) + [False] * (60 - kept(tokens))


def test_a_guide_that_breaks_over_a_draft_ends_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dense, grammars = decoder(), Grammars(write(tmp_path, byte_level()), VOCAB)
    grammar = regex("[ab]{20}")
    truth = continuations(events_of(test_grammar.sampler(dense, grammars), guided("r", grammar, max_tokens=30)), 4)
    take = Guide.take

    def breaking(guide: Guide, *tokens: int) -> None:
        if len(guide._taken) == 5:
            raise ValueError("out of order")
        take(guide, *tokens)

    monkeypatch.setattr(Guide, "take", breaking)
    beside = request("beside", prompt(9), max_tokens=30)
    engine = test_grammar.sampler(dense, grammars)
    found = answers(events_of(engine, beside, guided("r", grammar, max_tokens=30, asked={"grammar": grammar, "drafts": truth})))
    assert found["r"].failure.message == "its grammar could not be followed: ValueError: out of order"
    assert found["beside"].reasons == {0: "length"}
    assert not engine.in_hand

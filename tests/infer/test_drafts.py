"""Drafts against plain sampling: equal means equal bits, whatever was guessed and whoever samples beside it."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bloomery.infer import drafts as drafts_module
from bloomery.infer.plan import Limits
from bloomery.infer.request import Request
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.generation import Abort, Generate, SampledToken, SamplerEvent
from tests.infer.builders import adapter, answers, drain, generate, prompt, request, sampler
from tests.train.builders import VOCAB, decoder

TIGHT = Limits(slots=3, token_budget=40, cache_tokens=5 * BLOCK_PLACES)
Drafts = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


@pytest.fixture(scope="module")
def versions(model: Decoder) -> Mapping[str, FusedAdapter]:
    """`old`, a tiny and a small step from it, and other weights altogether."""
    old = adapter(model, 1)
    return {"old": old, "tiny": moved(old, 1e-4), "small": moved(old, 1e-3), "other": adapter(model, 2)}


def moved(weights: FusedAdapter, step: float) -> FusedAdapter:
    generator, other = torch.Generator().manual_seed(7), deepcopy(weights)
    for tensor in other.tensors:
        # Zeros around the factors stay.
        tensor += step * torch.randn(tensor.shape, generator=generator) * (tensor != 0)
    return other


def events_of(engine: Sampler, *requests: Generate) -> list[SamplerEvent]:
    for each in requests:
        engine.submit(each)
    return drain(engine)


def told(events: Sequence[SamplerEvent]) -> list[dict[str, Any]]:
    """Every token with all that is said of it, but for whether it was kept."""
    tokens = [event for event in events if isinstance(event, SampledToken)]
    named = sorted(tokens, key=lambda event: (event.request_id, event.sample, event.position))
    return [{name: getattr(event, name) for name in event.__struct_fields__ if name != "kept"} for event in named]


def drafted(ask: Generate, guesses: Drafts) -> Generate:
    return replace(ask, drafts=guesses)


def continuations(events: Sequence[SamplerEvent], samples: int) -> Drafts:
    found = answers(events)["r"].tokens
    return tuple(tuple(found.get(index, ())) for index in range(samples))


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def kept(events: Sequence[SamplerEvent]) -> int:
    return sum(event.kept for event in events if isinstance(event, SampledToken))


@pytest.mark.slow
@pytest.mark.parametrize("limits", [None, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("new", ["old", "tiny", "small", "other"])
def test_a_draft_changes_no_bit_of_the_answer_whatever_became_of_the_weights(model, versions, new, limits):
    def ask(version: str) -> Generate:
        return request("r", prompt(45), version=version, num_samples=4, max_tokens=40, seed=5, asked={"top_logprobs": 2})

    guesses = continuations(events_of(sampler(model, versions), ask("old")), 4)
    plain = events_of(sampler(model, versions), ask(new))
    engine = sampler(model, versions, limits)
    reused = events_of(engine, drafted(ask(new), guesses))
    assert told(reused) == told(plain)
    assert answers(reused)["r"].reasons == answers(plain)["r"].reasons
    agreed = sum(map(in_common, guesses, continuations(plain, 4)))
    assert kept(reused) == engine.tokens_kept == agreed
    assert agreed in {"old": [160], "tiny": range(60, 160), "small": range(10, 60), "other": range(10)}[new]


def test_a_draft_that_is_right_takes_no_decode_step(model):
    ask = request("r", prompt(45), num_samples=2, max_tokens=40)
    engine = sampler(model)
    guesses = continuations(events_of(sampler(model), ask), 2)
    engine.submit(drafted(ask, guesses))
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    # The second sample begins where the first has left the prompt.
    assert steps == 2
    assert engine.tokens_prefilled == 44 + 2 * 40


@pytest.mark.parametrize("wrong", [0, 1, 62, 63, 64, 65, 140, 149])
def test_a_long_draft_is_right_up_to_its_first_wrong_token_wherever_that_is(model, wrong):
    ask = request("r", prompt(45), max_tokens=150)
    plain = events_of(sampler(model), ask)
    (truth,) = continuations(plain, 1)
    events = events_of(sampler(model), drafted(ask, ((*truth[:wrong], (truth[wrong] + 1) % VOCAB, *truth[wrong + 1 :]),)))
    assert told(events) == told(plain)
    assert kept(events) == wrong


@st.composite
def guessed(draw: st.DrawFn, truth: Drafts, length: int) -> Drafts:
    """Of each sample: nothing, garbage, or its beginning with something wrong somewhere, or behind it."""
    guesses = []
    for tokens in truth:
        start = tokens[: draw(st.integers(0, len(tokens)))]
        rest = draw(st.lists(st.integers(0, VOCAB - 1), max_size=length - len(start)))
        guesses.append((*start, *rest))
    return tuple(guesses)


params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.3]),
        "top_k": st.sampled_from([1, 5]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.05]),
        "presence_penalty": st.sampled_from([1.5]),
        "frequency_penalty": st.sampled_from([0.7]),
        "repetition_penalty": st.sampled_from([1.4]),
        "logit_bias": st.just(((3, 5.0), (8, -20.0))),
        "min_tokens": st.integers(0, 3),
    },
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    shape=params,
    length=st.integers(1, 40),
    tokens=st.integers(1, 24),
    samples=st.integers(1, 3),
    stops=st.integers(0, 60),
    limits=st.sampled_from([None, TIGHT, Limits(slots=1, token_budget=25)]),
    scored=st.booleans(),
)
def test_no_draft_changes_what_any_request_says(model, data, shape, length, tokens, samples, stops, limits, scored):
    shape = {**shape, "min_tokens": min(shape.get("min_tokens", 0), tokens)}
    asked = {"prompt_logprobs": scored, "top_logprobs": 1}
    ask = request("r", prompt(length), num_samples=samples, max_tokens=tokens, stop_tokens=tuple(range(stops)), seed=3, asked=asked, **shape)
    plain = events_of(sampler(model), ask)
    guesses = data.draw(guessed(continuations(plain, samples), tokens))
    engine = sampler(model, limits=limits)
    neighbour = request("other", prompt(9), num_samples=2, max_tokens=12)
    reused = events_of(engine, neighbour, drafted(ask, guesses))
    mine = [event for event in reused if event.request_id == "r"]
    assert told(mine) == told(plain)
    assert answers(mine)["r"].reasons == answers(plain)["r"].reasons
    assert answers(reused)["other"].told == generate(sampler(model), neighbour)["other"].told
    assert kept(mine) == sum(map(in_common, guesses, continuations(plain, samples)))
    if scored:
        assert answers(mine)["r"].score == answers(plain)["r"].score


def test_a_trusted_draft_would_be_seen(model, versions, monkeypatch):
    """The planted bug: whatever was guessed is taken."""
    ask = request("r", prompt(30), version="other", num_samples=2, max_tokens=20)
    guesses = continuations(events_of(sampler(model, versions), request("r", prompt(30), version="old", num_samples=2, max_tokens=20)), 2)
    plain = told(events_of(sampler(model, versions), ask))
    assert told(events_of(sampler(model, versions), drafted(ask, guesses))) == plain

    def trusting(tokens: SampledToken, guess: int) -> SampledToken:
        return SampledToken(**{name: getattr(tokens, name) for name in tokens.__struct_fields__} | {"token": guess, "kept": True})

    drawn = drafts_module._drawn

    def trusted(guess: drafts_module.Guess, asked: Request, runner: Any) -> Any:
        for token, guessed_token in zip(drawn(guess, asked, runner), asked.guessed(guess.feed.sample.index), strict=False):
            yield trusting(token, guessed_token)

    monkeypatch.setattr(drafts_module, "_drawn", trusted)
    assert told(events_of(sampler(model, versions), drafted(ask, guesses))) != plain


def test_an_aborted_sample_leaves_its_siblings_and_the_cache_whole(model):
    ask = request("r", prompt(60), num_samples=3, max_tokens=60)
    guesses = continuations(events_of(sampler(model), ask), 3)
    engine = sampler(model, limits=Limits(slots=3, token_budget=40))
    engine.submit(drafted(ask, guesses))
    events = [event for _ in range(4) for event in engine.step()]
    engine.abort(Abort(request_id="r", sample=1))
    events += drain(engine)
    found = answers(events)["r"]
    assert found.reasons == {0: "length", 1: "abort", 2: "length"}
    assert (tuple(found.tokens[0]), tuple(found.tokens[2])) == (guesses[0], guesses[2])
    assert tuple(found.tokens.get(1, ())) == guesses[1][: len(found.tokens.get(1, ()))]
    assert not engine.running_sequences
    assert generate(engine, request("after", prompt(60)))["after"].told == generate(sampler(model), request("after", prompt(60)))["after"].told


def test_another_process_goes_on_with_what_is_left_of_a_draft(model):
    ask = request("r", prompt(30), num_samples=3, max_tokens=30)
    truth = continuations(events_of(sampler(model), ask), 3)
    wrong = (*truth[1][:20], (truth[1][20] + 1) % VOCAB, *truth[1][21:])
    begun = (truth[0][:12], truth[1][:25], ())
    plain = events_of(sampler(model), request("r", prompt(30), num_samples=3, max_tokens=30, asked={"begun": begun}))
    reused = events_of(
        sampler(model), request("r", prompt(30), num_samples=3, max_tokens=30, asked={"begun": begun, "drafts": (truth[0], wrong, truth[2])})
    )
    assert told(reused) == told(plain)
    assert kept(reused) == 18 + 0 + 30


@pytest.mark.parametrize(
    ("guesses", "says"),
    [
        (((1,),), "one for each"),
        (((1,) * 9, ()), "a sample has 8 at most"),
        (((VOCAB,), ()), f"holds token id {VOCAB}"),
        (((-1,), ()), "holds token id -1"),
    ],
    ids=str,
)
def test_a_draft_that_cannot_be_one_is_refused(model, guesses, says):
    found = generate(sampler(model), request("r", prompt(10), num_samples=2, max_tokens=8, asked={"drafts": guesses}))["r"]
    assert found.failure.category == "user"
    assert found.failure.field == "drafts"
    assert says in found.failure.message


def test_a_draft_longer_than_the_context_is_refused(model):
    length = model.config.context - 4
    found = generate(sampler(model), request("r", prompt(length), max_tokens=8, asked={"drafts": ((1,) * 5,)}))["r"]
    assert "a sample has 4 at most" in found.failure.message


@pytest.mark.parametrize(("dtype", "experts"), [(torch.bfloat16, False), (torch.float32, True)])
def test_half_precision_and_routing_agree_to_the_bit_too(dtype, experts):
    other = decoder(dtype=dtype, experts=experts)
    asked = {"routing": experts, "routing_weights": experts}
    ask = request("r", prompt(33), num_samples=2, max_tokens=20, asked=asked)
    plain = events_of(sampler(other), ask)
    truth = continuations(plain, 2)
    wrong = (truth[0], (*truth[1][:7], (truth[1][7] + 1) % VOCAB, *truth[1][8:]))
    reused = events_of(sampler(other), request("r", prompt(33), num_samples=2, max_tokens=20, asked=asked | {"drafts": wrong}))
    assert told(reused) == told(plain)
    assert kept(reused) == 27
    prompts = [[event for event in events if type(event).__name__ == "PromptRouted"] for events in (plain, reused)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == experts


def test_broken_weights_say_so_of_a_draft_too(model):
    broken = adapter(model, 0)
    broken.get("layers.1.qkv").b.fill_(float("nan"))
    engine = sampler(model, {"broken": broken})
    ask = request("r", prompt(20), version="broken", num_samples=2, max_tokens=8, asked={"drafts": ((1, 2, 3), (4, 5))})
    found = generate(engine, ask)["r"]
    assert "not finite" in found.failure.message
    assert not found.tokens
    after = generate(engine, request("after", prompt(20)))["after"]
    assert after.told == generate(sampler(model), request("after", prompt(20)))["after"].told

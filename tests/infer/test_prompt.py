"""Everything that can be asked about a prompt, against the trainer's logits of the whole sequence: equal means equal bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from bloomery.infer.plan import Limits
from bloomery.infer.scoring import chunk_rows
from bloomery.models.head import logits, logsumexp
from bloomery.models.pads import BLOCK_PLACES
from bloomery.models.targets import UNEMBED
from bloomery.types.arrays import Array
from bloomery.types.generation import NO_LOGPROB, PromptTargets
from tests.infer.builders import Answer, adapter, full_hidden, generate, prompt, request, sampler
from tests.train.builders import VOCAB, decoder

FORMS = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
TIGHT = Limits(slots=2, token_budget=44)
ROOMY = Limits(slots=16, token_budget=2048, kept_tokens=4096)


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.fixture(scope="module")
def adapters(model):
    return {"v1": adapter(model, 1)}


def cells(*pairs: tuple[int, int]) -> PromptTargets:
    positions, ids = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    return PromptTargets(positions=Array.of(positions), ids=Array.of(ids))


def table(model, tokens, weights=None) -> np.ndarray:
    """Log-probabilities of every token after every token [P, V], with the whole sequence in one forward."""
    with torch.no_grad():
        hidden_RD = full_hidden(model, tokens, weights)
        logits_RV = logits(hidden_RD, model.head_weight, weights.get(UNEMBED) if weights is not None else None)
        return (logits_RV - logsumexp(logits_RV)[:, None])[: len(tokens)].numpy()


def ask(model, adapters, tokens, asked, *, limits=ROOMY, version="base", **params) -> Answer:
    each = request("r", tokens, version=version, asked=asked, **{"max_tokens": 0, **params})
    answer = generate(sampler(model, adapters, limits), each)["r"]
    assert answer.failure is None, answer.failure
    return answer


@pytest.mark.parametrize(("dtype", "experts"), FORMS)
@pytest.mark.parametrize("limits", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_chosen_tokens_are_scored_at_chosen_places(dtype, experts, limits):
    model, tokens = decoder(dtype=dtype, experts=experts), prompt(130)
    adapters = {"v1": adapter(model, 1)}
    pairs = [(3, 7), (3, 7), (3, 299), (64, 0), (127, 5), (129, 5), (129, 6)]
    answer = ask(model, adapters, tokens, {"targets": cells(*pairs)}, limits=limits, version="v1")
    expected = table(model, tokens, adapters["v1"])
    assert answer.score.target_logprobs.numpy().tolist() == [expected[position - 1, token] for position, token in pairs]


@pytest.mark.parametrize(("dtype", "experts"), FORMS)
def test_drawn_tokens_have_the_models_log_probabilities(dtype, experts):
    model, tokens = decoder(dtype=dtype, experts=experts), prompt(90)
    answer = ask(model, {}, tokens, {"prompt_draws": 5}, limits=TIGHT, temperature=0.8)
    ids, values = answer.score.drawn_ids.numpy(), answer.score.drawn_logprobs.numpy()
    assert ids.shape == values.shape == (89, 5)
    assert np.array_equal(values, np.take_along_axis(table(model, tokens)[:-1], ids.astype(np.int64), 1))


@pytest.mark.parametrize("limits", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_the_place_of_every_token_among_all_is_told(model, limits):
    tokens = prompt(130)
    asked = {"prompt_logprobs": True, "prompt_top_k": VOCAB, "scored_from": 3}
    answer = ask(model, {}, tokens, {**asked, "prompt_ranks": True}, limits=limits)
    order = (-table(model, tokens)).argsort(-1, kind="stable")
    places = [order[position - 1].tolist().index(tokens[position]) + 1 for position in range(3, 130)]
    assert answer.score.ranks.numpy().tolist() == [0, 0, 0, *places]
    assert ask(model, {}, tokens, asked, limits=limits).score.ranks is None


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drawn_tokens_follow_the_distribution_at_the_temperature(model, temperature):
    tokens, count = prompt(6), 4000
    answer = ask(model, {}, tokens, {"prompt_draws": count}, temperature=temperature, top_k=1, top_p=0.1)
    powers = np.exp(table(model, tokens)[:-1].astype(np.float64) / temperature)
    for drawn, weights in zip(answer.score.drawn_ids.numpy(), powers, strict=True):
        expected = weights / weights.sum() * count
        common = np.flatnonzero(expected >= 5)
        observed = np.bincount(drawn, minlength=VOCAB)
        rest = [count - observed[common].sum()], [count - expected[common].sum()]
        assert chisquare([*observed[common], *rest[0]], [*expected[common], *rest[1]]).pvalue > 1e-4


def test_draws_are_the_seeds_alone_and_one_more_changes_none_before(model):
    tokens = prompt(40)
    few, many = (ask(model, {}, tokens, {"prompt_draws": count}, seed=5).score.drawn_ids.numpy() for count in (2, 7))
    assert np.array_equal(few, many[:, :2])
    assert not np.array_equal(few, ask(model, {}, tokens, {"prompt_draws": 2}, seed=6).score.drawn_ids.numpy())
    assert len({tuple(column) for column in many.T.tolist()}) == 7


def test_at_temperature_zero_the_likeliest_token_is_drawn(model):
    answer = ask(model, {}, prompt(40), {"prompt_draws": 3}, temperature=0.0)
    assert np.array_equal(answer.score.drawn_ids.numpy(), table(model, prompt(40))[:-1].argmax(1)[:, None].repeat(3, 1))


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5, 60, 129])
def test_only_the_end_of_a_prompt_is_scored_where_that_is_asked(model, last):
    tokens = prompt(130)
    asked = {"prompt_logprobs": True, "prompt_top_k": 2, "scored_from": 130 - last}
    answer = ask(model, {}, tokens, asked, limits=TIGHT)
    expected = table(model, tokens)
    logprobs, top = answer.score.logprobs.numpy(), answer.score.top_logprobs.numpy()
    assert np.isnan(logprobs[:-last]).all()
    assert logprobs[-last:].tolist() == [expected[position - 1, tokens[position]] for position in range(130 - last, 130)]
    assert (top[:-last] == NO_LOGPROB).all()
    assert (answer.score.top_ids.numpy()[:-last] == 0).all()
    assert np.array_equal(top[-last:], np.sort(expected[129 - last : 129])[:, :-3:-1])


def test_the_parts_of_an_inquiry_have_beginnings_of_their_own(model):
    tokens = prompt(130)
    asked = {"prompt_logprobs": True, "scored_from": 100, "targets": cells((50, 1), (120, 2)), "prompt_draws": 1}
    score = ask(model, {}, tokens, asked, limits=TIGHT).score
    expected = table(model, tokens)
    assert np.isnan(score.logprobs.numpy()).tolist() == [True] * 100 + [False] * 30
    assert score.target_logprobs.numpy().tolist() == [expected[49, 1], expected[119, 2]]
    assert score.drawn_ids.shape == (129, 1)


def test_many_rows_are_scored_in_parts(model):
    wide = decoder()
    rows = chunk_rows(200_000)
    assert 64 <= rows < 130
    assert chunk_rows(VOCAB) > 1024
    assert np.array_equal(ask(wide, {}, prompt(900), {"prompt_logprobs": True}).score.logprobs.numpy()[1:], diagonal(wide, prompt(900)))


def diagonal(model, tokens) -> np.ndarray:
    return np.array([row[token] for row, token in zip(table(model, tokens), tokens[1:], strict=False)], np.float32)


# One token straight from the prefill


@pytest.mark.parametrize(("dtype", "experts"), FORMS)
@pytest.mark.parametrize("length", [1, 2, 4, 5, 77, 512, 513])
def test_one_token_from_the_prefill_is_the_one_that_a_decode_step_gives(dtype, experts, length):
    model = decoder(dtype=dtype, experts=experts)
    params = {"max_tokens": 1, "seed": 9, "temperature": 0.9, "top_k": 50}
    one = ask(model, {}, prompt(length), {"top_logprobs": 3}, limits=TIGHT, **params)
    two = generate(sampler(model, {}, TIGHT), request("r", prompt(length), num_samples=2, asked={"top_logprobs": 3}, **params))["r"]
    assert (one.tokens[0], one.logprobs[0], one.top[0]) == (two.tokens[0], two.logprobs[0], two.top[0])
    assert one.reasons == {0: "length"}


def test_scoring_with_one_token_takes_no_decode_step(model, adapters):
    engine = sampler(model, adapters, ROOMY)
    engine.submit(request("r", prompt(200), version="v1", max_tokens=1, asked={"prompt_logprobs": True}))
    events = engine.step()
    assert [type(event).__name__ for event in events] == ["PromptScored", "SampledToken", "SampleFinished"]
    assert engine.tokens_prefilled == 200
    assert not engine.busy


def test_one_token_that_is_a_stop_token_says_so(model):
    free = ask(model, {}, prompt(30), {}, max_tokens=1)
    stopped = ask(model, {}, prompt(30), {}, max_tokens=1, stop_tokens=(free.tokens[0][0],))
    assert (stopped.tokens, stopped.reasons) == (free.tokens, {0: "stop"})


# Keys and values that lie there already


def test_equal_prompts_are_prefilled_once_and_answered_as_alone(model, adapters):
    engine = sampler(model, adapters, ROOMY)
    each = [request(f"r{seed}", prompt(100), version="v1", seed=seed, max_tokens=5) for seed in range(8)]
    together = generate(engine, *each)
    assert engine.tokens_prefilled == 99
    assert [together[one.request_id].found for one in each] == [0] + [99] * 7
    for one in each:
        assert together[one.request_id].told == generate(sampler(model, adapters), one)[one.request_id]


def test_another_version_takes_nothing_over(model, adapters):
    engine = sampler(model, adapters, ROOMY)
    answers = generate(engine, request("a", prompt(100), version="v1"), request("b", prompt(100)))
    assert engine.tokens_prefilled == 2 * 99
    assert answers["b"] == generate(sampler(model, adapters), request("b", prompt(100)))["b"]


def test_the_end_of_a_known_prompt_is_scored_without_its_beginning(model, adapters):
    engine, tokens = sampler(model, adapters, ROOMY), prompt(400)
    generate(engine, request("long", tokens[:350], version="v1", max_tokens=1))
    before = engine.tokens_prefilled
    asked = {"prompt_logprobs": True, "scored_from": 350}
    answer = generate(engine, request("end", tokens, version="v1", max_tokens=1, asked=asked))["end"]
    assert (answer.found, engine.tokens_prefilled - before) == (349, 51)
    assert np.array_equal(answer.score.logprobs.numpy()[350:], diagonal_of(model, tokens, adapters["v1"])[349:])
    again = generate(engine, request("whole", tokens, version="v1", max_tokens=1, asked={"prompt_logprobs": True}))["whole"]
    assert again.found == 0
    assert np.array_equal(again.score.logprobs.numpy()[1:], diagonal_of(model, tokens, adapters["v1"]))


def diagonal_of(model, tokens, weights) -> np.ndarray:
    return np.array([row[token] for row, token in zip(table(model, tokens, weights), tokens[1:], strict=False)], np.float32)


@pytest.mark.parametrize(("dtype", "experts"), FORMS)
@pytest.mark.parametrize("split", [17, 18, 255, 510, 513, 799, 880])
def test_a_long_prompt_has_the_same_bits_wherever_it_is_taken_up(dtype, experts, split):
    model, tokens = decoder(dtype=dtype, experts=experts), prompt(900)
    engine = sampler(model, {}, ROOMY)
    generate(engine, request("begins", tokens[:split], max_tokens=1))
    asked = {"prompt_logprobs": True, "scored_from": split}
    answer = generate(engine, request("ends", tokens, max_tokens=3, seed=2, asked=asked))["ends"]
    assert answer.found == split - 1
    assert np.array_equal(answer.score.logprobs.numpy()[split:], diagonal(model, tokens)[split - 1 :])
    assert answer.tokens == generate(sampler(model, {}), request("r", tokens, max_tokens=3, seed=2))["r"].tokens


def test_the_next_turn_goes_on_from_what_was_sampled(model):
    engine = sampler(model, {}, ROOMY)
    said = generate(engine, request("turn", prompt(50), max_tokens=30))["turn"].tokens[0]
    following = request("next", [*prompt(50), *said, *prompt(20, seed=3)], max_tokens=4)
    answer = generate(engine, following)["next"]
    assert answer.found == 79
    assert answer.told == generate(sampler(model, {}), following)["next"]


def test_late_siblings_take_over_what_the_first_have_left(model):
    engine = sampler(model, {}, Limits(slots=2, token_budget=64))
    group = request("group", prompt(100), num_samples=7, max_tokens=5, asked={"prompt_logprobs": True})
    answer = generate(engine, group)["group"]
    assert engine.tokens_prefilled == 99
    assert answer == generate(sampler(model, {}, ROOMY), group)["group"]


def test_siblings_behind_a_beginning_that_another_computes_in_the_same_step_are_scored_once(model):
    engine = sampler(model, {}, ROOMY)
    scored = request("scored", [*prompt(40), *prompt(23, seed=1)], num_samples=2, max_tokens=3, asked={"targets": cells((25, 3), (60, 7))})
    found = generate(engine, request("first", [*prompt(40), *prompt(5, seed=2)], max_tokens=3), scored)["scored"]
    assert found.told == generate(sampler(model, {}, ROOMY), scored)["scored"].told
    assert engine.tokens_prefilled == 44 + 62 - 24


def test_broken_weights_are_not_kept(model):
    broken = adapter(model, 0)
    broken.get("layers.1.qkv").b.fill_(float("nan"))
    engine = sampler(model, {"broken": broken}, ROOMY)
    for name in ("first", "second"):
        answer = generate(engine, request(name, prompt(60), version="broken"))[name]
        assert "are broken" in answer.failure.message
        assert answer.found == 0


@st.composite
def asked_together(draw):
    """Requests with prompts that have beginnings in common, of two versions, that ask for all kinds of things."""
    requests = []
    for number in range(draw(st.integers(2, 6))):
        length = draw(st.integers(1, 150))
        own = draw(st.integers(0, min(length, 40)))
        tokens = [*prompt(300)[: length - own], *prompt(own, seed=draw(st.integers(1, 2)))] if own else prompt(300)[:length]
        asked: dict[str, object] = {}
        if draw(st.booleans()) and length > 1:
            asked |= {"prompt_logprobs": True, "prompt_top_k": draw(st.integers(0, 2)), "scored_from": draw(st.integers(1, length - 1))}
        if draw(st.booleans()) and length > 1:
            asked["targets"] = cells(*sorted((draw(st.integers(1, length - 1)), draw(st.integers(0, VOCAB - 1))) for _ in range(3)))
        if draw(st.integers(0, 3)) == 0:
            asked["prompt_draws"] = 2
        most = draw(st.integers(0 if asked else 1, 5))
        count = draw(st.integers(1, 3)) if most else 1
        version = draw(st.sampled_from(["base", "v1"]))
        requests.append(request(f"r{number}", tokens, version=version, seed=number, max_tokens=most, num_samples=count, asked=asked))
    return requests


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(requests=asked_together(), slots=st.integers(1, 5), spare=st.integers(0, 80), blocks=st.integers(1, 64), kept=st.sampled_from([0, 100, 4096]))
def test_with_and_without_what_lies_there_the_bits_are_the_same(model, adapters, requests, slots, spare, blocks, kept):
    limits = Limits(slots=slots, token_budget=slots + 24 + spare, cache_tokens=blocks * BLOCK_PLACES, kept_tokens=kept)
    engine = sampler(model, adapters, limits)
    for _ in range(2):
        together = generate(engine, *requests)
        for each in requests:
            alone = generate(sampler(model, adapters, Limits(kept_tokens=0)), each)[each.request_id]
            assert repr(together[each.request_id].told) == repr(alone.told), each.request_id


@pytest.mark.parametrize(
    ("asked", "max_tokens", "rows"),
    [({}, 3, [4, 4, 4]), ({}, 1, [4]), ({"prompt_logprobs": True, "scored_from": 290}, 0, [12]), ({"prompt_logprobs": True}, 0, [300])],
    ids=["sampled from", "one token", "its end scored", "all of it scored"],
)
def test_the_end_of_the_last_block_is_computed_for_rows_that_are_wanted_alone(asked, max_tokens, rows):
    model, seen = decoder(), []
    model.layers[-1].mlp.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    ask(model, {}, prompt(300), asked, max_tokens=max_tokens)
    assert seen == rows


def test_experts_of_the_last_block_are_told_of_every_row():
    model = decoder(experts=True)
    seen: list[int] = []
    model.layers[-1].mlp.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    ask(model, {}, prompt(300), {"routing": True}, max_tokens=2)
    assert seen == [300, 4, 4]

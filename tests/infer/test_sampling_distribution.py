"""The distribution that a token is drawn from, and the log-probabilities of it, against the definitions in float64."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from bloomery.infer.plan import Limits
from bloomery.infer.sampling import Draw, adjust, choose, kept
from bloomery.models.decoder import Decoder
from bloomery.models.head import logits as head_logits
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.checks import check_generate
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import SampledToken
from tests.infer.builders import adapter, answers, drain, full_hidden, full_logprobs, generate, naive, prompt, request, sampler
from tests.infer.test_sampling import logits, params
from tests.train.builders import decoder

VOCAB = 24
PROMPT, SAMPLED = [3, 3, 5, 20], [7, 5, 7, 7, 11]
SHAPED: list[dict[str, object]] = [
    {"min_p": 0.2},
    {"min_p": 0.05, "top_k": 9, "top_p": 0.8, "temperature": 1.3},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    {"frequency_penalty": 0.7, "temperature": 0.6},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logit_bias": ((2, 3.5), (7, -100.0), (11, 1.0))},
    {"min_tokens": 9, "stop_tokens": (1, 7)},
    {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logit_bias": ((5, 2.0),),
        "min_tokens": 9,
        "stop_tokens": (4,),
        "min_p": 0.02,
        "top_p": 0.9,
    },
    {"temperature": 0.7, "top_k": 5},
]


def draw(position: int = len(SAMPLED), *, sample: int = 0, top: int = 0, allowed: Sequence[int] | None = None, **asked: object) -> Draw:
    mask = None if allowed is None else np.isin(np.arange(VOCAB), allowed)
    return Draw(sample, position, params(**asked), PROMPT, SAMPLED, mask, top)


def oracle(row: np.ndarray, one: Draw) -> np.ndarray:
    """Log-probabilities by the definitions, token by token, in float64."""
    asked, values = one.params, row.astype(np.float64)
    for token in range(len(row)):
        times = list(one.sampled).count(token)
        if times or token in one.prompt:
            values[token] = values[token] / asked.repetition_penalty if values[token] > 0 else values[token] * asked.repetition_penalty
        values[token] -= asked.frequency_penalty * times + asked.presence_penalty * (times > 0)
        values[token] += dict(asked.logit_bias).get(token, 0.0)
        excluded = one.allowed_V is not None and not one.allowed_V[token]
        if excluded or (one.position < asked.min_tokens and token in asked.stop_tokens):
            values[token] = -math.inf
    values /= asked.temperature
    order = sorted((token for token in range(len(row)) if values[token] > -math.inf), key=lambda token: (-values[token], token))
    order = [token for token in order if math.exp(values[token] - values[order[0]]) >= asked.min_p]
    order = order[: asked.top_k or None]
    total, mass, kept = sum(math.exp(values[token]) for token in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += math.exp(values[token]) / total
        if mass >= asked.top_p:
            break
    logprobs = np.full(len(row), -math.inf)
    logprobs[kept] = values[kept] - math.log(sum(math.exp(values[token]) for token in kept))
    return logprobs


@pytest.mark.parametrize("asked", SHAPED, ids=str)
def test_tokens_follow_the_shaped_distribution_and_say_so(asked: dict[str, object]) -> None:
    # A fixed seed: the test is deterministic, and 0.001 is the share of seeds that would fail it.
    count, row = 1_000, logits(1, VOCAB)[0]
    draws = [draw(sample=sample, top=6, seed=11, **asked) for sample in range(count)]
    chosen = choose(np.broadcast_to(row, (count, VOCAB)), draws)
    expected = oracle(row, draws[0])
    seen = np.bincount(chosen.tokens_B, minlength=VOCAB)
    mass = np.exp(expected) * count
    assert (seen[mass == 0] == 0).all()
    assert chisquare(seen[mass > 5], mass[mass > 5] * seen[mass > 5].sum() / mass[mass > 5].sum()).pvalue > 0.001
    # float32: a logit of magnitude 8 has steps of 1e-6.
    for index in range(50):
        token, told = chosen.tokens_B[index], chosen.processed[index]
        assert told.logprob == pytest.approx(expected[token], abs=4e-6)
        best = np.argsort(-expected, kind="stable")[:6]
        assert [other for other, _ in told.top] == [other for other in best if expected[other] > -math.inf]
        assert [value for _, value in told.top] == pytest.approx(expected[[other for other, _ in told.top]], abs=4e-6)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 30),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    repetition=st.floats(0.1, 5),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    sampled=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
)
def test_the_log_probability_of_a_drawn_token_is_that_of_the_definition(
    seed: int,
    temperature: float,
    top_k: int,
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
    sampled: list[int],
    allowed: set[int] | None,
) -> None:
    asked = params(
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    mask = None if allowed is None else np.isin(np.arange(VOCAB), list(allowed))
    one = Draw(0, len(sampled), asked, PROMPT, sampled, mask)
    row = logits(1, VOCAB, seed)
    chosen = choose(row, [one])
    token, expected = int(chosen.tokens_B[0]), oracle(row[0], one)
    # Biases round away what keeps tokens apart: at the edge of `top_k` the next in line may stand for one.
    assume(expected[token] > -math.inf)
    told = chosen.processed[0].logprob if one.shapes else expected[token]
    # A logit of 100 has steps of 8e-6 in float32, and is divided by 0.2.
    assert told == pytest.approx(expected[token], abs=1e-4)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.999), (5000, 0.9), (40, 0.9), (3000, 1.0)])
def test_of_a_large_vocabulary_as_many_are_kept_as_the_definition_keeps(spread: float, top_k: int, top_p: float) -> None:
    row = logits(1, 20_000)[0] * np.float32(spread)
    scaled = row - row.max()
    mass = np.exp(np.sort(scaled)[::-1][: top_k or None], dtype=np.float64).cumsum()
    expected = len(mass) if top_p == 1 else 1 + int(np.searchsorted(mass, top_p * mass[-1]))
    mine = kept(scaled, top_k, top_p)
    assert mine.sum() == expected
    assert scaled[mine].min() >= scaled[~mine].max()


def test_penalties_count_what_they_say_they_count() -> None:
    row = logits(1, VOCAB)
    before = row.copy()
    said, sampled = {*PROMPT, *SAMPLED}, set(SAMPLED)
    presence = adjust(row, [draw(presence_penalty=1.0)])[0] - row[0]
    assert set(np.flatnonzero(presence)) == sampled
    assert presence[sorted(sampled)] == pytest.approx([-1.0] * len(sampled), abs=1e-6)
    frequency = adjust(row, [draw(frequency_penalty=1.0)])[0] - row[0]
    assert {token: round(-float(frequency[token])) for token in np.flatnonzero(frequency)} == {7: 3, 5: 1, 11: 1}
    repetition = adjust(row, [draw(repetition_penalty=2.0)])[0]
    assert set(np.flatnonzero(repetition != row[0])) == said
    assert (repetition[sorted(said)] == [value / 2 if value > 0 else value * 2 for value in row[0, sorted(said)]]).all()
    assert (row == before).all()


def test_end_tokens_come_when_their_time_has_come() -> None:
    row = logits(1, VOCAB)
    early, late = (draw(position, temperature=0.0, min_tokens=5, stop_tokens=(int(row.argmax()),)) for position in (4, 5))
    assert choose(row, [early]).tokens_B[0] != row.argmax()
    assert choose(row, [late]).tokens_B[0] == row.argmax()
    # Where a grammar allows nothing but the end, it comes too early rather than something that is not allowed.
    end = int(row.argmin())
    assert choose(row, [draw(0, min_tokens=5, stop_tokens=(end,), allowed=[end])]).tokens_B[0] == end


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_is_not_allowed_never_comes_and_has_no_mass(temperature: float) -> None:
    rows = logits(40, VOCAB)
    chosen = choose(rows, [draw(position, allowed=[2, 9], temperature=temperature, top=5) for position in range(40)])
    assert set(chosen.tokens_B.tolist()) <= {2, 9}
    for told in chosen.processed.values():
        assert {token for token, _ in told.top} <= {2, 9}
        assert sum(math.exp(value) for _, value in told.top) == pytest.approx(1, abs=1e-6)


def test_only_rows_that_are_shaped_have_another_distribution_than_the_models() -> None:
    rows = logits(4, VOCAB)
    draws = [draw(), draw(temperature=0.5), draw(min_tokens=2, stop_tokens=(1,)), draw(temperature=0.0, top=3)]
    chosen = choose(rows, draws)
    # The third is past its `min_tokens`.
    assert sorted(chosen.processed) == [1, 3]
    assert chosen.processed[3] == (0.0, ((int(rows[3].argmax()), 0.0),))


def test_a_row_is_chosen_alike_alone_and_in_company() -> None:
    rows = logits(len(SHAPED) * 3, 4096)
    draws = [draw(len(SAMPLED), sample=row, top=3, seed=row, **SHAPED[row % len(SHAPED)]) for row in range(len(rows))]
    together = choose(rows, draws)
    for row, one in enumerate(draws):
        alone = choose(rows[row : row + 1], [one])
        assert alone.tokens_B[0] == together.tokens_B[row]
        assert alone.processed[0] == together.processed[row]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


PENALISED: dict[str, object] = {
    "presence_penalty": 0.8,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": ((3, 2.0), (9, -4.0)),
    "min_p": 0.02,
}


def test_penalties_are_a_function_of_the_tokens_so_far(model: Decoder) -> None:
    """Preempted, chunked, in company and alone: the same tokens, those of the slow oracle, and the same log-probabilities of both kinds."""
    group = request("group", prompt(500), num_samples=2, max_tokens=24, seed=4, temperature=0.8, asked={"top_logprobs": 2}, **PENALISED)
    short = request("short", prompt(20), max_tokens=10, seed=5, **PENALISED)
    easy = generate(sampler(model), group, short, request("plain", prompt(9), max_tokens=10))
    # The second sample is preempted when the first outgrows 16 blocks.
    tight = sampler(model, limits=Limits(slots=3, token_budget=40, cache_tokens=17 * BLOCK_PLACES))
    told = {"group": generate(tight, group)["group"].told, "short": generate(sampler(model), short)["short"].told}
    assert told == {name: easy[name].told for name in told}
    assert tight.tokens_prefilled > len(group.prompt.numpy()) - 1
    assert (easy["short"].tokens[0], easy["short"].logprobs[0]) == naive(model, prompt(20), short.params)
    assert easy["short"].tokens != generate(sampler(model), request("short", prompt(20), max_tokens=10, seed=5))["short"].tokens


def test_both_log_probabilities_of_a_token_are_those_of_the_definition(model: Decoder) -> None:
    asked = request("r", prompt(30), max_tokens=12, temperature=0.6, top_k=40, seed=2, asked={"top_logprobs": 3}, **PENALISED)
    engine = sampler(model)
    engine.submit(asked)
    events = [event for event in drain(engine) if isinstance(event, SampledToken)]
    tokens = [event.token for event in events]
    assert [event.logprob for event in events] == full_logprobs(model, prompt(30) + tokens, None)[29:].tolist()
    rows = logits_of(model, prompt(30) + tokens)[29:]
    for row, event in zip(rows, events, strict=False):
        own = row.astype(np.float64) - math.log(np.exp(row.astype(np.float64)).sum())
        drawn_from = oracle(row, Draw(0, event.position, asked.params, prompt(30), tokens[: event.position]))
        assert event.processed_top is not None
        # Logits of magnitude 8 have steps of 1e-6 in float32; they are divided by the temperature.
        for known, shown in ((own, event.top_as("raw_logprobs")), (drawn_from, event.top_as("processed_logprobs"))):
            assert [token for token, _ in shown] == np.argsort(-known, kind="stable")[:3].tolist()
            assert [value for _, value in shown] == pytest.approx([known[token] for token, _ in shown], abs=1e-5)
        assert event.logprob_as("raw_logprobs") == event.logprob == pytest.approx(own[event.token], abs=1e-5)
        assert event.logprob_as("processed_logprobs") == event.processed_logprob == pytest.approx(drawn_from[event.token], abs=1e-5)


def logits_of(model: Decoder, tokens: list[int]) -> np.ndarray:
    """Of the trainer's forward, a row for each token [N, V]."""
    with torch.no_grad():
        rows: np.ndarray = head_logits(full_hidden(model, tokens, None), model.head_weight, None)[: len(tokens)].numpy()
    return rows


def test_broken_weights_are_told_whatever_the_sampling(model: Decoder) -> None:
    broken = adapter(model, 0)
    factors = broken.get("layers.1.qkv")
    assert factors is not None
    factors.b.fill_(float("nan"))
    shaped = {**PENALISED, "top_p": 0.9, "temperature": 0.5}
    found = generate(sampler(model, {"broken": broken}), request("r", prompt(50), version="broken", asked={"top_logprobs": 3}, **shaped))
    assert found["r"].failure is not None
    assert "not finite" in found["r"].failure.message


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": 1, "stop_tokens": (10**9,)}, "stop_token_ids"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_by_name(model: Decoder, asked: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_generate(request("r", prompt(5), **asked), model.config)
    assert refused.value.field == field
    assert f"`{field}`" in refused.value.message


def test_the_models_own_distribution_has_one_log_probability(model: Decoder) -> None:
    engine = sampler(model)
    engine.submit(request("r", prompt(30), asked={"top_logprobs": 2}))
    for event in drain(engine):
        if isinstance(event, SampledToken):
            assert (event.processed_logprob, event.processed_top) == (None, None)
            assert event.logprob_as("processed_logprobs") == event.logprob
            assert event.top_as("processed_logprobs") == event.top


def test_an_end_token_waits_for_its_time(model: Decoder) -> None:
    free = generate(sampler(model), request("r", prompt(30), max_tokens=20))["r"]
    stop = free.tokens[0][2]
    engine = sampler(model)
    engine.submit(request("r", prompt(30), max_tokens=20, stop_tokens=(stop,), min_tokens=6))
    waited = answers(drain(engine))["r"].tokens[0]
    assert stop not in waited[:6]
    assert waited[:2] == free.tokens[0][:2]

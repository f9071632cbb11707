"""Models with states: whatever a sampler takes over, remembers, forks, gives up and begins anew, the bits are the trainer's.

With chunks of 16 rows, so that short texts have several.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from bloomery.infer.blocks import blocks_for
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.kernel_probe import probe
from bloomery.models.load import fill, load_decoder, stored_tensors
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.generation import SampledToken, Weights
from tests.infer.builders import Adapters, Answer, adapter, answers, drain, full_logprobs, generate, naive, prompt, request
from tests.infer.test_swap import follower
from tests.models.builders import saved

FAMILIES = ("qwen3_5_text", "nemotron_h, dense")
CHUNK = 16

MakeSampler = Callable[..., Sampler]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    loaded = load_decoder(saved(request.param, tmp_path_factory.mktemp("model")), dtype=torch.float32)
    assert loaded.config.recurrent is not None
    config = dataclasses.replace(loaded.config, recurrent=dataclasses.replace(loaded.config.recurrent, chunk_rows=CHUNK))
    decoder = Decoder(config, dtype=torch.float32).requires_grad_(False)
    fill(decoder, stored_tensors(loaded))
    return decoder


@pytest.fixture(scope="module")
def sampler(model: Decoder) -> MakeSampler:
    form = probe(model).form

    def make(limits: Limits | None = None, adapters: dict[str, FusedAdapter] | None = None) -> Sampler:
        return Sampler(model, Adapters(model, adapters), limits, form=form)

    return make


def assert_the_trainers(model: Decoder, tokens: Sequence[int], answer: Answer, weights: FusedAdapter | None = None) -> None:
    """Of every sample the log-probabilities are those of one forward over all of it."""
    assert answer.tokens
    for index, sampled in answer.tokens.items():
        whole = [*tokens, *sampled]
        assert answer.logprobs[index] == full_logprobs(model, whole, weights)[len(tokens) - 1 :].tolist(), index


@pytest.mark.parametrize("length", [1, CHUNK - 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_decoding_over_the_begin_of_a_chunk_gives_the_trainers_bits(model: Decoder, sampler: MakeSampler, length: int) -> None:
    ask = request("r", prompt(length), max_tokens=6)
    answer = generate(sampler(), ask)["r"]
    assert (answer.tokens[0], answer.logprobs[0]) == naive(model, prompt(length), ask.params)


@pytest.mark.parametrize("budget", [32, 52, 400])
def test_a_prompt_in_pieces_of_any_size_beside_others_gives_the_same(model: Decoder, sampler: MakeSampler, budget: int) -> None:
    weights = {f"v{seed}": adapter(model, seed) for seed in range(2)}
    asks = [
        request("long", prompt(5 * CHUNK + 7), version="v0", max_tokens=20),
        request("short", prompt(5), version="v1", max_tokens=20),
        request("full", prompt(2 * CHUNK), max_tokens=20),
    ]
    together = generate(sampler(Limits(slots=3, token_budget=budget), weights), *asks)
    for ask in asks:
        assert_the_trainers(model, ask.prompt.numpy().tolist(), together[ask.request_id], weights.get(ask.weights.version))


@pytest.mark.parametrize("length", [9, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_whoever_has_the_same_prompt_begins_behind_it_though_others_are_far_ahead(model: Decoder, sampler: MakeSampler, length: int) -> None:
    tokens, engine = prompt(length), sampler(Limits(slots=3, token_budget=64, kept_tokens=0))
    asks = [request("far", tokens, num_samples=2, max_tokens=40), request("late", tokens, num_samples=3, max_tokens=10, seed=5)]
    found = generate(engine, *asks)
    for ask in asks:
        assert len({tuple(sampled) for sampled in found[ask.request_id].tokens.values()}) == ask.num_samples
        assert_the_trainers(model, tokens, found[ask.request_id])
    assert engine.tokens_prefilled == length - 1


def test_the_same_prompt_once_more_is_found_after_its_first_answer(model: Decoder, sampler: MakeSampler) -> None:
    tokens, engine = prompt(CHUNK + 5), sampler()
    generate(engine, request("first", tokens, max_tokens=2 * CHUNK))
    answer = generate(engine, request("second", tokens, max_tokens=9, seed=2))["second"]
    assert answer.found == engine.tokens_prefilled == len(tokens) - 1
    assert_the_trainers(model, tokens, answer)


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_ended(model: Decoder, sampler: MakeSampler) -> None:
    tokens, engine = prompt(CHUNK - 5), sampler()
    said = generate(engine, request("one", tokens, max_tokens=2 * CHUNK + 3))["one"].tokens[0]
    follow_up = [*tokens, *said, *prompt(9, seed=9)]
    answer = generate(engine, request("two", follow_up, max_tokens=CHUNK))["two"]
    assert answer.found == len(tokens) + len(said) - 1
    assert_the_trainers(model, follow_up, answer)


@pytest.mark.parametrize(
    ("shared", "known"),
    [
        # Behind the prompt, of whose end a state is known; in its last chunk; before that.
        (2 * CHUNK + 14, 2 * CHUNK + 4),
        (2 * CHUNK + 2, 2 * CHUNK + 2),
        (2 * CHUNK - 2, 0),
    ],
)
def test_what_parts_from_a_conversation_begins_where_a_state_is_known(model: Decoder, sampler: MakeSampler, shared: int, known: int) -> None:
    tokens, engine = prompt(2 * CHUNK + 5), sampler()
    said = generate(engine, request("one", tokens, num_samples=2, max_tokens=CHUNK + 9))["one"].tokens[1]
    other = [*[*tokens, *said][:shared], *prompt(40, seed=shared)]
    answer = generate(engine, request("other", other, max_tokens=5))["other"]
    assert answer.found == known
    assert_the_trainers(model, other, answer)


def test_who_loses_his_place_begins_anew_and_says_the_same(model: Decoder, sampler: MakeSampler) -> None:
    asks = [request(f"r{length}", prompt(length), max_tokens=CHUNK + 5, num_samples=2, seed=length) for length in (CHUNK - 5, 500, 508)]
    # Keys and values of all of them take 36 blocks in the beginning and 40 in the end.
    states = 6 * blocks_for(KeyValueCache.state_tokens(model.config, torch.float32))
    engine = sampler(Limits(slots=6, token_budget=400, cache_tokens=(38 + states) * BLOCK_PLACES))
    together = generate(engine, *asks)
    assert engine.preemptions > 0
    for ask in asks:
        assert_the_trainers(model, ask.prompt.numpy().tolist(), together[ask.request_id])


@pytest.mark.slow
@pytest.mark.parametrize("begun", [2, 7, 2 * CHUNK])
def test_a_stream_that_goes_on_elsewhere_says_the_same(sampler: MakeSampler, begun: int) -> None:
    ask = request("r", prompt(CHUNK - 7), max_tokens=3 * CHUNK)
    whole = generate(sampler(), ask)["r"]
    engine = sampler()
    engine.submit(replace(ask, begun=(tuple(whole.tokens[0][:begun]),)))
    told = [(event.token, event.logprob) for event in drain(engine) if isinstance(event, SampledToken)]
    assert told == list(zip(whole.tokens[0], whole.logprobs[0], strict=True))[begun:]


def test_a_prompts_scores_are_the_trainers_over_all_chunks(model: Decoder, sampler: MakeSampler) -> None:
    tokens = prompt(4 * CHUNK + 5)
    ask = request("r", tokens, max_tokens=1, asked={"prompt_logprobs": True})
    score = generate(sampler(Limits(slots=2, token_budget=30)), ask)["r"].score
    assert score is not None
    assert np.array_equal(score.logprobs.numpy()[1:], full_logprobs(model, tokens, None))


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_swap_in_the_middle_of_a_chunk_ends_nobody(model: Decoder, sampler: MakeSampler, policy: str) -> None:
    new, tokens, asked = adapter(model, 1), prompt(CHUNK + 3), 2 * CHUNK
    engine = sampler(None, {"new": new})
    engine.serve("policy", Weights(version="base"))
    events = engine.step()
    engine.submit(follower("r", tokens, max_tokens=asked))
    for _ in range(6):
        events += engine.step()
    engine.swap("policy", Weights(version="new", key="snapshots/new"), policy)
    answer = answers([*events, *drain(engine)])["r"]
    before, after = (full_logprobs(model, [*tokens, *answer.tokens[0]], weights)[len(tokens) - 1 :] for weights in (None, new))
    of_base = sum(said == expected for said, expected in zip(answer.logprobs[0], before, strict=True))
    of_new = sum(said == expected for said, expected in zip(answer.logprobs[0], after, strict=True))
    assert 0 < of_base < asked
    assert of_new == (asked - of_base if policy == "recompute" else 0)


def test_a_slot_holds_nothing_of_who_left_it(model: Decoder, sampler: MakeSampler) -> None:
    engine = sampler(Limits(slots=2, token_budget=600, kept_tokens=0))
    for seed in range(3):
        first, second = prompt(CHUNK + 9 + seed, seed), prompt(3 + seed, seed)
        answer = generate(engine, request("r", first, max_tokens=CHUNK), request("s", second, max_tokens=9))
        assert_the_trainers(model, first, answer["r"])
        assert_the_trainers(model, second, answer["s"])

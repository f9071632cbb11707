"""The engine against the slow oracle: equal means equal bits, on the kernels of the machine that runs the tests."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from bloomery.infer import cache
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import VERSIONS_IN_MEMORY, Model
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.generation import NO_LOGPROB, Abort, Generate, SampledToken, SampleFinished, SamplerEvent, Weights
from tests.infer.builders import Adapters, adapter, answers, drain, full_logprobs, generate, naive, prompt, request, sampler
from tests.train.builders import VOCAB, decoder

LENGTHS = (1, 2, 3, 4, 5, 30, 77, 200, 333, 511, 512, 513, 530, 800)
SCORE = {"prompt_logprobs": True}


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.fixture(scope="module")
def adapters(model):
    return {f"v{seed}": adapter(model, seed) for seed in range(3)}


def mixed_requests(**params: object) -> list[Generate]:
    versions, temperatures = ("base", "v0", "v1", "v2"), (1.0, 0.0, 0.7)
    return [
        request(f"r{length}", prompt(length), version=versions[n % 4], seed=n, temperature=temperatures[n % 3], **{"max_tokens": 6, **params})
        for n, length in enumerate(LENGTHS)
    ]


def test_tokens_and_logprobs_equal_a_whole_forward_per_token_whatever_the_company(model, adapters):
    requests = mixed_requests()
    together = generate(sampler(model, adapters), *requests)
    for each in requests:
        tokens, logprobs = naive(model, each.prompt.numpy().tolist(), each.params, adapters.get(each.weights.version))
        answer = together[each.request_id]
        assert answer.tokens == {0: tokens}, each.request_id
        assert answer.logprobs == {0: logprobs}, each.request_id
        assert answer.reasons == {0: "length"}
        assert answer.found == 0
        assert generate(sampler(model, adapters), each)[each.request_id] == answer


@pytest.mark.parametrize(("dtype", "experts"), [(torch.bfloat16, False), (torch.float32, True)])
def test_half_precision_and_experts_agree_to_the_bit_too(dtype, experts):
    other = decoder(dtype=dtype, experts=experts)
    weights = {f"v{seed}": adapter(other, seed) for seed in range(3)}
    requests = [each for each in mixed_requests(max_tokens=3) if each.prompt.shape[0] in (3, 77, 333, 513)]
    together = generate(sampler(other, weights), *requests)
    for each in requests:
        tokens, logprobs = naive(other, each.prompt.numpy().tolist(), each.params, weights.get(each.weights.version))
        assert together[each.request_id].tokens == {0: tokens}
        assert together[each.request_id].logprobs == {0: logprobs}


def test_a_sliding_window_is_honoured_in_prefill_and_decode(model):
    windowed = decoder()
    for block, window in zip(windowed.layers, (24, None), strict=True):
        block.window = window
    each = request("r", prompt(60), max_tokens=20)
    answer = generate(sampler(windowed, limits=Limits(slots=2, token_budget=32)), each)["r"]
    tokens, logprobs = naive(windowed, prompt(60), each.params)
    assert (answer.tokens[0], answer.logprobs[0]) == (tokens, logprobs)
    assert tokens != naive(model, prompt(60), each.params)[0]


def test_chunks_preemption_and_late_siblings_change_no_bit(model, adapters):
    requests = [
        request("long", prompt(700), version="v0", max_tokens=20, asked=SCORE),
        request("group", prompt(450), version="v1", num_samples=5, max_tokens=80, seed=4),
        request("short", prompt(9), max_tokens=40, asked=SCORE | {"prompt_top_k": 2}),
    ]
    easy = generate(sampler(model, adapters), *requests)
    tight = Limits(slots=3, token_budget=40, cache_tokens=20 * BLOCK_PLACES)
    engine = sampler(model, adapters, tight)
    assert generate(engine, *requests) == easy
    assert engine.preemptions > 0
    assert engine.tokens_sampled == 20 + 400 + 40
    assert len({tuple(tokens) for tokens in easy["group"].tokens.values()}) == 5


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(model):
    ask = request("r", prompt(20), seed=77, num_samples=3, max_tokens=12)
    first, again = (generate(sampler(model), ask)["r"] for _ in range(2))
    assert first == again
    other = generate(sampler(model), request("r", prompt(20), seed=78, num_samples=3, max_tokens=12))["r"]
    assert all(other.tokens[sample] != first.tokens[sample] for sample in range(3))


def test_a_samples_tokens_do_not_depend_on_how_many_are_asked_for(model):
    three = generate(sampler(model), request("r", prompt(20), num_samples=3))["r"]
    assert generate(sampler(model), request("r", prompt(20)))["r"].tokens[0] == three.tokens[0]


@pytest.mark.parametrize("length", [1, 2, 64, 513])
def test_prompt_scores_are_the_trainers_bits(model, adapters, length):
    tokens = prompt(length)
    ask = request("r", tokens, version="v1", max_tokens=0, asked=SCORE | {"prompt_top_k": 3})
    answer = generate(sampler(model, adapters, Limits(slots=2, token_budget=100)), ask)["r"]
    assert answer.reasons == {0: "length"}
    assert answer.tokens == {}
    scored = answer.score.logprobs.numpy()
    assert scored.shape == (length,)
    assert math.isnan(scored[0])
    assert np.array_equal(scored[1:], full_logprobs(model, tokens, adapters["v1"]))
    ids, values = answer.score.top_ids.numpy(), answer.score.top_logprobs.numpy()
    assert ids.shape == values.shape == (length, 3)
    assert (ids[0] == 0).all()
    assert (values[0] == NO_LOGPROB).all()
    assert (np.diff(values) <= 0).all()
    hits = ids[1:] == np.array(tokens[1:])[:, None]
    assert np.array_equal(values[1:][hits], scored[1:][hits.any(1)])
    assert (scored[1:] <= values[1:, 0]).all()


def test_scoring_and_sampling_in_one_request(model):
    ask = request("r", prompt(40), num_samples=2, asked=SCORE)
    answer = generate(sampler(model), ask)["r"]
    assert np.array_equal(answer.score.logprobs.numpy()[1:], full_logprobs(model, prompt(40), None))
    assert answer.tokens == generate(sampler(model), request("r", prompt(40), num_samples=2))["r"].tokens


def test_reported_logprobs_are_the_models_own_whatever_the_sampling(model):
    shaped = generate(sampler(model), request("r", prompt(30), temperature=0.3, top_k=5, top_p=0.9, asked={"top_logprobs": 4}))["r"]
    tokens = shaped.tokens[0]
    assert shaped.logprobs[0] == full_logprobs(model, prompt(30) + tokens, None)[29:].tolist()
    for token, logprob, top in zip(tokens, shaped.logprobs[0], shaped.top[0], strict=True):
        assert len(top) == 4
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert dict(top).get(token, logprob) == logprob


def test_a_stop_token_ends_its_sample_and_is_part_of_it(model):
    free = generate(sampler(model), request("r", prompt(30), max_tokens=20, num_samples=2))["r"]
    stop = free.tokens[0][7]
    stopped = generate(sampler(model), request("r", prompt(30), max_tokens=20, num_samples=2, stop_tokens=(stop,)))["r"]
    for sample in range(2):
        end = free.tokens[sample].index(stop) + 1 if stop in free.tokens[sample] else 20
        assert stopped.tokens[sample] == free.tokens[sample][:end]
        assert stopped.reasons[sample] == ("stop" if stop in free.tokens[sample] else "length")


def test_the_context_ends_a_sample(model):
    answer = generate(sampler(model), request("r", prompt(1020), max_tokens=100))["r"]
    assert len(answer.tokens[0]) == 4
    assert answer.reasons == {0: "length"}


def test_abort_ends_one_sample_or_all_and_spares_the_rest(model):
    engine = sampler(model, limits=Limits(slots=3, token_budget=64))
    for name in ("keep", "drop"):
        engine.submit(request(name, prompt(12), num_samples=2, max_tokens=10))
    events = engine.step() + engine.step()
    engine.abort(Abort(request_id="drop"))
    engine.abort(Abort(request_id="keep", sample=1))
    engine.abort(Abort(request_id="unknown"))
    found = answers(events + drain(engine))
    assert found["drop"].reasons == {0: "abort", 1: "abort"}
    assert found["keep"].reasons == {0: "length", 1: "abort"}
    assert found["keep"].tokens[0] == generate(sampler(model), request("keep", prompt(12), max_tokens=10))["keep"].tokens[0]


LONG_PROMPT = 700
ABORTED_IN_PREFILL = pytest.mark.parametrize("asked", [{}, SCORE | {"prompt_top_k": 2}], ids=["sampled", "scored"])


def half_way(engine: Sampler, request_id: str) -> list[SamplerEvent]:
    """Step until one sample of a request has a part of its prompt, and answered a part of what is asked about it, while its siblings wait."""
    events: list[SamplerEvent] = []
    while not (cached := cached_by(engine, request_id)):
        events += engine.step()
    asked = engine._queues.requests[request_id]
    assert len(cached) == 1
    assert 0 < cached[0] < LONG_PROMPT - 1
    assert [sample.index for sample in engine._queues.waiting if sample.request_id == request_id] == [1, 2, 3]
    assert asked.inquiry is None or (0 < asked.inquiry._known < LONG_PROMPT - 1)
    return events


def cached_by(engine: Sampler, request_id: str) -> list[int]:
    return [sample.cached for sample in engine._queues.running if sample.request_id == request_id and sample.cached]


def beside(model, adapters, asked: dict[str, object], *, kept_tokens: int) -> tuple[Sampler, list[Generate], Generate]:
    """A sampler with somebody who decodes, a long request of four samples behind him, and one behind that."""
    engine = sampler(model, adapters, Limits(slots=3, token_budget=64, cache_tokens=64 * BLOCK_PLACES, kept_tokens=kept_tokens))
    others = [request("runs", prompt(12), version="v0", max_tokens=40), request("waits", prompt(90), max_tokens=10, asked=SCORE)]
    gone = request("gone", prompt(LONG_PROMPT), version="v1", num_samples=4, max_tokens=5, asked=asked)
    for each in (others[0], gone, others[1]):
        engine.submit(each)
    return engine, others, gone


@ABORTED_IN_PREFILL
def test_one_who_is_aborted_in_the_middle_of_his_prefill_gives_all_room_back_and_changes_nobodys_bits(model, adapters, asked):
    engine, others, gone = beside(model, adapters, asked, kept_tokens=0)
    events = half_way(engine, "gone")
    (runs,) = [sample for sample in engine._queues.running if sample.request_id == "runs"]
    full = engine.cache_usage
    engine.abort(Abort(request_id="gone"))
    assert engine._cache._blocks.held == set(runs.blocks)
    assert (engine.running_sequences, engine.waiting_sequences) == (1, 1)
    assert 0 < engine.cache_usage < full
    found = answers(events + drain(engine))
    assert found["gone"].reasons == dict.fromkeys(range(4), "abort")
    assert (found["gone"].tokens, found["gone"].score) == ({}, None)
    alone = generate(sampler(model, adapters), *others)
    assert {each.request_id: found[each.request_id].told for each in others} == {name: answer.told for name, answer in alone.items()}
    assert not engine._cache._blocks.held
    assert generate(engine, gone)["gone"].told == generate(sampler(model, adapters), gone)["gone"].told


@ABORTED_IN_PREFILL
def test_siblings_of_one_who_is_aborted_in_the_middle_of_the_prefill_have_their_bits_and_all_that_was_asked(model, adapters, asked):
    engine, others, gone = beside(model, adapters, asked, kept_tokens=0)
    events = half_way(engine, "gone")
    engine.abort(Abort(request_id="gone", sample=0))
    found = answers(events + drain(engine))
    undisturbed = generate(sampler(model, adapters), *others, gone)
    assert found["gone"].reasons == {0: "abort"} | dict.fromkeys(range(1, 4), "length")
    assert found["gone"].tokens == {sample: undisturbed["gone"].tokens[sample] for sample in range(1, 4)}
    assert found["gone"].logprobs == {sample: undisturbed["gone"].logprobs[sample] for sample in range(1, 4)}
    assert found["gone"].score == undisturbed["gone"].score
    assert {each.request_id: found[each.request_id].told for each in others} == {
        each.request_id: undisturbed[each.request_id].told for each in others
    }
    assert not engine._cache._blocks.held


def test_what_one_has_computed_who_is_aborted_in_the_middle_of_his_prefill_is_of_use_to_the_next(model, adapters):
    engine, _, gone = beside(model, adapters, {}, kept_tokens=64 * BLOCK_PLACES)
    half_way(engine, "gone")
    (cached,) = cached_by(engine, "gone")
    engine.abort(Abort(request_id="gone"))
    drain(engine)
    again = generate(engine, gone)["gone"]
    assert again.found == cached
    assert again.told == generate(sampler(model, adapters), gone)["gone"].told


def test_weights_that_someone_uses_stay_in_memory(model, adapters):
    adapters = adapters | {f"w{n}": adapters["v2"] for n in range(VERSIONS_IN_MEMORY)}
    loads = Adapters(model, adapters)
    engine = Sampler(model, loads)
    engine.submit(request("first", prompt(8), version="v0", max_tokens=30))
    events = engine.step()
    for n in range(VERSIONS_IN_MEMORY):
        engine.submit(request(f"r{n}", prompt(8), version=f"w{n}", max_tokens=1))
    engine.submit(request("again", prompt(8), version="v0", max_tokens=30))
    engine.submit(request("known", prompt(8), version=f"w{VERSIONS_IN_MEMORY - 1}", max_tokens=1))
    found = answers(events + drain(engine))
    assert found["first"].told == found["again"].told
    assert loads.loads.count("v0") == 1
    assert loads.loads.count(f"w{VERSIONS_IN_MEMORY - 1}") == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"tokens": []}, "at least one token"),
        ({"tokens": [1, VOCAB]}, f"from 0 to {VOCAB - 1}"),
        ({"tokens": [-1]}, "from 0"),
        ({"tokens": [1] * 1024}, "leaves no room in the model's context of 1024: shorten it to at most 1023"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 2, "max_tokens": 0}, "set `num_samples` to 1"),
        ({"asked": {"top_logprobs": VOCAB + 1}}, "top_logprobs"),
    ],
    ids=str,
)
def test_a_bad_request_is_a_user_error_and_harms_nobody(model, bad, says):
    engine = sampler(model)
    engine.submit(request("good", prompt(10)))
    engine.submit(request("bad", **{"tokens": [1, 2, 3], **bad}))
    found = answers(drain(engine))
    assert found["bad"].failure.category == "user"
    assert says in found["bad"].failure.message
    assert found["good"] == generate(sampler(model), request("good", prompt(10)))["good"]


def test_a_request_id_in_use_is_refused(model):
    engine = sampler(model)
    engine.submit(request("r", prompt(10)))
    engine.submit(request("r", prompt(10)))
    failed = engine.step()[0]
    assert failed.category == "user"
    assert "is being served already" in failed.message


def test_weights_that_cannot_be_loaded_fail_their_request_alone(model):
    class Damaged(Adapters):
        def load(self, weights: Weights) -> Model:
            if weights.version != "base":
                raise ValueError("damaged")
            return super().load(weights)

    engine = Sampler(model, Damaged(model))
    engine.submit(request("bad", prompt(10), version="v9"))
    engine.submit(request("good", prompt(10)))
    found = answers(drain(engine))
    assert found["bad"].failure.category == "server"
    assert "cannot load weights v9: ValueError: damaged" in found["bad"].failure.message
    assert found["good"].reasons == {0: "length"}


def test_broken_weights_fail_their_requests_and_leave_nothing_behind(model, adapters):
    broken = adapter(model, 0)
    broken.get("layers.1.qkv").b.fill_(float("nan"))
    engine = sampler(model, adapters | {"broken": broken})
    engine.submit(request("bad", prompt(50), version="broken", num_samples=2))
    engine.submit(request("good", prompt(10), version="v0", max_tokens=30))
    engine.submit(request("late", prompt(10), version="v0", max_tokens=30))
    engine.submit(request("scored", prompt(50), version="broken", asked=SCORE))
    found = answers(drain(engine))
    for name in ("bad", "scored"):
        assert found[name].failure.message == "weights broken are broken: they give log-probabilities that are not finite"
        assert not found[name].tokens
    engine.submit(request("after", prompt(10), version="v0", max_tokens=30))
    after = answers(drain(engine))["after"]
    assert found["good"].told == found["late"].told == after.told


def test_a_step_that_breaks_ends_those_who_ran_and_the_others_go_on(model):
    engine = sampler(model, limits=Limits(slots=1, token_budget=64))
    engine.submit(request("ran", prompt(10)))
    engine.submit(request("waited", prompt(10)))
    engine.step()
    engine.fail_running("out of memory")
    found = answers(drain(engine))
    assert (found["ran"].failure.message, found["ran"].failure.category) == ("out of memory", "server")
    assert found["waited"] == generate(sampler(model), request("waited", prompt(10)))["waited"]


def test_memory_that_runs_out_for_a_newcomer_ends_those_who_run_and_the_engine_goes_on(model, monkeypatch):
    def exhausted(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    engine = sampler(model, limits=Limits(slots=2, token_budget=64))
    engine.submit(request("runs", prompt(10), num_samples=3))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_zeros", exhausted)
        with pytest.raises(RuntimeError, match="not enough memory"):
            engine.step()
    engine.fail_running("out of memory")
    assert (engine.running_sequences, engine.waiting_sequences) == (0, 0)
    found = generate(engine, request("after", prompt(10)))
    assert (found["runs"].failure.message, found["runs"].failure.category) == ("out of memory", "server")
    assert found["after"] == generate(sampler(model), request("after", prompt(10)))["after"]


def test_memory_that_stands_empty_is_given_back_after_a_while_and_not_between_bursts(model, monkeypatch):
    monkeypatch.setattr(cache, "_KEEP_BYTES", 0)
    engine = Sampler(model, Adapters(model, None), idle_s=3600)
    storage, asked = engine._cache, request("r", prompt(300), num_samples=2)
    first = generate(engine, asked)["r"].told
    taken = storage._blocks.capacity
    engine.tidy()
    assert generate(engine, asked)["r"].told == first
    engine.tidy()
    assert storage._blocks.capacity == taken > 2 * len(storage._blocks.held), "the next burst takes it as it is"
    engine._idle_s = 0.0
    engine.submit(asked)
    engine.step()
    engine.tidy()
    assert storage._blocks.capacity == taken, "somebody runs"
    drain(engine)
    engine.tidy()
    assert storage._blocks.capacity == len(storage._blocks.held) > 0
    assert generate(engine, asked)["r"].told == first


def test_a_sampler_goes_with_the_last_who_looks_at_it(model):
    engine = sampler(model)
    generate(engine, request("r", prompt(30)))
    gone = weakref.ref(engine._cache)
    # What its steps left behind.
    gc.collect()
    gc.disable()
    try:
        del engine
        assert gone() is None, "its memory would stay until somebody collects garbage"
    finally:
        gc.enable()


def test_whoever_asks_to_forget_prompts_has_their_memory_at_once(model, monkeypatch):
    monkeypatch.setattr(cache, "_KEEP_BYTES", 0)
    engine = sampler(model)
    generate(engine, request("r", prompt(300)))
    engine.reset_prefix_cache()
    assert engine._cache._blocks.capacity == 0


def test_forgetting_everything_leaves_an_idle_engine(model):
    engine = sampler(model)
    engine.submit(request("r", prompt(10), num_samples=3))
    engine.submit(request("bad", []))
    engine.step()
    engine.forget_all()
    assert not engine.busy
    assert (engine.running_sequences, engine.waiting_sequences) == (0, 0)
    assert generate(engine, request("r", prompt(10)))["r"].reasons == {0: "length"}


def test_events_come_as_they_happen(model):
    engine = sampler(model)
    engine.submit(request("r", prompt(10), max_tokens=3))
    assert engine.busy
    kinds = [[type(event) for event in engine.step()] for _ in range(3)]
    assert kinds == [[SampledToken], [SampledToken], [SampledToken, SampleFinished]]
    assert not engine.busy

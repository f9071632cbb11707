"""Weights swapped under requests that run: which numbers go on, which are computed again, and what is never mixed up."""

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch

from bloomery.infer import versions
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.sampling import Draw, choose
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter, fuse
from bloomery.models.head import logits
from bloomery.models.pads import BLOCK_PLACES, ROW_PAD
from bloomery.models.targets import UNEMBED, adapter_targets
from bloomery.types.errors import BloomeryError
from bloomery.types.generation import Abort, Generate, Live, SampledToken, SamplerEvent, Weights
from bloomery.types.serving import version_spans
from tests.infer.builders import Adapters, adapter, answers, drain, full_hidden, full_logprobs, generate, naive, prompt, request
from tests.infer.test_versions import other_model
from tests.train.builders import decoder

NEW = Weights(version="new", key="k")


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


def serving(model: Decoder, new: FusedAdapter | Decoder, limits: Limits | None = None, first: FusedAdapter | None = None) -> Sampler:
    """Serves `first`, or the bare base, as `policy`."""
    engine = Sampler(model, Adapters(model, {"new": new} | ({} if first is None else {"first": first})), limits)
    engine.serve("policy", Weights(version="base") if first is None else Weights(version="first", key="k"))
    engine.step()
    return engine


def follower(name: str, tokens: Sequence[int], **params: object) -> Generate:
    made = request(name, tokens, **params)
    return Generate(**{each: getattr(made, each) for each in made.__struct_fields__} | {"weights": Live(name="policy")})


def swapped_after(engine: Sampler, steps: int, policy: str, *requests: Generate) -> list[SamplerEvent]:
    for each in requests:
        engine.submit(each)
    events = [event for _ in range(steps) for event in engine.step()]
    engine.swap("policy", NEW, policy)
    return events + drain(engine)


def continued(model: Decoder, weights: FusedAdapter | None, tokens: list[int], ask: Generate, begun: list[int]) -> list[int]:
    """What the weights sample behind `begun`, with a whole forward per token."""
    sequence = tokens + begun
    factors = None if weights is None else weights.get(UNEMBED)
    for position in range(len(begun), ask.params.max_tokens):
        last = (len(sequence) - 1) // ROW_PAD * ROW_PAD
        with torch.no_grad():
            row = logits(full_hidden(model, sequence, weights)[last : last + ROW_PAD], model.head_weight, factors)[len(sequence) - 1 - last]
        sequence.append(int(choose(row[None].numpy(), [Draw(0, position, ask.params)]).tokens_B[0]))
    return sequence[len(tokens) :]


def head_alone(model: Decoder) -> FusedAdapter:
    full = adapter(model, 3)
    a, b = full.get(UNEMBED)
    return fuse(adapter_targets(model.config), {UNEMBED: Factors(a, b)}, 1.0)


@pytest.mark.parametrize("policy", ["keep", "recompute", "flush"])
def test_equal_numbers_under_another_version_change_no_bit(model, policy):
    same = adapter(model, 1)
    asks = [follower("one", prompt(70), max_tokens=12), follower("two", prompt(33), num_samples=3, max_tokens=12)]
    alone = serving(model, adapter(model, 2), first=same)
    for each in asks:
        alone.submit(each)
    undisturbed = answers(drain(alone))
    events = swapped_after(serving(model, adapter(model, 1), first=same), 6, policy, *asks)
    for name, answer in answers(events).items():
        assert answer.told == undisturbed[name].told
        for sample in answer.tokens:
            spans = version_spans(token for token in events if isinstance(token, SampledToken) and (token.request_id, token.sample) == (name, sample))
            assert [span.version for span in spans] == ["first", "new"]


@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "whole"])
@pytest.mark.parametrize("policy", ["recompute", "flush"])
def test_what_is_computed_again_is_wholly_of_the_new_weights(model, policy, whole):
    new = other_model(model, 5) if whole else adapter(model, 5)
    ask, tokens = follower("r", prompt(70), max_tokens=12), prompt(70)
    events = swapped_after(serving(model, new), 5, policy, ask)
    found = answers(events)["r"]
    old, after = version_spans(token for token in events if isinstance(token, SampledToken))
    assert old.stop == after.start
    assert 0 < old.stop < 12
    now, fused = (new, None) if whole else (model, new)
    assert found.tokens[0] == continued(now, fused, tokens, ask, naive(model, tokens, ask.params)[0][: old.stop])
    assert found.logprobs[0][old.stop :] == full_logprobs(now, tokens + found.tokens[0], fused)[69 + old.stop :].tolist()


def test_kept_numbers_are_those_of_the_old_weights_and_the_rest_is_of_the_new(model):
    tokens = prompt(70)
    ask = follower("r", tokens, max_tokens=12)
    begun = naive(model, tokens, ask.params)[0]
    head = head_alone(model)
    events = swapped_after(serving(model, head), 5, "keep", ask)
    turned = version_spans(token for token in events if isinstance(token, SampledToken))[1].start
    # Keys and values do not depend on the head, so kept ones are those that the new weights would give.
    assert answers(events)["r"].tokens[0] == continued(model, head, tokens, ask, begun[:turned])
    kept, again = (answers(swapped_after(serving(model, adapter(model, 5)), 5, policy, ask))["r"].logprobs[0] for policy in ("keep", "recompute"))
    assert kept[:turned] == again[:turned]
    assert kept[turned] != again[turned]


def test_a_prompt_that_is_half_computed_begins_anew(model):
    tokens, new = prompt(300), adapter(model, 5)
    ask = follower("r", tokens, max_tokens=6, asked={"prompt_logprobs": True})
    events = swapped_after(serving(model, new, Limits(slots=2, token_budget=100)), 2, "keep", ask)
    found = answers(events)["r"]
    assert (found.tokens[0], found.logprobs[0]) == naive(model, tokens, ask.params, new)
    assert found.score.logprobs.numpy()[1:].tolist() == full_logprobs(model, tokens, new).tolist()
    assert [span.version for span in version_spans(event for event in events if isinstance(event, SampledToken))] == ["new"]


def test_nobody_takes_over_numbers_of_other_weights(model):
    """Requests with one prompt, that follow or hold the old or the new weights, before, while and after a swap keeps numbers of the old."""
    tokens, new = prompt(120), adapter(model, 5)
    engine = serving(model, new)
    versions = {"base": None, "new": new}
    expected = {version: naive(model, tokens, request("r", tokens, max_tokens=20).params, weights) for version, weights in versions.items()}
    engine.submit(follower("kept", tokens, max_tokens=20))
    events = [event for _ in range(6) for event in engine.step()]
    engine.swap("policy", NEW, "keep")
    events += engine.step()
    for name in ("follows", "late"):
        engine.submit(follower(name, tokens, max_tokens=20) if name == "follows" else request(name, tokens, version="new", max_tokens=20))
    engine.submit(request("old", tokens, max_tokens=20))
    events += drain(engine)
    engine.submit(follower("after", tokens, max_tokens=20))
    engine.submit(request("old after", tokens, max_tokens=20))
    found = answers(events + drain(engine))
    assert found["kept"].tokens[0] not in (expected["base"][0], expected["new"][0])
    for name in ("follows", "late", "after"):
        assert (found[name].tokens[0], found[name].logprobs[0]) == expected["new"], name
    for name in ("old", "old after"):
        assert (found[name].tokens[0], found[name].logprobs[0]) == expected["base"], name


@pytest.mark.parametrize("policy", ["keep", "recompute", "flush"])
def test_what_was_kept_of_requests_that_have_left_is_forgotten_by_a_flush_alone(model, policy):
    engine, tokens = serving(model, adapter(model, 5)), prompt(100)
    first = generate(engine, request("first", tokens))["first"]
    engine.swap("policy", NEW, policy)
    drain(engine)
    again = generate(engine, request("again", tokens))["again"]
    assert again.found == (0 if policy == "flush" else 99)
    assert again.told == first.told


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_nothing_is_dropped_where_room_is_scarce(model, policy):
    tight = Limits(slots=3, token_budget=60, cache_tokens=7 * BLOCK_PLACES)
    asks = [follower(f"r{length}", prompt(length), num_samples=3, max_tokens=30) for length in (5, 90, 450)]
    events = swapped_after(serving(model, adapter(model, 5), tight), 12, policy, *asks)
    for name, answer in answers(events).items():
        assert answer.reasons == {sample: "length" for sample in range(3)}, name
        assert all(len(tokens) == 30 for tokens in answer.tokens.values())


class Slow(Adapters):
    """Reads from a disk, on the loader's thread."""

    def weigh(self, weights: Weights) -> int:
        return 0 if weights.key is None else 1_000

    def load(self, weights: Weights) -> Model:
        if weights.version == "broken":
            raise ValueError("damaged")
        return super().load(weights)


def test_nobody_waits_for_weights_that_others_wait_for(model):
    read = threading.Event()

    class Held(Slow):
        def load(self, weights: Weights) -> Model:
            assert weights.key is None or read.wait(60)
            return super().load(weights)

    engine = Sampler(model, Held(model, {"new": adapter(model, 5)}))
    engine.submit(request("waits", prompt(9), version="new", max_tokens=5))
    engine.submit(request("runs", prompt(9), max_tokens=20))
    events: list[SamplerEvent] = []
    while "runs" not in answers(events) or not answers(events)["runs"].reasons:
        events += engine.step()
    assert {event.request_id for event in events} == {"runs"}
    read.set()
    assert answers(drain(engine))["waits"].reasons == {0: "length"}


def test_a_step_of_those_who_run_waits_no_longer_for_weights_than_steps_take(model, monkeypatch):
    read = threading.Event()

    class Held(Slow):
        def load(self, weights: Weights) -> Model:
            assert weights.key is None or read.wait(60)
            return super().load(weights)

    engine = Sampler(model, Held(model, {"new": adapter(model, 5)}))
    # A step that waited for the load would see it give up.
    monkeypatch.setattr(engine.versions, "_at_once_s", 120.0)
    engine.submit(request("runs", prompt(9), max_tokens=20))
    events = engine.step() + engine.step()
    staged = engine.stage(NEW)
    while not answers(events)["runs"].reasons:
        events += engine.step()
    assert not staged.done()
    read.set()
    while not staged.done():
        engine.step()


def test_weights_that_cannot_be_read_are_not_swapped_in(model):
    engine = Sampler(model, Slow(model))
    engine.serve("policy", Weights(version="base"))
    engine.step()
    engine.submit(follower("r", prompt(20), max_tokens=8))
    done = engine.swap("policy", Weights(version="broken", key="k"), "keep")
    found = answers(drain(engine))["r"]
    assert found.tokens[0] == naive(model, prompt(20), request("r", [1], max_tokens=8).params)[0]
    assert "cannot load weights broken: ValueError: damaged" in str(done.exception())
    assert engine.served("policy").version == "base"


def test_swaps_of_one_name_come_in_their_order(model):
    engine = Sampler(model, Slow(model, {"new": adapter(model, 5)}))
    engine.serve("policy", Weights(version="base"))
    engine.step()
    engine.swap("policy", NEW, "keep")
    engine.swap("policy", Weights(version="base"), "keep")
    drain(engine)
    assert engine.served("policy").version == "base"
    assert engine.swaps == 2


def test_a_swap_without_room_in_a_pause_keeps_no_core_busy(model, monkeypatch):
    engine = Sampler(model, Slow(model, {"v0": adapter(model, 0), "new": adapter(model, 5)}), versions_in_memory=1)
    engine.serve("policy", Weights(version="base"))
    engine.submit(request("runs", prompt(9), version="v0", max_tokens=2))
    while not engine.running_sequences:
        engine.step()
    engine.pause("keep")
    done = engine.swap("policy", NEW, "keep")
    assert engine.busy
    waits: list[bool] = []

    def noted(futures: Collection[Future[Any]], timeout: float, **options: Any) -> Any:
        waits.append(timeout > 0 and not any(future.done() for future in futures))
        return wait(futures, timeout, **options)

    monkeypatch.setattr(versions, "wait", noted)
    for _ in range(3):
        engine.step()
    # Each step stood still for something that was not there.
    assert waits == [True] * 3
    assert not done.done()
    engine.resume()
    drain(engine)
    assert done.result(timeout=0).version == "new"


def test_what_was_given_as_tensors_stays_while_any_name_stands_for_it(model):
    engine = Sampler(model, Slow(model))
    base, given = Weights(version="base"), Weights(version="given")
    for name in ("one", "another", "third"):
        engine.serve(name, base)
    drain(engine)
    engine.versions.hold(Model("given", model, adapter(model, 5)), 1_000, pinned=True)
    for name in ("one", "another", "third"):
        engine.swap(name, given, "keep")
    drain(engine)
    engine.swap("one", base, "keep")
    drain(engine)
    engine.withdraw("another")
    assert engine.served("third") == given
    assert "given" in engine.versions.held
    engine.swap("third", base, "keep")
    drain(engine)
    assert "given" not in engine.versions.held


def test_more_adapters_than_fit_are_served_right_and_no_more_than_fit_are_in_memory(model):
    adapters, bound = {f"v{seed}": adapter(model, seed) for seed in range(8)}, 3
    source = Slow(model, adapters)
    engine = Sampler(model, source, versions_in_memory=bound)
    asks = [request(f"{turn} {name}", prompt(9 + turn), version=name, seed=turn, max_tokens=3) for turn in range(2) for name in adapters]
    events: list[SamplerEvent] = []
    for turn in (asks[: len(adapters)], asks[len(adapters) :]):
        for each in turn:
            engine.submit(each)
        while engine.busy:
            events += engine.step()
            assert len(engine.versions.held) <= bound
    found = answers(events)
    for each in asks:
        tokens, logprobs = naive(model, each.prompt.numpy().tolist(), each.params, adapters[each.weights.version])
        assert (found[each.request_id].tokens, found[each.request_id].logprobs) == ({0: tokens}, {0: logprobs}), each.request_id
    assert len(source.loads) > len(adapters)


def test_who_gives_up_waiting_for_weights_is_gone(model):
    engine = Sampler(model, Slow(model, {"v0": adapter(model, 0), "v1": adapter(model, 1)}), versions_in_memory=1)
    engine.submit(request("has room", prompt(9), version="v0", max_tokens=20))
    events: list[SamplerEvent] = []
    while not engine.running_sequences:
        events += engine.step()
    engine.submit(request("all", prompt(9), version="v1", num_samples=2))
    engine.submit(request("half", prompt(9), version="v1", num_samples=2))
    engine.abort(Abort(request_id="all"))
    engine.abort(Abort(request_id="half", sample=1))
    assert engine.waiting_sequences == 2
    found = answers(events + drain(engine))
    assert found["all"].reasons == {0: "abort", 1: "abort"}
    assert found["half"].reasons == {0: "length", 1: "abort"}
    assert not found["half"].tokens.get(1)


def test_staged_weights_are_in_memory_while_all_places_are_taken_and_change_nobodys_answer(model):
    limits = Limits(slots=2)
    asks = [request("runs", prompt(40), version="base", max_tokens=30, num_samples=2), request("waits", prompt(9), version="base", max_tokens=2)]
    alone = Sampler(model, Adapters(model, {"new": adapter(model, 1)}), limits)
    for each in asks:
        alone.submit(each)
    undisturbed = answers(drain(alone))
    engine = Sampler(model, Adapters(model, {"new": adapter(model, 1)}), limits)
    for each in asks:
        engine.submit(each)
    events = engine.step()
    staged = engine.stage(NEW)
    while not staged.done():
        events += engine.step()
    assert "new" in engine.versions.held
    assert (engine.running_sequences, engine.waiting_sequences, engine.names) == (2, 1, {})
    assert answers(events + drain(engine)) == undisturbed


def test_weights_that_cannot_be_staged_say_why_and_nobody_who_samples_hears_of_it(model):
    engine = Sampler(model, Adapters(model, {}))
    engine.submit(request("runs", prompt(40), version="base", max_tokens=8))
    staged = engine.stage(Weights(version="missing", key="k"))
    events = drain(engine)
    with pytest.raises(BloomeryError, match="cannot load weights missing"):
        staged.result(60)
    assert len(answers(events)["runs"].tokens[0]) == 8

"""The plan in models with states: one begins where a state is known, whoever comes, leaves and passes by."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.plan import Chunk, Fork, Limits, Sample, Stem, Stretch, plan_step
from bloomery.infer.states import Beginning
from tests.infer.test_plan import Simulation, arrivals, departures, samples_of, serve_and_lose, small_limits, stem

CHUNK = 64
NO_NUMBERS = torch.empty(0)


class StateSimulation(Simulation):
    """Knows the state at the last begin of a chunk of each who runs, and of a prompt that at the last before its end."""

    def __init__(self, limits: Limits, *, keeping: int = 0) -> None:
        super().__init__(limits, keeping=keeping)
        self.marks: dict[Stem, Stretch] = {}

    def stretches(self, sample: Sample) -> list[Stretch]:
        marks = [self.marks[sample.stem]] if sample.stem in self.marks else []
        return [Stretch(sample.cached // CHUNK * CHUNK, sample.cached), *marks]

    def advance(self, sample: Sample, stop: int) -> None:
        super().advance(sample, stop)
        if sample.cached // CHUNK == sample.shared // CHUNK < stop // CHUNK:
            assert sample.cached >= sample.shared, "rows of the prompt that nobody will know"
            self.marks.setdefault(sample.stem, Stretch(sample.shared // CHUNK * CHUNK, sample.shared))

    def fork(self, fork: Fork) -> None:
        known = self.stretches(fork.source) if isinstance(fork.source, Sample) else fork.source.stretches
        assert any(stretch.first <= fork.tokens <= stretch.last for stretch in known), "nobody knows that state"
        super().fork(fork)

    def cut(self, sample: Sample, tokens: int) -> None:
        if tokens < sample.cached:
            self.leave(sample)
            self.waiting.insert(0, sample)
            return
        super().cut(sample, tokens)

    def beginnings(self, sample: Sample) -> tuple[Beginning, ...]:
        return tuple(Beginning(stretch, NO_NUMBERS, NO_NUMBERS) for stretch in self.stretches(sample))

    def leave(self, sample: Sample) -> None:
        super().leave(sample)
        self.marks = {stem: mark for stem, mark in self.marks.items() if any(other.stem is stem for other in self.running)}


def with_states(limits: Limits, state_tokens: int = 0) -> Limits:
    return replace(limits, chunk_rows=CHUNK, state_tokens=state_tokens)


@settings(max_examples=150, deadline=None)
@given(arriving=arrivals(), limits=small_limits, pause=st.integers(0, 40), keeping=st.integers(0, 4), state_tokens=st.integers(0, 900))
def test_everyone_is_served_and_begins_where_a_state_is_known(arriving, limits, pause, keeping, state_tokens):
    engine, submitted = StateSimulation(with_states(limits, state_tokens), keeping=keeping), 0
    for arrival in arriving:
        engine.submit(arrival.samples, arrival.quota)
        submitted += len(arrival.samples)
        for _ in range(pause):
            if engine.waiting or engine.running:
                engine.step()
    engine.run()
    assert len(engine.finished) == submitted


@settings(max_examples=150, deadline=None)
@given(
    arriving=arrivals(),
    limits=small_limits,
    pause=st.integers(0, 40),
    keeping=st.integers(0, 4),
    state_tokens=st.integers(0, 900),
    leaving=departures,
)
def test_those_who_leave_in_mid_flight_leave_no_state_that_nobody_knows(arriving, limits, pause, keeping, state_tokens, leaving):
    serve_and_lose(StateSimulation(with_states(limits, state_tokens), keeping=keeping), arriving, leaving, pause=pause)


def test_samples_of_a_request_prefill_their_prompt_once_however_late_they_come():
    engine = StateSimulation(with_states(Limits(slots=3, token_budget=200)))
    first, late = samples_of("first", prompt=3 * CHUNK + 9, count=2), samples_of("late", prompt=3 * CHUNK + 9)
    engine.submit(first, 3 * CHUNK)
    for _ in range(2 * CHUNK):
        engine.step()
    engine.submit([replace(sample, stem=stem(3 * CHUNK + 9, "first")) for sample in late], 3)
    engine.run()
    assert engine.prefilled == 3 * CHUNK + 8


def test_nobody_waits_for_a_state_that_another_only_passes():
    """A beginning in common that ends before the other's prompt does: by the time it is there the state has moved on."""
    other, mine = samples_of("other", prompt=stem(900, own=300)), samples_of("mine", prompt=stem(900, own=301))
    plan = plan_step([*other, *mine], [], with_states(Limits(slots=2, token_budget=1000)))
    assert [chunk.sample.request_id for chunk in plan.prefill] == ["other", "mine"]
    assert plan.forks == ()


def test_states_take_places_whatever_the_length():
    small, dear = Limits(slots=4, cache_tokens=2048), Limits(slots=4, cache_tokens=2048, state_tokens=512)
    placed = [len(plan_step(samples_of("r", prompt=9, count=4), [], limits).admit) for limits in (small, dear)]
    assert placed == [4, 3]


def test_who_begins_anew_stops_where_his_prompt_ends_so_that_others_can_begin_there():
    (sample,) = samples_of("r", prompt=3 * CHUNK + 9)
    sample.length += 2 * CHUNK
    engine = StateSimulation(with_states(Limits(slots=2, token_budget=1000)))
    engine.submit([sample], 3)
    assert engine.step().prefill == (Chunk(sample, 0, sample.shared),)
    engine.step()
    assert list(engine.marks.values()) == [Stretch(3 * CHUNK, sample.shared)]

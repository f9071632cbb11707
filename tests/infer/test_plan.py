"""The laws of planning, over random arrivals: a fake engine obeys each plan and checks it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.plan import Limits, Plan, Sample, fits, plan_step


def samples_of(request_id: str, *, prompt: int, count: int = 1, decodes: bool = True) -> list[Sample]:
    return [Sample(request_id, index, shared=prompt - 1, length=prompt, decodes=decodes) for index in range(count)]


class FakeEngine:
    """Obeys plans; every sample ends when it has sampled `quota` tokens."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.quota: dict[Sample, int] = {}
        self.prefilled = 0
        self.finished: list[Sample] = []

    def submit(self, samples: Sequence[Sample], quota: int) -> None:
        self.waiting += samples
        self.quota |= dict.fromkeys(samples, quota)

    def step(self) -> Plan:
        plan = plan_step(self.waiting, self.running, self.limits)
        self.check(plan)
        for sample in plan.preempt:
            self.running.remove(sample)
            sample.cached = 0
        self.waiting = [*plan.preempt, *self.waiting[len(plan.admit) :]]
        self.running += plan.admit
        for sample, start, stop in plan.prefill:
            assert start == sample.cached < stop <= sample.length - 1
            sample.cached = stop
            self.prefilled += stop - start
        for sample, source in plan.forks:
            assert source.request_id == sample.request_id
            assert source is not sample
            assert source.cached >= sample.shared > sample.cached == 0
            sample.cached = sample.shared
        assert len(set(self.running)) == len(self.running)
        assert not set(self.running) & set(self.waiting)
        assert len(self.running) <= self.limits.slots
        assert fits(self.running, self.limits)
        for sample in plan.decode:
            self.decode(sample)
        for sample in [sample for sample in self.running if not sample.decodes and not sample.missing]:
            self.finish(sample)
        return plan

    def check(self, plan: Plan) -> None:
        spent = sum(chunk.stop - chunk.start for chunk in plan.prefill) + len(plan.decode)
        assert spent > 0 or plan.preempt or plan.admit, "nothing happens although someone waits or runs"
        assert spent <= self.limits.token_budget
        assert list(plan.admit) == self.waiting[: len(plan.admit)], "first come, first served"
        assert list(plan.preempt) == self.running[len(self.running) - len(plan.preempt) :], "the youngest leave"
        assert len(set(plan.decode)) == len(plan.decode)
        ready = [sample for sample in self.running if sample.decodes and not sample.missing and sample not in plan.preempt]
        assert set(ready) <= set(plan.decode), "whoever can decode does"

    def decode(self, sample: Sample) -> None:
        assert sample in self.running
        assert sample.decodes
        assert sample.missing == 0
        sample.cached = sample.length
        sample.length += 1
        self.quota[sample] -= 1
        if not self.quota[sample]:
            self.finish(sample)

    def finish(self, sample: Sample) -> None:
        self.running.remove(sample)
        self.finished.append(sample)

    def run(self) -> list[Plan]:
        plans: list[Plan] = []
        most_steps = 20 + 3 * sum(self.quota[sample] + sample.length for sample in [*self.waiting, *self.running])
        while self.waiting or self.running:
            plans.append(self.step())
            assert len(plans) < most_steps, "somebody starves"
        return plans


requests = st.lists(st.tuples(st.integers(1, 1100), st.integers(1, 4), st.integers(1, 60), st.booleans()), max_size=5)
small_limits = st.builds(
    lambda slots, spare, tokens: Limits(slots=slots, token_budget=slots + 8 + spare, cache_tokens=tokens),
    st.integers(1, 9),
    st.integers(0, 600),
    st.integers(1, 8000),
)


@settings(max_examples=60, deadline=None)
@given(arrivals=requests, limits=small_limits, pause=st.integers(0, 5))
def test_everyone_is_served_within_the_budget_and_in_order(arrivals, limits, pause):
    engine, submitted = FakeEngine(limits), 0
    for number, (prompt, count, quota, decodes) in enumerate(arrivals):
        samples = samples_of(f"r{number}", prompt=prompt, count=count if decodes else 1, decodes=decodes)
        if decodes or prompt > 1:
            engine.submit(samples, quota)
            submitted += len(samples)
        for _ in range(pause if engine.waiting or engine.running else 0):
            if engine.waiting or engine.running:
                engine.step()
    engine.run()
    assert len(engine.finished) == submitted


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks_while_others_decode():
    engine = FakeEngine(Limits(slots=4, token_budget=64))
    engine.submit(samples_of("short", prompt=5), quota=50)
    engine.step()
    engine.submit(samples_of("long", prompt=400), quota=1)
    plans = engine.run()
    during = [plan for plan in plans if plan.prefill]
    assert len(during) == 7
    assert all(plan.decode for plan in during)
    assert all((chunk.stop - chunk.start) % 4 == 0 for plan in during[:-1] for chunk in plan.prefill)


def test_samples_of_a_request_prefill_their_prompt_once():
    engine = FakeEngine(Limits(slots=8, token_budget=300))
    engine.submit(samples_of("group", prompt=200, count=8), quota=3)
    plans = engine.run()
    assert engine.prefilled == 199
    assert len(plans[0].forks) == 7
    assert len(plans[0].decode) == 8


def test_samples_beyond_the_slots_fork_from_siblings_that_still_run():
    engine = FakeEngine(Limits(slots=2, token_budget=300))
    first, second, third = samples_of("group", prompt=100, count=3)
    engine.submit([first], quota=9)
    engine.submit([second], quota=2)
    engine.submit([third], quota=2)
    engine.run()
    assert engine.prefilled == 99


def test_the_youngest_gives_way_when_the_cache_is_full_and_is_prefilled_again_later():
    engine = FakeEngine(Limits(slots=4, token_budget=600, cache_tokens=1024))
    engine.submit(samples_of("old", prompt=500), quota=30)
    engine.submit(samples_of("young", prompt=40), quota=100)
    plans = engine.run()
    assert [sample.request_id for plan in plans for sample in plan.preempt] == ["young"]
    again = [chunk for plan in plans for chunk in plan.prefill if chunk.sample.request_id == "young"][1]
    assert again.start == 0
    assert again.stop > 39
    assert [sample.request_id for sample in engine.finished] == ["old", "young"]


def test_a_sample_larger_than_the_cache_runs_alone():
    engine = FakeEngine(Limits(slots=4, token_budget=600, cache_tokens=512))
    engine.submit(samples_of("huge", prompt=900), quota=2)
    engine.submit(samples_of("next", prompt=9), quota=2)
    engine.run()
    assert [sample.request_id for sample in engine.finished] == ["huge", "next"]


def test_a_budget_without_room_for_prefill_is_refused():
    with pytest.raises(ValueError, match="leaves no room"):
        Limits(slots=64, token_budget=64)

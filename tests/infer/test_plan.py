"""The laws of planning, over random arrivals: a fake engine obeys each plan, has the blocks of a real cache for it, and checks it."""

import zlib
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.blocks import Blocks, blocks_for
from bloomery.infer.plan import CLASSES, LEAST_SHARED, Chunk, Fork, Kept, Limits, Plan, Sample, Stem, blocks_of, in_common, plan_step
from bloomery.infer.prefixes import Prefixes
from bloomery.infer.retrace import WIDTHS
from bloomery.infer.states import Beginning
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.generation import Priority


def stem(length: int, mark: object = 0, *, version: str = "v", own: int = 0) -> Stem:
    """A prompt that has all but its last `own` tokens in common with the others of its mark, as far as they reach."""
    tokens = np.random.default_rng(zlib.crc32(str(mark).encode())).integers(0, 1000, 4096)[:length].astype(np.int32)
    tokens[length - own :] += 1000 + length
    return Stem(version, tokens)


def samples_of(
    request_id: str,
    *,
    prompt: int | Stem,
    count: int = 1,
    decodes: bool = True,
    first_scored: int | None = None,
    left: int = 1,
    priority: Priority = "rollout",
    drafted: int = 0,
) -> list[Sample]:
    shared = stem(prompt, request_id) if isinstance(prompt, int) else prompt
    length = len(shared.tokens)
    reusable = length - 1 if first_scored is None else first_scored - 1
    shape = {"decodes": decodes, "left": left, "priority": priority, "drafted": drafted}
    return [Sample(request_id, index, shared, length, reusable, **shape) for index in range(count)]


def vars_of(sample: Sample) -> list[object]:
    """All that is known of it; what it begins with cannot change."""
    return [getattr(sample, field.name) for field in fields(sample) if field.name != "stem"]


def fits(samples: Sequence[Sample], limits: Limits) -> bool:
    """Whether the cache holds all of them when they have reached as far as they are to in this step; one alone always may run."""
    missing = sum(max(0, blocks_for(sample.reach) - len(sample.blocks)) for sample in samples)
    return len(samples) <= 1 or (len(samples) <= limits.slots and blocks_of(samples, limits) + missing <= limits.blocks)


class Simulation:
    """Obeys plans; every sample ends when it has sampled `quota` tokens, and of those that ended `keeping` times as much is kept as one here needs.

    Of what drafts guess one token in `wrong_in` is not drawn; where they are `guessing` every other sample has parted from its draft.
    """

    def __init__(self, limits: Limits, *, keeping: int = 0, wrong_in: int = 9, guessing: bool = False) -> None:
        self.limits, self.noise = limits, np.random.default_rng(wrong_in)
        self.guessing = guessing
        self.wrong_in = wrong_in
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.quota: dict[Sample, int] = {}
        self.prefilled = 0
        self.finished: list[Sample] = []
        self.aborted: list[Sample] = []
        self.blocks = Blocks()
        self.prefixes = Prefixes(self.blocks, keeping * blocks_for(600), blocks_for(limits.state_tokens))
        self.answered: dict[str, int] = {}
        """Prompt tokens that a request's samples have computed or had from a sibling, behind those that it may have from others."""

    @property
    def kept(self) -> Sequence[Kept]:
        return self.prefixes.kept

    def submit(self, samples: Sequence[Sample], quota: int) -> None:
        self.waiting += samples
        self.quota |= dict.fromkeys(samples, quota)

    def step(self) -> Plan:
        plan = self.plan()
        self.check(plan)
        for sample in plan.preempt:
            self.leave(sample)
        self.waiting = [*plan.preempt, *(sample for sample in self.waiting if sample not in plan.admit)]
        self.running += plan.admit
        for sample in plan.passed:
            sample.passed += 1
        self.fork_all(plan.found)
        for chunk in plan.prefill:
            self.prefill(chunk)
        assert {fork.source for fork in plan.forks} <= {chunk.sample for chunk in plan.prefill}, "else it was there before"
        self.fork_all(plan.forks)
        assert len(set(self.running)) == len(self.running)
        assert not set(self.running) & set(self.waiting)
        assert len(self.running) <= self.limits.slots
        assert fits(self.running, self.limits)
        self.check_blocks()
        for sample, ahead in zip(plan.decode, plan.ahead, strict=True):
            self.decode(sample, ahead)
        for chunk in plan.prefill:
            self.verify(chunk.sample)
        for sample in [sample for sample in self.running if not sample.decodes and not sample.missing]:
            self.finish(sample)
        self.check_blocks()
        return plan

    def plan(self) -> Plan:
        """It is a function of what it is given, and changes nothing of that."""
        given = (self.waiting, self.running, self.limits, self.kept)
        before = deepcopy([vars_of(sample) for sample in [*self.waiting, *self.running]]), list(self.kept)
        plan = plan_step(*given)
        assert plan_step(*given) == plan
        assert ([vars_of(sample) for sample in [*self.waiting, *self.running]], list(self.kept)) == before
        return plan

    def take(self, count: int) -> list[int]:
        """As a cache does: what was kept makes room."""
        while (lacking := count - self.blocks.free) > 0:
            if self.blocks.capacity < self.limits.blocks:
                self.blocks.grow(self.limits.blocks)
            elif not self.prefixes.evict():
                assert len(self.running) == 1, "there is no room for what is planned"
                self.blocks.grow(self.blocks.capacity + lacking)
        return self.blocks.take(count)

    def advance(self, sample: Sample, stop: int) -> None:
        sample.blocks += self.take(max(0, blocks_for(stop) - len(sample.blocks)))

    def fork_all(self, forks: Sequence[Fork]) -> None:
        begun = []
        for fork in forks:
            blocks = fork.source.blocks if isinstance(fork.source, Sample) else self.prefixes.use(fork.source).blocks
            begun.append(blocks[: blocks_for(fork.tokens)])
            self.blocks.hold(begun[-1])
        for fork, blocks in zip(forks, begun, strict=True):
            self.fork(fork)
            whole = fork.tokens // BLOCK_PLACES
            assert not fork.sample.blocks
            fork.sample.blocks = [*blocks[:whole], *self.take(len(blocks) - whole)]
            self.blocks.let_go(blocks[whole:])

    def check_blocks(self) -> None:
        """None is lost, none is had by two who do not share it, and those who run keep within the cache."""
        holders = Counter(chain.from_iterable(sample.blocks for sample in self.running))
        holders.update(self.prefixes._held)
        assert {block: self.blocks.holders(block) for block in self.blocks.held} == holders
        assert len(self.blocks.held) + self.blocks.free == self.blocks.capacity
        assert sorted([*self.blocks.held, *self.blocks._free]) == list(range(1, self.blocks.capacity + 1))
        for sample in self.running:
            assert blocks_for(sample.cached) <= len(sample.blocks) == len(set(sample.blocks))
            # Where its next token goes nobody else looks.
            assert all(self.blocks.holders(block) == 1 for block in sample.blocks[sample.cached // BLOCK_PLACES :])
        assert not any(sample.blocks for sample in [*self.waiting, *self.finished, *self.aborted])
        assert len(self.running) <= 1 or blocks_of(self.running, self.limits) <= self.limits.blocks

    def leave(self, sample: Sample) -> None:
        self.running.remove(sample)
        self.blocks.let_go(sample.blocks)
        sample.blocks, sample.cached = [], 0

    def fork(self, fork: Fork) -> None:
        sample, source, tokens = fork
        assert sample in self.running
        assert source is not sample
        assert sample.cached == 0
        assert tokens <= in_common(sample.stem, source.stem), "keys of other tokens or weights"
        if isinstance(source, Sample):
            assert source in self.running, "whose slot may be another's by now"
            assert source.cached >= tokens
        sibling = isinstance(source, Sample) and source.request_id == sample.request_id
        limit = sample.shared if sibling else sample.reusable
        assert min(limit, LEAST_SHARED) <= tokens <= limit
        sample.cached = tokens

    def prefill(self, chunk: Chunk) -> None:
        sample, start, stop = chunk
        assert start == sample.cached < stop <= (sample.reach if sample.drafted else sample.length - sample.left)
        self.advance(sample, stop)
        sample.cached = stop
        self.prefilled += stop - start
        reached = self.answered.setdefault(sample.request_id, sample.reusable)
        assert start <= reached, "what the tokens between would have told is never known"
        self.answered[sample.request_id] = max(reached, stop)

    def check(self, plan: Plan) -> None:
        spent = sum(chunk.stop - chunk.start for chunk in plan.prefill) + len(plan.decode) + sum(plan.ahead)
        assert spent > 0 or plan.preempt or plan.admit, "nothing happens although someone waits or runs"
        assert spent <= self.limits.token_budget
        computed = [(chunk.sample.request_id, place) for chunk in plan.prefill for place in range(chunk.start, min(chunk.stop, chunk.sample.shared))]
        assert len(set(computed)) == len(computed), "two siblings compute the same, and answer twice what is asked about it"
        for priority in CLASSES:
            admit, waiting, preempt, running = (of(priority, queue) for queue in (plan.admit, self.waiting, plan.preempt, self.running))
            assert admit == waiting[: len(admit)], "first come, first served"
            assert preempt == running[len(running) - len(preempt) :], "the youngest leave"
            self.check_floor(priority, plan)
        assert len(set(plan.decode)) == len(plan.decode)
        ready = [sample for sample in self.running if sample.decodes and not sample.missing and sample not in plan.preempt]
        assert set(ready) <= set(plan.decode), "whoever can decode does"
        # Beside those who decode already, whoever's prefill ends in this step does.
        assert sum(plan.ahead) <= max(0, min(16, self.limits.slots) - len(ready)), "many rows leave no time for guesses"
        for sample, ahead in zip(plan.decode, plan.ahead, strict=True):
            assert ahead in WIDTHS
            assert ahead <= sample.ahead
            assert not ahead or min(CLASSES.index(each.priority) for each in ready) == CLASSES.index(sample.priority)

    def check_floor(self, priority: Priority, plan: Plan) -> None:
        running, leaving = of(priority, self.running), of(priority, plan.preempt)
        unfinished = [sample for sample in running if sample.missing and sample not in leaving]
        assert not unfinished or unfinished[0] in {chunk.sample for chunk in plan.prefill}, "who has a place gets on in every step"
        came_before = [sample for sample in plan.admit if CLASSES.index(sample.priority) < CLASSES.index(priority)]
        kept = len(running) - len(leaving)
        # Whom enough have passed claims room before those who run.
        first = [sample for sample in plan.admit if any(other.passed >= self.limits.slots for other in of(sample.priority, plan.admit))]
        full = not fits([*first, *(sample for sample in self.running if sample not in plan.preempt), *leaving[:1]], self.limits)
        assert not leaving or kept >= self.limits.floor(priority) or full or not came_before, "a class before takes nothing of the floor"

    def decode(self, sample: Sample, ahead: int) -> None:
        assert sample in self.running
        assert sample.decodes
        assert sample.missing == 0
        self.advance(sample, sample.length)
        before = len(sample.blocks)
        self.advance(sample, sample.length + ahead)
        assert len(sample.blocks) == before, "guesses take no room"
        right = ahead and int(self.noise.integers(ahead + 1))
        sample.cached = sample.length + right
        sample.length += right + 1
        self.quota[sample] -= right + 1
        if self.guessing and sample.index % 2:
            sample.ahead = max(0, min(int(self.noise.integers(9)), -sample.length % BLOCK_PLACES, self.quota[sample] - 1))
        if not self.quota[sample]:
            self.finish(sample)

    def verify(self, sample: Sample) -> None:
        """Each row from the last certain token on gives one more; after a wrong guess what is cached behind it is forgotten."""
        if not sample.drafted:
            return
        reached = sample.cached
        while reached >= sample.length and self.quota[sample]:
            right = sample.drafted > 0 and self.noise.integers(self.wrong_in) > 0
            reached = reached if right else sample.length
            sample.length += 1
            sample.drafted = sample.drafted - 1 if right else 0
            self.quota[sample] -= 1
        self.cut(sample, min(reached, sample.length - 1))
        if not self.quota[sample]:
            self.finish(sample)

    def cut(self, sample: Sample, tokens: int) -> None:
        self.blocks.let_go(sample.blocks[blocks_for(tokens) :])
        del sample.blocks[blocks_for(tokens) :]
        sample.cached = tokens

    def finish(self, sample: Sample) -> None:
        self.finished.append(sample)
        if sample in self.waiting:
            self.waiting.remove(sample)
            return
        answered = self.answered.get(sample.request_id, sample.reusable)
        assert answered >= sample.shared, "a prompt that is scored is computed to its end"
        self.keep(sample)
        self.leave(sample)

    def abort(self, samples: Sequence[Sample]) -> None:
        """They leave, one after the other, wherever they are; what the last of a request that runs has cached is kept, however little it is."""
        for sample in samples:
            self.aborted.append(sample)
            if sample in self.waiting:
                self.waiting.remove(sample)
                continue
            if sum(other.request_id == sample.request_id for other in self.running) == 1:
                self.keep(sample)
            self.leave(sample)
            self.check_blocks()

    def keep(self, sample: Sample) -> None:
        tokens = np.concatenate([sample.stem.tokens, np.full(max(0, sample.cached - len(sample.stem.tokens)), 7, np.int32)])
        blocks = sample.blocks[: blocks_for(sample.cached)]
        self.prefixes.keep(Stem(sample.stem.version, tokens[: sample.cached]), blocks, self.beginnings(sample))

    def beginnings(self, sample: Sample) -> tuple[Beginning, ...]:
        """Where one can go on, if not everywhere."""
        return ()

    def run(self) -> list[Plan]:
        plans: list[Plan] = []
        most_steps = 20 + 3 * sum(self.quota[sample] + sample.length for sample in [*self.waiting, *self.running])
        while self.waiting or self.running:
            plans.append(self.step())
            assert len(plans) < most_steps, "somebody starves"
        return plans


def of(priority: Priority, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.priority == priority]


class Arrival:
    """Samples of one request: few marks and versions, so that many have beginnings in common."""

    def __init__(self, number: int, draw: st.DrawFn) -> None:
        length = draw(st.integers(1, 1100))
        own = draw(st.integers(0, length))
        prompt = stem(length, draw(st.integers(0, 1)), version=draw(st.sampled_from("vvw")), own=own)
        form = draw(st.sampled_from(["decodes", "decodes", "scores", "one token"]))
        scored = draw(st.none() | st.integers(1, length))
        count = draw(st.integers(1, 4)) if form == "decodes" else 1
        self.quota = draw(st.integers(1, 60))
        self.samples = samples_of(
            f"r{number}",
            prompt=prompt,
            count=count,
            decodes=form == "decodes",
            first_scored=scored,
            left=int(form != "one token"),
            priority=draw(st.sampled_from(CLASSES)),
            drafted=draw(st.sampled_from([0, 0, 1, 7, 300])) if form == "decodes" else 0,
        )


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    return [Arrival(number, draw) for number in range(draw(st.integers(0, 6)))]


class Departure(NamedTuple):
    """Somebody goes away before a step: one sample, or all of its request."""

    step: int
    place: int
    """Of the sample among all that run and wait, counted round and round."""
    together: bool


departures = st.lists(st.builds(Departure, st.integers(0, 60), st.integers(0, 40), st.booleans()), max_size=15)


def serve_and_lose(engine: Simulation, arriving: Sequence[Arrival], leaving: Sequence[Departure], *, pause: int) -> None:
    """Submit one after the other, and have some leave on the way; everybody else is served to the end, and nothing is left behind."""
    most_steps = 100 + 3 * sum(arrival.quota + sample.length for arrival in arriving for sample in arrival.samples)
    due = iter(arriving)
    for step in count():
        if step % (pause + 1) == 0 and (arrival := next(due, None)) is not None:
            engine.submit(arrival.samples, arrival.quota)
        for departure in leaving:
            inside = [*engine.running, *engine.waiting]
            if departure.step == step and inside:
                gone = inside[departure.place % len(inside)]
                engine.abort([each for each in inside if each is gone or (departure.together and each.request_id == gone.request_id)])
        if engine.waiting or engine.running:
            engine.step()
        elif step >= (pause + 1) * len(arriving):
            break
        assert step < most_steps + (pause + 1) * len(arriving), "somebody starves"
    everybody = [sample for arrival in arriving for sample in arrival.samples]
    assert Counter([*engine.finished, *engine.aborted]) == Counter(everybody)
    assert set(engine.blocks.held) == set(engine.prefixes._held)
    engine.prefixes.clear()
    assert not engine.blocks.held


small_limits = st.builds(
    lambda slots, spare, tokens: Limits(slots=slots, token_budget=slots + 24 + spare, cache_tokens=tokens),
    st.integers(1, 9),
    st.integers(0, 600),
    st.integers(1, 8000),
)


@settings(max_examples=150, deadline=None)
@given(arriving=arrivals(), limits=small_limits, pause=st.integers(0, 5), keeping=st.integers(0, 4), guessing=st.booleans())
def test_everyone_is_served_within_the_budget_and_in_order(arriving, limits, pause, keeping, guessing):
    engine, submitted = Simulation(limits, keeping=keeping, guessing=guessing), 0
    for arrival in arriving:
        engine.submit(arrival.samples, arrival.quota)
        submitted += len(arrival.samples)
        for _ in range(pause if engine.waiting or engine.running else 0):
            if engine.waiting or engine.running:
                engine.step()
    engine.run()
    assert len(engine.finished) == submitted


@settings(max_examples=150, deadline=None)
@given(arriving=arrivals(), limits=small_limits, pause=st.integers(0, 5), keeping=st.integers(0, 4), leaving=departures)
def test_those_who_leave_in_mid_flight_take_nothing_with_them_and_the_others_are_served(arriving, limits, pause, keeping, leaving):
    serve_and_lose(Simulation(limits, keeping=keeping, guessing=True), arriving, leaving, pause=pause)


@settings(max_examples=60, deadline=None)
@given(
    limits=small_limits,
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    meek=st.sampled_from(["rollout", "evaluation"]),
    length=st.sampled_from([300, 3000]),
    patience=st.sampled_from([0, 1, 3]),
)
def test_no_class_starves_however_much_of_those_before_it_arrives_and_leaves_again(limits, lengths, meek, length, patience):
    """Every so many steps the oldest of the others gives up, where they do."""
    engine, steps, number = Simulation(limits), 0, 0
    (sample,) = samples_of("meek", prompt=length, priority=meek)
    while sample not in engine.finished:
        while len(engine.waiting) <= limits.slots:
            before = CLASSES[number % CLASSES.index(meek)]
            engine.submit(samples_of(f"r{number}", prompt=lengths[number % len(lengths)], priority=before), quota=9)
            number += 1
            if number == 3:
                engine.submit([sample], quota=20)
        engine.step()
        steps += 1
        if patience and steps % patience == 0:
            engine.abort([other for other in (*engine.running, *engine.waiting) if other is not sample][:1])
        assert steps < 2000, "it starves"


@pytest.mark.parametrize("spare", range(0, 80, 8))
def test_one_who_is_sent_back_again_and_again_for_those_who_grow_keeps_his_turn(spare):
    engine, steps = Simulation(Limits(slots=2, token_budget=26, cache_tokens=3000 + spare)), 0
    (long,) = samples_of("long", prompt=3000, priority="rollout")
    engine.submit([long], quota=20)
    while long not in engine.finished:
        if len(engine.waiting) <= 2:
            engine.submit(samples_of(f"short {steps}", prompt=25, priority="production"), quota=9)
        engine.step()
        steps += 1
        assert steps < 2000, "it starves"


@settings(max_examples=60, deadline=None)
@given(
    arriving=st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(1, 3000), st.integers(1, 9), st.integers(0, 3)), max_size=12),
    slots=st.integers(1, 9),
    cache_tokens=st.integers(1, 9000),
)
def test_who_waits_for_room_holds_up_no_class_before_his_until_enough_have_passed_him(arriving, slots, cache_tokens):
    """Every class gets what it would get if those behind it who are to wait had never come."""
    engine = Simulation(Limits(slots=slots, token_budget=1 << 20, cache_tokens=cache_tokens))

    def step() -> None:
        plan = plan_step(engine.waiting, engine.running, engine.limits)
        in_vain = {sample for sample in engine.waiting if sample not in plan.admit and sample.passed < slots}
        for rank, priority in enumerate(CLASSES):
            others = [sample for sample in engine.waiting if sample not in in_vain or CLASSES.index(sample.priority) <= rank]
            without = plan_step(others, engine.running, engine.limits)
            assert of(priority, without.admit) == of(priority, plan.admit)
            assert of(priority, without.preempt) == of(priority, plan.preempt)
        engine.step()
        assert all(sample.passed < 2 * slots for sample in engine.waiting)

    for number, (priority, length, quota, steps) in enumerate(arriving):
        engine.submit(samples_of(f"r{number}", prompt=length, priority=priority), quota)
        for _ in range(steps):
            if engine.waiting or engine.running:
                step()
    while engine.waiting or engine.running:
        step()
    assert len(engine.finished) == len(arriving)


@given(first=st.lists(st.integers(0, 2), max_size=40), second=st.lists(st.integers(0, 2), max_size=40), same=st.booleans())
def test_what_two_stems_have_in_common_is_in_both(first, second, same):
    one, other = (Stem(version, np.array(tokens, np.int32)) for version, tokens in (("v", first), ("v" if same else "w", second)))
    common = in_common(one, other)
    assert first[:common] == second[:common]
    assert common == 0 or same
    if same and one.head == other.head:
        assert common == min(len(first), len(second)) or first[common] != second[common]


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks_while_others_decode():
    engine = Simulation(Limits(slots=4, token_budget=64))
    engine.submit(samples_of("short", prompt=5), quota=50)
    engine.step()
    engine.submit(samples_of("long", prompt=400), quota=1)
    plans = engine.run()
    during = [plan for plan in plans if plan.prefill]
    assert len(during) == 7
    assert all(plan.decode for plan in during)
    assert all((chunk.stop - chunk.start) % 4 == 0 for plan in during[:-1] for chunk in plan.prefill)


def test_samples_of_a_request_prefill_their_prompt_once():
    engine = Simulation(Limits(slots=8, token_budget=300))
    engine.submit(samples_of("group", prompt=200, count=8), quota=3)
    plans = engine.run()
    assert engine.prefilled == 199
    assert len(plans[0].forks) == 7
    assert len(plans[0].decode) == 8


def test_samples_beyond_the_slots_fork_from_siblings_that_still_run():
    engine = Simulation(Limits(slots=2, token_budget=300))
    first, second, third = samples_of("group", prompt=100, count=3)
    engine.submit([first], quota=9)
    engine.submit([second], quota=2)
    engine.submit([third], quota=2)
    engine.run()
    assert engine.prefilled == 99


def test_the_youngest_gives_way_when_the_cache_is_full_and_is_prefilled_again_later():
    engine = Simulation(Limits(slots=4, token_budget=600, cache_tokens=18 * BLOCK_PLACES))
    engine.submit(samples_of("old", prompt=500), quota=30)
    engine.submit(samples_of("young", prompt=40), quota=100)
    plans = engine.run()
    assert [sample.request_id for plan in plans for sample in plan.preempt] == ["young"]
    again = [chunk for plan in plans for chunk in plan.prefill if chunk.sample.request_id == "young"][1]
    assert again.start == 0
    assert again.stop > 39
    assert [sample.request_id for sample in engine.finished] == ["old", "young"]


def test_a_group_runs_together_where_its_prompt_fits_once():
    """What 8 samples begin with takes 20 blocks, and each of them 2 of its own, or 3 when it ends."""
    engine = Simulation(Limits(slots=8, token_budget=4096, cache_tokens=(20 + 8 * 3) * BLOCK_PLACES))
    engine.submit(samples_of("group", prompt=20 * BLOCK_PLACES + 9, count=8), quota=60)
    plans = engine.run()
    assert len(plans[0].decode) == 8
    assert not any(plan.preempt for plan in plans)
    assert engine.prefilled == 20 * BLOCK_PLACES + 8


def test_requests_with_one_prompt_run_together_where_it_fits_once():
    engine = Simulation(Limits(slots=8, token_budget=4096, cache_tokens=(20 + 8 * 3) * BLOCK_PLACES))
    for number in range(8):
        engine.submit(samples_of(f"r{number}", prompt=stem(20 * BLOCK_PLACES + 9)), quota=60)
    engine.step()
    assert len(engine.step().decode) == 8
    engine.run()
    assert engine.prefilled == 20 * BLOCK_PLACES + 8


def test_there_is_room_for_the_copy_of_a_block_that_is_kept_until_it_is_made():
    engine = Simulation(Limits(slots=4, token_budget=4096, cache_tokens=6 * BLOCK_PLACES), keeping=1)
    engine.submit(samples_of("first", prompt=stem(2 * BLOCK_PLACES + 20)), quota=1)
    engine.run()
    engine.submit(samples_of("beside", prompt=2 * BLOCK_PLACES + 20), quota=9)
    engine.step()
    engine.submit(samples_of("again", prompt=stem(2 * BLOCK_PLACES + 15, own=3)), quota=1)
    assert not engine.step().admit
    engine.run()
    assert engine.prefilled == 2 * (2 * BLOCK_PLACES + 19) + 2


def test_what_is_kept_goes_block_by_block_when_those_who_run_need_room_and_the_rest_is_still_of_use():
    engine = Simulation(Limits(slots=2, token_budget=4096, cache_tokens=30 * BLOCK_PLACES), keeping=2)
    engine.submit(samples_of("first", prompt=stem(20 * BLOCK_PLACES)), quota=1)
    engine.run()
    engine.submit(samples_of("other", prompt=stem(18 * BLOCK_PLACES, "other")), quota=1)
    engine.run()
    assert [len(kept.stem.tokens) for kept in engine.kept] == [12 * BLOCK_PLACES, 18 * BLOCK_PLACES]
    engine.submit(samples_of("again", prompt=stem(20 * BLOCK_PLACES)), quota=1)
    (plan,) = engine.run()
    assert [fork.tokens for fork in plan.found] == [12 * BLOCK_PLACES]


def test_a_sample_larger_than_the_cache_runs_alone():
    engine = Simulation(Limits(slots=4, token_budget=600, cache_tokens=512))
    engine.submit(samples_of("huge", prompt=900), quota=2)
    engine.submit(samples_of("next", prompt=9), quota=2)
    engine.run()
    assert [sample.request_id for sample in engine.finished] == ["huge", "next"]


def test_a_budget_without_room_for_prefill_is_refused():
    with pytest.raises(ValueError, match="leaves no room"):
        Limits(slots=64, token_budget=64)


def long_limits(slots: int = 8) -> Limits:
    return Limits(slots=slots, token_budget=1024, cache_tokens=1 << 16)


def test_equal_prompts_of_different_requests_are_prefilled_once():
    engine = Simulation(long_limits())
    for number in range(6):
        engine.submit(samples_of(f"r{number}", prompt=stem(300)), quota=2 + number)
    plans = engine.run()
    assert engine.prefilled == 299
    assert len(plans[0].decode) == 6


def test_a_common_beginning_is_prefilled_once_and_the_rest_by_each():
    engine = Simulation(long_limits())
    for number in range(4):
        engine.submit(samples_of(f"r{number}", prompt=stem(300 + number, own=20)), quota=3)
    engine.run()
    assert engine.prefilled == 299 + 20 + 21 + 22


def test_a_sibling_waits_for_one_who_begins_behind_what_this_step_computes():
    """Else both would compute, and answer for, what comes behind the common beginning."""
    engine = Simulation(Limits())
    engine.submit(samples_of("first", prompt=stem(45, "m", own=9)), quota=9)
    siblings = samples_of("pair", prompt=stem(63, "m", own=27), count=2, first_scored=20)
    engine.submit(siblings, quota=9)
    plan = engine.step()
    assert [fork.tokens for fork in plan.forks] == [19]
    assert siblings[1] not in plan.admit
    plan = engine.step()
    assert (plan.prefill, plan.forks) == ((Chunk(siblings[0], 19, 62),), (Fork(siblings[1], siblings[0], 62),))


def test_nothing_is_taken_over_from_other_weights_or_for_a_few_tokens():
    engine = Simulation(long_limits())
    engine.submit(samples_of("a", prompt=stem(300, version="v")), quota=9)
    engine.submit(samples_of("b", prompt=stem(300, version="w")), quota=9)
    few = stem(300).tokens.copy()
    few[LEAST_SHARED - 1 :] += 1
    engine.submit(samples_of("c", prompt=Stem("v", few)), quota=9)
    engine.run()
    assert engine.prefilled == 3 * 299


def test_what_has_left_and_was_kept_need_not_be_computed_again():
    engine = Simulation(long_limits(), keeping=1)
    engine.submit(samples_of("first", prompt=stem(300)), quota=5)
    engine.run()
    engine.submit(samples_of("again", prompt=stem(300), count=3), quota=5)
    (plan, *_) = engine.run()
    assert engine.prefilled == 299
    assert [fork.tokens for fork in plan.found] == [299] * 3
    assert len(plan.decode) == 3


def test_the_next_turn_of_a_conversation_prefills_what_is_new():
    engine = Simulation(long_limits(), keeping=1)
    engine.submit(samples_of("turn", prompt=stem(300)), quota=40)
    engine.run()
    said = np.concatenate([engine.kept[0].stem.tokens, np.arange(2000, 2050, dtype=np.int32)])
    engine.submit(samples_of("next", prompt=Stem("v", said)), quota=1)
    engine.run()
    assert engine.prefilled == 299 + 49


def test_tokens_whose_scores_are_asked_for_are_computed_and_those_before_them_are_not():
    engine = Simulation(long_limits(), keeping=1)
    engine.submit(samples_of("first", prompt=stem(300)), quota=1)
    engine.run()
    engine.submit(samples_of("end", prompt=stem(300), decodes=False, first_scored=290), quota=1)
    engine.run()
    assert engine.prefilled == 299 + 299 - 289
    engine.submit(samples_of("all", prompt=stem(300), decodes=False, first_scored=1), quota=1)
    engine.run()
    assert engine.prefilled == 299 + 10 + 299


def test_a_prompt_that_wants_one_token_is_prefilled_to_its_end_and_not_decoded():
    engine = Simulation(long_limits())
    engine.submit(samples_of("r", prompt=stem(300), decodes=False, left=0), quota=1)
    (plan,) = engine.run()
    assert (engine.prefilled, plan.decode) == (300, ())


def test_a_prompt_that_another_is_just_prefilling_is_waited_for():
    engine = Simulation(Limits(slots=4, token_budget=64, cache_tokens=1 << 16))
    engine.submit(samples_of("first", prompt=stem(500)), quota=3)
    engine.submit(samples_of("second", prompt=stem(520)), quota=3)
    engine.run()
    assert engine.prefilled == 519


def test_production_takes_the_places_of_rollouts_but_for_their_floor():
    engine = Simulation(long_limits(slots=8))
    engine.submit(samples_of("rollouts", prompt=20, count=12, priority="rollout"), quota=50)
    engine.step()
    assert len(engine.running) == 8
    engine.submit(samples_of("served", prompt=30, count=9, priority="production"), quota=5)
    engine.step()
    assert (len(of("production", engine.running)), len(of("rollout", engine.running))) == (6, engine.limits.floor("rollout"))
    engine.run()
    assert [sample.request_id for sample in engine.finished][:9] == ["served"] * 9


ROOM_FOR_EIGHT = Limits(slots=8, token_budget=4096, cache_tokens=8 * 2 * BLOCK_PLACES)


def test_one_who_is_served_does_not_wait_behind_a_long_evaluation_that_waits_for_room():
    engine = Simulation(ROOM_FOR_EIGHT)
    engine.submit(samples_of("first", prompt=30, count=4, priority="production"), quota=50)
    engine.step()
    engine.submit(samples_of("long", prompt=2000, priority="evaluation"), quota=2)
    engine.submit(samples_of("also judged", prompt=40, priority="evaluation"), quota=2)
    engine.submit(samples_of("served", prompt=40, priority="production"), quota=5)
    assert [sample.request_id for sample in engine.step().admit] == ["served"]
    engine.run()
    assert [sample.request_id for sample in engine.finished] == ["served", *["first"] * 4, "long", "also judged"]


def test_so_many_pass_one_who_waits_for_room_as_have_places_and_then_nobody():
    engine, passing = Simulation(ROOM_FOR_EIGHT), 0
    engine.submit(samples_of("first", prompt=30, count=2, priority="production"), quota=9)
    engine.step()
    (long,) = samples_of("long", prompt=3000, priority="evaluation")
    engine.submit([long], quota=2)
    for number in range(100):
        engine.submit(samples_of(f"r{number}", prompt=30, priority="production"), quota=9)
        plan = engine.step()
        if long in plan.admit:
            break
        passing += len(plan.admit)
    assert passing == ROOM_FOR_EIGHT.slots
    assert long.passed == ROOM_FOR_EIGHT.slots
    engine.run()


def test_one_who_has_grown_too_long_takes_nobody_of_a_class_before_with_him():
    engine = Simulation(ROOM_FOR_EIGHT)
    engine.submit(samples_of("served", prompt=30, count=4, priority="production"), quota=30)
    engine.submit(samples_of("judged", prompt=8 * BLOCK_PLACES - 20, priority="evaluation"), quota=40)
    left = [sample.request_id for plan in engine.run() for sample in plan.preempt]
    assert left == ["judged"]


def test_one_who_is_served_waits_for_no_long_prompt_of_a_rollout():
    engine = Simulation(Limits(slots=4, token_budget=64))
    engine.submit(samples_of("long", prompt=3000, priority="rollout"), quota=1)
    engine.step()
    engine.submit(samples_of("served", prompt=40, priority="production"), quota=1)
    plan = engine.step()
    assert [chunk.sample.request_id for chunk in plan.prefill] == ["served", "long"]
    assert [sample.request_id for sample in plan.decode] == ["served"]


def test_one_who_is_served_does_not_wait_for_what_an_evaluation_computes():
    engine = Simulation(Limits(slots=4, token_budget=64, cache_tokens=1 << 16))
    engine.submit(samples_of("judged", prompt=stem(500), priority="evaluation"), quota=3)
    engine.step()
    engine.submit(samples_of("served", prompt=stem(520), priority="production"), quota=3)
    plan = engine.step()
    assert [fork.sample.request_id for fork in plan.found] == []
    assert plan.prefill[0].sample.request_id == "served"


def test_classes_behind_one_that_decodes_prefill_little_in_a_step():
    engine = Simulation(Limits(slots=4, token_budget=101))
    engine.submit(samples_of("served", prompt=10, priority="production"), quota=3)
    engine.step()
    engine.submit([*samples_of("long", prompt=500, priority="rollout"), *samples_of("judged", prompt=500, priority="evaluation")], quota=1)
    plan = engine.step()
    assert [sample.request_id for sample in plan.decode] == ["served"]
    assert {chunk.sample.priority: chunk.stop - chunk.start for chunk in plan.prefill} == {"rollout": 12, "evaluation": 8}
    engine.step()
    assert sum(chunk.stop - chunk.start for chunk in engine.step().prefill) > 90


def test_every_class_prefills_in_every_step():
    engine = Simulation(Limits(slots=4, token_budget=100))
    for priority in CLASSES:
        engine.submit(samples_of(priority, prompt=2000, priority=priority), quota=1)
    engine.step()
    plan = engine.step()
    tokens = {chunk.sample.priority: chunk.stop - chunk.start for chunk in plan.prefill}
    assert tokens == {"production": 72, "rollout": 12, "evaluation": 12}


def test_guesses_are_fed_by_few_in_the_first_class_that_decodes():
    engine = Simulation(Limits(slots=32, token_budget=300))
    for place, priority in enumerate(("rollout", "rollout", "evaluation")):
        engine.submit(samples_of(f"r{place}", prompt=4, priority=priority), quota=90)
    engine.step()
    for sample in engine.running:
        sample.ahead = 20
    assert engine.plan().ahead == (3, 7, 0)
    engine.running[0].ahead = 2
    assert engine.plan().ahead == (1, 7, 0)
    engine.submit(samples_of("many", prompt=4, count=14), quota=90)
    while len(engine.step().decode) != 17:
        pass
    for sample in engine.running:
        sample.ahead = 20
    assert engine.plan().ahead == (0,) * 17

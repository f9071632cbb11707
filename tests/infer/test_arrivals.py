"""Who waits for room in memory, and who may pass him meanwhile. Versions are named by their size in bytes; there is room for 100."""

from collections import Counter
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.infer.arrivals import Arrivals, Ready
from bloomery.infer.plan import CLASSES
from bloomery.infer.versions import Model, Versions
from bloomery.types.generation import Abort, Generate, Priority, Weights
from tests.infer.builders import prompt, request

MANY = 200
"""Requests: more than may pass."""


class Sized:
    """Weighs versions by their names; loads them when it may."""

    def __init__(self) -> None:
        self.may_load = Event()
        self.may_load.set()

    def weigh(self, weights: Weights) -> int:
        return int(weights.version.partition("-")[0])

    def load(self, weights: Weights) -> Model:
        assert self.may_load.wait(60)
        return Model(weights.version, None, None)


def arriving(source: Sized | None = None) -> Arrivals:
    return Arrivals(Versions(source or Sized(), lambda: 10_000, limit_bytes=100, at_once_s=0))


def ask(request_id: str, version: str, priority: Priority = "rollout") -> Generate:
    return request(request_id, prompt(5), version=version, asked={"priority": priority})


def taken(arrivals: Arrivals, *in_use: str) -> list[str]:
    """Who goes on while these versions are in use; what can be loaded is waited for."""
    return [ready.generate.request_id for ready in until_there(arrivals, set(in_use))]


def until_there(arrivals: Arrivals, in_use: set[str]) -> list[Ready]:
    ready: list[Ready] = []
    for _ in range(3):
        ready += arrivals.take_requests(set(in_use))
        arrivals.wait()
    return ready


def flip(arrivals: Arrivals) -> None:
    """Nothing is in use any more: every swap has its weights."""
    while arrivals.num_swaps:
        for swap, model in arrivals.take_swaps(set()):
            swap.done.set_result(model)
        arrivals.wait()


def running(version: str = "60-a") -> Arrivals:
    """With weights in memory."""
    arrivals = arriving()
    arrivals.add(ask("runs", version), None, paused=False)
    assert taken(arrivals) == ["runs"]
    return arrivals


def test_one_whose_weights_are_there_passes_one_who_waits_for_room():
    arrivals = running()
    for request_id, version in (("waits", "60-b"), ("also waits", "60-b"), ("goes on", "60-a")):
        arrivals.add(ask(request_id, version), None, paused=False)
    assert taken(arrivals, "60-a") == ["goes on"]
    assert taken(arrivals) == ["waits", "also waits"]


def test_so_many_pass_one_who_waits_for_room_and_then_nobody():
    arrivals = running()
    arrivals.add(ask("waits", "60-b"), None, paused=False)
    passing = []
    for number in range(MANY):
        arrivals.add(ask(f"r{number}", "60-a"), None, paused=False)
        passing += [ready.generate.request_id for ready in arrivals.take_requests({"60-a"})]
    assert passing == [f"r{number}" for number in range(64)]
    assert taken(arrivals) == ["waits"]
    assert taken(arrivals) == [f"r{number}" for number in range(64, MANY)]


def test_nobody_of_a_class_behind_passes_one_who_waits_for_room():
    arrivals = running()
    for request_id, version, priority in (("served", "60-b", "production"), ("rolled", "60-a", "rollout"), ("served too", "60-a", "production")):
        arrivals.add(ask(request_id, version, priority), None, paused=False)
    assert taken(arrivals, "60-a") == ["served too"]
    assert taken(arrivals) == ["served"]
    assert taken(arrivals) == ["rolled"]


def test_room_goes_to_the_first_class_that_wants_it():
    arrivals = running()
    for request_id, version, priority in (("judged", "60-b", "evaluation"), ("served", "60-c", "production")):
        arrivals.add(ask(request_id, version, priority), None, paused=False)
    assert taken(arrivals, "60-a") == []
    assert taken(arrivals) == ["served"]
    assert taken(arrivals) == ["judged"]


def test_those_who_go_on_together_keep_their_order():
    arrivals = running()
    for number, priority in enumerate(("evaluation", "production", "rollout", "production")):
        arrivals.add(ask(f"r{number}", "60-a", priority), None, paused=False)
    assert taken(arrivals, "60-a") == ["r0", "r1", "r2", "r3"]


def test_requests_pass_a_swap_that_waits_for_room_and_then_it_has_its_turn():
    arrivals = running()
    swapped = arrivals.swap("policy", Weights(version="60-b", key="k"), "keep")
    passing = 0
    for number in range(MANY):
        arrivals.add(ask(f"r{number}", "60-a"), None, paused=False)
        in_use = {"60-a"}
        assert arrivals.take_swaps(in_use) == []
        passing += len(arrivals.take_requests(in_use))
    assert passing == 64
    flip(arrivals)
    assert swapped.result(timeout=0).version == "60-b"
    assert len(taken(arrivals)) == MANY - 64


def test_whose_weights_were_given_room_uses_it_before_a_swap_that_lacks_it():
    """Neither waits for the other: the room is free again when the request has ended."""
    source = Sized()
    source.may_load.clear()
    arrivals = arriving(source)
    arrivals.add(ask("was first", "60-a"), None, paused=False)
    assert arrivals.take_requests(set()) == []
    swapped = arrivals.swap("policy", Weights(version="60-b", key="k"), "keep")
    assert arrivals.take_swaps(in_use := set()) == []
    source.may_load.set()
    assert [ready.generate.request_id for ready in until_there(arrivals, in_use)] == ["was first"]
    flip(arrivals)
    assert swapped.result(timeout=0).version == "60-b"


def test_one_who_gives_up_is_forgotten():
    arrivals = running()
    arrivals.add(ask("waits", "60-b"), None, paused=False)
    arrivals.add(ask("goes on", "60-a"), None, paused=False)
    assert taken(arrivals, "60-a") == ["goes on"]
    assert arrivals.abort(Abort(request_id="waits")) is not None
    assert arrivals.samples == 0
    assert taken(arrivals) == []


@settings(max_examples=25, deadline=None)
@given(
    meek=st.sampled_from(CLASSES),
    others=st.lists(st.tuples(st.sampled_from(["60-a", "30-c", "50-d"]), st.sampled_from(CLASSES), st.integers(1, 4)), min_size=1, max_size=6),
    in_queue=st.integers(1, 6),
)
def test_everybody_finds_room_however_much_arrives_for_the_weights_in_memory(meek, others, in_queue):
    arrivals, number = arriving(), 0
    steps_left: Counter[tuple[str, str]] = Counter()
    waiting = True
    for step in range(600):
        while arrivals.num_requests < in_queue:
            version, priority, steps = others[number % len(others)]
            arrivals.add(ask(f"r{number} {steps}", version, priority), None, paused=False)
            number += 1
        if step == 3:
            arrivals.add(ask("meek 1", "60-b", meek), None, paused=False)
        for ready in arrivals.take_requests({version for version, _ in steps_left}):
            assert isinstance(ready.weights, Model)
            request_id = ready.generate.request_id
            waiting = waiting and request_id != "meek 1"
            steps_left[ready.weights.version, request_id] = int(request_id.rpartition(" ")[2])
        arrivals.wait()
        steps_left = Counter({each: steps - 1 for each, steps in steps_left.items() if steps > 1})
        if not waiting:
            return
    pytest.fail("it starves")


def test_weights_without_a_name_are_brought_into_memory_beside_swaps_and_wait_for_room_like_these() -> None:
    arrivals = arriving()
    staged, named = arrivals.swap(None, Weights(version="60-a", key="k"), "keep"), arrivals.swap("policy", Weights(version="30-b", key="k"), "keep")
    again = arrivals.swap(None, Weights(version="60-a", key="k"), "keep")
    # What runs leaves no room for the first, and the others do not wait behind it.
    arrivals.add(ask("runs", "50-c"), None, paused=False)
    assert taken(arrivals, "50-c") == ["runs"]
    while not named.done():
        for swap, model in arrivals.take_swaps({"50-c"}):
            swap.done.set_result(model)
    assert not staged.done()
    assert not again.done()
    flip(arrivals)
    assert {staged.result(0).version, again.result(0).version} == {"60-a"}
    assert arrivals.names == {}

"""Classes of requests at a real sampler while the load of each comes and goes: who has places, who waits, and that nobody's answer changes."""

from collections import Counter

import pytest

from bloomery.infer.plan import CLASSES, Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.types.generation import Generate, SampledToken, SampleFinished, SamplerEvent
from tests.infer.builders import answers, generate, prompt, request, sampler
from tests.train.builders import decoder

LIMITS = Limits(slots=8, token_budget=512)
FLOORS = {priority: LIMITS.floor(priority) for priority in CLASSES}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


def asked(priority: str, count: int, *, max_tokens: int) -> list[Generate]:
    return [
        request(f"{priority} {number}", prompt(20, number), seed=number, max_tokens=max_tokens, asked={"priority": priority})
        for number in range(count)
    ]


class Load:
    """Steps a sampler, and sees in every step that no class takes what is another's."""

    def __init__(self, engine: Sampler) -> None:
        self.engine = engine
        self.events: list[SamplerEvent] = []
        self._open: Counter[str] = Counter()
        self.places: dict[str, int] = {}
        """Of each class, in the last step."""
        self.told: Counter[str] = Counter()
        """Tokens of each class in that step."""

    def submit(self, requests: list[Generate]) -> None:
        for each in requests:
            self.engine.submit(each)
            self._open[each.priority] += 1

    def step(self) -> None:
        events = self.engine.step()
        ended = Counter(_class(event) for event in events if isinstance(event, SampleFinished))
        self.told = Counter(_class(event) for event in events if isinstance(event, SampledToken))
        waiting = self.engine.waiting_by_priority
        self.places = {priority: self._open[priority] - waiting.get(priority, 0) for priority in CLASSES}
        self._check(waiting)
        self._open -= ended
        self.events += events

    def _check(self, waiting: dict[str, int]) -> None:
        assert 0 not in waiting.values()
        assert sum(self.places.values()) <= LIMITS.slots
        for rank, priority in enumerate(CLASSES):
            assert self.places[priority] >= min(self._open[priority], FLOORS[priority]), "its floor is sure"
            if waiting.get(priority):
                assert all(self.places[behind] <= FLOORS[behind] for behind in CLASSES[rank + 1 :]), "what floors leave is of the first who wants it"


def _class(event: SamplerEvent) -> str:
    return event.request_id.partition(" ")[0]


def test_production_has_what_floors_leave_and_others_keep_theirs_and_come_back(model: Decoder) -> None:
    long, rush = [*asked("rollout", 12, max_tokens=30), *asked("evaluation", 4, max_tokens=30)], asked("production", 9, max_tokens=6)
    load = Load(sampler(model, limits=LIMITS))
    load.submit(long)
    load.step()
    assert load.places == {"production": 0, "rollout": 7, "evaluation": FLOORS["evaluation"]}
    assert load.engine.waiting_by_priority == {"rollout": 5, "evaluation": 3}
    load.submit(rush)
    load.step()
    squeezed = {"production": 5, "rollout": FLOORS["rollout"], "evaluation": FLOORS["evaluation"]}
    assert load.places == load.told == squeezed
    assert load.engine.waiting_by_priority == {"production": 4, "rollout": 10, "evaluation": 3}
    assert load.engine.preemptions == 5
    while load.engine.waiting_by_priority.get("production"):
        load.step()
    while load.places["production"]:
        load.step()
    assert load.places["rollout"] == 7
    while load.engine.busy:
        load.step()
    found = answers(load.events)
    undisturbed = generate(sampler(model), *long, *rush)
    assert {name: answer.told for name, answer in found.items()} == {name: answer.told for name, answer in undisturbed.items()}
    assert load.engine.waiting_by_priority == {}


@pytest.mark.parametrize("alone", CLASSES)
def test_a_class_that_is_alone_has_all_places(model: Decoder, alone: str) -> None:
    load = Load(sampler(model, limits=LIMITS))
    load.submit(asked(alone, 10, max_tokens=3))
    load.step()
    assert load.places[alone] == LIMITS.slots
    assert load.engine.waiting_by_priority == {alone: 2}

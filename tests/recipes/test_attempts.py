"""One failed scoring ends no loop: whoever needs scores asks for them again, a bounded number of times."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest

from bloomery.client import Client, Sampler
from bloomery.recipes.advantages import Weighed
from bloomery.recipes.async_grpo import AsyncGrpoConfig, anchored
from bloomery.recipes.attempts import patiently
from bloomery.recipes.holding import Bar, Holding
from bloomery.recipes.reference import Reference
from bloomery.recipes.rollouts import Graded, Group, Rollout
from bloomery.types.errors import InvalidInput, WorkerError
from tests.live import LiveServer
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL

ATTEMPTS = 3
CONFIG = AsyncGrpoConfig(policy=POLICY, rollouts=replace(SMALL, attempts=ATTEMPTS), anchor="snapshot")


class Failing(httpx.BaseTransport):
    """Tells of so many scorings that they failed, as a server does whose worker could not."""

    def __init__(self, times: int) -> None:
        self.left, self.scored = times, 0
        self._wire = httpx.HTTPTransport()
        self._failed: set[str] = set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read() or b"{}") if request.method == "POST" else {}
        if body.get("request_id") in self._failed:
            return httpx.Response(200, json={"error": "the worker could not", "category": "server"})
        response = self._wire.handle_request(request)
        if "prompt_logprobs" in body:
            self.scored += 1
            if self.left:
                self.left -= 1
                self._failed.add(json.loads(response.read())["request_id"])
        return response

    def close(self) -> None:
        self._wire.close()


Scores = Callable[[Client, Sampler, Rollout], object]


def holds(client: Client, sampler: Sampler, rollout: Rollout) -> object:
    holding = Holding(Bar(client, BASE, "promised"), {BASE: sampler}.get, every=True, attempts=ATTEMPTS, timeout_s=30)
    return holding.held(Group(0, rollout.problem, (Graded(rollout, 1.0, {}),), ()))


def pulls(_: Client, sampler: Sampler, rollout: Rollout) -> object:
    return Reference(sampler, 0.1, 4, attempts=ATTEMPTS, timeout_s=30).pull([weighed(rollout)])


def anchors(_: Client, sampler: Sampler, rollout: Rollout) -> object:
    (row,) = anchored([weighed(rollout._replace(versions=("older",) * len(rollout.tokens)))], sampler, CONFIG)
    assert row.anchor == rollout.logprobs
    return row


def weighed(rollout: Rollout) -> Weighed:
    (segment,) = rollout.segments
    return Weighed(segment, np.ones(len(rollout.tokens), dtype=np.float32))


@pytest.fixture
def rollout(live_server: LiveServer) -> Iterator[Rollout]:
    with Client(live_server.url, live_server.key) as client:
        (told,) = client.sampler(BASE).sample(PROBLEMS[0].prompt, max_tokens=6, seed=4).result().sequences
        yield Rollout("0.0", PROBLEMS[0], told.tokens, told.logprobs, (BASE,) * len(told.tokens), told.stopped)


@pytest.mark.parametrize("scores", [holds, pulls, anchors])
def test_a_scoring_that_failed_is_asked_for_again(live_server: LiveServer, rollout: Rollout, scores: Scores) -> None:
    failing = Failing(ATTEMPTS - 1)
    with Client(live_server.url, live_server.key, transport=failing) as client:
        assert scores(client, client.sampler(BASE), rollout)
    assert (failing.left, failing.scored) == (0, ATTEMPTS)


@pytest.mark.parametrize("scores", [holds, pulls, anchors])
def test_one_that_fails_every_time_is_told_as_what_it_failed_with(live_server: LiveServer, rollout: Rollout, scores: Scores) -> None:
    failing = Failing(ATTEMPTS)
    with Client(live_server.url, live_server.key, transport=failing) as client, pytest.raises(WorkerError, match="the worker could not"):
        scores(client, client.sampler(BASE), rollout)
    assert failing.scored == ATTEMPTS


def test_what_is_the_callers_mistake_is_not_asked_again() -> None:
    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        raise InvalidInput("the text is too long", field="prompt")

    with pytest.raises(InvalidInput):
        patiently(ATTEMPTS, ask)
    assert len(asked) == 1

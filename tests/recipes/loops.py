"""What the tests of both loops share: a small loop, clients in the middle of whose work somebody dies, and a record of what was graded."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import httpx

from bloomery.client import Client
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import Problem, Rollout, RolloutConfig
from tests.live import LiveServer

BASE = "bloomery-tiny"
PROBLEMS = [Problem(f"p{number}", tuple(range(100 + number, 110 + number))) for number in range(5)]
POLICY = PolicyConfig(base_model=BASE, rank=4, learning_rate=1e-3, seed=3)
SMALL = RolloutConfig(group_size=3, max_tokens=4, seed=11)
LONG = RolloutConfig(group_size=3, max_tokens=64, seed=11)
"""Takes long enough for who samples them to be killed meanwhile."""
MIDDLE_S = 25.0
"""Within the time of a grader."""


class Killed(BaseException):
    """The loop is dead: nothing catches this."""


class Mortal(httpx.BaseTransport):
    """Dies with the operation of this number, before or after the server has it."""

    def __init__(self, operation: int, *, heard: bool) -> None:
        self._operation, self._heard = operation, heard
        self._wire = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fatal = request.method == "POST" and f"/operations/{self._operation}" in request.url.path
        if fatal and not self._heard:
            raise Killed
        response = self._wire.handle_request(request)
        if fatal:
            response.read()
            raise Killed
        return response

    def close(self) -> None:
        self._wire.close()


@contextmanager
def mortal_client(server: LiveServer, operation: int, *, heard: bool) -> Iterator[Client]:
    """A client for a loop that is killed."""
    with Client(server.url, server.key, transport=Mortal(operation, heard=heard)) as client:
        yield client


class Record:
    """Grades by the tokens' sum, so that groups vary, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[str, tuple[int, ...], tuple[float, ...]]]] = {}

    def grade(self, rollout: Rollout) -> float:
        """The same for the same tokens."""
        self.seen.setdefault(rollout.id, set()).add((rollout.problem.id, rollout.tokens, rollout.logprobs))
        return float(sum(rollout.tokens))


Grade = Callable[[Rollout], float]


class InTheMiddle(httpx.BaseTransport):
    """Has somebody killed in the middle of a step of two groups: within a call of its grader, while the rollouts of its other group are in flight.

    `step` counts from 0. Of its rollouts the second are asked for when the first are graded, and that goes on when the server has taken them.
    """

    def __init__(self, step: int, kill: Callable[[], None]) -> None:
        self._step, self._kill = step, kill
        self._wire, self._requests, self._lock = httpx.HTTPTransport(), count(), threading.Lock()
        self._grading, self._in_flight = threading.Event(), threading.Event()
        self.killed = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        # What is only scored is no rollout.
        asks = request.url.path == "/api/v1/asample" and "num_samples" in json.loads(request.read())
        if not asks or next(self._requests) != 2 * self._step + 1:
            return self._wire.handle_request(request)
        assert self._grading.wait(MIDDLE_S)
        response = self._wire.handle_request(request)
        response.read()
        self._in_flight.set()
        return response

    def close(self) -> None:
        self._wire.close()

    def within(self, grade: Grade) -> Grade:
        """A grader that gives what another one gives."""

        def graded(rollout: Rollout) -> float:
            with self._lock:
                if not self.killed and int(rollout.id.partition(".")[0]) // 2 == self._step:
                    self.killed = True
                    self._grading.set()
                    assert self._in_flight.wait(MIDDLE_S)
                    self._kill()
            return grade(rollout)

        return graded

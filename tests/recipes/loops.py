"""What the tests of both loops share: a small loop, a client that dies where it is told to, and a record of what was graded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from bloomery.client import Client
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import Problem, Rollout, RolloutConfig
from tests.live import LiveServer

BASE = "bloomery-tiny"
PROBLEMS = [Problem(f"p{number}", tuple(range(100 + number, 110 + number))) for number in range(5)]
POLICY = PolicyConfig(base_model=BASE, rank=4, learning_rate=1e-3, seed=3)
SMALL = RolloutConfig(group_size=3, max_tokens=4, seed=11)


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

"""Environments of the package `verifiers` (0.3, its classic ones) as agents: their dataset, turns, tools and rubric as they are, our loops.

    import verifiers as vf

    env = vf.load_environment("my-environment")
    with VerifiersAgent(env) as agent, Agents(agent, tokenizer) as agents:
        train(client, problems(env), agents, GrpoConfig(...), Path("cursor.json"), steps=30)

The rubric's reward is the rollout's, and its functions' values are the parts. Importing this module takes the package; nothing else of Bloomery does.
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

from verifiers.clients import OpenAIChatCompletionsClient  # type: ignore[import-not-found]
from verifiers.types import ClientConfig  # type: ignore[import-not-found]

from bloomery.recipes.agents import Episode
from bloomery.recipes.event_loops import EventLoops
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Problem
from bloomery.types.errors import InvalidInput

_CLOSES_WITHIN_S: Final = 5.0
_RAISED: ContextVar[list[Exception]] = ContextVar("raised")
"""What reward functions of the rollout at hand raised."""


class EnvironmentFailed(Exception):
    """A rollout of an environment came to no reward."""


def problems(env: Any, most: int = -1) -> list[Problem]:
    """The rows that an environment trains on, all of them or the first so many. A row of other content is another problem."""
    rows = [dict(row) for row in env.get_dataset(n=most)]
    return [Problem(f"{row['example_id']}-{_digest(row)}", (), row) for row in rows]


def _digest(row: Mapping[str, Any]) -> str:
    return sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:8]


class VerifiersAgent:
    """An agent for `Agents`, within its `with`: one rollout of the environment for each episode, all on one event loop, as in the package."""

    def __init__(self, env: Any) -> None:
        if env.requires_group_rollouts or env.provides_advantages:
            raise InvalidInput("this rubric rates rollouts against each other: rewards here are of one rollout, and groups compare them", field="env")
        if not env.score_rollouts:
            raise InvalidInput("`score_rollouts` of the environment is off: every reward would be 0", field="env")
        self._env = env
        self._loops = EventLoops("verifiers")
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = WeakKeyDictionary()

    def __enter__(self) -> Self:
        self._loops.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._clients:
            with suppress(TimeoutError):
                self._loops.run(self._close, _CLOSES_WITHIN_S)
        self._loops.__exit__(*raised)

    def __call__(self, episode: Episode) -> Reward:
        """Under the episode's deadline, whatever the environment waits for."""
        result: Reward = self._loops.run(functools.partial(self._rollout, episode), episode.timeout_s)
        return result

    async def _rollout(self, episode: Episode) -> Reward:
        raised: list[Exception] = []
        _RAISED.set(raised)
        for rubric in _rubrics(self._env.rubric):
            rubric.funcs = [_watched(function) for function in rubric.funcs]
        # Asked for once more, the reward stands where a metric of that name would be.
        columns = ["reward", "metrics", "trajectory"]
        asked = dict(self._env.sampling_args)
        output = await self._env.run_rollout(episode.problem.data, self._client(episode), episode.model, asked, state_columns=columns)
        return _reward(episode, output, raised)

    async def _close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _client(self, episode: Episode) -> "_Client":
        """With the episode's key, on the connections of this loop: to open some of its own takes longer than a short answer."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = _Client(ClientConfig(api_base_url=episode.base_url, api_key_var="", max_retries=0))
        return _Client(self._clients[loop].client.with_options(api_key=episode.api_key, base_url=episode.base_url))


def _reward(episode: Episode, output: Mapping[str, Any], raised: list[Exception]) -> Reward:
    if "error_chain" in output:
        raise EnvironmentFailed(output["error_chain"])
    if output["stop_condition"] == "timeout_reached":
        raise TimeoutError("the environment's own time was up")
    if raised:
        # The package goes on with 0 where a reward function raises.
        raise raised[0]
    turns = {step["response"].id: step["reward"] for step in output["trajectory"] if step["reward"] is not None}
    return Reward(episode.rollout_id, output["reward"], output["metrics"], turns)


class _Client(OpenAIChatCompletionsClient):  # type: ignore[misc]
    async def to_native_tool(self, tool: Any) -> Any:
        """The package declares every tool `strict`, which would have answers drawn from another distribution than the one that is trained."""
        return await super().to_native_tool(tool.model_copy(update={"strict": None}))


def _rubrics(rubric: Any) -> Iterator[Any]:
    """A rubric and all that it is made of."""
    yield rubric
    for part in (*getattr(rubric, "rubrics", ()), *(env.rubric for env in getattr(rubric, "env_map", {}).values())):
        yield from _rubrics(part)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which it is known when it raised."""
    if hasattr(function, "watched_by_bloomery"):
        return function

    @functools.wraps(function)
    def watched(*arguments: Any, **named: Any) -> Any:
        with _Noting():
            value = function(*arguments, **named)
        return _awaited(value) if inspect.isawaitable(value) else value

    watched.watched_by_bloomery = True  # type: ignore[attr-defined]
    return watched


async def _awaited(value: Any) -> Any:
    with _Noting():
        return await value


class _Noting:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            _RAISED.get().append(error)

"""Models elsewhere that the server was told of, asked as `ENDPOINT:MODEL`. They cost money, so the configuration says whose keys may ask them.

What an endpoint refuses is told as what it is to the caller: the key that it does not take is the server's and not his, so that is Unavailable.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

from bloomery.config import EndpointConfig
from bloomery.grade.endpoints import Endpoint
from bloomery.grade.models import Answer, Question, Vectors
from bloomery.services.access.limits import RateLimits
from bloomery.services.access.principal import Principal
from bloomery.types.errors import Forbidden, NotFound, Unauthorized, Unavailable, shown
from bloomery.types.resources import Price

SEPARATOR: Final = ":"
_OURS: Final = "tinker:"

T = TypeVar("T", Answer, Vectors)


def is_elsewhere(model: str) -> bool:
    """Whether a name can only be one of an endpoint's models: no name of this server's has the separator, but for paths of weights."""
    return SEPARATOR in model and not model.startswith(_OURS)


class Outside:
    """A model of an endpoint, on the account of one caller: what he asks counts on his limits."""

    def __init__(self, endpoint: "_Open", model: str, limits: RateLimits, caller: Principal) -> None:
        self._endpoint, self._model, self._limits, self._caller = endpoint, model, limits, caller

    @property
    def price(self) -> Price | None:
        """What it costs, where that was told."""
        return (self._endpoint.config.models or {}).get(self._model)

    async def ask(self, question: Question) -> Answer:
        """One answer; the model that the question names is this one, whatever it is called there."""
        asked = replace(question, model=self._model)
        return await self._counted(self._endpoint.answer(lambda client: client.ask(asked)))

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        return await self._counted(self._endpoint.answer(lambda client: client.embed(self._model, texts)))

    async def _counted(self, asking: Coroutine[Any, Any, T]) -> T:
        with closing(asking):
            self._limits.request(self._caller)
            found = await asking
        self._limits.sampled(self._caller, found.usage.prompt_tokens + found.usage.completion_tokens)
        return found


class Endpoints:
    """All of them, connected as long as the `async with` lasts."""

    def __init__(self, configs: Sequence[EndpointConfig], environment: Mapping[str, str], limits: RateLimits) -> None:
        self._open = {config.name: _Open(config, config.key(environment)) for config in configs}
        self._limits = limits
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for endpoint in self._open.values():
            await self._stack.enter_async_context(endpoint.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def list(self, p: Principal) -> list[EndpointConfig]:
        """Those that the caller's project may ask."""
        p.require("read", "train")
        return [endpoint.config for endpoint in self._open.values() if p.project in endpoint.config.projects]

    def named(self, p: Principal, model: str) -> Outside:
        """Who answers for `ENDPOINT:MODEL`."""
        p.require("train")
        name, _, inner = model.partition(SEPARATOR)
        endpoint = self._open.get(name)
        if endpoint is None or p.project not in endpoint.config.projects:
            problem = f"no model `{shown(model, 256)}`: there is no endpoint `{shown(name)}` for project `{p.project}`"
            raise NotFound(f"{problem}, see GET /api/v1/endpoints", field="model")
        if not inner or (endpoint.config.models is not None and inner not in endpoint.config.models):
            raise NotFound(f"endpoint `{name}` is not asked for a model `{shown(inner, 256)}`: see GET /api/v1/endpoints", field="model")
        return Outside(endpoint, inner, self._limits, p)


class _Open:
    """One endpoint: so many questions at a time, each within its time."""

    def __init__(self, config: EndpointConfig, key: str | None) -> None:
        self.config = config
        self.client = Endpoint(config.base_url, key, timeout_s=config.timeout_s)
        self._places = asyncio.Semaphore(config.concurrency)

    async def answer(self, asked: Callable[[Endpoint], Awaitable[T]]) -> T:
        """What comes of asking."""
        try:
            async with self._places, asyncio.timeout(self.config.timeout_s):
                return await asked(self.client)
        except TimeoutError:
            raise Unavailable(f"endpoint `{self.config.name}` did not answer within {self.config.timeout_s:g} s") from None
        except (Unauthorized, Forbidden) as error:
            problem = f"endpoint `{self.config.name}` does not take the key of this server"
            raise Unavailable(f"{problem}: whoever runs it gives another in the file of --endpoints ({error.message})") from None

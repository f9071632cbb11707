"""Messages and texts to tokens, off the event loop: a template may take seconds, and long texts take long to encode. Short ones are encoded at once.

Few threads at a time work for each base, and what waits for them waits without a thread: a slow template holds up its own requests only.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from bloomery.services.engines.models import Models
from bloomery.types.errors import InvalidInput, Unavailable

THREADS: Final = 2
WAIT_S: Final = 30.0
AT_ONCE: Final = 512
"""Characters: to hand them to a thread and back takes about as long as to make tokens of them."""
_EACH: Final = 64
"""Of which as many take as long as a text itself, however short."""

T = TypeVar("T")


class Rendering:
    """The tokenizers of all base models, for callers on the event loop."""

    def __init__(self, models: Models, wait_s: float = WAIT_S) -> None:
        self._models, self._wait_s = models, wait_s
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(THREADS))

    async def prompt(
        self,
        base_hash: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation in which these tools may be called, up to where the answer begins; `variables` are the template's."""
        context = self._models.size(base_hash).context
        tokenizer = self._models.tokenizer(base_hash)

        def render() -> list[int]:
            return tokenizer.render_prompt(messages, tools=tools or None, context=context, variables=variables)

        said = [value for message in messages for value in message.values()]
        at_once = tokenizer.renders_here and not tools and _short(said)
        return render() if at_once else await self._on_thread(base_hash, render)

    async def encode(self, base_hash: str, texts: Sequence[str], fields: Sequence[str]) -> list[list[int]]:
        """The tokens of each text; the first that the context cannot hold is refused, by the name of its field, before others are encoded."""
        context = self._models.size(base_hash).context
        tokenizer = self._models.tokenizer(base_hash)

        def encode() -> list[list[int]]:
            for text, field in zip(texts, fields, strict=True):
                tokenizer.check_fits(text, context, field)
            return [_fitting(tokenizer.encode(text), context, field) for text, field in zip(texts, fields, strict=True)]

        return encode() if _short(texts) else await self._on_thread(base_hash, encode)

    async def _on_thread(self, base_hash: str, work: Callable[[], T]) -> T:
        turn = self._turns[base_hash]
        try:
            async with asyncio.timeout(self._wait_s):
                await turn.acquire()
        except TimeoutError:
            what = f"waited {self._wait_s:g} s for a turn to make tokens for base model {base_hash}"
            raise Unavailable(f"{what}, which has too many messages and texts in hand: send the request again") from None
        running = asyncio.get_running_loop().run_in_executor(None, work)
        # A caller who leaves does not stop the thread, so the turn ends when the thread does.
        running.add_done_callback(partial(_end_turn, turn))
        return await asyncio.shield(running)


def _fitting(tokens: list[int], context: int, field: str) -> list[int]:
    if len(tokens) > context:
        raise InvalidInput(f"`{field}` has {len(tokens)} tokens and leaves no room in the model's context of {context}: shorten it", field=field)
    return tokens


def _short(said: Sequence[Any]) -> bool:
    """Whether these are texts alone, and little of them."""
    return all(isinstance(each, str | None) for each in said) and sum(_EACH + len(each or "") for each in said) <= AT_ONCE


def _end_turn(turn: asyncio.Semaphore, done: asyncio.Future[Any]) -> None:
    turn.release()
    if not done.cancelled():
        # Looked at here, because a caller who left does not.
        done.exception()

"""An embedded engine that gives whoever watches a request time to do something in the middle of it, however late his threads come to that."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, Final

import pytest

from bloomery.infer.embedded import EmbeddedEngine
from bloomery.types.generation import SampledToken, SamplerEvent

_AT_ONCE: Final = 100
"""Tokens of a request that come as quickly as they can."""
_STEP_S: Final = 0.03
"""How long each step stands still behind them, while somebody is in the middle of one."""


class UnhurriedEngine(EmbeddedEngine):
    """Samples slowly while one of `held` has some of its tokens, and as always once it is empty."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._tokens: Counter[str] = Counter()
        self._held: frozenset[str] = frozenset()
        self._released = Event()
        self._step_as_always = self._sampler.step
        vars(self._sampler)["step"] = self._step

    def hold(self, request_id: str) -> None:
        """Something is about to happen in the middle of this request."""
        self._held |= {request_id}
        self._released.clear()

    def release(self) -> None:
        """Nothing is any more."""
        self._held = frozenset()
        self._released.set()

    def _step(self) -> list[SamplerEvent]:
        if any(self._tokens[request_id] >= _AT_ONCE for request_id in self._held):
            self._released.wait(_STEP_S)
        events = self._step_as_always()
        self._tokens.update(event.request_id for event in events if isinstance(event, SampledToken))
        return events


@contextmanager
def impatient(engine: EmbeddedEngine, **deadlines: float) -> Iterator[None]:
    """Whoever waits meanwhile waits so long for what does not come; what does come may take its time before and after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_deadlines", replace(engine._deadlines, **deadlines))
        patch.setattr(engine._thread, "_step_s", engine._deadlines.step_s)
        yield

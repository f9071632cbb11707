"""The weights that training began with: how far the policy has gone from them, and what pulls it back where that is asked (`kl_coefficient`).

Both are compared at the temperature at which rollouts are drawn: what is trained is that distribution, and so is what it is held to.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from bloomery.client import PendingSample, Sampler
from bloomery.recipes.advantages import Weighed, pull_to_reference
from bloomery.recipes.agreement import k3
from bloomery.recipes.attempts import patiently
from bloomery.types.errors import Unavailable, WorkerError


class Reference:
    """Scores what is trained by the first weights: all of it where the policy is pulled, a few rollouts of a step where it is only looked at."""

    def __init__(self, first: Sampler, coefficient: float, rollouts: int, *, attempts: int, timeout_s: float) -> None:
        self._first, self._coefficient, self._rollouts = first, coefficient, rollouts
        self._attempts, self._timeout_s = attempts, timeout_s
        self._asked: list[tuple[Weighed, PendingSample]] = []
        self._kl: float | None = None

    def pull(self, data: Sequence[Weighed]) -> list[Weighed]:
        """The data, held to the reference; otherwise as it is, and some of it begins to be scored."""
        self._kl, self._asked = None, []
        if self._coefficient:
            scored = patiently(self._attempts, lambda: self._scored(self._ask(data)))
            self._note(scored)
            return pull_to_reference(data, [given for _, given in scored], self._coefficient)
        with suppress(Unavailable, WorkerError):
            # What is only looked at ends no loop.
            self._asked = self._ask(data[:: max(1, len(data) // self._rollouts)][: self._rollouts] if self._rollouts else ())
        return [*data]

    def kl(self) -> float | None:
        """Of the policy to its first weights, in nats a token, over what was scored of the last step; None where nothing was."""
        asked, self._asked = self._asked, []
        with suppress(Unavailable, WorkerError):
            if asked:
                self._note(self._scored(asked))
        return self._kl

    def _ask(self, rows: Sequence[Weighed]) -> list[tuple[Weighed, PendingSample]]:
        return [(row, self._first.score(row.segment.tokens, temperature=row.segment.temperature)) for row in rows]

    def _scored(self, asked: Sequence[tuple[Weighed, PendingSample]]) -> list[tuple[Weighed, list[float]]]:
        scored = [(row, pending.prompt_logprobs(self._timeout_s)) for row, pending in asked]
        return [(row, [logprobs[place] for place in row.segment.places]) for row, logprobs in scored]

    def _note(self, scored: Sequence[tuple[Weighed, Sequence[float]]]) -> None:
        d = np.array([then - now for row, given in scored for then, now in zip(given, row.segment.logprobs, strict=True)])
        self._kl = k3(d) if len(d) else None

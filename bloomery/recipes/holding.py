"""What a loop holds its rollouts to while it runs (`PolicyConfig.agreement`), however far the trainer is ahead of them.

`Bar` says what a difference has to stay below: nothing at all where the server promises bits, a bar of rounding, or it is not looked for. `Holding`
has the rollouts of a loop scored by the weights that each of their tokens names, so a token is compared with the version that drew it, and never with
the newer one that is trained; and it counts how often the likeliest token came. Groups are held on the threads that make them, whatever makes them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from bloomery.client import Client, Sampler
from bloomery.recipes.agreement import Agreement, Held, Recomputed, check_drawn, check_whole, compare, promises_bits, require, score
from bloomery.recipes.attempts import patiently
from bloomery.recipes.rollouts import Group
from bloomery.recipes.segments import Segment
from bloomery.types.errors import Corrupt, Forbidden
from bloomery.types.fidelity import Mode

WINDOW: Final = 4096
"""Tokens among which the likeliest are counted: enough to see a temperature of 0.9, few enough to see a fault that begins late."""


class Bar:
    """How much sampler and trainer may differ by."""

    def __init__(self, client: Client, base_model: str, agreement: Held) -> None:
        self._client, self._base_model, self._agreement = client, base_model, agreement
        self._promised = False

    def now(self) -> Mode | None:
        """None: whatever differs is only shown. It is asked anew each time: processes come and go, and while one is away what it said counts."""
        if self._agreement == "off":
            return None
        if self._bits_are_promised():
            return "exact"
        return "plain" if self._agreement == "always" else None

    def hold(self, agreement: Agreement, version: str, what: str) -> None:
        """Corrupt where it is not met. What is equal to the bit is so for anybody: the server need not be asked."""
        if agreement.largest == 0 or (mode := self.now()) is None:
            return
        try:
            require(agreement, version, mode)
        except Corrupt as error:
            raise self.refusal(what, error, mode) from error

    def refusal(self, what: str, error: Corrupt, mode: Mode) -> Corrupt:
        """What is said of it, with the way out."""
        rule = "the server promises rollouts with its trainer's bits" if mode == "exact" else '`agreement="always"` holds them to bars of rounding'
        return Corrupt(
            f"{what} held and nothing of it is learnt, because {rule}: {error.message}. Mend that, or go on all the "
            'same: the same cursor with `agreement="off"` in the PolicyConfig'
        )

    def _bits_are_promised(self) -> bool:
        try:
            said = promises_bits(self._client.status(), self._base_model)
        except Forbidden:
            # A key for training alone is told nothing of processes, and a loop must not end by that.
            return False
        self._promised = self._promised if said is None else said
        return self._promised


class Scores(NamedTuple):
    """What a loop has had scored since it was last asked."""

    tokens: int
    deviation: float
    """Of how often the likeliest token came, in standard errors."""
    held_share: float | None
    """Of the groups that were made, those that were held to anything; None where none was made."""


class Holding:
    """Scores groups as they are made; threads may share it.

    `every`: all rollouts of a group, because their updates are not on policy; otherwise one of each, because the trainer's own forward will say the
    same of all of them at no cost.
    """

    def __init__(self, bar: Bar, sampler_of: Callable[[str], Sampler | None], *, every: bool, attempts: int, timeout_s: float) -> None:
        self._bar, self._sampler_of, self._every = bar, sampler_of, every
        self._attempts, self._timeout_s = attempts, timeout_s
        self._lock = threading.Lock()
        self._looks = False
        self._tokens, self._deviation = 0, 0.0
        self._groups = self._held_groups = 0
        self._likeliest: deque[float] = deque(maxlen=WINDOW)
        self._came: deque[bool] = deque(maxlen=WINDOW)

    def held(self, group: Group) -> Group:
        """The group, whose tokens are those that were served; Corrupt where they are not."""
        looks = self._is_looked_for()
        with self._lock:
            self._groups += 1
            self._held_groups += looks
        if not looks:
            return group
        members = group.members if self._every else group.members[group.number % len(group.members) :][:1] if group.members else ()
        segments = [segment for member in members for segment in member.rollout.segments if all(map(self._sampler_of, segment.versions))]
        for place, segment in enumerate(segments):
            check_whole(place, segment)
        recomputed = patiently(self._attempts, lambda: score(segments, self._known, self._timeout_s))
        for version, agreement in compare(segments, [each.logprobs for each in recomputed]).items():
            self._bar.hold(agreement, version, f"the rollouts of group {group.number} are")
        self._count(group, segments, recomputed)
        return group

    def take_scores(self) -> Scores:
        """What was scored since this was asked last."""
        with self._lock:
            tokens, groups, held_groups = self._tokens, self._groups, self._held_groups
            self._tokens = self._groups = self._held_groups = 0
            return Scores(tokens, self._deviation, held_groups / groups if groups else None)

    def _is_looked_for(self) -> bool:
        """Scoring where nothing is refused would only cost time. A server that promises nothing is asked at every group: its engine may be away."""
        self._looks = self._looks or self._bar.now() is not None
        return self._looks

    def _known(self, version: str) -> Sampler:
        sampler = self._sampler_of(version)
        assert sampler is not None
        return sampler

    def _count(self, group: Group, segments: Sequence[Segment], recomputed: Sequence[Recomputed]) -> None:
        with self._lock:
            if group.failures:
                # Who failed may have failed for the tokens that came: those that are left were chosen, and do not show how tokens are drawn.
                self._likeliest.clear()
                self._came.clear()
            else:
                self._likeliest.extend(float(logprob) for each in recomputed for logprob in each.likeliest)
                self._came.extend(bool(came) for each in recomputed for came in each.came)
            self._tokens += sum(len(segment.places) for segment in segments)
            newest = next((version for segment in reversed(segments) for version in reversed(segment.versions)), "")
            try:
                self._deviation = check_drawn(self._likeliest, self._came, newest)
            except Corrupt as error:
                if (mode := self._bar.now()) is not None:
                    raise self._bar.refusal(f"the rollouts up to group {group.number} are", error, mode) from error

"""Weights in memory are looked at again, in rotation, for as long as they are served.

What nobody writes can still change, by a fault of ours or of the machine, and no hash of an update would see it.

A turn is a 64th of the weights that are next, or `TURN_ELEMENTS` where that is less, between two steps or in an idle second: a millisecond or two. A
matrix that lies packed is put back into plain order as a whole, which takes as much memory as it has, and of a large head tenths of a second. What
has changed is taken out of service: a version at once, and the base with the whole process.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from bloomery.infer.sampler import Sampler
from bloomery.sync.proof import Proof
from bloomery.types.errors import Corrupt

log = logging.getLogger(__name__)

SCRUB_S: Final = 1.0
TURN_ELEMENTS: Final = 4 << 20
_PARTS: Final = 64


class Scrub:
    """Goes round the proofs of the base and of the versions that a sampler has in memory."""

    def __init__(self, base: Sequence[Proof], sampler: Sampler, every_s: float = SCRUB_S) -> None:
        self._base, self._sampler, self._every_s = base, sampler, every_s
        self._to_come: deque[int | str] = deque()
        """What is left of this round: numbers of the base's proofs, and versions."""
        self._due_s = time.monotonic() + every_s
        self._begun = False
        self.rounds = 0
        """How often everything was looked at."""
        self.condemned: dict[str, str] = {}
        """Versions that were taken out of service, and why."""

    @property
    def due_in_s(self) -> float:
        """Until the next turn."""
        return max(0.0, self._due_s - time.monotonic())

    def take_turn(self) -> None:
        """Look at the next part, when it is time. Corrupt where the base has changed: the process is of no use any more."""
        if self.due_in_s > 0:
            return
        self._due_s = time.monotonic() + self._every_s
        proof = self._next()
        try:
            proof.scrub(max(1, min(TURN_ELEMENTS, -(-proof.numel // _PARTS))))
        except Corrupt as error:
            if proof in self._base:
                raise
            version = proof.expected.version
            log.error("%s; it is taken out of service, and read anew when somebody asks for it", error.message)
            self.condemned[version] = error.message
            self._sampler.condemn(version, error.message)
            self._to_come.popleft()
            return
        if proof.round_done:
            self._to_come.popleft()

    def _next(self) -> Proof:
        """That of what is looked at; weights that left the memory are passed over."""
        versions = self._sampler.versions.proofs
        while self._to_come:
            name = self._to_come[0]
            if isinstance(name, int):
                return self._base[name]
            if name in versions:
                return versions[name]
            self._to_come.popleft()
        self.rounds += self._begun
        self._begun = True
        self._to_come += [*range(len(self._base)), *versions]
        return self._base[0]

"""Weights in memory are looked at again, in rotation, for as long as they are served.

What nobody writes can still change, by a fault of ours or of the machine, and no hash of an update would see it.

A turn is a 64th of all that is in memory, or `TURN_ELEMENTS` where that is less, but of one version or one form of the base alone, between two steps
or in an idle second: a few milliseconds. So a round takes about 64 turns and one for each version, and more only where more is in memory than 64
times `TURN_ELEMENTS`. A matrix that lies packed is put back into plain order as a whole, which takes as much memory as it has, and of a large head
tenths of a second: one of more than `TURN_ELEMENTS` is read beside the steps, and the turns go on when that is done. What has changed is taken out of
service: a version at once, and the base with the whole process.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._turn_elements = TURN_ELEMENTS
        """In this round."""
        self._round_began_s = self.clean_s = time.monotonic()
        """`clean_s`: when the last round began that found nothing. What was computed before then was computed with sound weights."""
        # Its one thread ends with this object.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="scrub")
        self._beside: tuple[Proof, Future[int]] | None = None
        """What is just being read beside the steps."""
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
        if self._beside is not None and not self._beside[1].done():
            return
        proof = self._next() if self._beside is None else self._beside[0]
        try:
            if not self._looked(proof):
                return
        except Corrupt as error:
            if proof in self._base:
                raise
            version = proof.expected.version
            log.error("%s; it is taken out of service, and read anew when somebody asks for it", error.message)
            self.condemned[version] = error.message
            self._sampler.condemn(version, error)
            self._leave(proof)
            return
        if proof.round_done:
            self._leave(proof)

    def _looked(self, proof: Proof) -> bool:
        """Whether the part was looked at; else it is being read, and the next turn asks again."""
        if self._beside is not None:
            (_, read), self._beside = self._beside, None
            read.result()
            return True
        if proof.next_numel > TURN_ELEMENTS:
            self._beside = proof, self._reader.submit(proof.scrub, self._turn_elements)
            return False
        proof.scrub(self._turn_elements)
        return True

    def _leave(self, proof: Proof) -> None:
        """Of this one all was looked at; weights that left the memory meanwhile are not the first any more."""
        if self._to_come and self._proof(self._to_come[0]) in (proof, None):
            self._to_come.popleft()

    def _proof(self, name: int | str) -> Proof | None:
        return self._base[name] if isinstance(name, int) else self._sampler.versions.proofs.get(name)

    def _next(self) -> Proof:
        """That of what is looked at; weights that left the memory are passed over."""
        while self._to_come:
            if (proof := self._proof(self._to_come[0])) is not None:
                return proof
            self._to_come.popleft()
        if self._begun:
            self.rounds += 1
            self.clean_s = self._round_began_s
        self._begun, self._round_began_s = True, time.monotonic()
        versions = self._sampler.versions.proofs
        self._to_come += [*range(len(self._base)), *versions]
        self._turn_elements = min(TURN_ELEMENTS, -(-sum(proof.numel for proof in (*self._base, *versions.values())) // _PARTS))
        return self._base[0]

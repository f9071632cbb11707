"""A run's place in the engine, on the present connection: absent, opening, held or closing.

`sent` counts only while the run is held. An engine that refuses a run is asked again after a while, then with the checkpoint before.
"""

from enum import StrEnum
from typing import Final

from bloomery.services.engines.connection import Connection
from bloomery.services.training.backlog import payload_bytes
from bloomery.services.training.settle import RestorePoint
from bloomery.types.operations import Operation, Rejected, RunSpec, effect_of_failure
from bloomery.types.protocol import CloseRun, Execute, OpenRun

IN_FLIGHT: Final = 16
"""Operations at the engine at a time: enough to keep it busy, few enough to hold in memory."""
IN_FLIGHT_BYTES: Final = 64 << 20
"""Of payloads, at which no further one is sent before some are answered."""


class PlaceState(StrEnum):
    """Where the run is."""

    ABSENT = "absent"
    OPENING = "opening"
    HELD = "held"
    CLOSING = "closing"


class Place:
    """The engine's side of one run, as far as it is known here."""

    def __init__(self, spec: RunSpec, first_seq: int, project: str) -> None:
        self.state = PlaceState.ABSENT
        self.connection: Connection | None = None
        self.sent = self.answered = first_seq - 1
        """Highest operation sent, and highest one answered, since the run is held."""
        self.refusals = 0
        self.refused: RestorePoint | None = None
        self._spec, self._project = spec, project
        self._first_seq = first_seq
        self._opening: RestorePoint | None = None
        self._in_flight: dict[int, int] = {}
        """Bytes of the payloads that were sent last, by number."""

    def begin(self, connection: Connection, *, ready: int) -> None:
        """A new conversation: the run is where the engine says."""
        self.connection = connection
        held = connection.held.get(self._spec.run_id)
        # An engine that is ahead of the journal holds another history; opening the run again replaces it.
        if held is None or held > ready:
            self.state = PlaceState.ABSENT
        else:
            self._hold(held)

    async def open(self, restored: RestorePoint | None) -> None:
        """Ask the engine to hold the run, new or as its checkpoint left it."""
        assert self.connection is not None
        self.state, self._opening = PlaceState.OPENING, restored
        checkpoint, last_seq = (None, self._first_seq - 1) if restored is None else (restored.key, restored.seq)
        await self.connection.send(OpenRun(spec=self._spec, checkpoint=checkpoint, last_seq=last_seq, project=self._project))

    def opened(self, error: str | None, *, lacks_memory: bool = False) -> None:
        """The engine's answer; a run that it held already it may still give up. Memory that it lacks says nothing against a checkpoint."""
        if error is None and self.state == PlaceState.OPENING:
            self._hold(self._first_seq - 1 if self._opening is None else self._opening.seq)
        elif error is not None and self.state in (PlaceState.OPENING, PlaceState.HELD):
            assert self.connection is not None
            self.connection.held.pop(self._spec.run_id, None)
            self.state = PlaceState.ABSENT
            if not lacks_memory:
                self.refused = self._opening
                self.refusals += 1

    async def send(self, seq: int, operation: Operation, *, replay: bool) -> None:
        """Have the next operation executed; what is too large for any frame fails in its place in the order."""
        assert self.connection is not None
        try:
            self.connection.post(Execute(run_id=self._spec.run_id, seq=seq, operation=operation, replay=replay))
        except ValueError as error:
            refused = Rejected(message=f"{error}: send it in parts", effect=effect_of_failure(operation))
            self.connection.post(Execute(run_id=self._spec.run_id, seq=seq, operation=refused, replay=replay))
        self._in_flight = {one: size for one, size in self._in_flight.items() if self.answered < one < seq} | {seq: payload_bytes(operation)}
        self.sent = seq
        await self.connection.drain()

    async def close(self) -> None:
        """Ask the engine to checkpoint the run and let it go."""
        assert self.connection is not None
        self.state = PlaceState.CLOSING
        await self.connection.send(CloseRun(run_id=self._spec.run_id))

    def closed(self) -> None:
        """The engine let it go."""
        assert self.connection is not None
        self.connection.held.pop(self._spec.run_id, None)
        self.state = PlaceState.ABSENT

    def has_room(self) -> bool:
        """Whether another operation may be sent now."""
        waiting_bytes = sum(size for seq, size in self._in_flight.items() if self.answered < seq <= self.sent)
        return self.state == PlaceState.HELD and self.sent - self.answered < IN_FLIGHT and waiting_bytes < IN_FLIGHT_BYTES

    def _hold(self, seq: int) -> None:
        self.state, self.sent, self.answered = PlaceState.HELD, seq, seq
        self.refusals, self.refused = 0, None

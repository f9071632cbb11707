"""Names of the contract: of runs, of samplers, of futures.

The name of a future says all that its answer needs beside the result in the journal, so nothing is remembered about it.
"""

import re
from typing import Any, Final, NamedTuple, Self

from bloomery.types.errors import InvalidInput, NotFound

_TRAIN: Final = ":train:"
_SAMPLE: Final = "sample|"
SEQS_OF_A_CLONE: Final = 10**9
"""Clients of one sampler number their samples so far apart."""
_FOR_SAMPLER: Final = re.compile(r"(?P<kind>sampler|inflight):(?P<number>[0-9]{1,18})")
_EXTERNAL: Final = "external:"
_MOST_DIGITS: Final = 19
_SEQUENCE: Final = re.compile(r"(?P<sampler>.+):(?P<seq>[0-9]{1,19}):(?P<index>[0-9]{1,9})")


def model_name(session_id: str, model_seq_id: int) -> str:
    """The name of a session's run; the SDK makes up the same."""
    return f"{session_id}{_TRAIN}{model_seq_id}"


def session_of(model_id: str) -> str:
    """The session whose run this is."""
    session_id, mark, _ = model_id.partition(_TRAIN)
    if not mark:
        raise InvalidInput(f"run `{model_id}` belongs to no session: save its weights under a name", field="model_id")
    return session_id


class Creation(NamedTuple):
    """A run that was created; there is nothing left to wait for."""

    model_id: str

    def accepted(self) -> dict[str, Any]:
        """What the SDK gets for its request."""
        return {"request_id": f"create|{self.model_id}", "model_id": self.model_id}


class Unloading(NamedTuple):
    """A run that left the engine's memory; there is nothing left to wait for."""

    model_id: str

    def accepted(self) -> dict[str, Any]:
        """What the SDK gets for its request."""
        return {"request_id": f"unload|{self.model_id}", "model_id": self.model_id}


class LossCreation(NamedTuple):
    """A custom loss that was created; there is nothing left to wait for."""

    loss_id: str

    def accepted(self) -> dict[str, Any]:
        """What the SDK gets for its request."""
        return {"request_id": f"loss|{self.loss_id}"}


def samples_of(session_id: str) -> str:
    """How the names of a session's samples begin."""
    return f"{_SAMPLE}{session_id}:"


class SampleFuture(NamedTuple):
    """One sampling request of a sampler."""

    sampling_session_id: str
    seq: int

    @property
    def request_id(self) -> str:
        """Its name."""
        return f"{self.siblings}{self.seq}"

    @property
    def siblings(self) -> str:
        """How the names of all samples of the sampler begin."""
        return f"{_SAMPLE}{self.sampling_session_id}|"

    @property
    def clone(self) -> int:
        """Which of the sampler's clients asked for it."""
        return self.seq // SEQS_OF_A_CLONE

    def accepted(self, num_samples: int) -> dict[str, Any]:
        """What the SDK gets for its request; every sample has an id of its own."""
        ids = [f"{self.sampling_session_id}:{self.seq}:{index}" for index in range(num_samples)]
        return {"request_id": self.request_id, "sample_sequence_ids": ids}


class OperationFuture(NamedTuple):
    """An operation of a run. `about`: the name or path it was asked for, the sampler it saves for, or the export it makes.

    Names of weights have no colon, so none looks like one of the others.
    """

    model_id: str
    seq: int
    about: str = ""

    def named(self, name: str) -> Self:
        """It saves or loads under this name."""
        return self._replace(about=name)

    def for_sampler(self, number: int, *, inflight: bool = False) -> Self:
        """It saves for the session's sampler of this number; `inflight`: and for all others of the run that follow it."""
        return self._replace(about=f"{'inflight' if inflight else 'sampler'}:{number}")

    def exporting(self, name: str) -> Self:
        """It exports under this name."""
        return self._replace(about=f"{_EXTERNAL}{name}")

    @property
    def sampler(self) -> int | None:
        """The sampler it saves for."""
        found = _FOR_SAMPLER.fullmatch(self.about)
        return int(found["number"]) if found else None

    @property
    def inflight(self) -> bool:
        """Whether the sampler follows its run."""
        found = _FOR_SAMPLER.fullmatch(self.about)
        return found is not None and found["kind"] == "inflight"

    @property
    def export(self) -> str | None:
        """The name it exports under."""
        return self.about.removeprefix(_EXTERNAL) if self.about.startswith(_EXTERNAL) else None

    def accepted(self) -> dict[str, Any]:
        """What the SDK gets for its request."""
        return {"request_id": f"operation|{self.model_id}|{self.seq}|{self.about}", "model_id": self.model_id}


def parse_future(request_id: str) -> Creation | Unloading | LossCreation | SampleFuture | OperationFuture:
    """The future of this name."""
    match request_id.split("|", 3):
        case ["create", model_id]:
            return Creation(model_id)
        case ["unload", model_id]:
            return Unloading(model_id)
        case ["loss", loss_id]:
            return LossCreation(loss_id)
        case ["sample", sampling_session_id, seq] if _is_number(seq):
            return SampleFuture(sampling_session_id, int(seq))
        case ["operation", model_id, seq, about] if _is_number(seq):
            return OperationFuture(model_id, int(seq), about)
    raise NotFound(f"no future `{request_id}`", field="request_id")


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def parse_sequence(sequence_id: str) -> tuple[SampleFuture, int]:
    """The request that a sampled sequence belongs to, and its number in it."""
    if (found := _SEQUENCE.fullmatch(sequence_id)) is None:
        raise NotFound(f"no sample `{sequence_id}`")
    return SampleFuture(found["sampler"], int(found["seq"])), int(found["index"])

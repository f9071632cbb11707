"""Names of the contract: of runs, of samplers, of futures.

The name of a future says all that its answer needs beside the result in the journal, so nothing is remembered about it.
"""

from typing import Any, Final, NamedTuple, Self

from bloomery.types.errors import InvalidInput, NotFound

_TRAIN: Final = ":train:"
_SAMPLE: Final = "sample|"
_SAMPLER: Final = "sampler:"


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
        return f"{_SAMPLE}{self.sampling_session_id}|{self.seq}"

    def accepted(self, num_samples: int) -> dict[str, Any]:
        """What the SDK gets for its request; every sample has an id of its own."""
        ids = [f"{self.sampling_session_id}:{self.seq}:{index}" for index in range(num_samples)]
        return {"request_id": self.request_id, "sample_sequence_ids": ids}


class OperationFuture(NamedTuple):
    """An operation of a run. `about`: the name or path it was asked for, or the sampler it saves for."""

    model_id: str
    seq: int
    about: str = ""

    def named(self, name: str) -> Self:
        """It saves or loads under this name."""
        return self._replace(about=name)

    def for_sampler(self, number: int) -> Self:
        """It saves for the session's sampler of this number."""
        return self._replace(about=f"{_SAMPLER}{number}")

    @property
    def sampler(self) -> int | None:
        """The sampler it saves for. Names of weights have no colon, so none looks like one."""
        return int(self.about.removeprefix(_SAMPLER)) if self.about.startswith(_SAMPLER) else None

    def accepted(self) -> dict[str, Any]:
        """What the SDK gets for its request."""
        return {"request_id": f"operation|{self.model_id}|{self.seq}|{self.about}", "model_id": self.model_id}


def parse_future(request_id: str) -> Creation | SampleFuture | OperationFuture:
    """The future of this name."""
    match request_id.split("|", 3):
        case ["create", model_id]:
            return Creation(model_id)
        case ["sample", sampling_session_id, seq] if seq.isdecimal():
            return SampleFuture(sampling_session_id, int(seq))
        case ["operation", model_id, seq, about] if seq.isdecimal():
            return OperationFuture(model_id, int(seq), about)
    raise NotFound(f"no future `{request_id}`", field="request_id")

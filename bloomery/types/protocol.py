"""The conversation between the api (which connects) and an engine (which listens on a local socket).

A connection begins with `Welcome`: the engine says who it is, which runs it holds in memory and how far each is. The api opens the
runs it needs, sends every operation after that point in order, and acknowledges results once they are journaled; the engine sends
unacknowledged results again on the next connection. A fresh `boot_id` means an empty memory: runs are restored from their checkpoint.
Frames: 4 bytes little-endian length, then msgpack.
"""

import struct
from typing import Final, Literal

import msgspec

from bloomery.types.errors import Category
from bloomery.types.fidelity import Mode, Sampled
from bloomery.types.generation import Abort, Generate, Weights
from bloomery.types.kept import ToldEvent
from bloomery.types.operations import Operation, Result, RunSpec
from bloomery.types.probe import ProvedVersion
from bloomery.types.serving import QueueTimes
from bloomery.types.wire import Wire, encode

MAX_FRAME_BYTES: Final = 1 << 30
ALIVE_EVERY_S: Final = 2.0
Role = Literal["engine", "replica"]
"""What a process that holds a base model is for: an engine trains and samples, a replica only samples."""


class BaseInfo(Wire, frozen=True):
    """The base model an engine holds."""

    base_hash: str
    """Identity of weights, config, tokenizer and template; the version under which the bare base is sampled."""
    model_type: str
    vocab_size: int
    context: int
    parameters: int
    dtype: str
    parts: dict[str, int]
    """Parameters by part of the model (`types/footprint`), which are trained together or not at all."""


class OpenRun(Wire, frozen=True, tag="open_run"):
    """Hold this run in memory: new (`checkpoint` None, `last_seq` -1) or as its checkpoint left it after operation `last_seq`."""

    spec: RunSpec
    checkpoint: str | None
    last_seq: int
    project: str = ""
    """Whose it is: projects take turns, and within each its runs."""


class Execute(Wire, frozen=True, tag="execute"):
    """Run operation `seq`. `replay`: its result is journaled already and is only computed again."""

    run_id: str
    seq: int
    operation: Operation
    replay: bool = False


class Acknowledge(Wire, frozen=True, tag="acknowledge"):
    """The result of `seq` is durable: forget it."""

    run_id: str
    seq: int


class CloseRun(Wire, frozen=True, tag="close_run"):
    """Checkpoint the run and drop it from memory."""

    run_id: str


class Drain(Wire, frozen=True, tag="drain"):
    """Clean stop: finish what runs, checkpoint every run, answer `Drained`."""


class Compare(Wire, frozen=True, tag="compare"):
    """Make a fidelity card: what does the trainer's forward say of these answers, which a sampler gave with these weights?"""

    request_id: str
    weights: Weights
    answers: tuple[Sampled, ...]
    mode: Mode


class Stage(Wire, frozen=True, tag="stage"):
    """Have these weights in memory, proved, before anybody asks for them."""

    request_id: str
    weights: Weights


ToEngine = OpenRun | Execute | Acknowledge | CloseRun | Drain | Generate | Abort | Compare | Stage


class Proved(Wire, frozen=True):
    """What a process has proved of itself before it listened (`engine/proving`)."""

    root: str
    """State hash of the base model's live tensors: that of its files."""
    elements: int
    seconds: float
    """That reading them back took."""
    probe_tokens: int
    probe_max_abs: float
    """Largest difference of the probe prompt's log-probabilities to the trainer's, in nats."""
    probe_bit_equal: bool


class Welcome(Wire, frozen=True, tag="welcome"):
    """First frame of a connection. `runs`: last executed `seq` of each run in memory."""

    boot_id: str
    pid: int
    base: BaseInfo
    numerics: str
    """CPU flags, torch build, threads, pads, library of the products, sources, dtype: equal ids promise equal bits."""
    sampling_numerics: str
    """The same for what is sampled, and for the trainer's log-probabilities of it: without the threads, where those bits do not depend on them."""
    bit_exact: bool
    runs: dict[str, int]
    role: Role = "engine"
    proved: Proved | None = None


class RunOpened(Wire, frozen=True, tag="run_opened"):
    """The run is in memory, or `error` says why not."""

    run_id: str
    error: str | None = None
    fails: Category | None = None
    """Where there is no memory for it: whose error that is to the operations that wait, which is the server's when the engine has waited for it."""


class OperationDone(Wire, frozen=True, tag="operation_done"):
    """Sent again on every new connection until acknowledged. `seconds` is compute time."""

    run_id: str
    seq: int
    result: Result
    seconds: float
    replay: bool = False


class CheckpointWritten(Wire, frozen=True, tag="checkpoint_written"):
    """The state after operation `seq` is durable at blob `key`; earlier payloads are not needed any more."""

    run_id: str
    seq: int
    key: str
    digest: str


class RunClosed(Wire, frozen=True, tag="run_closed"):
    """The run is out of memory."""

    run_id: str


class Drained(Wire, frozen=True, tag="drained"):
    """Every run is checkpointed; the engine may be stopped."""


class SamplerEvents(Wire, frozen=True, tag="sampler_events"):
    """All events of one decode step in one frame."""

    events: tuple[ToldEvent, ...]


class EngineStatus(Wire, frozen=True, tag="status"):
    """Sent about once a second: what the executor is doing."""

    running_sequences: int
    waiting_sequences: int
    queued_operations: int
    tokens_sampled: int
    tokens_trained: int
    waiting_by_priority: dict[str, int] = msgspec.field(default_factory=dict)
    """Of the sequences that wait, how many of each class; those of which none waits are left out."""
    cache_usage: float = 0.0
    """Share of the key and value cache that those who run take, 0 to 1."""
    preemptions: int = 0
    """Sequences that had to leave the cache again before their end."""
    queue_times: QueueTimes = QueueTimes()
    proved_versions: dict[str, ProvedVersion] = msgspec.field(default_factory=dict)
    """Versions in memory whose live tensors were proved, with the root that they have, and how they answered the probe."""
    scrub_rounds: int = 0
    """How often all weights in memory were looked at again."""
    condemned: dict[str, str] = msgspec.field(default_factory=dict)
    """Versions that had changed in memory and were taken out of service, and why."""


class Alive(Wire, frozen=True, tag="alive"):
    """Sent every `ALIVE_EVERY_S` behind the `Welcome`: the process answers, whatever its executor is at."""


class Compared(Wire, frozen=True, tag="compared"):
    """The card (JSON of `resources.Fidelity`), or `error` says why there is none, and `code` what kind of error it is (`types/errors`)."""

    request_id: str
    card: bytes = b""
    error: str | None = None
    code: str = ""


class Staged(Wire, frozen=True, tag="staged"):
    """They are there, or `error` says why they cannot be, and `code` what kind of error it is (`types/errors`)."""

    request_id: str
    error: str | None = None
    code: str = ""


FromEngine = Welcome | RunOpened | OperationDone | CheckpointWritten | RunClosed | Drained | SamplerEvents | EngineStatus | Alive | Compared | Staged

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_LENGTH = struct.Struct("<I")


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of one message on the socket."""
    payload = encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame holds at most {MAX_FRAME_BYTES} bytes, this message has {len(payload)}")
    return _LENGTH.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """Length of the payload that follows a 4-byte header."""
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length


def parse_to_engine(payload: bytes) -> ToEngine:
    """Decode what the api sent."""
    return _to_engine.decode(payload)


def parse_from_engine(payload: bytes) -> FromEngine:
    """Decode what the engine sent."""
    return _from_engine.decode(payload)

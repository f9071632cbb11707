"""An engine process on a small random model, and the api's end of its socket.

Engines of these tests write a checkpoint after every optimizer step.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from bloomery.config import EngineConfig, ModelConfig, to_json
from bloomery.store.blobs import Blobs
from bloomery.types.arrays import Array
from bloomery.types.generation import SamplerEvent
from bloomery.types.operations import AdamParams, Datum, ForwardBackward, LoraSpec, Operation, OptimStep, RunSpec
from bloomery.types.protocol import (
    Acknowledge,
    CloseRun,
    Execute,
    FromEngine,
    OpenRun,
    OperationDone,
    Role,
    RunClosed,
    RunOpened,
    SamplerEvents,
    ToEngine,
    Welcome,
    frame,
    frame_length,
    parse_from_engine,
)
from tests import elsewhere

BASE = "b" * 32
VOCAB = 320
DEADLINE_S = 240.0
DEVICE = os.environ.get("BLOOMERY_TEST_DEVICE", "cpu")
"""Where engines of these tests compute; `tests.elsewhere.NAME` is no device, and found everywhere."""
Message = TypeVar("Message")


class Engine:
    """One engine and its data directory, which is that of `beside` where that is given; it can die and be started again."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        role: Role = "engine",
        beside: "Engine | None" = None,
        checkpoint_s: float = 0.0,
        checkpoint_bytes: int | None = None,
        fault: str | None = None,
        **environment: str,
    ) -> None:
        self.directory = directory
        self.fault = fault
        """That its next life has (`damaged`)."""
        self.socket = directory / "engine.sock"
        self.environment = environment
        data = (directory if beside is None else beside.directory) / "data"
        self.blobs = Blobs(data / "blobs")
        served = ModelConfig(alias="small", path=str(model), base_hash=BASE, dtype="float32", threads=1, socket=str(self.socket), device=DEVICE)
        self.config = EngineConfig(data_dir=str(data), model=served, role=role, checkpoint_s=checkpoint_s, checkpoint_bytes=checkpoint_bytes)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> None:
        self.socket.unlink(missing_ok=True)
        sound = "bloomery.engine" if DEVICE != elsewhere.NAME else "tests.devices.engine"
        program = [sound] if self.fault is None else ["tests.engine.damaged", self.fault]
        (self.directory / "engine.json").write_text(to_json(self.config))
        with (self.directory / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *program, str(self.directory / "engine.json")],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment, **environment},
            )

    def connect(self) -> "Api":
        """A conversation; waits until the engine listens."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(DEADLINE_S)
            try:
                connection.connect(str(self.socket))
                return Api(connection)
            except OSError:
                connection.close()
                assert self.process is not None
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.02)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> int:
        """Send a signal and wait for the end; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def died(self) -> int:
        """Wait for a death that comes by itself."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def log(self) -> str:
        return (self.directory / "engine.log").read_text()


@contextmanager
def engine(
    model: Path,
    directory: Path,
    *,
    role: Role = "engine",
    beside: Engine | None = None,
    checkpoint_s: float = 0.0,
    checkpoint_bytes: int | None = None,
    fault: str | None = None,
    **environment: str,
) -> Iterator[Engine]:
    """A started engine; killed at the end if it lives."""
    one = Engine(model, directory, role=role, beside=beside, checkpoint_s=checkpoint_s, checkpoint_bytes=checkpoint_bytes, fault=fault, **environment)
    one.start()
    try:
        yield one
    finally:
        if one.process is not None and one.process.poll() is None:
            one.kill()


class Api:
    """A conversation with an engine, message by message."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._stream = connection, connection.makefile("rb")
        self.seen: list[FromEngine] = []
        self.welcome = self.wait(Welcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._connection.close()

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self._connection.sendall(frame(message))

    def send_bytes(self, data: bytes) -> None:
        self._connection.sendall(data)

    def receive(self) -> FromEngine:
        """The next message; EOFError when the engine is gone or hung up."""
        header = self._stream.read(4)
        if len(header) < 4:
            raise EOFError
        message = parse_from_engine(self._stream.read(frame_length(header)))
        self.seen.append(message)
        return message

    def wait(self, kind: type[Message], where: Callable[[Message], bool] = lambda message: True) -> Message:
        """The next message of a kind; others are kept in `seen`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message = self.receive()
            if isinstance(message, kind) and where(message):
                return message
            assert time.monotonic() < deadline, f"no such {kind.__name__}"

    def until_silence(self) -> list[FromEngine]:
        """Everything until the engine hangs up."""
        first = len(self.seen)
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionResetError):
            return self.seen[first:]

    def open(self, run_id: str = "run-1", *, checkpoint: str | None = None, last_seq: int = -1, **lora: object) -> RunOpened:
        self.send(OpenRun(spec=spec(run_id, **lora), checkpoint=checkpoint, last_seq=last_seq))
        return self.wait(RunOpened)

    def execute(self, first_seq: int, *operations: Operation, run_id: str = "run-1", replay: bool = False) -> None:
        for seq, operation in enumerate(operations, first_seq):
            self.send(Execute(run_id=run_id, seq=seq, operation=operation, replay=replay))

    def done(self, seq: int, run_id: str = "run-1") -> OperationDone:
        """The result of an operation, acknowledged."""
        found = self.wait(OperationDone, lambda message: (message.run_id, message.seq) == (run_id, seq))
        self.send(Acknowledge(run_id=run_id, seq=seq))
        return found

    def close_runs(self, *run_ids: str) -> None:
        """Have the engine let go of runs; frames of a conversation that ended meanwhile would be dropped."""
        for run_id in run_ids:
            self.send(CloseRun(run_id=run_id))
            self.wait(RunClosed, lambda closed, run_id=run_id: closed.run_id == run_id)

    def events(self, *request_ids: str, until: Callable[[SamplerEvent], bool]) -> list[SamplerEvent]:
        """Sampler events of these requests, up to one that ends it."""
        found: list[SamplerEvent] = []
        while True:
            for event in self.wait(SamplerEvents).events:
                if event.request_id in request_ids:
                    found.append(event)
                    if until(event):
                        return found


def spec(run_id: str = "run-1", **lora: object) -> RunSpec:
    return RunSpec(run_id=run_id, base_hash=BASE, lora=LoraSpec(**{"rank": 8, "seed": 7, **lora}), micro_batch_tokens=256)


def learn(lengths: Iterable[int] = (40, 30), *, seed: int = 0, backward: bool = True) -> ForwardBackward:
    noise = np.random.default_rng(seed)
    data = []
    for length in lengths:
        targets = Array.of(noise.integers(0, VOCAB, length))
        weights = Array.of(np.ones(length, np.float32))
        data.append(Datum(tokens=Array.of(noise.integers(0, VOCAB, length).astype(np.int32)), inputs={"target_tokens": targets, "weights": weights}))
    return ForwardBackward(loss="cross_entropy", loss_config={}, data=tuple(data), backward=backward)


def step(learning_rate: float = 1e-2) -> OptimStep:
    return OptimStep(adam=AdamParams(learning_rate=learning_rate))


def history(steps: int) -> list[Operation]:
    """Forward-backward and optimizer step, alternating: operation 2 i + 1 is step i."""
    return [operation for seed in range(steps) for operation in (learn(seed=seed), step())]


def failpoints(directory: Path, *points: str) -> Mapping[str, str]:
    """Environment that kills the engine at these points, once each."""
    armed = ",".join(f"{point}:{directory / point.partition('@')[0]}.marker" for point in points)
    return {"BLOOMERY_FAILPOINTS": armed}

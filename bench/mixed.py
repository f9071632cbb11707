"""One replica for everybody: `python -m bench.mixed` prints one JSON line, which `python -m bench.mixed_chart` draws.

A replica process with the limits that it always has serves three classes at once, whose load comes and goes phase by phase. Each class has so many
requests in hand: what ends is followed by the next, and what is too much when a phase ends is aborted. Second by second and class by class: tokens,
places (tokens per step of the sampler), gaps between two tokens of a sample, and how long those that got their first token waited for it.
The peer is the same replica under the same load when everything is of one class, first come first served. `client_cpu` is what the load client, which
is a process of its own, took of one processor.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.line import Line, parser_of
from bench.shapes import SHAPES, write_directory
from bloomery.config import EngineConfig, ModelConfig, to_json
from bloomery.infer.plan import CLASSES, Limits
from bloomery.obs.lifetime import end_with
from bloomery.types import protocol
from bloomery.types.arrays import Array
from bloomery.types.generation import Abort, Generate, GenerateFailed, Priority, SampledToken, SampleFinished, SamplingParams, Weights
from bloomery.types.protocol import FromEngine, SamplerEvents, ToEngine, Welcome

BASE: Final = Weights(version="bench")
START_S: Final = 120.0
STOP_S: Final = 30.0
READ_BYTES: Final = 1 << 22


class Load(NamedTuple):
    """What requests of a class are like, in tokens."""

    prompt: int
    answer: int
    samples: int


LOADS: Final[dict[Priority, Load]] = {"production": Load(64, 64, 1), "rollout": Load(64, 192, 8), "evaluation": Load(128, 64, 1)}


class Phase(NamedTuple):
    """How many requests of each class are in hand for a while."""

    name: str
    production: int
    rollout: int
    evaluation: int

    def requests(self, priority: Priority) -> int:
        """Of one class."""
        wanted: int = getattr(self, priority)
        return wanted


PHASES: Final = (
    Phase("production alone", 12, 0, 0),
    Phase("rollouts come", 12, 12, 0),
    Phase("evaluation comes", 12, 12, 80),
    Phase("a rush of production", 96, 12, 80),
    Phase("it is over", 12, 12, 80),
    Phase("rollouts leave", 12, 0, 80),
    Phase("evaluation leaves", 12, 0, 0),
)

_CROWDED: Final = [phase for phase in PHASES if phase.production and phase.rollout and phase.evaluation]


@dataclass
class Second:
    """What came of one class in one second."""

    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


class Course(NamedTuple):
    """A whole run: seconds of each class, steps of each second, and what the client took of a processor."""

    seconds: Mapping[Priority, list[Second]]
    steps: list[int]
    client_cpu: float


def main() -> None:
    """Measure with classes and without."""
    asked = _arguments()
    line = Line("mixed")
    where = {"device": "cpu", "dtype": asked.dtype, "threads": asked.threads, "size": asked.size}
    with tempfile.TemporaryDirectory() as place:
        model = write_directory(SHAPES[asked.size], Path(place) / "model")
        courses = {way: asyncio.run(_course(Path(place), model, asked, classes=way == "classes")) for way in ("classes", "one_class")}
    limits = Limits()
    setting = {
        "slots": limits.slots,
        "floors": {priority: limits.floor(priority) for priority in CLASSES},
        "loads": {priority: load._asdict() for priority, load in LOADS.items()},
        "phases": [phase._asdict() for phase in PHASES],
        "phase_s": asked.seconds,
        "peer": "the same replica when all requests are of one class",
    }
    phases = {way: [_figures(course, [phase], asked.seconds) for phase in PHASES] for way, course in courses.items()}
    crowded = {way: _figures(course, _CROWDED, asked.seconds) for way, course in courses.items()}
    alone = phases["classes"][0]
    found = {"ratio": _ratios(alone, **crowded), "crowded": crowded, "by_phase": phases}
    line.tell({**where, **setting, **found, "timeline": {way: _timeline(course) for way, course in courses.items()}})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="5M")
    parser.add_argument("--seconds", type=int, default=10, help="of each phase")
    parser.add_argument("--threads", type=int, default=1, help="of the replica")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


async def _course(place: Path, model: Path, asked: argparse.Namespace, *, classes: bool) -> Course:
    async with _replica(place, model, asked) as (reader, writer):
        client = _Client(writer, SHAPES[asked.size].vocab_size, classes=classes)
        reading = asyncio.create_task(client.read(reader))
        # What a first step of every kind allocates is not measured.
        await _phase(PHASES[2], client, reading, 3)
        await _phase(Phase("rest", 0, 0, 0), client, reading, 1)
        client.begin(asked.seconds * len(PHASES))
        cpu_s, began_s = time.process_time(), time.perf_counter()
        for phase in PHASES:
            await _phase(phase, client, reading, asked.seconds)
        client_cpu = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
        reading.cancel()
        return Course(client.seconds, client.steps, round(client_cpu, 3))


async def _phase(phase: Phase, client: "_Client", reading: "asyncio.Task[None]", seconds: float) -> None:
    for priority in CLASSES:
        client.want(priority, phase.requests(priority))
    done, _ = await asyncio.wait([reading], timeout=seconds)
    if done:
        raise SystemExit(f"the replica went away: {reading.exception()}")


@dataclass
class _Request:
    """One in hand."""

    priority: Priority
    submitted_s: float
    unfinished: int
    last_s: dict[int, float] = field(default_factory=dict)
    """When each sample gave its latest token."""


class _Client:
    """Keeps so many requests of each class in hand and notes what comes."""

    def __init__(self, writer: asyncio.StreamWriter, vocab_size: int, *, classes: bool) -> None:
        self._writer, self._vocab_size, self._classes = writer, vocab_size, classes
        self._noise = np.random.default_rng(0)
        self._wanted: dict[Priority, int] = dict.fromkeys(CLASSES, 0)
        self._in_hand: dict[str, _Request] = {}
        self._submitted = 0
        self.begin(0)

    def begin(self, seconds: int) -> None:
        """Note what comes in the next so many seconds."""
        self._began_s = time.perf_counter()
        self.steps = [0] * seconds
        self.seconds: dict[Priority, list[Second]] = {priority: [Second() for _ in range(seconds)] for priority in CLASSES}

    def want(self, priority: Priority, requests: int) -> None:
        """From now on so many of a class are in hand; the youngest beyond leave."""
        self._wanted[priority] = requests
        mine = [request_id for request_id, request in self._in_hand.items() if request.priority == priority]
        for request_id in mine[requests:]:
            self._post(Abort(request_id=request_id))
            del self._in_hand[request_id]
        for _ in range(requests - len(mine)):
            self._submit(priority)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Until the replica goes away."""
        while True:
            message = await _message(reader)
            if isinstance(message, SamplerEvents):
                self._take(message, time.perf_counter())

    def _take(self, message: SamplerEvents, now_s: float) -> None:
        second = int(now_s - self._began_s)
        noted = second < len(self.steps)
        if noted and any(isinstance(event, SampledToken) for event in message.events):
            self.steps[second] += 1
        for event in message.events:
            if isinstance(event, GenerateFailed):
                raise RuntimeError(event.message)
            # Of an aborted one something may be on its way.
            if (request := self._in_hand.get(event.request_id)) is None:
                continue
            if isinstance(event, SampledToken):
                _note(request, event.sample, now_s, self.seconds[request.priority][second] if noted else Second())
            elif isinstance(event, SampleFinished):
                request.unfinished -= 1
                if not request.unfinished:
                    del self._in_hand[event.request_id]
                    self._submit(request.priority)

    def _submit(self, priority: Priority) -> None:
        self._submitted += 1
        load, request_id = LOADS[priority], f"{priority}-{self._submitted}"
        generate = Generate(
            request_id=request_id,
            weights=BASE,
            prompt=Array.of(self._noise.integers(3, self._vocab_size, load.prompt).astype(np.int32)),
            params=SamplingParams(max_tokens=load.answer, seed=self._submitted),
            num_samples=load.samples,
            priority=priority if self._classes else "rollout",
        )
        self._in_hand[request_id] = _Request(priority, time.perf_counter(), load.samples)
        self._post(generate)

    def _post(self, message: ToEngine) -> None:
        self._writer.write(protocol.frame(message))


def _note(request: _Request, sample: int, now_s: float, second: Second) -> None:
    """A token."""
    second.tokens += 1
    if sample in request.last_s:
        second.gaps_s.append(now_s - request.last_s[sample])
    else:
        second.waits_s.append(now_s - request.submitted_s)
    request.last_s[sample] = now_s


@asynccontextmanager
async def _replica(place: Path, model: Path, asked: argparse.Namespace) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A process of its own, and a conversation with it."""
    address, config = place / "s", place / "replica.json"
    served = ModelConfig(alias="bench", path=str(model), base_hash=BASE.version, dtype=asked.dtype, threads=asked.threads, socket=str(address))
    config.write_text(to_json(EngineConfig(data_dir=str(place / "data"), model=served, role="replica", log_level="warning")))
    process = subprocess.Popen([sys.executable, "-m", "bloomery.engine", str(config)], preexec_fn=end_with(os.getpid(), signal.SIGTERM))
    try:
        reader, writer = await _connect(address, process)
        yield reader, writer
        writer.close()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            address.unlink(missing_ok=True)


async def _connect(address: Path, process: "subprocess.Popen[bytes]") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            reader, writer = await asyncio.open_unix_connection(address, limit=READ_BYTES)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            assert isinstance(await _message(reader), Welcome)
            return reader, writer
    raise SystemExit("the replica did not start")


async def _message(reader: asyncio.StreamReader) -> FromEngine:
    return protocol.parse_from_engine(await reader.readexactly(protocol.frame_length(await reader.readexactly(4))))


def _timeline(course: Course) -> dict[str, Any]:
    """Every second of every class; None where nothing of a kind came."""
    classes: dict[str, object] = {
        priority: {
            "tokens": [second.tokens for second in seconds],
            "places": [round(second.tokens / max(1, steps), 1) for second, steps in zip(seconds, course.steps, strict=True)],
            "gap_p50_ms": [_ms(second.gaps_s, 0.5) for second in seconds],
            "gap_p95_ms": [_ms(second.gaps_s, 0.95) for second in seconds],
            "wait_p50_ms": [_ms(second.waits_s, 0.5) for second in seconds],
        }
        for priority, seconds in course.seconds.items()
    }
    return {"client_cpu": course.client_cpu, "steps": course.steps, **classes}


def _figures(course: Course, phases: Sequence[Phase], phase_s: int) -> dict[str, Any]:
    """Of some phases together, each without its first second, in which loads come and go."""
    starts = [PHASES.index(phase) * phase_s for phase in phases]
    seen = [second for start in starts for second in range(start + 1, start + phase_s)]
    steps = sum(course.steps[second] for second in seen)
    found: dict[str, Any] = {"phase": ", ".join(phase.name for phase in phases)}
    for priority, seconds in course.seconds.items():
        if not any(phase.requests(priority) for phase in phases):
            continue
        mine = [seconds[second] for second in seen]
        tokens = sum(second.tokens for second in mine)
        gaps, waits = ([value for part in parts for value in part] for parts in ([each.gaps_s for each in mine], [each.waits_s for each in mine]))
        found[priority] = {
            "tokens_per_s": round(tokens / len(mine), 1),
            "places": round(tokens / max(1, steps), 1),
            "gap_p50_ms": _ms(gaps, 0.5),
            "gap_p95_ms": _ms(gaps, 0.95),
            "gap_longest_ms": _ms(gaps, 1.0),
            "wait_p50_ms": _ms(waits, 0.5),
            "wait_p95_ms": _ms(waits, 0.95),
        }
    return found


def _ratios(alone: dict[str, Any], classes: dict[str, Any], one_class: dict[str, Any]) -> dict[str, float | None]:
    """What classes give production while everybody is there, and what the others cost it; None where the peer gave nothing at all."""
    mine, unsorted = classes["production"], one_class["production"]
    return {
        "production_tokens_over_one_class": _ratio(mine["tokens_per_s"], unsorted["tokens_per_s"]),
        "production_wait_p50_of_one_class_over": _ratio(unsorted["wait_p50_ms"], mine["wait_p50_ms"]),
        "production_gap_p95_over_alone": _ratio(mine["gap_p95_ms"], alone["production"]["gap_p95_ms"]),
    }


def _ratio(over: float | None, under: float | None) -> float | None:
    return round(over / under, 2) if over is not None and under else None


def _ms(seconds: list[float], share: float) -> float | None:
    """The quantile, in milliseconds."""
    return round(1000 * float(np.quantile(seconds, share)), 1) if seconds else None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Grading with users' code: what services call.

    async with Graders() as graders:
        results = await graders.grade(Program(source, "grade", "openai"), inputs)

Every input gets a result, in its place: a score, or why there is none. A batch shares one jailed process, so that what a grader imports is paid once;
what one grade leaves behind in its memory or its directory the next of the same batch sees. `isolate=True` gives each a process of its own. Where one
kills its process, it alone has failed, and the rest of the batch goes on in a fresh one, as it does when a batch has had its turn and others wait.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Self

from pydantic import ValidationError

from bloomery.grade import trusted
from bloomery.grade.inside import JAILED, SAID_CHARS
from bloomery.grade.jail import Level
from bloomery.grade.processes import Ended, Fork, ForkServer, Garbled, Lost, Obtained, TimedOut, described
from bloomery.grade.template import unicode
from bloomery.obs.machine import usable_cpus
from bloomery.types.errors import InvalidInput, NotSupported, Unavailable, reason
from bloomery.types.grading import FailureKind, GradeError, GradeInput, GradeResult

Style = Literal["auto", "plain", "openai", "trl", "eval_protocol", "verifiers"]

SOURCE_BYTES: Final = 256_000
WALL_S: Final = 120.0
MEMORY_BYTES: Final = 2 << 30
DISK_BYTES: Final = 64 << 20
TURN_S: Final = 5.0
"""How long a batch keeps its place while others wait for one."""
_LEAST_MEMORY_BYTES: Final = 64 << 20
_LOAD_S: Final = 60.0
_TRIES: Final = 3
"""Of a batch to begin, where fork servers die under it."""
_GARBLED: Final = "it wrote into its channel what no grade is"
_FRAME_BYTES: Final = 64 << 10
"""Of what is said about one grade."""
_FRAMES_BYTES: Final = 64 << 20
"""The same of a whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one grade, but for memory and disk, which are those of its process."""

    wall_s: float = 10.0
    load_s: float = 30.0
    """For running the module itself, with what it imports."""
    memory_bytes: int = 1 << 30
    """Of addresses, so that what is reserved counts."""
    disk_bytes: int = 16 << 20
    """Of each file in the work directory, and of all of them."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("wall_s", 0.001, WALL_S),
            ("load_s", 0.001, _LOAD_S),
            ("memory_bytes", _LEAST_MEMORY_BYTES, MEMORY_BYTES),
            ("disk_bytes", 0, DISK_BYTES),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidInput(f"{name} of a grader is between {least:g} and {most:g}, not {getattr(self, name):g}", field=name)


@dataclass(frozen=True, slots=True)
class Program:
    """Source of a module, the function in it, and how that is called: `auto` takes one of `completions` for TRL's, and any other for a plain one."""

    source: str
    entry: str
    style: Style = "auto"

    def __post_init__(self) -> None:
        if len(self.source.encode(errors="replace")) >= SOURCE_BYTES:
            raise InvalidInput(f"the source of a grader has less than {SOURCE_BYTES} bytes", field="source")
        if not self.entry.isidentifier():
            raise InvalidInput("the entry of a grader is the name of a function", field="entry")
        if self.style not in Style.__args__:  # type: ignore[attr-defined]
            raise InvalidInput(f"the style of a grader is one of {', '.join(Style.__args__)}", field="style")  # type: ignore[attr-defined]


class Graders:
    """At most `places` processes at a time; batches take turns in the order in which they came. The operator chooses `level`, never a program."""

    def __init__(self, *, level: Level = "L1", places: int | None = None, wait_s: float = 600.0) -> None:
        if level == "L3":
            raise NotSupported("graders run at level L1, in a jail, at L2, in a container, or trusted at L0: L3, on another machine, is not offered")
        self._level, self._wait_s = level, wait_s
        places = places or usable_cpus()
        self._places = asyncio.Semaphore(places)
        self._disk_bytes = places * DISK_BYTES
        self._waiting = 0
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._endings: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._endings)
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def obtained(self) -> Obtained:
        """The level that holds here; starts the fork server. Raises NotSupported where the level that was asked for is not to be had."""
        if self._level == "L0":
            return Obtained("L0", (), "the operator trusts all graders: their code runs in the server's own process")
        await self._running()
        return self._obtained

    async def check(self, program: Program, limits: Limits = Limits()) -> GradeError | None:
        """Why a program cannot be loaded, if it cannot."""
        if self._level == "L0":
            return await trusted.check(program.source, program.entry, program.style, limits.load_s)
        async with self._process(limits, grades=1) as process:
            return (await process.load(program)).error

    async def grade(self, program: Program, inputs: Sequence[GradeInput], limits: Limits = Limits(), *, isolate: bool = False) -> list[GradeResult]:
        """A result for each, in their order. Raises NotSupported where this machine gives no jail."""
        rows = [each.model_dump() for each in inputs]
        if self._level == "L0":
            return await trusted.grade(program.source, program.entry, program.style, rows, limits.load_s, limits.wall_s)
        results: list[GradeResult] = []
        failures = 0
        while len(results) < len(rows):
            left = rows[len(results) :]
            try:
                results += await self._turn(program, left[:1] if isolate else left, limits)
            except Unavailable as error:
                failures += 1
                if failures == _TRIES or (self._server is not None and self._server.alive):
                    results += [GradeResult.failed("unavailable", error.message)] * len(left)
        return results

    async def _turn(self, program: Program, rows: list[dict[str, Any]], limits: Limits) -> list[GradeResult]:
        """In one process: at least one result."""
        results: list[GradeResult] = []
        async with self._process(limits, grades=len(rows)) as process:
            loaded = await process.load(program)
            if loaded.error is not None and loaded.error.kind == "unavailable":
                raise Unavailable(loaded.error.detail)
            if loaded.error is not None:
                return [GradeResult(error=loaded.error)] * len(rows)
            began = time.monotonic()
            while len(results) < len(rows) and process.alive:
                # One result at least: who loads slowly gets on, too.
                if results and self._waiting and time.monotonic() - began > TURN_S:
                    break
                here = rows if loaded.together else rows[len(results) : len(results) + 1]
                results += await process.grade(here)
        return results

    @asynccontextmanager
    async def _process(self, limits: Limits, grades: int) -> "AsyncIterator[_Process]":
        await self._place()
        try:
            server = await self._running()
            # A bound beside the deadlines, should nobody be there to keep them: several threads may use several processors.
            cpu_s = int(limits.load_s + grades * limits.wall_s) * (os.cpu_count() or 1) + 1
            fork = await server.fork(memory_bytes=limits.memory_bytes, cpu_s=cpu_s, disk_bytes=limits.disk_bytes)
        except BaseException:
            self._places.release()
            raise
        process = _Process(server, fork, limits)
        try:
            yield process
        finally:
            # Results do not wait for the end of whoever gave them; the place does.
            ending = asyncio.create_task(self._leave(process))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _leave(self, process: "_Process") -> None:
        try:
            await process.end()
        finally:
            self._places.release()

    async def _place(self) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise Unavailable(f"no place for a grader within {self._wait_s:g} s: all of them are busy") from None
        finally:
            self._waiting -= 1

    async def _running(self) -> ForkServer:
        async with self._starting:
            if self._server is not None and not self._server.alive:
                await self._server.stop()
                self._server = None
            if self._server is None:
                self._server, self._obtained = await ForkServer.start(self._level, disk_bytes=self._disk_bytes)
            return self._server


class _Loaded(NamedTuple):
    error: GradeError | None
    together: bool = False


class _Process:
    """A fork that grades. When it misbehaves it is ended, and `alive` turns false."""

    def __init__(self, server: ForkServer, fork: Fork, limits: Limits) -> None:
        self._server, self._fork, self._limits = server, fork, limits
        self._said = ""
        self.alive = True

    async def load(self, program: Program) -> _Loaded:
        """Run the module, once there is a jail for it."""
        token = self._ask({"source": program.source, "entry": program.entry, "style": program.style}, 0)
        answer = await self._answer(JAILED, _LOAD_S)
        if isinstance(answer, GradeError):
            return _Loaded(GradeError(kind="unavailable", detail=f"a jail could not be made: {answer.detail}"))
        answer = await self._answer(token, self._limits.load_s)
        if isinstance(answer, dict) and answer["outcomes"]:
            answer = _result(answer["outcomes"][0], self._said).error or GradeError(kind="wrong_type", detail="it gave a score")
        if isinstance(answer, GradeError):
            return _Loaded(GradeError(kind=answer.kind, detail=f"while it was loaded: {answer.detail}"))
        return _Loaded(None, answer.get("together") is True)

    async def grade(self, rows: list[dict[str, Any]]) -> list[GradeResult]:
        """All of them at once, which is one but for functions that take whole batches."""
        answer = await self._answer(self._ask({"rows": rows}, len(rows)), self._limits.wall_s)
        if isinstance(answer, GradeError):
            return [GradeResult(error=answer)] * len(rows)
        outcomes = answer["outcomes"]
        if len(outcomes) != len(rows):
            return [GradeResult(error=await self._stopped("killed", _GARBLED))] * len(rows)
        return [_result(outcome, self._said) for outcome in outcomes]

    async def end(self) -> None:
        """Whatever it is doing."""
        if self.alive:
            self.alive = False
            await self._server.end(self._fork)

    def _ask(self, question: dict[str, Any], rows: int) -> dict[str, str]:
        """Its answer has the token of the question, which nobody knew before."""
        token = {"token": os.urandom(16).hex()}
        self._said = ""
        self._fork.channel.frame_bytes = min(_FRAME_BYTES * (rows + 1), _FRAMES_BYTES)
        self._fork.channel.send({**token, **question})
        return token

    async def _answer(self, expected: dict[str, Any], wall_s: float) -> dict[str, Any] | GradeError:
        until = asyncio.get_running_loop().time() + wall_s
        while True:
            try:
                frame = json.loads(await self._fork.channel.receive(until))
                said = frame.get("said")
                # Each says something, so that there is an end of them: a deadline is looked at only where no frame is there.
                if isinstance(said, str) and said and len(self._said) + len(said) <= SAID_CHARS:
                    self._said += unicode(said)
                elif expected.items() <= frame.items() and (expected == JAILED or isinstance(frame["outcomes"], list)):
                    answer: dict[str, Any] = frame
                    return answer
                else:
                    return await self._stopped("killed", _GARBLED)
            except TimedOut:
                return await self._stopped("timeout", f"it took longer than {wall_s:g} s")
            except Lost:
                return await self._ended()
            except (Garbled, ValueError, KeyError, AttributeError, TypeError, RecursionError):
                return await self._stopped("killed", _GARBLED)

    async def _stopped(self, kind: FailureKind, detail: str) -> GradeError:
        """By us, for something that it did."""
        await self.end()
        return GradeError(kind=kind, detail=_with_said(detail, self._said))

    async def _ended(self) -> GradeError:
        """By itself, or by somebody else."""
        await self._server.ends_itself(self._fork)
        self.alive = False
        ended = await self._server.end(self._fork)
        if ended is None:
            return GradeError(kind="unavailable", detail="the fork server of graders went away")
        kind, detail = _from_end(ended, self._limits)
        return GradeError(kind=kind, detail=_with_said(detail, self._said))


def _from_end(ended: Ended, limits: Limits) -> tuple[FailureKind, str]:
    if ended.why == "disk":
        return "killed", f"it had more than {limits.disk_bytes} bytes, or too many files, in its work directory"
    if ended.why == "asked":
        return "killed", "it closed its channel"
    if ended.status == -signal.SIGXCPU:
        return "timeout", "it used up its time of the processor"
    if ended.status == -signal.SIGKILL:
        return "killed", "its process was killed by SIGKILL: its own, or the kernel's because the machine is short of memory"
    return "killed", f"its process ended {described(ended)} before there was a score"


def _result(outcome: object, said: str) -> GradeResult:
    """Of what a jailed process wrote: checked like anything that comes from outside."""
    try:
        if not isinstance(outcome, dict) or outcome.keys() - {"score", "reason", "metrics", "kind", "detail"}:
            raise ValueError("no outcome")
        if "kind" in outcome:
            return GradeResult.failed(outcome["kind"], _with_said(reason(_Foreign(outcome["detail"])), said))
        return GradeResult.model_validate(outcome, strict=True)
    except (ValidationError, ValueError, KeyError):
        return GradeResult.failed("wrong_type", _with_said("what it gave is no score", said))


class _Foreign(Exception):
    """Stands for what was raised inside."""


def _with_said(detail: str, said: str) -> str:
    return f"{detail}\nit printed: {said.rstrip()}" if said.strip() else detail

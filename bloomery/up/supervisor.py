"""Keeps the children running until it is told to stop, then stops them in order: the runner of jobs, the api, which lets go
of its engines, and the others.

Replicas of a base model run from the start, or from when the api first wants them; from then on the engines, and the replicas for rollouts beside
them, keep to processors of their own. A replica that stands still is killed, so that it starts again.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from bloomery.config import stopping
from bloomery.types.errors import WorkerError
from bloomery.types.ids import now_us
from bloomery.up.children import Child, State, describe_exit
from bloomery.up.cores import Placement
from bloomery.up.health import Health

log = logging.getLogger(__name__)

_TICK_S: Final = 0.2
_HEALTH_EVERY_S: Final = 1.0
_HOUSEKEEPING_EVERY_S: Final = 30.0
_PATIENCE_LINE_EVERY_S: Final = 15.0
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs in the main thread; signals arrive as events between two looks at the children."""

    def __init__(
        self,
        api: Child,
        engines: Mapping[Child, frozenset[str]],
        replicas: Mapping[Child, str],
        rollouts: Sequence[Child] = (),
        runner: Child | None = None,
        *,
        wanted: frozenset[str],
        engine_placement: Placement,
        ask: Callable[[], Health],
        state_file: Path,
        say: Callable[[str], None],
    ) -> None:
        """`replicas` with the hash of their base, those of `wanted` bases from the start; `rollouts` are replicas that always run.

        `engine_placement` is that of engines and of `rollouts` while `replicas` run.
        """
        self._api, self._engines, self._ask, self._state_file, self._tell = api, engines, ask, state_file, say
        self._replicas, self._wanted, self._engine_placement = replicas, wanted, engine_placement
        self._rollouts, self._runners = rollouts, [] if runner is None else [runner]
        self._needed = (*engines, *rollouts, *(replica for replica, base_hash in replicas.items() if base_hash in wanted), api)
        self._was_ready = False
        self._events: SimpleQueue[int] = SimpleQueue()
        self._stopping = False
        self._next_health = self._next_housekeeping = 0.0

    @property
    def _children(self) -> Sequence[Child]:
        """Those that are to run."""
        return (*self._engines, *self._rollouts, *(replica for replica in self._replicas if replica.begun), self._api, *self._runners)

    def run(self, *, ready_within_s: float, on_ready: Callable[[], None]) -> None:
        """Start everything, call `on_ready` once, and return after a stop signal; WorkerError when a child cannot be kept alive."""
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        try:
            for child in (*self._engines, *self._rollouts, self._api, *self._runners):
                child.start()
            self._start_wanted()
            self._write_state()
            self._wait_until_ready(ready_within_s)
            self._was_ready = True
            if not self._stopping:
                on_ready()
            while not self._stopping:
                self._wait_for_event(min([_TICK_S * 5, *(left for child in self._children if (left := child.starts_in_s) is not None)]))
                self._look()
        finally:
            self._stop()

    def _wait_until_ready(self, within_s: float) -> None:
        start = time.monotonic()
        next_line = start + _PATIENCE_LINE_EVERY_S
        while not self._stopping and not all(child.ready for child in self._needed):
            self._wait_for_event(_TICK_S)
            self._next_health = 0.0
            self._look()
            now, late = time.monotonic(), [child for child in self._needed if not child.ready]
            if late and now - start > within_s:
                raise WorkerError(f"{late[0].name} was not ready within {within_s:.0f} s; {_end_of_log(late[0])}")
            if late and now > next_line:
                self._say(f"still waiting for {', '.join(child.name for child in late)} (log: {late[0].program.log})")
                next_line = now + _PATIENCE_LINE_EVERY_S

    def _look(self) -> None:
        changed = self._restart_the_dead()
        now = time.monotonic()
        if now >= self._next_health:
            changed |= self._note_health()
            self._next_health = now + _HEALTH_EVERY_S
        if now >= self._next_housekeeping:
            self._rotate_logs()
            self._next_housekeeping = now + _HOUSEKEEPING_EVERY_S
        if changed:
            self._write_state()

    def _start_wanted(self) -> bool:
        """Start the replicas that are wanted and never were started; whether there were any."""
        new = [replica for replica, base_hash in self._replicas.items() if base_hash in self._wanted and not replica.begun]
        if new:
            for process in (*self._engines, *self._rollouts):
                process.put(self._engine_placement)
        for replica in new:
            log.info("starts %s", replica.name)
            replica.start()
        return bool(new)

    def _restart_the_dead(self) -> bool:
        changed = False
        for child in self._children:
            if (status := child.reap()) is not None:
                self._mourn(child, status)
                changed = True
            if child.start_when_due():
                log.info("%s runs again as process %s", child.name, child.pid)
                changed = True
        return changed

    def _mourn(self, child: Child, status: int) -> None:
        how, waits_s = describe_exit(status), child.delay_s
        log.warning("%s %s", child.name, child.died)
        # Training goes on without a replica that cannot start, and who asks it for an answer is told.
        if child.hopeless and child in self._needed and not (self._was_ready and self._only_samples(child)):
            raise WorkerError(f"{child.name} {how}, {child.stillbirths} times without becoming ready; {_end_of_log(child)}")
        words = f"; its log ends: {said}" if (said := child.last_words(status)) else ""
        log.info("%s starts again in %.1f s", child.name, waits_s)
        self._say(f"{child.name} {how}; starting it again in {waits_s:.1f} s{words}")

    def _note_health(self) -> bool:
        health = self._ask()
        before = [child.state for child in self._children]
        self._wanted |= health.wanted
        started = self._start_wanted()
        self._api.note_ready(health.answers and self._api.pid is not None)
        for engine, aliases in self._engines.items():
            engine.note_ready(health.answers and engine.pid is not None and not aliases & health.waiting_for)
        for replica in (*self._rollouts, *self._replicas):
            replica.note_ready(replica.pid is not None and replica.name in health.replicas)
            if replica.state is State.NOT_READY and replica.name in health.silent:
                self._end_standstill(replica)
        for runner in self._runners:
            runner.note_ready(runner.pid is not None and runner.name in health.runners)
        return started or before != [child.state for child in self._children]

    def _only_samples(self, child: Child) -> bool:
        return child in self._replicas or child in self._rollouts

    def _end_standstill(self, replica: Child) -> None:
        """Only its end lets another life begin, and nothing is lost with it. An engine is left alone: two deaths condemn the operation in hand."""
        log.warning("%s lives and says nothing: it is killed", replica.name)
        self._say(f"{replica.name} lives and says nothing: it is killed")
        replica.signal(signal.SIGKILL)

    def _stop(self) -> None:
        self._stopping = True
        # A signal that came in the middle of a look was not waited for: it asked to stop, and not to hurry.
        self._events = SimpleQueue()
        log.info("stopping")
        # What works at jobs asks the api to the end.
        self._terminate(self._runners, stopping.RUNNER_S)
        self._terminate([self._api], stopping.API_S)
        self._terminate([*self._engines, *self._rollouts, *self._replicas], stopping.ENGINE_S)
        # Python takes its handlers away before it ends, and one more Ctrl-C would then make a clean stop look like a death.
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._write_state()

    def _terminate(self, children: list[Child], within_s: float) -> None:
        """SIGTERM, then SIGKILL at the deadline or at the user's second Ctrl-C."""
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + within_s
        impatient = False
        while (alive := [child for child in children if child.reap() is None and child.pid is not None]) and not impatient:
            impatient = self._wait_for_event(_TICK_S) in _STOP_SIGNALS or time.monotonic() > deadline
        for child in alive:
            log.warning("%s did not stop in time and is killed; the next start continues from the journal", child.name)
            child.signal(signal.SIGKILL)
        while any(child.reap() is None and child.pid is not None for child in alive):
            self._wait_for_event(_TICK_S)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stopping |= number in _STOP_SIGNALS
        self._events.put(number)

    def _wait_for_event(self, timeout_s: float) -> int | None:
        try:
            return self._events.get(timeout=timeout_s)
        except Empty:
            return None

    def _rotate_logs(self) -> None:
        for child in self._children:
            try:
                child.rotate_log()
            except OSError as error:
                log.warning("the log of %s cannot be moved aside: %s", child.name, error)

    def _say(self, line: str) -> None:
        """To the user, whose terminal may be a file on a full disk."""
        try:
            self._tell(line)
        except OSError as error:
            log.warning("cannot say `%s`: %s", line, error)

    def _write_state(self) -> None:
        """For `bloomery status`. Where it cannot be written, the disk full say, that is behind the times; the children run on."""
        try:
            self._replace_state()
        except OSError as error:
            log.warning("the state of the processes cannot be written: %s", error)

    def _replace_state(self) -> None:
        fresh = self._state_file.with_name(self._state_file.name + ".new")
        fresh.write_text(json.dumps({"children": [_row(child) for child in self._children]}))
        fresh.replace(self._state_file)


def _row(child: Child) -> dict[str, object]:
    """What `control.Process` reads."""
    left_s = child.starts_in_s
    return {
        "name": child.name,
        "pid": child.pid,
        "restarts": child.restarts,
        "state": child.state,
        "since_us": child.since_us,
        "died": child.died,
        "next_start_us": None if left_s is None else now_us() + int(left_s * 1e6),
    }


def _end_of_log(child: Child) -> str:
    return f"its log {child.program.log} ends:\n{child.log_tail()}"

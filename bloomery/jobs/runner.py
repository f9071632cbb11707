"""Gives processes to jobs that wait: `python -m bloomery.jobs.runner CONFIG.json`, started by the supervisor.

So many jobs run at a time, each in a process of its own that dies with this one. A process that ends without having told the server how its job did
is reported, and the job waits for another. When the runner starts it says that none of its processes lives, however the one before it ended.
Trackers that the server was given have a process each, too (`tracking`).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Final

from bloomery.client import Client
from bloomery.config import JobsConfig, TrackerConfig, TrackingConfig, to_json
from bloomery.config.data_dir import DataDir
from bloomery.obs import logs
from bloomery.obs.lifetime import end_with
from bloomery.types.errors import BloomeryError
from bloomery.types.leases import Lease, Order

log = logging.getLogger(__name__)

WAIT_S: Final = 20.0
PAUSE_S: Final = 1.0
"""After a server that is away, or a process that cannot be started."""
PATIENCE_S: Final = 600.0


class Runner:
    """Runs until `stop`."""

    def __init__(self, config: JobsConfig) -> None:
        self._config = config
        self._key = DataDir(Path(config.data_dir)).api_key.read_text().strip()
        self._stopping = threading.Event()
        self._processes: set[subprocess.Popen[str]] = set()

    def run(self) -> None:
        """Work through jobs; returns once stopped, with every process ended and every job given back."""
        with self._client(PATIENCE_S) as client:
            if given_back := client.runner(self._config.name).release():
                log.info("jobs that the runner before had wait again: %s", ", ".join(given_back))
        slots = [threading.Thread(target=self._work_through, name=f"slot-{number}") for number in range(self._config.slots)]
        slots += [threading.Thread(target=self._track, args=(tracker,), name=tracker.kind) for tracker in self._config.trackers]
        for slot in slots:
            slot.start()
        self._stopping.wait()
        for process in list(self._processes):
            process.kill()
        # Once so that those who wait for a job wait no longer, and once for what one of them was given meanwhile.
        self._give_back()
        for slot in slots:
            slot.join()
        self._give_back()

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """End every process, and return."""
        self._stopping.set()

    def _give_back(self) -> None:
        try:
            with self._client(0.0) as client:
                client.runner(self._config.name).release()
        except BloomeryError as error:
            log.info("the server is away already, and is told at the next start: %s", error.message)

    def _work_through(self) -> None:
        with self._client(PATIENCE_S) as client:
            runner = client.runner(self._config.name)
            while not self._stopping.is_set():
                try:
                    if (lease := runner.claim(WAIT_S)) is None:
                        continue
                    words = self._process_of(lease)
                    if not self._stopping.is_set():
                        runner.ended(lease.job.id, lease.job.epoch, words)
                except BloomeryError as error:
                    log.warning("%s", error.message)
                    self._stopping.wait(PAUSE_S)
                except Exception:
                    # Whatever one job comes to, its slot is there for the next.
                    log.exception("a slot failed, and goes on")
                    self._stopping.wait(PAUSE_S)

    def _process_of(self, lease: Lease) -> str:
        """Have a process do the job; how it ended."""
        log.info("job %s (%s) begins its life %d", lease.job.id, lease.job.spec.name, lease.job.epoch)
        words = self._ended("bloomery.jobs.process", Order(url=self._config.url, lease=lease).model_dump_json())
        log.info("job %s: its process %s", lease.job.id, words)
        return words

    def _ended(self, module: str, said: str) -> str:
        """How a process of this module, which was told something, ended."""
        try:
            process = subprocess.Popen(
                # -P: whatever lies in the current directory is not ours to import.
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                text=True,
                preexec_fn=end_with(os.getpid(), signal.SIGKILL),
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._stopping.wait(PAUSE_S)
            return f"could not be started: {error}"
        self._processes.add(process)
        if self._stopping.is_set():
            process.kill()
        try:
            process.communicate(said)
        finally:
            self._processes.discard(process)
        status = process.returncode
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _track(self, tracker: TrackerConfig) -> None:
        """Have a process tell it what jobs measure."""
        config = self._config
        tracking = TrackingConfig(data_dir=config.data_dir, url=config.url, name=config.name, tracker=tracker, log_level=config.log_level)
        while not self._stopping.is_set():
            words = self._ended("bloomery.jobs.tracking", to_json(tracking))
            if not self._stopping.wait(PAUSE_S):
                log.warning("the process for %s %s, and is started again", tracker.kind, words)

    def _client(self, patience_s: float) -> Client:
        return Client(self._config.url, self._key, patience_s=patience_s)


def main() -> None:
    """Read the configuration and run."""
    config = JobsConfig.from_json(Path(sys.argv[1]).read_text())
    logs.configure("jobs", config.log_level)
    runner = Runner(config)
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, runner.stop)
    runner.run()


if __name__ == "__main__":
    main()

"""`bloomery fidelity`: `prepare` says how the threads of this process wait, then `cards` measures models in it. Only `cards` imports torch."""

import os

from bloomery.engine.thread_waits import prepare_threads
from bloomery.obs.machine import usable_cpus


def prepare(threads: int | None) -> None:
    """As in an engine that trains, and before `cards` is imported."""
    prepare_threads(os.environ, "engine", threads or usable_cpus())

"""Which process gets how many threads and which processors: what is served must not wait for what is trained.

Where there are enough processors each side has its own. On fewer, half of them would idle for whoever only trains, so there the engine has all of
them and yields: it gets what replicas leave. Replicas that serve have fewer threads than the engine wherever there are two processors or more, so
their numerics ids differ; cards and streams compare the numerics of sampling, which leave threads out where the probe finds that forwards do not
depend on them. Replicas for rollouts are on the engine's side. They have as many threads as it has, for that number is part of the whole id: so what
they sample has the bits that it trains on where the probe finds otherwise too.
"""

import os
import sys
from typing import Final, NamedTuple

from bloomery.obs.machine import usable_cpus

_REPLICA_SHARE = 4
"""Replicas get one processor in so many: a decode step gains little from more threads, a training pass almost all there is."""
_FEW = 4
"""On fewer processors an engine computes with all of them, and yields while replicas run."""
_YIELDING: Final = 5
"""Niceness: about a quarter of the time of a processor that somebody else wants too."""


class Placement(NamedTuple):
    """Where a process runs while replicas run."""

    cores: frozenset[int] | None = None
    """None: wherever there is room."""
    niceness: int = 0


class Shares(NamedTuple):
    """Threads of each engine, which are also those of each replica for rollouts, and of each replica that serves; and where they run."""

    threads: int
    replica_threads: int
    engine: Placement = Placement()
    replica: Placement = Placement()


def share(*, engines: int, replicas: int, from_start: bool, threads: int | None, rollouts: int = 0) -> Shares:
    """Divide the processors of this machine. `replicas` of each engine's base, which run `from_start` or once they are wanted.

    `rollouts` are the replicas for rollouts beside each engine.
    """
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    return divide(sorted(cores), usable_cpus(), replicas=engines * replicas, from_start=from_start, threads=threads, rollouts=rollouts)


def divide(cores: list[int], usable: int, *, replicas: int, from_start: bool, threads: int | None, rollouts: int = 0) -> Shares:
    """The same for a machine of `usable` processors, which may be fewer than the `cores` that processes can be pinned to; `replicas` in all."""
    each = max(1, usable // (_REPLICA_SHARE * max(1, replicas)))
    pool = min(usable - 1, each * replicas)
    trained = usable - pool if from_start or usable >= _FEW else usable
    own = threads or max(1, trained // (1 + rollouts))
    shares = Shares(own, min(each, own))
    if not replicas:
        return shares
    # Under a quota the processors are not ours to divide: others run on them too.
    if usable < _FEW or len(cores) != usable:
        return shares._replace(engine=Placement(niceness=_YIELDING))
    return shares._replace(engine=Placement(frozenset(cores[:-pool])), replica=Placement(frozenset(cores[-pool:])))


def announce(shares: Shares, replicas: int, *, from_start: bool, rollouts: int = 0) -> str:
    """The line that says it of one base model."""
    engine = f"the engine computes with {_count(shares.threads, 'thread')}"
    if rollouts:
        engine += f", and so {'do' if rollouts > 1 else 'does'} {_count(rollouts, 'replica')} for rollouts"
    if not replicas:
        return f"{engine}{'; the engine' if rollouts else ' and'} serves what is deployed (--replicas 0)"
    when = "" if from_start else ", started when something is deployed or the model is asked"
    each = _count(shares.replica_threads, "thread") + (" each" if replicas > 1 else "")
    served = f"{engine}; {_count(replicas, 'replica')} with {each} will serve{when}"
    if shares.engine.cores is None or shares.replica.cores is None:
        return f"{served}, on any processor, and {'they then yield' if rollouts else 'the engine then yields'} to {'them' if replicas > 1 else 'it'}"
    then = "they then keep" if rollouts else "the engine then keeps"
    return f"{served}, on {_listed(shares.replica.cores)}, and {then} to {_listed(shares.engine.cores)}"


def warn(threads: int | None, usable: int) -> str | None:
    """The line that says that an engine was given more threads than can run."""
    if threads is None or threads <= usable:
        return None
    return (
        f"warning: --threads {threads} on {_count(usable, 'usable processor')}: threads that wait for each other make it slower, leave the option out"
    )


def _listed(cores: frozenset[int]) -> str:
    return f"processor{'s' if len(cores) > 1 else ''} {', '.join(map(str, sorted(cores)))}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

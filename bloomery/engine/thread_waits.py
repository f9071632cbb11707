"""How the threads of one process wait for each other between two kernels; torch's pool reads it from the environment when it is loaded. No torch.

Threads that look for work without end starve whoever shares the processors, and one that sleeps is some fifty microseconds late. A replica serves
beside others, so its threads sleep soon. Those of an engine that trains look three times as often, which spans most gaps between two kernels: on idle
processors a step of a small model takes a tenth less, beside a process that takes one of two processors 3 % more (docs/design/015).
"""

from collections.abc import Mapping, MutableMapping
from typing import Final

from bloomery.types.protocol import Role

_LOOKS: Final[Mapping[Role, int]] = {"engine": 3000, "replica": 1000}
"""How often a thread looks whether there is work before it sleeps."""


def thread_waits(role: Role) -> dict[str, str]:
    """Environment of a process of this role."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(_LOOKS[role])}


def prepare_threads(environment: MutableMapping[str, str], role: Role, threads: int) -> None:
    """Before torch is imported; what the user set stays."""
    for name, value in {"OMP_NUM_THREADS": str(threads), **thread_waits(role)}.items():
        environment.setdefault(name, value)

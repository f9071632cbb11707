"""When engines write automatic checkpoints (`docs/operate.md`), as the user's environment has it."""

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from bloomery.config import DEFAULT_CHECKPOINT_S
from bloomery.types.errors import InvalidInput

SECONDS: Final = "BLOOMERY_CHECKPOINT_SECONDS"
BYTES: Final = "BLOOMERY_CHECKPOINT_BYTES"


class CheckpointsAfter(NamedTuple):
    """After so much compute of a run, or so many bytes of payloads; None for as many as `EngineConfig` says."""

    seconds: float
    bytes: int | None


def checkpoints_after(environment: Mapping[str, str]) -> CheckpointsAfter:
    """What it asks for, or what is usual."""
    return CheckpointsAfter(
        _number(environment, SECONDS, float, "a number of seconds") if SECONDS in environment else DEFAULT_CHECKPOINT_S,
        int(_number(environment, BYTES, int, "a whole number of bytes")) if BYTES in environment else None,
    )


def _number(environment: Mapping[str, str], variable: str, kind: Callable[[str], float], what: str) -> float:
    try:
        number = kind(environment[variable])
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidInput(f"{variable} is `{environment[variable][:64]}`: set it to {what}, 0 or more, or unset it", field=variable)
    return number

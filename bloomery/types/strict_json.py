"""JSON as its standard has it. Python's own reader also takes NaN, infinities, and numbers that become one."""

import json
import math
from typing import Any


class NotFinite(ValueError):
    """NaN, an infinity, or a number that becomes one: what stands there."""


def read(text: str) -> Any:
    """The value of a text. NotFinite for such a number in it, another ValueError or RecursionError for what is no JSON at all."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> Any:
    raise NotFinite(constant)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise NotFinite(text[:64])
    return value

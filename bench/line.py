"""The JSON line of a benchmark, whose first fields are the same in all of them."""

import json
from collections.abc import Mapping

from bench.machine import machine


class Line:
    """Made before anything is measured, because it says what else the machine was busy with then."""

    def __init__(self, bench: str) -> None:
        self._header = {"bench": bench, **machine()}

    def tell(self, found: Mapping[str, object]) -> None:
        """Print it: how it was measured, and what came of it."""
        print(json.dumps({**self._header, **found}))

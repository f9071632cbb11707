"""The whole loop, measured: `python -m bench.loop` runs the demo against a server of its own and prints one JSON line.

Named peers in the same run: the majority class and a bag-of-words classifier, on the same rows.
"""

import json
import platform
import sys
import time
from datetime import UTC, datetime

from bloomery.cli.demo import Bars, figures, run, serving


def main() -> None:
    """Run the demo once and print its figures."""
    started = time.monotonic()
    with serving("bloomery-tiny", keep=False) as server:
        report = run(server, None, Bars(sys.stderr))
    machine = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps({"bench": "loop", **machine, **figures(report, time.monotonic() - started)}))


if __name__ == "__main__":
    main()

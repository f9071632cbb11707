"""The whole loop, measured: `python -m bench.loop` runs the demo against a server of its own and prints one JSON line.

Named peers in the same run: the majority class and a bag-of-words classifier, on the same rows.
"""

import json
import sys
import time

from bench.machine import machine
from bloomery.cli.demo import Bars, console_for, figures, run, serving, show


def main() -> None:
    """Run the demo once and print its figures."""
    where, started = machine(), time.monotonic()
    with serving("bloomery-tiny", keep=False) as server:
        report = run(server, None, Bars(sys.stderr))
    seconds = time.monotonic() - started
    show(report, seconds, console_for(sys.stderr))
    print(json.dumps({"bench": "loop", **where, **figures(report, seconds)}))


if __name__ == "__main__":
    main()

"""The whole loop, measured: `python -m bench.loop` runs the demo against a server of its own and prints one JSON line.

Named peers in the same run: the majority class and a bag-of-words classifier, on the same rows.
"""

import sys
import time

from bench.line import Line
from bloomery.cli.demo import Bars, console_for, figures, run, show
from bloomery.cli.demo_server import serving


def main() -> None:
    """Run the demo once and print its figures."""
    line, started = Line("loop"), time.monotonic()
    with serving("bloomery-tiny", keep=False) as server:
        report = run(server, None, Bars(sys.stderr))
    seconds = time.monotonic() - started
    show(report, seconds, console_for(sys.stderr))
    line.tell(figures(report, seconds))


if __name__ == "__main__":
    main()

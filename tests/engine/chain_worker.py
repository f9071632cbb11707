"""A trainer in a process of its own, for tests that kill it: `python -m tests.engine.chain_worker FOLDER LEARNING_RATE`.

It publishes versions of one run, and says a line for each."""

import json
import sys
from pathlib import Path

from tests.engine.test_chains import Loop

VERSIONS = 4


def main() -> None:
    """The process. It trains from the beginning, as who replays operations does, and so publishes again what a life before it had published."""
    folder, learning_rate = Path(sys.argv[1]), float(sys.argv[2])
    loop = Loop(folder)
    for place in range(VERSIONS):
        done = loop.publish(learning_rate, steps=min(place, 1))
        print(json.dumps({"version": done.version, "key": done.key, "by_chain": done.travelled is not None}), flush=True)


if __name__ == "__main__":
    main()

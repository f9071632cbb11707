"""The engine process: `python -m bloomery.engine CONFIG.json`, started by the supervisor."""

import os
import sys
from pathlib import Path

from bloomery.config import EngineConfig
from bloomery.obs import logs


def main() -> None:
    """Read the configuration and serve."""
    config = EngineConfig.from_json(Path(sys.argv[1]).read_text())
    logs.configure("engine", config.log_level)
    # The thread pool of torch reads these when it is loaded: threads that spin while they wait starve whoever shares the processors.
    for name, value in {"OMP_NUM_THREADS": str(config.model.threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}.items():
        os.environ.setdefault(name, value)
    from bloomery.engine.process import run

    run(config)


if __name__ == "__main__":
    main()

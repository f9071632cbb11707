"""The engine process: `python -m bloomery.engine CONFIG.json`, started by the supervisor."""

import os
import sys
from pathlib import Path

from bloomery.config import EngineConfig
from bloomery.engine.thread_waits import prepare_threads
from bloomery.obs import logs
from bloomery.obs.garbage_collector import importing


def main() -> None:
    """Read the configuration and serve."""
    config = EngineConfig.from_json(Path(sys.argv[1]).read_text())
    logs.configure("engine", config.log_level)
    prepare_threads(os.environ, config.role, config.model.threads)
    with importing():
        from bloomery.engine.process import run

    run(config)


if __name__ == "__main__":
    main()

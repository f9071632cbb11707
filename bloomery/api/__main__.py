"""The api process: `python -m bloomery.api CONFIG.json`, started by the supervisor."""

import sys
from pathlib import Path

from bloomery.config import ApiConfig
from bloomery.obs import logs
from bloomery.obs.garbage_collector import importing


def main() -> None:
    """Read the configuration and serve."""
    config = ApiConfig.from_json(Path(sys.argv[1]).read_text())
    logs.configure("api", config.log_level)
    with importing():
        from bloomery.api.process import run

    run(config)


if __name__ == "__main__":
    main()

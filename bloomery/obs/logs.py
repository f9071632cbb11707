"""One log format for every process: time in UTC, level, process, logger, message.

Children write to standard error, which the supervisor has pointed at their file; the supervisor itself writes its own file.
"""

import logging
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

LOG_FILE_BYTES: Final = 8 << 20
"""A log longer than this becomes `<name>.log.1`, replacing the one before it."""


def configure(process: str, level: str = "info", file: Path | None = None) -> None:
    """Send the root logger to `file`, or to standard error without one."""
    handler = RotatingFileHandler(file, maxBytes=LOG_FILE_BYTES, backupCount=1) if file else logging.StreamHandler()
    handler.setFormatter(_formatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It tells of every request at the level at which our processes tell what happened.
    logging.getLogger("httpx").setLevel("DEBUG" if level == "debug" else "WARNING")


def _formatter(process: str) -> logging.Formatter:
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter

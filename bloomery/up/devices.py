"""The device that engines compute on, tried before anything is written: an engine would find out only when it loads its model."""

import re
import subprocess
import sys
from typing import Final

from bloomery.config import DEFAULT_DEVICE
from bloomery.types.errors import InvalidInput

_DEVICE: Final = re.compile(r"cpu|cuda(:[0-9]+)?")
_TRY: Final = "import sys, torch; torch.zeros(1, device=sys.argv[1])"
_TRY_S: Final = 120.0


def check(device: str) -> None:
    """Refuse one that torch does not have here; in a process of its own, because this one is to stay without torch."""
    if not _DEVICE.fullmatch(device):
        raise InvalidInput(f"--device is `{device[:64]}`: give cpu, cuda or cuda:N", field="device")
    if device != DEFAULT_DEVICE and (problem := _problem(device)):
        raise InvalidInput(f"--device {device}: torch has no such device here ({problem}): leave it out to compute on the processor", field="device")


def _problem(device: str) -> str:
    """Why it cannot be used; empty where it can."""
    try:
        tried = subprocess.run([sys.executable, "-P", "-c", _TRY, device], capture_output=True, text=True, check=False, timeout=_TRY_S)
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_TRY_S:.0f} s"
    said = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    return "" if tried.returncode == 0 else said[-1][:200] if said else f"exit code {tried.returncode}"

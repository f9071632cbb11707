"""The numerics id: which bits to expect of this process. It goes into the journal, into manifests, and from one process to another.

Gradients depend on the number of threads, so it is part of the id. Forwards need not: `sampling_id` is for what is sampled, and compared with that.
"""

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import Final

import torch

from bloomery.models.factors import RANK_PAD
from bloomery.models.native import bindings
from bloomery.models.pads import KEY_PAD, ROW_PAD
from bloomery.models.products import library

_COMPUTE: Final = ("models", "train", "infer")
"""Packages whose code decides about bits: with another loss, packing or optimizer the same operations may give others."""


def numerics_id(dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
    """Equal ids promise equal bits: CPU model and flags (or GPU), torch build, threads, pads, whose products and kernels, our own sources, dtype."""
    return _hash(str(torch.get_num_threads()), dtype, torch.device(device))


def sampling_id(dtype: torch.dtype, device: torch.device | str = "cpu", *, any_threads: bool) -> str:
    """Equal ids promise equal bits of forwards, and nothing about gradients.

    `any_threads`: this process is bit-exact, and one thread gives it the bits of all (`Form.one_thread`). Two such processes agree whatever
    their numbers of threads: each of them with what one thread computes, and so with the other.
    """
    return _hash("any" if any_threads else str(torch.get_num_threads()), dtype, torch.device(device))


def _hash(threads: str, dtype: torch.dtype, device: torch.device) -> str:
    parts = (
        platform.machine(),
        _device_name(device),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"threads={threads}",
        f"pads={ROW_PAD},{KEY_PAD},{RANK_PAD}",
        f"products={library(dtype, device)}",
        f"kernels={bindings.identity()}",
        f"sources={_sources_hash()}",
        str(dtype),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def sources() -> list[Path]:
    """All Python of ours that computes, or lays out what is computed, in a fixed order. Kernels in C are `bindings.identity`'s."""
    package = Path(__file__).parents[1]
    return sorted(path for folder in _COMPUTE for path in (package / folder).rglob("*.py"))


@cache
def _sources_hash() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return "|".join(next((line for line in lines if line.startswith(key)), key) for key in ("model name", "flags"))

"""What this process may use of the machine: memory, processors and their instructions, limits of its control group included."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512bw", "avx_ne_convert", "amx_bf16", "bf16"})
"""Of processors whose products of bfloat16 are not slower than those of float32."""


def free_memory_bytes() -> int:
    """Memory that can be had without swapping."""
    return min([_host_free_bytes(), *_cgroup_free_bytes()])


def total_memory_bytes() -> int:
    """Memory that there is for this process, whoever holds it now."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_cgroup_total_bytes()])


def usable_cpus() -> int:
    """Processors this process may run on, at least one."""
    return max(1, min([_affinity(), *_cgroup_cpus()]))


def processor_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Instruction sets by the kernel's names; empty where it does not tell."""
    lines = _read(cpuinfo).splitlines()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), ()))


def slow_in_bfloat16(flags: frozenset[str]) -> bool:
    """Whether a processor that tells its flags has no instructions for products of bfloat16."""
    return bool(flags) and _BFLOAT16_FLAGS.isdisjoint(flags)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _host_free_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(available.split()[1]) << 10


def _cgroup_free_bytes() -> Iterator[int]:
    for group in _own_cgroups():
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            # Pages of files count as used but are given back on demand.
            yield max(0, int(limit) - int(used) + _reclaimable_bytes(group))


def _cgroup_total_bytes() -> Iterator[int]:
    for group in _own_cgroups():
        if (limit := _read(group / "memory.max")).isdigit():
            yield int(limit)


def _reclaimable_bytes(group: Path) -> int:
    stats = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(stats.get("inactive_file", 0))


def _cgroup_cpus() -> Iterator[int]:
    for group in _own_cgroups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            yield -(-int(quota) // int(period))


def _own_cgroups() -> list[Path]:
    """The control group of this process and those above it; empty where there are none of version 2."""
    entries = _read(Path("/proc/self/cgroup")).splitlines()
    own = [_CGROUP_ROOT / entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")]
    return [group for leaf in own for group in (leaf, *leaf.parents) if group.is_relative_to(_CGROUP_ROOT)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""

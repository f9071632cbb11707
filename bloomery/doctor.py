"""`bloomery doctor`: what this machine has, whether bit-exact mode holds on it, and what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bloomery import __version__
from bloomery.config import GraderLevel
from bloomery.config.data_dir import DataDir
from bloomery.grade import processes as grading
from bloomery.obs.machine import free_memory_bytes, usable_cpus
from bloomery.types.errors import BloomeryError
from bloomery.up import agents, base_models, cores, endpoints, layout, lock, tables
from bloomery.up.base_models import ModelArgument
from bloomery.up.hints import command

_PACKAGES: Final = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "sqlalchemy": "SQLAlchemy",
    "obstore": "obstore",
    "sklearn": "scikit-learn",
}
_LOW_DISK_BYTES: Final = 2_000_000_000


class Finding(NamedTuple):
    """One line of the report; `problem` says what to do about it."""

    topic: str
    text: str
    problem: str | None = None


def examine(
    data_dir: Path,
    models: Sequence[str],
    dtype: str,
    threads: int | None,
    outside: Path | None = None,
    remote: Path | None = None,
    graders: GraderLevel = "L1",
) -> Iterator[Finding]:
    """Look at everything, cheap things first."""
    yield Finding("bloomery", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _packages()
    yield Finding("processors", f"{usable_cpus()} usable of {os.cpu_count()}")
    shares = cores.share(engines=max(1, len(models)), replicas=1, from_start=False, threads=threads)
    yield Finding("replicas", cores.announce(shares, 1, from_start=False))
    yield Finding("memory", f"{base_models.gigabytes(free_memory_bytes())} free")
    yield _graders(graders)
    yield from _data_dir(DataDir(data_dir.expanduser().resolve()))
    if outside is not None:
        yield from _endpoints(outside)
    if remote is not None:
        yield from _agents(remote)
    if importlib.util.find_spec("torch"):
        yield from _devices()
        for value in models or [base_models.DEFAULT_MODEL]:
            yield from _model(value, dtype, shares.threads)


def _packages() -> Iterator[Finding]:
    for module, distribution in _PACKAGES.items():
        if importlib.util.find_spec(module):
            yield Finding(distribution, importlib.metadata.version(distribution))
        else:
            yield Finding(distribution, "missing", f"install {distribution}, for example with `make setup`")


def _graders(asked: GraderLevel) -> Finding:
    """Whether code of graders can run here at the level that was asked for."""
    found = grading.level(asked)
    if found.level == asked:
        return Finding("graders", f"{asked}, jailed: {', '.join(found.layers)}")
    refused = f"code of graders is refused, because this machine does not give {grading.PLACES[asked]}: {found.reason}"
    return Finding("graders", f"{found.level}, without a jail", refused)


def _data_dir(data: DataDir) -> Iterator[Finding]:
    nearest = next(path for path in (data.root, *data.root.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    low = f"less than {base_models.gigabytes(_LOW_DISK_BYTES)} left for {data.root}: free some, or use another --data-dir"
    yield Finding("disk", f"{base_models.gigabytes(free)} free for {data.root}", low if free < _LOW_DISK_BYTES else None)
    try:
        version = layout.check(data)
        tables.check(data)
        server = lock.holder(data)
    except BloomeryError as error:
        yield Finding("data directory", str(data.root), error.message)
        return
    if version is None:
        yield Finding("data directory", "new: `bloomery up` creates it")
    elif server is None:
        yield Finding("data directory", f"layout {version}, no server running")
    else:
        # Its own server is what the directory is for; how that one is, is for `status` to say.
        status = command("status", data)
        yield Finding("data directory", f"layout {version}, in use by process {server.pid}, which serves {server.url}: see `{status}`")


def _endpoints(file: Path) -> Iterator[Finding]:
    """What `up` would take of it; nobody outside is asked."""
    try:
        for endpoint in endpoints.read(file, os.environ):
            yield Finding("endpoint", endpoints.announce(endpoint).removeprefix("endpoint "))
    except BloomeryError as error:
        yield Finding("endpoints", str(file), error.message)


def _agents(file: Path) -> Iterator[Finding]:
    try:
        for agent in agents.read(file, jobs=1):
            yield Finding("agent", agents.announce(agent).removeprefix("agent "), "; ".join(agents.troubles(agent)) or None)
    except BloomeryError as error:
        yield Finding("agents", str(file), error.message)


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding("cpu kernels", torch.backends.cpu.get_cpu_capability())
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("gpus", ", ".join(gpus) or "none (nothing needs one)")


def _model(value: str, dtype: str, threads: int) -> Iterator[Finding]:
    try:
        (argument,) = base_models.model_arguments([value])
        base = base_models.check(argument, dtype)
        free = free_memory_bytes()
        yield Finding("model", base_models.announce(base, dtype, free))
        base_models.refuse_what_does_not_fit([base], dtype, free)
        yield _bit_exact(argument, dtype, threads)
    except BloomeryError as error:
        yield Finding("model", value, error.message)


def _bit_exact(model: ModelArgument, dtype: str, threads: int) -> Finding:
    import torch

    from bloomery.models.kernel_probe import probe
    from bloomery.models.load import load_decoder
    from bloomery.models.native import bindings
    from bloomery.models.numerics import numerics_id

    torch.set_num_threads(threads)
    compute: torch.dtype = getattr(torch, dtype)
    report = probe(load_decoder(model.directory, dtype=compute))
    kernels = "native kernels in float32" if bindings.present() else "no native kernels, for which a C compiler is wanted"
    where = f"{dtype}, {threads} threads, {kernels}, numerics {numerics_id(compute)}"
    if report.bit_exact:
        return Finding("bit-exact mode", f"holds for {model.alias} ({where}): sampled and trained log-probabilities agree to the bit")
    return Finding("bit-exact mode", f"does not hold for {model.alias} ({where}): {'; '.join(report.failures)}")

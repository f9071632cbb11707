"""Composition: options in, a running server out."""

import ipaddress
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bloomery import __version__
from bloomery.config import ApiConfig, EngineConfig, ModelConfig, RecordMode, to_json
from bloomery.config.data_dir import DataDir
from bloomery.obs import logs
from bloomery.obs.machine import free_memory_bytes, usable_cpus
from bloomery.types.errors import Conflict, InvalidInput
from bloomery.types.ids import now_us
from bloomery.types.keys import PREFIX
from bloomery.up import base_models, health, keys, layout
from bloomery.up.base_models import BaseModel
from bloomery.up.children import Child, Program
from bloomery.up.lock import Holder, Lock, check_free, locked
from bloomery.up.supervisor import Supervisor

log = logging.getLogger(__name__)

_RUNTIME_PREFIX: Final = "bloomery-"
# The kernel's limit for the path of a unix socket is 108 bytes.
_LONGEST_RUNTIME_DIR: Final = 80
_READY_S: Final = 120.0
_READY_S_PER_GB: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    """What `bloomery up` was asked for; `port` 0 takes any free one, `threads` None every processor."""

    data_dir: Path
    host: str
    port: int
    models: Sequence[str]
    record: RecordMode
    dtype: str
    threads: int | None
    custom_losses: bool


def up(options: UpOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Serve in the foreground until a stop signal; what is refused is refused before anything is written."""
    _check_host(options.host, environment)
    models = [base_models.check(model, options.dtype) for model in base_models.wanted(options.models)]
    _check_memory(models, options.dtype)
    data = DataDir(options.data_dir.expanduser().resolve())
    layout.check(data)
    check_free(data)
    port = _free_port(options.host, options.port)
    layout.create(data)
    with locked(data) as lock:
        layout.bring_up_to_date(data)
        logs.configure("supervisor", file=data.log("supervisor"))
        key = keys.development_key(data.api_key, environment)
        runtime = _runtime_dir(lock)
        holder = Holder(pid=os.getpid(), host=options.host, port=port, started_us=now_us(), runtime_dir=str(runtime))
        lock.announce(holder)
        try:
            supervisor = _supervisor(options, models, data, holder, lock, environment)
            gigabytes = sum(model.needs_bytes for model in models) / 1e9
            supervisor.run(ready_within_s=_READY_S + _READY_S_PER_GB * gigabytes, on_ready=lambda: _greet(holder, key, data))
        finally:
            shutil.rmtree(runtime)
            data.processes.unlink(missing_ok=True)
            lock.clear()
    say("stopped")


def remove_runtime_dir(lock: Lock) -> None:
    """What the holder before kept outside of the data directory, when it was killed."""
    if lock.previous and Path(lock.previous.runtime_dir).name.startswith(_RUNTIME_PREFIX):
        shutil.rmtree(lock.previous.runtime_dir, ignore_errors=True)


def say(line: str) -> None:
    """To the terminal, at once even through a pipe; nobody listening there is no reason to stop."""
    with suppress(BrokenPipeError):
        print(line, flush=True)


def _supervisor(
    options: UpOptions, models: Sequence[BaseModel], data: DataDir, holder: Holder, lock: Lock, environment: Mapping[str, str]
) -> Supervisor:
    configs = _model_configs(options, models, Path(holder.runtime_dir))
    api = ApiConfig(
        data_dir=str(data.root),
        host=holder.host,
        port=holder.port,
        record=options.record,
        models=configs,
        custom_losses=options.custom_losses,
    )
    api_child = Child(_program("api", "bloomery.api", to_json(api), data, holder, lock, _environment(environment, threads=1)))
    engines: dict[Child, frozenset[str]] = {}
    for served in {config.socket: config for config in reversed(configs)}.values():
        config = EngineConfig(data_dir=str(data.root), model=served)
        name = "engine-" + served.alias.replace("/", "-")
        program = _program(
            name, "bloomery.engine", to_json(config), data, holder, lock, _environment(environment, threads=served.threads), served.socket
        )
        engines[Child(program)] = frozenset(other.alias for other in configs if other.socket == served.socket)
    return Supervisor(api_child, engines, ask=lambda: health.ask(holder.host, holder.port), state_file=data.processes, say=say)


def _model_configs(options: UpOptions, models: Sequence[BaseModel], runtime: Path) -> tuple[ModelConfig, ...]:
    """Names of the same base share one engine and its socket."""
    threads = options.threads or usable_cpus()
    sockets: dict[str, str] = {}
    configs = []
    for model in models:
        base = base_models.base_hash(model.directory)
        path = sockets.setdefault(base, str(runtime / f"engine-{len(sockets)}.sock"))
        configs.append(ModelConfig(alias=model.alias, path=str(model.directory), base_hash=base, dtype=options.dtype, threads=threads, socket=path))
    return tuple(configs)


def _program(
    name: str, module: str, config: str, data: DataDir, holder: Holder, lock: Lock, env: Mapping[str, str], socket_path: str | None = None
) -> Program:
    path = Path(holder.runtime_dir) / f"{name}.json"
    path.write_text(config)
    # -P: whatever lies in the user's current directory is not ours to import.
    argv = [sys.executable, "-P", "-m", module, str(path)]
    return Program(name=name, argv=argv, env=env, log=data.log(name), socket=Path(socket_path) if socket_path else None, inherit=(lock.fd,))


def _environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The user's, and thread pools that neither spin while they wait nor take every processor by default."""
    return {
        **environment,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _check_host(host: str, environment: Mapping[str, str]) -> None:
    preset = keys.preset_key(environment)
    local = host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
    if not local and preset is None:
        raise InvalidInput(
            f"--host {host} lets other machines in: set {keys.VARIABLE} to a key of your own first (it starts with {PREFIX})", field="host"
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_memory(models: Sequence[BaseModel], dtype: str) -> None:
    free = free_memory_bytes()
    for model in models:
        say(base_models.announce(model, dtype, free))
    one_of_each = {model.directory: model for model in models}
    base_models.refuse_what_does_not_fit(list(one_of_each.values()), dtype, free)


def _free_port(host: str, port: int) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise InvalidInput(f"--host {host} is no address of this machine: use 127.0.0.1", field="host") from None
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Conflict(
                f"cannot listen on {host}:{port} ({error.strerror}): stop what listens there, or choose another --port", field="port"
            ) from None
        chosen: int = probe.getsockname()[1]
    return chosen


def _runtime_dir(lock: Lock) -> Path:
    """A private directory for sockets; that of a supervisor which was killed is removed first."""
    remove_runtime_dir(lock)
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=_RUNTIME_PREFIX, dir=parent if len(parent) < _LONGEST_RUNTIME_DIR else "/tmp"))


def _greet(holder: Holder, key: keys.DevelopmentKey, data: DataDir) -> None:
    say(f"Bloomery {__version__} is ready: {holder.url}")
    if key.created:
        say(f"API key: {key.value}  (shown once; it is kept in {data.api_key})")
    else:
        say(f"API key: from {keys.VARIABLE}" if key.preset else f"API key: see {data.api_key}")
    say("Ctrl-C or `bloomery stop` stops it.")

"""Composition: options in, a running server out."""

import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bloomery import __version__
from bloomery.config import (
    DEFAULT_KEEP_ROLLOUTS,
    AgentConfig,
    ApiConfig,
    EndpointConfig,
    EngineConfig,
    GraderLevel,
    JobsConfig,
    LogLevel,
    ModelConfig,
    RecordMode,
    ReplicaConfig,
    TrackerConfig,
    to_json,
)
from bloomery.config.data_dir import DataDir
from bloomery.grade import processes as grading
from bloomery.obs import logs
from bloomery.obs.machine import free_memory_bytes, usable_cpus
from bloomery.types.errors import Conflict, InvalidInput
from bloomery.types.ids import now_us
from bloomery.types.keys import PREFIX
from bloomery.up import agents, base_models, chain_keys, cores, devices, endpoints, health, keys, layout, names, tables, trackers
from bloomery.up.addresses import is_address, wrong_host
from bloomery.up.base_models import CheckedModel
from bloomery.up.checkpoints import CheckpointsAfter, checkpoints_after
from bloomery.up.children import REPLICA, ROLLOUTS, RUNNER, Child, Program
from bloomery.up.cores import Shares
from bloomery.up.hints import command
from bloomery.up.lock import Holder, Lock, check_free, locked
from bloomery.up.supervisor import Supervisor

_RUNTIME_PREFIX: Final = "bloomery-"
# The kernel's limit for the path of a unix socket is 108 bytes.
_LONGEST_RUNTIME_DIR: Final = 80
_READY_S: Final = 120.0
_READY_S_PER_GB: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    """What `bloomery up` was asked for; `port` 0 takes any free one, `threads` None those that `cores` finds. So many `jobs` run at a time.

    `replicas` of each base model run from the start; None: one runs from when it is wanted, if there is memory for it. `rollout_replicas` of each run
    from the start too.
    """

    data_dir: Path
    host: str
    port: int
    models: Sequence[str]
    record: RecordMode
    dtype: str
    threads: int | None
    custom_losses: bool
    max_waiting: int
    replicas: int | None
    rollout_replicas: int
    plain: bool
    device: str
    log_level: LogLevel
    jobs: int
    keep_rollouts: int = DEFAULT_KEEP_ROLLOUTS
    endpoints: Path | None = None
    agents: Path | None = None
    graders: GraderLevel = "L1"
    track: Sequence[str] = ()
    public_hosts: Sequence[str] = ()
    sign_chains: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What is to run: all that was decided before the first process starts. `replicas` of each base, `hashes` of the bases of `models`."""

    options: UpOptions
    checkpoints_after: CheckpointsAfter
    endpoints: tuple[EndpointConfig, ...]
    agents: tuple[AgentConfig, ...]
    public_hosts: tuple[str, ...]
    trackers: tuple[TrackerConfig, ...]
    models: Sequence[CheckedModel]
    hashes: Sequence[str]
    replicas: int
    shares: Shares
    data: DataDir
    holder: Holder
    lock: Lock
    environment: Mapping[str, str]

    @property
    def from_start(self) -> bool:
        """Whether replicas run before anybody wants them."""
        return self.options.replicas is not None


def up(options: UpOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Serve in the foreground until a stop signal; what is refused is refused before anything is written."""
    _check_host(options.host, environment)
    public_hosts = _public_hosts(options.public_hosts)
    after = checkpoints_after(environment)
    devices.check(options.device)
    outside = endpoints.read(options.endpoints, environment) if options.endpoints else ()
    remote = agents.read(options.agents, options.jobs) if options.agents else ()
    _check_graders(options.graders)
    models = [base_models.check(model, options.dtype) for model in base_models.model_arguments(options.models)]
    replicas = _check_memory(models, options.dtype, options.replicas, options.rollout_replicas)
    data = DataDir(options.data_dir.expanduser().resolve())
    tracked = trackers.read(options.track, options.jobs, data.root, environment)
    layout.check(data)
    check_free(data)
    tables.check(data)
    chain_keys.check(data, wanted=options.sign_chains)
    names.refuse_taken(models, data)
    port = _free_port(options.host, options.port)
    layout.create(data)
    with locked(data) as lock:
        layout.bring_up_to_date(data)
        logs.configure("supervisor", options.log_level, data.log("supervisor"))
        tables.bring_up_to_date(data, say)
        key = keys.development_key(data.api_key, environment)
        chain_keys.make(data, wanted=options.sign_chains)
        runtime = _runtime_dir(lock)
        holder = Holder(pid=os.getpid(), host=options.host, port=port, started_us=now_us(), runtime_dir=str(runtime))
        lock.announce(holder)
        try:
            hashes = [base_models.base_hash(model.directory) for model in models]
            plan = _Plan(
                options=options,
                checkpoints_after=after,
                endpoints=outside,
                agents=remote,
                public_hosts=public_hosts,
                trackers=tracked,
                models=models,
                hashes=hashes,
                replicas=replicas,
                shares=_shares(options, len(set(hashes)), replicas),
                data=data,
                holder=holder,
                lock=lock,
                environment=environment,
            )
            _supervisor(plan).run(ready_within_s=_ready_within_s(models, options), on_ready=lambda: _greet(holder, key, data))
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


def _check_graders(level: GraderLevel) -> None:
    """A container is tried before anything is started: a server that was asked for one and has none would refuse every grader."""
    if level == "L2" and (found := grading.level(level)).level != level:
        raise InvalidInput(f"--graders L2 takes a container, and this machine gives none: {found.reason}", field="graders")


def _shares(options: UpOptions, engines: int, replicas: int) -> Shares:
    from_start = options.replicas is not None
    return cores.share(engines=engines, replicas=replicas, from_start=from_start, threads=options.threads, rollouts=options.rollout_replicas)


def _ready_within_s(models: Sequence[CheckedModel], options: UpOptions) -> float:
    return _READY_S + _READY_S_PER_GB * base_models.needed_bytes(models, (options.replicas or 0) + options.rollout_replicas) / 1e9


def _supervisor(plan: _Plan) -> Supervisor:
    configs = _model_configs(plan)
    engines: dict[Child, frozenset[str]] = {}
    serving: dict[Child, str] = {}
    rollouts: list[Child] = []
    if warning := cores.warn(plan.options.threads, usable_cpus()):
        say(warning)
    for endpoint in plan.endpoints:
        say(endpoints.announce(endpoint))
    for agent in plan.agents:
        say(agents.announce(agent))
        for trouble in agents.troubles(agent):
            say(trouble)
    for tracker in plan.trackers:
        say(trackers.announce(tracker))
    for served in {config.socket: config for config in reversed(configs)}.values():
        say(f"{served.alias}: {cores.announce(plan.shares, plan.replicas, from_start=plan.from_start, rollouts=plan.options.rollout_replicas)}")
        for config, name in _processes(plan, served):
            child = _child(plan, name, "bloomery.engine", config)
            if name.startswith(ROLLOUTS):
                rollouts.append(child)
            elif config.role == "replica":
                child.put(plan.shares.replica)
                serving[child] = served.base_hash
            else:
                engines[child] = frozenset(other.alias for other in configs if other.socket == served.socket)
    return Supervisor(
        _child(plan, "api", "bloomery.api", _api_config(plan, configs)),
        engines,
        serving,
        rollouts,
        _child(plan, RUNNER, "bloomery.jobs.runner", _jobs_config(plan)) if plan.options.jobs else None,
        wanted=frozenset(plan.hashes) if plan.from_start else frozenset(),
        engine_placement=plan.shares.engine,
        ask=lambda: health.ask(plan.holder.host, plan.holder.port),
        state_file=plan.data.processes,
        say=say,
    )


def _api_config(plan: _Plan, configs: tuple[ModelConfig, ...]) -> ApiConfig:
    options = plan.options
    return ApiConfig(
        data_dir=str(plan.data.root),
        host=plan.holder.host,
        port=plan.holder.port,
        record=options.record,
        models=configs,
        custom_losses=options.custom_losses,
        max_waiting=options.max_waiting,
        keep_rollouts=options.keep_rollouts,
        endpoints=plan.endpoints,
        agents=plan.agents,
        graders=options.graders,
        public_hosts=plan.public_hosts,
        log_level=options.log_level,
    )


def _jobs_config(plan: _Plan) -> JobsConfig:
    options = plan.options
    return JobsConfig(
        data_dir=str(plan.data.root),
        url=replace(plan.holder, host=health.reachable(plan.holder.host)).url,
        name=RUNNER,
        slots=options.jobs,
        trackers=plan.trackers,
        log_level=options.log_level,
    )


def _processes(plan: _Plan, served: ModelConfig) -> Iterator[tuple[EngineConfig, str]]:
    """The engine of a base and its replicas, with their names."""
    options, (seconds, size) = plan.options, plan.checkpoints_after
    engine = EngineConfig(
        data_dir=str(plan.data.root), model=served, plain=options.plain, checkpoint_s=seconds, checkpoint_bytes=size, log_level=options.log_level
    )
    yield engine, "engine-" + base_models.file_name(served.alias)
    for replica in served.replicas:
        model = replace(served, socket=replica.socket, threads=plan.shares.replica_threads)
        yield replace(engine, model=model, role="replica"), replica.name
    for replica in served.rollout_replicas:
        yield replace(engine, model=replace(served, socket=replica.socket), role="replica"), replica.name


def _model_configs(plan: _Plan) -> tuple[ModelConfig, ...]:
    """Names of the same base share one engine, its socket, and its replicas, which bear the first of the names."""
    runtime = Path(plan.holder.runtime_dir)
    first: dict[str, int] = {}
    configs = []
    for index, (model, base) in enumerate(zip(plan.models, plan.hashes, strict=True)):
        number = first.setdefault(base, index)
        name = base_models.file_name(plan.models[number].alias)
        configs.append(
            ModelConfig(
                alias=model.alias,
                path=str(model.directory),
                base_hash=base,
                dtype=plan.options.dtype,
                threads=plan.shares.threads,
                socket=str(runtime / f"engine-{number}.sock"),
                device=plan.options.device,
                replicas=tuple(
                    ReplicaConfig(name=f"{REPLICA}{name}-{copy}", socket=str(runtime / f"replica-{number}-{copy}.sock"))
                    for copy in range(plan.replicas)
                ),
                rollout_replicas=tuple(
                    ReplicaConfig(name=f"{ROLLOUTS}{name}-{copy}", socket=str(runtime / f"rollouts-{number}-{copy}.sock"))
                    for copy in range(plan.options.rollout_replicas)
                ),
            )
        )
    return tuple(configs)


def _child(plan: _Plan, name: str, module: str, config: ApiConfig | EngineConfig | JobsConfig) -> Child:
    path = Path(plan.holder.runtime_dir) / f"{name}.json"
    path.write_text(to_json(config))
    model = config.model if isinstance(config, EngineConfig) else None
    program = Program(
        name=name,
        # -P: whatever lies in the user's current directory is not ours to import.
        argv=[sys.executable, "-P", "-m", module, str(path)],
        env=_environment(plan.environment, threads=1 if model is None else model.threads),
        log=plan.data.log(name),
        socket=None if model is None else Path(model.socket),
        inherit=(plan.lock.fd,),
    )
    return Child(program)


def _environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The user's, and thread pools that do not take every processor by default; how they wait the engine says itself."""
    return {
        **environment,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _check_host(host: str, environment: Mapping[str, str]) -> None:
    preset = keys.preset_key(environment)
    local = host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
    if not local and preset is None:
        raise InvalidInput(
            f"--host {host} lets other machines in: set {keys.VARIABLE} to a key of your own first (it starts with {PREFIX})", field="host"
        )


def _public_hosts(names: Sequence[str]) -> tuple[str, ...]:
    """As they are compared with what browsers ask for."""
    for name in names:
        if (wrong := wrong_host(name)) is not None:
            raise InvalidInput(f"--public-host: {wrong}: give the name alone, as in bloomery.example.com", field="public_host")
    return tuple(name.lower().removesuffix(".") for name in names)


def _check_memory(models: Sequence[CheckedModel], dtype: str, replicas: int | None, rollouts: int) -> int:
    """Refuse what does not fit; says how many replicas that serve each base can have. Each holds the weights once more, those for rollouts too."""
    free = free_memory_bytes()
    for model in models:
        say(base_models.announce(model, dtype, free))
    one_of_each = list({model.directory: model for model in models}.values())
    base_models.refuse_what_does_not_fit(one_of_each, dtype, free, replicas=(replicas or 0) + rollouts)
    if replicas is not None:
        return replicas
    if base_models.needed_bytes(one_of_each, replicas=1 + rollouts) <= free:
        return 1
    say("there is no memory for a replica of its own: the engine serves what is deployed, and answers wait for training")
    return 0


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
    say(keys.announce(key, data.api_key))
    say(f"Ctrl-C or `{command('stop', data)}` stops it.")

"""`bloomery up`."""

from typing import Annotated

import typer

from bloomery.cli.options import (
    DATA_DIR,
    AgentsOption,
    DataDirOption,
    DTypeOption,
    EndpointsOption,
    GradersOption,
    ModelOption,
    ReplicasOption,
    ThreadsOption,
)
from bloomery.config import (
    DEFAULT_DEVICE,
    DEFAULT_JOBS,
    DEFAULT_KEEP_ROLLOUTS,
    DEFAULT_LOG_LEVEL,
    DEFAULT_MAX_WAITING,
    DEFAULT_PORT,
    LogLevel,
    RecordMode,
)


def up(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Another than loopback needs BLOOMERY_API_KEY set.")] = "127.0.0.1",
    public_host: Annotated[
        list[str] | None,
        typer.Option("--public-host", metavar="NAME", help="A name of this server, as browsers may ask for it (docs/security.md). Repeatable."),
    ] = None,
    data_dir: DataDirOption = DATA_DIR,
    model: ModelOption = None,
    record: Annotated[RecordMode, typer.Option(help="What to keep of traffic: nothing, all but texts and tokens, or all.")] = "full",
    keep_rollouts: Annotated[
        int,
        typer.Option("--keep-rollouts", min=0, help="Newest steps of each run whose rollouts are kept, of those before every tenth. 0: none."),
    ] = DEFAULT_KEEP_ROLLOUTS,
    dtype: DTypeOption = "float32",
    threads: ThreadsOption = None,
    custom_losses: Annotated[
        bool, typer.Option("--custom-losses", help="Compute losses that clients define here, and not in the client (docs/losses.md).")
    ] = False,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=1, help="Samples that may wait for an engine; requests beyond are told to come again.")
    ] = DEFAULT_MAX_WAITING,
    replicas: ReplicasOption = None,
    rollout_replicas: Annotated[
        int,
        typer.Option(
            "--rollout-replicas",
            min=0,
            max=64,
            help="Processes per base model, each with an engine's threads, that sample rollouts and what nobody deployed. 0: the engine does.",
        ),
    ] = 0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Sample a little faster, without bit-exactness: no seed promise, and no stream outlives its engine.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="Where engines and replicas compute: cpu, cuda or cuda:N.")] = DEFAULT_DEVICE,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, max=64, help="Managed jobs that run at a time, each in a process of its own. 0: none.")
    ] = DEFAULT_JOBS,
    endpoints: EndpointsOption = None,
    agents: AgentsOption = None,
    graders: GradersOption = "L1",
    track: Annotated[
        list[str] | None,
        typer.Option("--track", metavar="KIND[=WHERE]", help="Also tell tensorboard=DIR, mlflow=URI or wandb=PROJECT what jobs measure. Repeatable."),
    ] = None,
    sign_chains: Annotated[
        bool, typer.Option("--sign-chains", help="Sign what runs publish to their chains with a key that is made once (docs/weight-sync.md).")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="What all processes write to their logs.")] = DEFAULT_LOG_LEVEL,
) -> None:
    """Start the server and keep it running until Ctrl-C."""
    from bloomery.up.start import UpOptions
    from bloomery.up.start import up as run

    options = UpOptions(
        data_dir=data_dir,
        host=host,
        port=port,
        models=model or [],
        record=record,
        keep_rollouts=keep_rollouts,
        dtype=dtype,
        threads=threads,
        custom_losses=custom_losses,
        max_waiting=max_waiting,
        replicas=replicas,
        rollout_replicas=rollout_replicas,
        plain=plain,
        device=device,
        log_level=log_level,
        jobs=jobs,
        endpoints=endpoints,
        agents=agents,
        graders=graders,
        track=track or [],
        public_hosts=public_host or [],
        sign_chains=sign_chains,
    )
    run(options)

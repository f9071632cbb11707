"""`bloomery stop`, `status` and `logs`: the running server, seen from another terminal."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.types.errors import BloomeryError
from bloomery.types.ids import now_us
from bloomery.types.resources import EndpointShown, Status

_TIMEOUT_S: Final = 5.0
_PROCESSES: Final = "supervisor, api, jobs, engine or engine-NAME, replica or replica-NAME-N, rollouts or rollouts-NAME-N; all by default."


def stop(data_dir: DataDirOption = DATA_DIR) -> None:
    """Stop the server: requests finish, runs are checkpointed."""
    from bloomery.up import control

    stopped = control.stop(_data(data_dir))
    typer.echo(f"stopped process {stopped.pid}, which served {stopped.url}")


def status(data_dir: DataDirOption = DATA_DIR) -> None:
    """Show the server's address, its processes, and what they have proved of the weights that they hold.

    Exits with 0 when all of them are ready, with 1 when one is not, with 2 when no server is running.
    """
    from bloomery.up import control

    server = control.status(_data(data_dir))
    typer.echo(f"{server.holder.url} {'answers' if server.answers else 'does not answer'} (supervisor: process {server.holder.pid})")
    width = max((len(process.name) for process in server.processes), default=0)
    for process in server.processes:
        state = process.state if process.ready else f"{process.state} since {_utc(process.since_us)}"
        death = "" if process.ready else _death(process.died, process.next_start_us)
        typer.echo(f"{process.name:{width}}  pid {process.pid or '-'}  {state}  restarts {process.restarts}{death}")
    if not server.ready:
        raise typer.Exit(1)
    for line in _told(_data(data_dir), server.holder.url):
        typer.echo(line)


def logs(
    process: Annotated[str | None, typer.Argument(help=_PROCESSES)] = None,
    data_dir: DataDirOption = DATA_DIR,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of each log's last lines.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written from now on.")] = False,
) -> None:
    """Show what the processes said."""
    from bloomery.up import control

    files = control.log_files(_data(data_dir), process)
    ends = {}
    for file in files:
        shown = control.tail(file, lines)
        ends[file] = shown.end
        for line in shown.lines:
            _show(file, line, files)
    if follow:
        for file, line in control.follow(ends):
            _show(file, line, files)


def _death(died: str | None, next_start_us: int | None) -> str:
    """How the last life of a process ended, and when the next begins."""
    soon = "" if next_start_us is None else f"; starts again in {max(0, next_start_us - now_us()) / 1e6:.1f} s"
    return "" if died is None else f"  {died}{soon}"


def _told(data: DataDir, url: str) -> list[str]:
    """What can be had of it: the verdict stands without, for whoever may not read the key, or asks an api that is just going away."""
    with suppress(BloomeryError, OSError), Client(url, data.api_key.read_text().strip(), timeout_s=_TIMEOUT_S, patience_s=0) as client:
        return [*_proofs(client.status()), *map(_endpoint, client.endpoints()), *(f"agent {each.name} at {each.url}" for each in client.agents())]
    return []


def _endpoint(endpoint: EndpointShown) -> str:
    models = "any model" if endpoint.models is None else ", ".join(f"{endpoint.name}:{model}" for model in endpoint.models)
    return f"endpoint {endpoint.name} at {endpoint.base_url}: {models}"


def _proofs(status: Status) -> Iterator[str]:
    """One line for each process that holds a model and is connected."""
    engines = [(", ".join(engine.aliases), engine.detail) for engine in status.engines]
    for name, detail in [*engines, *((replica.name, replica.detail) for replica in status.replicas)]:
        if (base := detail.get("proved")) is None:
            continue
        versions, condemned = detail.get("proved_versions", {}), detail.get("condemned", {})
        parts = [
            f"base {base['root'][:12]}, probe {_answered([base['probe_max_abs']])}",
            f"{len(versions)} versions in memory" + (f", probes {_answered(_differences(versions))}" if _differences(versions) else ""),
            f"{detail.get('scrub_rounds', 0)} rounds of scrubbing",
            *(f"took {version[:12]} out of service: {why}" for version, why in condemned.items()),
        ]
        yield f"{name} proved: {'; '.join(parts)}"


def _differences(versions: dict[str, Any]) -> list[float]:
    return [version["probe"]["max_abs"] for version in versions.values() if version["probe"] is not None]


def _answered(differences: list[float]) -> str:
    """In words, from what sampler and trainer differed by."""
    return "with the trainer's bits" if not any(differences) else f"within {max(differences):.2g} nats of the trainer"


def _show(file: Path, line: str, files: list[Path]) -> None:
    typer.echo(f"{file.stem} | {line}" if len(files) > 1 else line)


def _utc(time_us: int) -> str:
    return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _data(data_dir: Path) -> DataDir:
    return DataDir(data_dir.expanduser().resolve())

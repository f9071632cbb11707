"""`bloomery stop`, `status` and `logs`: the running server, seen from another terminal."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.config.data_dir import DataDir


def stop(data_dir: DataDirOption = DATA_DIR) -> None:
    """Stop the server: requests finish, runs are checkpointed."""
    from bloomery.up import control

    stopped = control.stop(_data(data_dir))
    typer.echo(f"stopped process {stopped.pid}, which served {stopped.url}")


def status(data_dir: DataDirOption = DATA_DIR) -> None:
    """Show the server's address and its processes.

    Exits with 0 when all of them are ready, with 1 when one is not, with 2 when no server is running.
    """
    from bloomery.up import control

    server = control.status(_data(data_dir))
    typer.echo(f"{server.holder.url} {'answers' if server.answers else 'does not answer'} (supervisor: process {server.holder.pid})")
    width = max((len(process.name) for process in server.processes), default=0)
    for process in server.processes:
        state = process.state if process.ready else f"{process.state} since {_utc(process.since_us)}"
        typer.echo(f"{process.name:{width}}  pid {process.pid or '-'}  {state}  restarts {process.restarts}")
    if not server.ready:
        raise typer.Exit(1)


def logs(
    process: Annotated[str | None, typer.Argument(help="supervisor, api, engine or engine-NAME, replica or replica-NAME-N; all by default.")] = None,
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


def _show(file: Path, line: str, files: list[Path]) -> None:
    typer.echo(f"{file.stem} | {line}" if len(files) > 1 else line)


def _utc(time_us: int) -> str:
    return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _data(data_dir: Path) -> DataDir:
    return DataDir(data_dir.expanduser().resolve())

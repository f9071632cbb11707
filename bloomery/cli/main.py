"""`bloomery`: the commands, and the place where errors, and files that cannot be used, become one line and exit code 2."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bloomery import __version__
from bloomery.cli import (
    backup,
    dataset,
    demo,
    deployment,
    doctor,
    evaluation,
    export,
    fidelity,
    gc,
    grader,
    inspect_task,
    job,
    key,
    model,
    server,
    sync,
    up,
)
from bloomery.types.errors import BloomeryError


class OneLineErrors(TyperGroup):
    """Our own errors say what to do, so they need no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BloomeryError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.filename is None:
                raise
            typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    name="bloomery",
    cls=OneLineErrors,
    help="Train, serve, watch, collect, train again: on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for command in (
    up.up,
    demo.demo,
    server.stop,
    server.status,
    server.logs,
    doctor.doctor,
    fidelity.fidelity,
    export.export,
    backup.backup,
    backup.restore,
    gc.gc,
):
    app.command()(command)
evaluation.app.command()(inspect_task.inspect)
for nouns in (dataset.app, job.app, model.app, deployment.app, evaluation.app, grader.app, key.app, sync.app):
    app.add_typer(nouns)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    """Train, serve, watch, collect, train again: on your own machine."""


if __name__ == "__main__":
    app()

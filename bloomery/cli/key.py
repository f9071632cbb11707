"""`bloomery key`: who may do what on this server, and in which project."""

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from bloomery.cli import complete
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.cli.running import client_of
from bloomery.cli.show import JsonOption, print_json
from bloomery.types.keys import SCOPES, Key

HEADINGS: Final = ("PROJECT", "NAME", "SCOPES", "CREATED", "LAST USED", "EXPIRES", "RPM", "TPM")
_DAY_S: Final = 86_400

app = Noun(name="key", help="Give out, list and take back API keys of the running server.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(help="What the key is called in its project.")]
KnownNameArgument = Annotated[str, typer.Argument(help="What the key is called in its project.", autocompletion=complete.keys)]
ProjectOption = Annotated[str | None, typer.Option("--project", help="Another project than `default`; made by its first key.")]


@app.command()
def create(
    name: NameArgument,
    scopes: Annotated[list[str], typer.Option("--scopes", help=f"What it allows, with commas: some of {', '.join(sorted(SCOPES))}. Repeatable.")],
    project: ProjectOption = None,
    days: Annotated[int | None, typer.Option("--days", min=1, max=3650, help="Refuse it after so many days.")] = None,
    rpm: Annotated[int | None, typer.Option("--rpm", min=1, help="Requests to models that it may make per minute.")] = None,
    tpm: Annotated[int | None, typer.Option("--tpm", min=1, help="Tokens of prompts and answers that it may use per minute.")] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Make a key and print it: it is stored nowhere and cannot be shown again."""
    wanted = {scope for part in ",".join(scopes).split(",") if (scope := part.strip())}
    with client_of(data_dir) as client:
        ttl_s = None if days is None else days * _DAY_S
        made = client.keys.create(name, wanted, project=project, ttl_s=ttl_s, requests_per_minute=rpm, tokens_per_minute=tpm)
    if as_json:
        return print_json(made)
    # The key alone on the standard output: for `KEY=$(bloomery key create ...)`.
    typer.echo(f"key `{made.name}` of project `{made.project}` may {', '.join(made.scopes)}; keep it, it is shown this once:", err=True)
    typer.echo(made.key)


@app.command("list")
def list_all(
    project: Annotated[str | None, typer.Option("--project", help="Of this project alone.")] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show all keys but never their secrets."""
    with client_of(data_dir) as client:
        found = client.keys.list(project=project)
    if as_json:
        return print_json(found)
    rows = [HEADINGS, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command()
def revoke(name: KnownNameArgument, project: ProjectOption = None, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Have a key refused from now on."""
    with client_of(data_dir) as client:
        revoked = client.keys.revoke(name, project=project)
    if as_json:
        return print_json(revoked)
    typer.echo(f"key `{revoked.name}` of project `{revoked.project}` is refused from now on")


def _row(key: Key) -> tuple[str, ...]:
    times = [_time(at_us) for at_us in (key.created_us, key.last_used_us, key.expires_us)]
    limits = ["none" if limit is None else str(limit) for limit in (key.requests_per_minute, key.tokens_per_minute)]
    return (key.project, key.name, ",".join(key.scopes), *times, *limits)


def _time(at_us: int | None) -> str:
    return "never" if at_us is None else datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M")

"""`bloomery model`: the base models that the server holds, and what was published of them."""

from typing import Annotated

import typer

from bloomery.cli import complete
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.cli.running import came_of, client_of
from bloomery.cli.show import JsonOption, print_json, print_table, utc

app = Noun(name="model", help="Show base models, and the versions that were trained of them.", no_args_is_help=True)


@app.command("list")
def list_all(as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show the base models."""
    with client_of(data_dir) as client:
        found = client.models()
    if as_json:
        return print_json(found)
    rows = [(m.alias, str(m.context), str(m.vocab_size), "ready" if m.ready else "not ready", m.path) for m in found]
    print_table(("NAME", "CONTEXT", "VOCABULARY", "ENGINE", "DIRECTORY"), rows)


@app.command()
def versions(as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show the versions that were published under a name, newest first."""
    with client_of(data_dir) as client:
        found = client.snapshots()
        jobs = {} if as_json else {job.run: job.spec.name for job in client.jobs.list()}
    if as_json:
        return print_json(found)
    rows = [(each.version or "-", jobs.get(each.run_id, "-"), each.name or "-", each.run_id, str(each.step), utc(each.created_us)) for each in found]
    print_table(("VERSION", "JOB", "NAME", "RUN", "STEP", "CREATED"), rows)


@app.command()
def card(
    name: Annotated[
        str, typer.Argument(help="A job, a deployment, a version, or tinker://RUN/sampler_weights/NAME.", autocompletion=complete.deployments)
    ],
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Print a model card: what it was trained from, on what and how, what was measured of it, and what was not."""
    with client_of(data_dir) as client:
        version = came_of(client, name)
        if as_json:
            return print_json(client.versions.card(version))
        typer.echo(client.versions.card_text(version).rstrip())

"""`bloomery deployment`: what is served under which name."""

from decimal import Decimal
from typing import Annotated

import typer

from bloomery.cli import complete
from bloomery.cli.evidence import evidence_words, with_evidence
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.cli.running import came_of, client_of
from bloomery.cli.show import JsonOption, fidelity_words, print_json, print_table, utc
from bloomery.cli.specs import checked
from bloomery.types.deployments import Deployment
from bloomery.types.errors import InvalidInput
from bloomery.types.resources import Price

app = Noun(name="deployment", help="Serve versions under names, and go back to earlier ones.", no_args_is_help=True)
NewNameArgument = Annotated[str, typer.Argument(help="What callers give as `model`.")]
NameArgument = Annotated[str, typer.Argument(help="What callers give as `model`.", autocompletion=complete.deployments)]
SourceArgument = Annotated[str, typer.Argument(help="A job, a version, or the name of a base model.", autocompletion=complete.sources)]
EvidenceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--evidence",
        help="An evaluation of the version, or the job that it came of, whose figures are kept as why it went live. Repeatable.",
        autocompletion=complete.evidence,
    ),
]


@app.command()
def create(
    name: NewNameArgument,
    source: SourceArgument,
    evidence: EvidenceOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Serve what came of a job, or any version, under a new name."""
    with client_of(data_dir) as client:
        _tell(client.deployments.create(name, *with_evidence(client, evidence or [], came_of(client, source))), as_json)


@app.command()
def promote(
    name: NameArgument,
    source: SourceArgument,
    evidence: EvidenceOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Make another version the live one."""
    with client_of(data_dir) as client:
        _tell(client.deployments.promote(name, *with_evidence(client, evidence or [], came_of(client, source))), as_json)


@app.command()
def rollback(
    name: NameArgument,
    revision: Annotated[int, typer.Argument(min=1, help="Number of an earlier revision.")],
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Make an earlier revision live again."""
    with client_of(data_dir) as client:
        _tell(client.deployments.rollback(name, revision), as_json)


@app.command()
def price(
    name: NameArgument,
    prompt: Annotated[float | None, typer.Option("--prompt", min=0, help="US dollars for a million tokens of prompts.")] = None,
    completion: Annotated[float | None, typer.Option("--completion", min=0, help="The same of answers.")] = None,
    cached: Annotated[
        float | None, typer.Option("--cached", min=0, help="The same of prompt tokens that were computed before, where it differs.")
    ] = None,
    unset: Annotated[bool, typer.Option("--unset", help="Forget the price: what is served costs nothing that is known.")] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Say what the tokens of a deployment cost from now on; its requests then show their cost."""
    if unset and (prompt, completion, cached) != (None, None, None):
        raise InvalidInput("a price is given or forgotten: leave --unset out, or the prices", field="unset")
    if not unset and (prompt is None or completion is None):
        raise InvalidInput("a price is of prompts and of answers: give --prompt and --completion, or --unset", field="prompt")
    said = {"prompt_usd_per_mtok": prompt, "cached_prompt_usd_per_mtok": cached, "completion_usd_per_mtok": completion}
    wanted = None if unset else checked(Price, said)
    with client_of(data_dir) as client:
        found = client.deployments.set_price(name, wanted)
    if as_json:
        return print_json(found)
    typer.echo(f"`{found.name}`: {_price_words(found.price)}")


@app.command("list")
def list_all(as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show all deployments."""
    with client_of(data_dir) as client:
        found = client.deployments.list()
    if as_json:
        return print_json(found)
    rows = [
        (
            each.name,
            each.base_model,
            str(each.live.number),
            each.live.version,
            fidelity_words(each.fidelity),
            _price_words(each.price),
            utc(each.updated_us),
        )
        for each in found
    ]
    print_table(("NAME", "BASE MODEL", "REVISION", "VERSION", "FIDELITY", "PRICE", "SINCE"), rows)


@app.command()
def show(name: NameArgument, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show a deployment with its revisions."""
    with client_of(data_dir) as client:
        found = client.deployments.get(name)
    if as_json:
        return print_json(found)
    _tell(found, as_json=False)
    rows = [(str(each.number), each.state, each.version, utc(each.created_us), evidence_words(each.evidence)) for each in found.revisions]
    print_table(("REVISION", "STATE", "VERSION", "CREATED", "EVIDENCE"), rows)


def _tell(deployment: Deployment, as_json: bool) -> None:
    if as_json:
        return print_json(deployment)
    live = deployment.live
    typer.echo(f"`{deployment.name}` serves version {live.version} (revision {live.number}), fidelity {fidelity_words(deployment.fidelity)}")


def _price_words(price: Price | None) -> str:
    """In US dollars for a million tokens."""
    if price is None:
        return "no price"
    cached = "" if price.cached_prompt_usd_per_mtok is None else f" ({_plain(price.cached_prompt_usd_per_mtok)} cached)"
    return f"${_plain(price.prompt_usd_per_mtok)}{cached} + ${_plain(price.completion_usd_per_mtok)} per million"


def _plain(usd: float) -> str:
    """All digits of it, without an exponent."""
    return f"{Decimal(repr(usd)).normalize():f}"

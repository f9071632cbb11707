"""`bloomery fidelity`."""

import json
from typing import Annotated

import typer

from bloomery.cli.options import DTypeOption, ThreadsOption
from bloomery.types.resources import Fidelity


def fidelity(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Known names or directories; the shipped model without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model and line.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Measure the fastest sampler, which does not promise equal bits.")] = False,
    dtype: DTypeOption = "float32",
    threads: ThreadsOption = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=1000, help="How many to sample in each of 9 sequences.")] = 24,
) -> None:
    """Compare what the sampler says of its tokens with what the trainer says of them; exit code 1 when a card fails."""
    from bloomery.fidelity import prepare

    prepare(threads)
    from bloomery.fidelity.cards import examine

    if not as_json:
        typer.echo(f"{'model':<20}{'architecture':<15}{'mode':<7}{'tokens':>7}{'k3':>10}{'max |d|':>10}{'equal bits':>12}  verdict")
    reports = examine(models or [], dtype, threads, tokens, plain=plain)
    passed = [show(report.model, report.architecture, report.card, as_json=as_json) for report in reports]
    if not all(passed):
        raise typer.Exit(1)


def show(model: str, architecture: str, card: Fidelity, *, as_json: bool) -> bool:
    """Print one card; whether it passes."""
    if as_json:
        typer.echo(json.dumps({"model": model, "architecture": architecture, **card.model_dump()}))
    else:
        numbers = f"{card.tokens:>7}{card.k3:>10.2g}{card.max_abs:>10.2g}{card.bit_equal:>12.1%}"
        typer.echo(f"{model:<20}{architecture:<15}{card.mode:<7}{numbers}  {card.verdict}")
        if card.first_difference is not None:
            typer.echo(f"  the first difference: {card.first_difference}")
    return card.verdict == "pass"

"""`bloomery dataset`: files become versions of data sets, checked row by row before, and seen in tokens after."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from rich.table import Table

from bloomery.cli import complete
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption, UrlOption
from bloomery.cli.running import client_of
from bloomery.cli.show import JsonOption, console
from bloomery.client import Client
from bloomery.types.datasets import DatasetVersion, Estimate, RenderedRow, RenderedTokens, RowProblem, TokenStatistics, Validation
from bloomery.types.errors import InvalidInput, NotFound

app = Noun(name="dataset", help="Make, check and look at data sets of the running server.", no_args_is_help=True)
NewNameArgument = Annotated[str, typer.Argument(help="The data set.")]
NameArgument = Annotated[str, typer.Argument(help="The data set.", autocompletion=complete.datasets)]
RowsArgument = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Rows: .jsonl, .csv or .parquet.")]
FormatOption = Annotated[Literal["jsonl", "csv", "parquet"] | None, typer.Option("--format", help="Where the file's name does not say it.")]
KindOption = Annotated[
    Literal["chat", "preference", "prompt", "completion"] | None, typer.Option("--kind", help="Of the rows; by default that of the first.")
]
SplitOption = Annotated[Literal["train", "validation", "eval"], typer.Option("--split", help="Which part of the data set.")]
EvalOption = Annotated[float, typer.Option("--eval", min=0, max=0.99, help="Share of the training rows to hold out for evaluation.")]
ValidationOption = Annotated[float, typer.Option("--validation", min=0, max=0.99, help="Share of them to hold out for validation.")]
ByOption = Annotated[str | None, typer.Option("--by", help="Field whose values are kept on one side; by default the prompt.")]
ParentOption = Annotated[str | None, typer.Option("--parent", help="Also take the training rows of this version.")]
VersionOption = Annotated[str | None, typer.Option("--version", help="Id, manifest or number of a version; by default the newest.")]
ModelOption = Annotated[str, typer.Option("--model", help="Base model whose tokens are meant.", autocompletion=complete.models)]
ContextOption = Annotated[int | None, typer.Option("--context", min=1, help="Cut rows at so many tokens; by default at the model's context.")]


@app.command()
def create(name: NewNameArgument, as_json: JsonOption = False, url: UrlOption = None, data_dir: DataDirOption = DATA_DIR) -> None:
    """Make an empty data set."""
    with client_of(data_dir, url) as client:
        made = client.datasets.create(name)
    if as_json:
        return _print_json(made)
    typer.echo(f"data set `{made.name}` is there: `bloomery dataset upload {made.name} FILE` adds rows")


@app.command()
def delete(name: NameArgument, url: UrlOption = None, data_dir: DataDirOption = DATA_DIR) -> None:
    """Forget a data set with all its versions, unless a job that has not ended needs its rows."""
    with client_of(data_dir, url) as client:
        client.datasets.delete(name)
    typer.echo(f"data set `{name}` is deleted")


@app.command()
def upload(
    name: NameArgument,
    rows: RowsArgument,
    split: SplitOption = "train",
    format: FormatOption = None,
    kind: KindOption = None,
    skip: Annotated[bool, typer.Option("--skip", help="Import the good rows, and keep which are broken and why.")] = False,
    evaluation: EvalOption = 0.0,
    validation: ValidationOption = 0.0,
    by: ByOption = None,
    parent: ParentOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Import a file as the next version; the data set is made if it is not there."""
    choice = {"split": split, "kind": kind, "eval": evaluation, "validation": validation, "by": by, "on_error": "skip" if skip else "refuse"}
    with client_of(data_dir, url) as client:
        parent = None if parent is None else _version(client, name, parent).id
        new = name not in {known.name for known in client.datasets.list()}
        if new:
            client.datasets.create(name)
        try:
            made = client.datasets.upload(name, rows, format=format, parent=parent, **choice)
        except InvalidInput:
            # Whoever mends the file finds no empty data set that he did not ask for.
            if new and not client.datasets.get(name).versions:
                client.datasets.delete(name)
            raise
    if as_json:
        return _print_json(made)
    _show_versions([made])
    _show_counts(made.counts)
    _show_division(made)


@app.command()
def validate(
    rows: RowsArgument,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Check against what this data set holds out.", autocompletion=complete.datasets)
    ] = None,
    split: SplitOption = "train",
    format: FormatOption = None,
    kind: KindOption = None,
    evaluation: EvalOption = 0.0,
    validation: ValidationOption = 0.0,
    by: ByOption = None,
    parent: ParentOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Say what an upload would come to, row by row; nothing is stored. The exit code is 1 if rows are broken."""
    choice = {"split": split, "kind": kind, "eval": evaluation, "validation": validation, "by": by}
    with client_of(data_dir, url) as client:
        if parent is not None and dataset is not None:
            parent = _version(client, dataset, parent).id
        found = client.datasets.validate(rows, format=format, dataset=dataset, parent=parent, **choice)
    if as_json:
        _print_json(found)
    else:
        _show_validation(found)
        _show_division(found)
    if found.rejected:
        raise typer.Exit(1)


@app.command("list")
def list_all(as_json: JsonOption = False, url: UrlOption = None, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show all data sets and the newest version of each."""
    with client_of(data_dir, url) as client:
        known = client.datasets.list()
    if as_json:
        return _print_json(known)
    table = _table("NAME", "KIND", "VERSIONS", "TRAIN", "VALIDATION", "EVAL")
    for each in known:
        newest = each.versions[-1] if each.versions else None
        rows = _rows(newest) if newest else ("", "", "")
        table.add_row(each.name, newest.kind if newest else "", str(len(each.versions)), *rows)
    console().print(table)


@app.command()
def show(
    name: NameArgument,
    version: VersionOption = None,
    model: Annotated[str | None, typer.Option("--model", help="Also count tokens of this base model.", autocompletion=complete.models)] = None,
    split: SplitOption = "train",
    context: ContextOption = None,
    epochs: Annotated[float | None, typer.Option("--epochs", min=0.01, max=1000, help="Of the estimate; 1 by default.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option("--tokens-per-s", min=0.001, help="Speed of training, for an estimate of its time.")] = None,
    price: Annotated[float | None, typer.Option("--price", min=0.000001, help="Of a million tokens, for an estimate of its cost.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show the versions of a data set, or one of them: where its rows went, which were skipped, and how long they are."""
    if model is None and any((context, epochs, tokens_per_s, price)):
        raise InvalidInput("a context, epochs, a speed and a price are of the tokens of a base model: give --model, too", field="model")
    with client_of(data_dir, url) as client:
        if version is None and model is None:
            known = client.datasets.get(name)
            return _print_json(known) if as_json else _show_versions(known.versions)
        shown = _version(client, name, version)
        rejected = client.datasets.rejected(name, shown.id, limit=100)
        lengths, expected = None, None
        if model is not None:
            lengths = client.datasets.statistics(name, shown.id, model=model, split=split, context=context)
            more = {"context": context, "tokens_per_s": tokens_per_s, "price_per_million": price}
            expected = client.datasets.estimate(name, shown.id, model=model, epochs=epochs or 1.0, split=split, **more)
    if as_json:
        return _print_json({"version": shown, "rejected": rejected, "statistics": lengths, "estimate": expected})
    _show_versions([shown])
    _show_counts(shown.counts)
    _show_problems(rejected)
    if lengths is not None and expected is not None:
        _show_lengths(lengths, expected)


@app.command()
def preview(
    name: NameArgument,
    model: ModelOption,
    version: VersionOption = None,
    split: SplitOption = "train",
    limit: Annotated[int, typer.Option("--limit", min=1, max=50, help="Rows.")] = 3,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Of the first row.")] = 0,
    context: ContextOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show rows as a model is trained on them: every stretch of tokens with its weight in the loss."""
    with client_of(data_dir, url) as client:
        shown = _version(client, name, version)
        rows = client.datasets.preview(name, shown.id, model=model, split=split, limit=limit, offset=offset, context=context)
    if as_json:
        return _print_json(rows)
    for row in rows:
        _show_row(row)


@app.command()
def split(
    name: NameArgument,
    evaluation: EvalOption = 0.0,
    validation: ValidationOption = 0.0,
    by: ByOption = None,
    version: VersionOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Hold out shares of the training rows in a new version, group by group; rows that are nearly the same stay together."""
    with client_of(data_dir, url) as client:
        made = client.datasets.split(name, _version(client, name, version).id, eval=evaluation, validation=validation, by=by)
    if as_json:
        return _print_json(made)
    _show_versions([made])
    _show_counts(made.counts)
    _show_division(made)


def _version(client: Client, name: str, wanted: str | None) -> DatasetVersion:
    versions = client.datasets.get(name).versions
    if not versions:
        raise NotFound(f"data set `{name}` has no version yet: `bloomery dataset upload {name} FILE` makes one", field="version")
    if wanted is None:
        return versions[-1]
    found = next((each for each in versions if wanted in (each.id, each.manifest, str(each.number))), None)
    if found is None:
        raise NotFound(f"data set `{name}` has no version `{wanted}`: `bloomery dataset show {name}` lists them", field="version")
    return found


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _rows(version: DatasetVersion) -> tuple[str, ...]:
    return tuple(str(version.counts.get(f"{split}.rows", 0)) for split in ("train", "validation", "eval"))


def _show_versions(versions: Iterable[DatasetVersion]) -> None:
    table = _table("NUMBER", "ID", "KIND", "MADE BY", "TRAIN", "VALIDATION", "EVAL")
    for each in versions:
        table.add_row(str(each.number), each.id, each.kind, str(each.recipe.get("kind", "")), *_rows(each))
    console().print(table)


def _show_counts(counts: dict[str, int]) -> None:
    table = _table("STAGE", "ROWS")
    for stage, rows in counts.items():
        table.add_row(stage, str(rows))
    console().print("", table)


def _show_division(made: DatasetVersion | Validation) -> None:
    """Shares are of groups, of which there may be too few for one to fall on the other side."""
    if made.unfilled:
        groups = f"the training rows are of {made.counts['split.unlike_groups']} groups that are unlike each other, and these are held out whole"
        advice = "give a larger share, a field with more values (`--by`), or a file of such rows (`upload --split`)"
        console().print("", f"no row is held out for {' or '.join(made.unfilled)}: {groups}; {advice}", sep="\n")


def _show_validation(found: Validation) -> None:
    screen = console()
    screen.print(f"{found.format}, {found.kind or 'unknown'} rows: {found.rows} read, {found.accepted} accepted, {found.rejected} rejected")
    if found.reasons:
        table = _table("REASON", "ROWS")
        for reason, rows in found.reasons.items():
            table.add_row(reason, str(rows))
        screen.print("", table)
    _show_problems(found.problems)
    if found.ignored:
        screen.print("", "fields that are left out: " + ", ".join(f"{field} ({rows})" for field, rows in found.ignored.items()), sep="\n")
    if found.labels:
        _show_labels([(label.label, label.rows) for label in found.labels])
    if found.counts:
        _show_counts(found.counts)


def _show_problems(problems: Sequence[RowProblem]) -> None:
    if not problems:
        return
    table = _table("SPLIT", "ROW", "FIELD", "PROBLEM", "WHAT TO DO")
    for each in problems:
        table.add_row(each.split, str(each.row), each.field or "", each.message, each.suggestion or "")
    console().print("", table)


def _show_labels(labels: Sequence[tuple[str, int]]) -> None:
    table = _table("LABEL", "ROWS")
    for label, rows in labels:
        table.add_row(label, str(rows))
    console().print("", table)


def _show_lengths(lengths: TokenStatistics, expected: Estimate) -> None:
    table = _table("TOKENS OF", lengths.model)
    measured = "" if lengths.measured == lengths.rows else f", of which {lengths.measured} were measured"
    table.add_row("rows", f"{lengths.rows}{measured}")
    table.add_row("an epoch", f"{lengths.tokens:,}, {lengths.trained_tokens:,} of them trained")
    table.add_row("a row", ", ".join([f"mean {lengths.mean:.0f}", *(f"{name} {value}" for name, value in lengths.percentiles.items())]))
    table.add_row("the longest", f"{lengths.longest}")
    table.add_row(f"over {lengths.context}", f"{lengths.truncated} rows are cut, {lengths.without_loss} of all teach nothing")
    if lengths.refused:
        table.add_row("refused", f"{lengths.refused} rows by the model's template: {lengths.first_refused}")
    table.add_row(f"{expected.epochs:g} epochs", f"{expected.tokens:,}")
    if expected.seconds is not None:
        table.add_row("time", f"{expected.seconds:,.0f} s")
    if expected.cost is not None:
        table.add_row("cost", f"{expected.cost:,.2f}")
    console().print("", table)
    if lengths.labels:
        _show_labels([(label.label, label.rows) for label in lengths.labels])


def _show_row(row: RenderedRow) -> None:
    sides = [(f"example {place}", example) for place, example in enumerate(row.examples)]
    sides += [(name, side) for name, side in (("preferred", row.preferred), ("rejected", row.rejected)) if side is not None]
    if row.problem is not None:
        console().print(f"row {row.row}: {row.problem}", "")
    for name, side in sides:
        cut = ", cut at the context" if row.truncated else ""
        console().print(f"row {row.row}, {name}: {len(side.tokens)} tokens{cut}", _stretches(side), "")


def _stretches(side: RenderedTokens) -> Table:
    table = _table("WEIGHT", "TOKENS", "TEXT")
    for weight, pairs in groupby(zip(side.weights, side.texts, strict=True), key=lambda pair: pair[0]):
        texts = [text for _, text in pairs]
        table.add_row(f"{weight:g}", str(len(texts)), "".join(texts).replace("\n", "\\n\n").removesuffix("\n"), style="green" if weight else None)
    return table

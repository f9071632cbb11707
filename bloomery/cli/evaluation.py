"""`bloomery eval`: what models answer to a data set, and what graders say of it."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bloomery.cli import complete
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption, UrlOption
from bloomery.cli.running import client_of
from bloomery.cli.show import JsonOption, console, number, print_json, print_table, utc
from bloomery.cli.specs import checked, put, put_options, read
from bloomery.client import Client
from bloomery.types.evaluations import (
    Difference,
    Evaluation,
    EvaluationItem,
    EvaluationResult,
    EvaluationSpec,
    EvaluationState,
    GraderSummary,
    ItemStatus,
    Measured,
    ModelSummary,
)
from bloomery.types.resources import Split

app = Noun(name="eval", help="Evaluate models: what they answer to a data set, and what graders say of it.", no_args_is_help=True)
EvaluationArgument = Annotated[str, typer.Argument(help="Name or id of an evaluation.", autocompletion=complete.evaluations)]
WatchOption = Annotated[bool, typer.Option("--watch", help="Follow it until it has ended.")]
_SHOWN_CHARS: Final = 60
_FAILS: Final = ": of graders without a `pass_threshold` only those of the types string_check and label_model fail any"
_FLAGS: Final = {"name": "the evaluation a name, as the first word", "data": "--dataset NAME", "models": "--model NAME", "graders": "--grader NAME"}
"""What says the fields that have no default."""


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="Of the evaluation.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", exists=True, dir_okay=False, help="A YAML or JSON file of a spec.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="What is asked: NAME, or NAME@VERSION.", autocompletion=complete.datasets)] = None,
    split: Annotated[Split | None, typer.Option("--split", help="Whose rows are asked; eval by default.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Only so many rows, the first of the split.")] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="A base model, a version, a deployment or ENDPOINT:MODEL. Repeatable.", autocompletion=complete.asked),
    ] = None,
    graders: Annotated[list[str] | None, typer.Option("--grader", help="NAME, or NAME@VERSION. Repeatable.", autocompletion=complete.graders)] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Answers of each model to each row.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Of an answer.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the samples.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any other field, with dots: params.top_p=0.9. Repeatable.")
    ] = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Start an evaluation. A file says what flags can say; flags come after it."""
    given: dict[str, Any] = read(file) if file else {}
    flags: dict[str, Any] = {"name": name, "data.split": split, "data.rows": rows, "models": models or None, "graders": graders or None}
    flags |= {"params.samples": samples, "params.temperature": temperature, "params.max_tokens": max_tokens, "params.seed": seed}
    if dataset is not None:
        flags |= dict(zip(("data.dataset", "data.version"), dataset.split("@", 1), strict=False))
    for field, value in flags.items():
        if value is not None:
            put(given, field, value)
    put_options(given, options)
    with client_of(data_dir, url) as client:
        made = client.evaluations.create(checked(EvaluationSpec, given, _FLAGS))
        if watch:
            made = _follow(client, made.id, quiet=as_json)
    _show(made, as_json)


@app.command("list")
def list_all(
    state: Annotated[EvaluationState | None, typer.Option("--state", help="Only of this state.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show all evaluations, newest first."""
    with client_of(data_dir, url) as client:
        found = client.evaluations.list(state=state)
    if as_json:
        return print_json(found)
    rows = [
        (
            each.spec.name,
            each.spec.data.dataset,
            ", ".join(model.model for model in each.spec.models),
            ", ".join(grader.label for grader in each.spec.graders),
            each.state,
            f"{each.progress.answered}/{each.progress.answers}",
            utc(each.created_us),
        )
        for each in found
    ]
    print_table(("NAME", "DATA SET", "MODELS", "GRADERS", "STATE", "ANSWERS", "CREATED"), rows)


@app.command()
def show(
    evaluation: EvaluationArgument, watch: WatchOption = False, as_json: JsonOption = False, url: UrlOption = None, data_dir: DataDirOption = DATA_DIR
) -> None:
    """Show one: how the models did, and how they differ row by row."""
    with client_of(data_dir, url) as client:
        found = _follow(client, evaluation, quiet=as_json) if watch else client.evaluations.get(evaluation)
    _show(found, as_json)


@app.command()
def items(
    evaluation: EvaluationArgument,
    status: Annotated[ItemStatus | None, typer.Option("--status", help="Only of this one.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only answers of this model.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show answers one by one, with their scores or why there is none."""
    with client_of(data_dir, url) as client:
        found = islice(client.evaluations.items(evaluation, status=status, model=model), limit)
        if as_json:
            for item in found:
                typer.echo(item.model_dump_json())
            return
        if not (shown := list(found)):
            # Who asks what failed, of a grader that fails nothing, would take an empty table for good news.
            return typer.echo("there is no such answer" + (_FAILS if status == "failed" else ""))
        print_table(("ROW", "MODEL", "ANSWER", "SCORES"), [(_row(item), item.model, _answer(item), _scores(item)) for item in shown])


@app.command()
def cancel(evaluation: EvaluationArgument, as_json: JsonOption = False, url: UrlOption = None, data_dir: DataDirOption = DATA_DIR) -> None:
    """End an evaluation; what was answered and scored stays."""
    with client_of(data_dir, url) as client:
        ended = client.evaluations.cancel(evaluation)
    if as_json:
        return print_json(ended)
    typer.echo(f"{evaluation} {ended.state.words}")


@app.command()
def delete(evaluation: EvaluationArgument, url: UrlOption = None, data_dir: DataDirOption = DATA_DIR) -> None:
    """Forget an evaluation that has ended, with all its items."""
    with client_of(data_dir, url) as client:
        client.evaluations.delete(evaluation)
    typer.echo(f"{evaluation} is deleted")


@app.command()
def leaderboard(
    dataset: Annotated[str, typer.Argument(help="NAME, or NAME@VERSION.", autocompletion=complete.datasets)],
    grader: Annotated[str, typer.Argument(help="NAME, or NAME@VERSION.", autocompletion=complete.graders)],
    split: Annotated[Split, typer.Option("--split", help="Whose rows were asked.")] = "eval",
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show models by what a grader says of their answers to a data set, best first."""
    name, _, version = dataset.partition("@")
    of, _, number_ = grader.partition("@")
    grader_version = int(number_) if number_.isascii() and number_.isdigit() else None
    if number_ and grader_version is None:
        raise typer.BadParameter(f"{number_} is no version of a grader", param_hint="GRADER")
    with client_of(data_dir, url) as client:
        board = client.evaluations.leaderboard(name, of, version=version or None, grader_version=grader_version, split=split)
    if as_json:
        return print_json(board)
    rows = [
        (str(line.place), line.summary.model, _version(line.summary), *_figures(line.summary, line.summary.graders[0]), line.evaluation)
        for line in board.data
    ]
    print_table(("", "MODEL", "VERSION", *_FIGURES, "EVALUATION"), rows)


_FIGURES: Final = ("MEAN [95 %]", "PASSED [95 %]", "INVALID", "P50 s", "P95 s", "USD / 1,000")


def _follow(client: Client, evaluation: str, *, quiet: bool) -> Evaluation:
    if quiet:
        return client.evaluations.wait(evaluation)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} scores"), TimeRemainingColumn())
    with Progress(*columns, console=console()) as progress:
        bar = progress.add_task("waits", total=None)

        def changed(now: Evaluation) -> None:
            progress.update(bar, description=now.state, completed=now.progress.scored, total=now.progress.scores)

        try:
            return client.evaluations.wait(evaluation, on_change=changed)
        except KeyboardInterrupt:
            name = client.evaluations.get(evaluation).spec.name
            progress.console.print(f"`{name}` goes on: `bloomery eval show {name}` says how it stands, `bloomery eval cancel {name}` ends it")
            raise


def _show(found: Evaluation, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        data, progress = found.spec.data, found.progress
        typer.echo(f"{found.spec.name} {found.state.words}" + (f": {found.reason}" if found.reason else ""))
        done = f"{progress.answered} of {progress.answers} answers, {progress.scored} of {progress.scores} scores"
        typer.echo(f"{found.rows} rows of {data.dataset}, {data.split}: {done}")
        if found.result is not None:
            _show_result(found.result)
    if found.state is EvaluationState.FAILED:
        raise typer.Exit(1)


def _show_result(result: EvaluationResult) -> None:
    rows = [(model.model, _version(model), grader.grader, *_figures(model, grader)) for model in result.models for grader in model.graders]
    print_table(("MODEL", "VERSION", "GRADER", *_FIGURES), rows)
    if result.differences:
        show_differences(result.differences)


def show_differences(differences: Sequence[Difference]) -> None:
    """Pairs of models, on the same rows."""
    pairs = [(f"{each.model} - {each.other}", each.grader, _difference(each), f"{each.wins} / {each.ties} / {each.losses}") for each in differences]
    print_table(("PAIR", "GRADER", "DIFFERENCE [95 %]", "WON / TIED / LOST"), pairs)


def _figures(model: ModelSummary, grader: GraderSummary) -> tuple[str, ...]:
    times = number(model.latency_p50_s), number(model.latency_p95_s)
    cost = "unknown" if model.usd_per_1000 is None else number(model.usd_per_1000)
    return measured_words(grader.mean), measured_words(grader.passed), f"{grader.invalid_rate:.1%}", *times, cost


def _version(model: ModelSummary) -> str:
    return "-" if model.version is None else model.version[:12]


def measured_words(value: Measured | None) -> str:
    """With its interval, where there is one."""
    if value is None:
        return "-"
    return number(value.value) if value.interval is None else f"{value.value:.4g} [{value.interval[0]:.4g}, {value.interval[1]:.4g}]"


def _difference(pair: Difference) -> str:
    if pair.difference is None or pair.difference.interval is None:
        return measured_words(pair.difference)
    low, high = pair.difference.interval
    verdict = "" if low <= 0 <= high else "  better" if low > 0 else "  worse"
    return f"{pair.difference.value:+.4g} [{low:+.4g}, {high:+.4g}]{verdict}"


def _row(item: EvaluationItem) -> str:
    return str(item.row) if not item.sample else f"{item.row}.{item.sample}"


def _answer(item: EvaluationItem) -> str:
    if item.answer.error is not None:
        return f"({item.answer.error.kind}: {item.answer.error.detail})"
    said = item.answer.text or json.dumps(item.answer.tools) if item.answer.tools else item.answer.text
    return repr(said if len(said) <= _SHOWN_CHARS else f"{said[: _SHOWN_CHARS - 3]}...")


def _scores(item: EvaluationItem) -> str:
    told = []
    for score in item.scores:
        error = score.result.error
        told.append(f"{score.grader} {number(score.result.score) if error is None else f'({error.kind}: {error.detail})'}")
    return ", ".join(told) or "-"

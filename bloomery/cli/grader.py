"""`bloomery grader`: what scores outputs."""

import ast
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from pydantic import ValidationError

from bloomery.cli import complete
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.cli.running import client_of
from bloomery.cli.show import JsonOption, number, print_json, print_table, utc
from bloomery.config.written import read_yaml
from bloomery.recipes.online import score_served
from bloomery.types.errors import InvalidInput, misfit
from bloomery.types.graders import (
    ATTACK_CALLS,
    ATTACK_TOKENS,
    MAX_ROWS,
    AttackGrader,
    AttackRow,
    Calibration,
    ComparedPair,
    GraderAttack,
    LabelledRow,
    OutputRow,
)
from bloomery.types.grading import GradeResult
from bloomery.types.statistics import score_of

Row = TypeVar("Row", OutputRow, LabelledRow, ComparedPair)
app = Noun(name="grader", help="Keep graders, and try them on outputs.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(help="The grader.", autocompletion=complete.graders)]
VersionOption = Annotated[int | None, typer.Option("--version", min=1, help="Another version than the newest.")]


@app.command()
def create(
    name: NameArgument,
    source: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Grader JSON or YAML as OpenAI publishes it, or a Python file.")],
    entry: Annotated[
        str | None, typer.Option("--entry", help="Of a Python file: the function; score by default, or the only one that there is.")
    ] = None,
    style: Annotated[
        str | None, typer.Option("--style", help="Of a Python file: auto, plain, openai, trl, eval_protocol or verifiers; auto by default.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Keep a version of a grader; the same again is the version that is there."""
    if source.suffix != ".py" and (entry, style) != (None, None):
        raise InvalidInput(f"--entry and --style are of a Python file, and {source} says itself what is called: leave them out", field="source")
    spec = _function(source, entry, style) if source.suffix == ".py" else _declared(source)
    with client_of(data_dir) as client:
        made = client.graders.create(name, spec)
    if as_json:
        return print_json(made)
    typer.echo(f"grader `{made.name}` is version {made.version}, hash {made.hash[:12]}")


@app.command("list")
def list_all(as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show the newest version of every grader."""
    with client_of(data_dir) as client:
        found = client.graders.list()
    if as_json:
        return print_json(found)
    rows = [(each.name, str(each.version), str(each.spec.get("type")), each.hash[:12], utc(each.created_us)) for each in found]
    print_table(("NAME", "VERSION", "TYPE", "HASH", "CREATED"), rows)


@app.command()
def show(name: NameArgument, version: VersionOption = None, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show a version of a grader."""
    with client_of(data_dir) as client:
        found = client.graders.get(name, version)
    if as_json:
        return print_json(found)
    typer.echo(yaml.safe_dump(found.model_dump(mode="json"), sort_keys=False).rstrip())


@app.command("test")
def try_out(
    name: NameArgument,
    outputs: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL: `output`, and `item` with the row's fields.")],
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Grade outputs of a file, and show each score or why there is none."""
    rows = _rows(outputs, _lines(outputs), OutputRow)
    with client_of(data_dir) as client:
        run = client.graders.run(name, rows, version=version)
    if as_json:
        return print_json(run)
    shown = [(str(place), number(result.score), _why(result)) for place, result in enumerate(run.results, start=1)]
    print_table(("ROW", "SCORE", "REASON"), shown)
    if any(result.error is not None for result in run.results):
        raise typer.Exit(1)


@app.command()
def score(
    name: NameArgument,
    deployment: Annotated[str | None, typer.Option("--deployment", help="Only what it answered.", autocompletion=complete.deployments)] = None,
    hours: Annotated[float | None, typer.Option("--hours", min=0.01, help="Only answers of the last so many hours.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many answers, the newest.")] = 100,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Score answers that were served, each once, and keep the scores as feedback on them."""
    since_us = None if hours is None else int((time.time() - hours * 3600) * 1e6)
    with client_of(data_dir) as client:
        found = score_served(client, name, version=version, deployment=deployment, since_us=since_us, limit=limit)
    if as_json:
        return typer.echo(json.dumps([{**each._asdict(), "result": each.result.model_dump(mode="json")} for each in found]))
    if not found:
        of = "" if deployment is None else f" by `{deployment}`"
        return typer.echo(f"nothing was served{of} that has a text and no score of `{name}` yet")
    print_table(("ANSWER", "MODEL", "SCORE", "REASON"), [(each.span, each.model, number(each.result.score), _why(each.result)) for each in found])
    if scores := [each.result.score for each in found if each.result.score is not None]:
        mean = score_of(scores)
        between = "" if mean.interval is None else f" [{number(mean.interval.low)}, {number(mean.interval.high)}]"
        typer.echo(f"{len(scores)} of {len(found)} answers have a score: {number(mean.value)}{between} on average")


@app.command()
def attack(
    name: NameArgument,
    rows: Annotated[
        Path | None, typer.Option("--rows", exists=True, dir_okay=False, help="JSONL as for RFT; `good` and `bad` are honest answers, if any.")
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Or prompts of a data set: NAME, or NAME@VERSION.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Attack on a data set anew, where it is known what comes of it.")] = False,
    max_calls: Annotated[int, typer.Option("--max-calls", min=1, help="Questions to judges.")] = ATTACK_CALLS,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of judges.")] = ATTACK_TOKENS,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Look for reward without competence; exits with 1 unless there is none."""
    asked = None if rows is None else _attack_rows(rows)
    if (asked is None) == (dataset is None):
        raise InvalidInput("an attack is on `--rows FILE` or on `--dataset NAME`: give one of them", field="rows")
    if again and dataset is None:
        raise InvalidInput("`--again` is of a data set: of rows in a file nothing is known that could be looked for anew", field="again")
    of_data, _, of_version = (dataset or "").partition("@")
    on: dict[str, Any] = {"dataset": of_data, "dataset_version": of_version or None, "again": again} if dataset else {}
    with client_of(data_dir) as client:
        report = client.graders.attack(name, asked, version=version, max_calls=max_calls, max_tokens=max_tokens, **on)
    if as_json:
        print_json(report)
    else:
        _transcript(report)
    if report.verdict != "sound":
        raise typer.Exit(1)


@app.command()
def attacks(name: NameArgument, version: VersionOption = None, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show what came of attacks of a version on data sets, latest first."""
    with client_of(data_dir) as client:
        found = client.graders.attacks(name, version)
    if as_json:
        return print_json(found)
    for report in found:
        typer.echo(f"attack {report.id} of {utc(report.created_us or 0)} on split {report.split} of {report.dataset_version}")
        _transcript(report)


@app.command()
def waive(
    name: NameArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why jobs are to take it whatever attacks find; it is kept and shown.")],
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Have jobs take a version of a grader whatever attacks find."""
    with client_of(data_dir) as client:
        found = client.graders.waive(name, reason, version=version)
    if as_json:
        return print_json(found)
    assert found.waiver is not None
    typer.echo(f"grader `{found.name}` version {found.version} is waived by {found.waiver.by}: {found.waiver.reason}")


@app.command()
def calibrate(
    name: NameArgument,
    labelled: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="JSONL: `output`, `item`, and `label`: true, false, or a judge's label; `swapped`, if any. Or pairs: `first`, `second` (each with "
            "`output` and `item`) and `choice`: first, second or tie.",
        ),
    ],
    threshold: Annotated[float | None, typer.Option("--threshold", help="A score of at least this passes.")] = None,
    tie_within: Annotated[float, typer.Option("--tie-within", min=0, help="Of pairs: scores no further apart prefer neither.")] = 0.0,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Measure a grader by what people say of the same outputs, or of which of two is better; exits with 1 where it is not good enough to gate."""
    # Once: what comes through a pipe is there once.
    lines = _lines(labelled)
    pairs = _has_pairs(lines)
    if pairs and threshold is not None:
        raise InvalidInput("what passes is of single outputs, and the file has pairs: leave --threshold out", field="threshold")
    if tie_within and not pairs:
        raise InvalidInput("ties are of pairs, and the file has single outputs: leave --tie-within out", field="tie_within")
    rows = _rows(labelled, lines, ComparedPair) if pairs else _rows(labelled, lines, LabelledRow)
    if not 2 <= len(rows) <= MAX_ROWS:
        raise InvalidInput(f"{labelled} has {len(rows):,} rows: a card is made of 2 to {MAX_ROWS:,}", field="rows")
    with client_of(data_dir) as client:
        card = client.graders.calibrate(name, rows, version=version, threshold=threshold, tie_within=tie_within)
    if as_json:
        print_json(card)
    else:
        _card(card)
    if not card.calibrated:
        raise typer.Exit(1)


@app.command()
def calibrations(name: NameArgument, version: VersionOption = None, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show the calibration cards of a version, latest first; the latest of rows counts, or of pairs where there is none of rows."""
    with client_of(data_dir) as client:
        found = client.graders.calibrations(name, version)
    if as_json:
        return print_json(found)
    for card in found:
        _card(card)


def _why(result: GradeResult) -> str:
    return result.reason or (f"{result.error.kind}: {result.error.detail}" if result.error else "")


def _card(card: Calibration) -> None:
    says = "may gate" if card.calibrated else f"cannot gate: {card.why}"
    typer.echo(f"card {card.id} of {utc(card.created_us)}: grader `{card.name}` version {card.version} {says}")
    kappa = f"{number(card.kappa)} [{number(card.kappa_low)}, {number(card.kappa_high)}]"
    what = "rows" if card.pairs is None else "pairs"
    rows = [("kappa [95 %]", kappa, f"{card.rows - card.invalid} {what}, {card.invalid} others without a verdict")]
    rates = {"agreement": card.agreement, "majority baseline": card.majority_baseline}
    if (pairs := card.pairs) is None:
        rates |= {"true positive rate": card.true_positive_rate, "true negative rate": card.true_negative_rate}
    else:
        rates |= {"agreement without ties": pairs.decided, "people prefer the first": pairs.people_first, "it prefers the first": pairs.grader_first}
        rows.append(("ties", f"{pairs.people_ties} of people, {pairs.grader_ties} of it", f"{pairs.both_ties} of both"))
    rates["position flips"] = card.position_flips
    shares = (
        (each, f"{number(rate.value)} [{number(rate.low)}, {number(rate.high)}]", f"{rate.hits} of {rate.total}") for each, rate in rates.items()
    )
    print_table(("MEASURE", "VALUE", "OF"), [*rows, *shares])


def _transcript(report: GraderAttack) -> None:
    typer.echo(f"grader `{report.name}` version {report.version} is {report.verdict}: {report.why}")
    asked = f", {report.calls} questions to judges, {report.tokens} tokens" if report.calls else ""
    typer.echo(f"{report.attacks} attacks, {report.grades} grades, {report.failed} of them without a score{asked}")
    if report.waiver is not None:
        typer.echo(f"waived by {report.waiver.by} on {utc(report.waiver.created_us)}: {report.waiver.reason}")
    elif report.verdict == "hackable" or not report.varied:
        typer.echo(f"`bloomery grader waive {report.name} --version {report.version} --reason WHY` has jobs take it all the same")
    for exploit in report.exploits:
        typer.echo(f"\n{exploit.name}: {exploit.mean_score:.3g} on average in {exploit.rows} rows, {exploit.share:.0%} of the honest scale")
        for example in exploit.examples:
            typer.echo(f"  asked  {example.prompt[:200]!r}\n  said   {example.output[:200]!r}\n  paid   {example.score:g}")


def _has_pairs(lines: Sequence[tuple[int, bytes]]) -> bool:
    """Whether the first row is one; what is no JSON is named by whoever reads it."""
    try:
        found = next((json.loads(line) for _, line in lines), None)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "choice" in found


def _rows(file: Path, lines: Sequence[tuple[int, bytes]], kind: type[Row]) -> list[Row]:
    """The `lines` of a file."""
    rows = []
    for place, line in lines:
        try:
            rows.append(kind.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidInput(f"{file}, line {place}: {f'`{where}`: ' if where else ''}{first['msg']}", field="rows") from None
    if not rows:
        raise InvalidInput(f"{file} has no rows: each is a line of JSON with its `output`", field="rows")
    return rows


def _lines(file: Path) -> list[tuple[int, bytes]]:
    """With their places. Texts in JSON may hold other separators than this one."""
    return [(place, line) for place, line in enumerate(file.read_bytes().split(b"\n"), start=1) if line.strip()]


def _attack_rows(file: Path) -> list[AttackRow]:
    try:
        rows = [_attack_row(json.loads(line)) for _, line in _lines(file)]
        return AttackGrader.model_validate({"rows": rows}).rows or []
    except ValidationError as error:
        raise InvalidInput(f"{file}: {misfit(error.errors()[0], {'rows': rows}).message}", field="rows") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file}: {error}", field="rows") from None


def _attack_row(given: Any) -> dict[str, Any]:
    """A row of a data set of prompts: what is neither the conversation nor an answer is the row's own."""
    if not isinstance(given, dict) or not isinstance(given.get("item", {}), dict):
        raise ValueError("each row is an object, and so is its `item`")
    known = {name: given.pop(name) for name in ("messages", "good", "bad") if name in given}
    if "messages" not in known and isinstance(given.get("prompt"), str):
        known["messages"] = [{"role": "user", "content": given["prompt"]}]
    return {"item": given.pop("item", {}) | given, **known}


def _declared(file: Path) -> dict[str, Any]:
    try:
        spec = json.loads(file.read_bytes()) if file.suffix == ".json" else read_yaml(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} can be read neither as JSON nor as YAML: {error}", field="file") from None
    if not isinstance(spec, dict):
        raise InvalidInput(f"{file} holds no grader: it is an object with a `type`", field="file")
    return spec


def _function(file: Path, entry: str | None, style: str | None) -> dict[str, Any]:
    try:
        source = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8: {error.reason} at byte {error.start + 1}", field="file") from None
    spec = {"type": "function", "source": source, "entry": entry or _only_function(file, source)}
    return spec if style is None else spec | {"style": style}


def _only_function(file: Path, source: str) -> str:
    """`score`, unless the file has functions and none of that name: then the only one, for reward functions have names of their own."""
    try:
        program = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(f"{file} is no Python: {error}", field="source") from None
    functions = [each.name for each in program.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [name for name in functions if not name.startswith("_")]
    if not public and not any(map(_binds_score, ast.walk(program))):
        raise InvalidInput(
            f"{file} has no function: write `def score(output, ...): return 1.0`, whose parameters name what it is told", field="source"
        )
    if "score" in functions or not public:
        return "score"
    if len(public) > 1:
        raise InvalidInput(f"{file} has the functions {', '.join(map('`{}`'.format, public))}: --entry says which of them scores", field="entry")
    return public[0]


def _binds_score(node: ast.AST) -> bool:
    """Whether it gives something the name `score`: a definition, an assignment, or an import."""
    match node:
        case ast.FunctionDef(name="score") | ast.AsyncFunctionDef(name="score") | ast.ClassDef(name="score"):
            return True
        case ast.Name(id="score", ctx=ast.Store()):
            return True
        case ast.alias():
            return (node.asname or node.name) in ("score", "*")
    return False

"""`bloomery job`: data and a method in, a model out; followed while it happens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import typer
import yaml
from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bloomery.cli import complete
from bloomery.cli.chain import STAGES, stages_of
from bloomery.cli.eject import script
from bloomery.cli.flags import Noun
from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.cli.running import client_of, server_of
from bloomery.cli.show import JsonOption, console, fidelity_words, harmless, number, print_json, size_words, utc
from bloomery.cli.specs import checked, put, put_options, read
from bloomery.client import Client
from bloomery.types.errors import InvalidInput, shown
from bloomery.types.jobs import Compared, Gate, Job, JobPoint, JobSample, JobSpec, JobState, SampleField

app = Noun(name="job", help="Train models of data sets: start, follow and steer managed jobs of the running server.", no_args_is_help=True)
JobArgument = Annotated[str, typer.Argument(help="Name or id of a job.", autocompletion=complete.jobs)]
WatchOption = Annotated[bool, typer.Option("--watch", help="Follow it until it ends or stands still.")]
_FLAGS: Final = {"name": "the job a name, as the first word", "data": "--dataset NAME", "base_model": "--model NAME"}
"""What says the fields that have no default."""
_FIRST: Final = ("loss", "evaluation/loss", "reward/raw", "accuracy", "kl/teacher")
"""What is shown of the newest step while a job is followed."""
_BYTES: Final = ("sync/bytes", "sync/whole_bytes")
_SHOWN: Final = (*_FIRST, "reward/held_out", "learning_rate", "gradient_norm", *_BYTES)
_SAMPLES: Final = 3
_SAMPLE_CHARS: Final = 300
"""Of each text of those that are shown."""
_LOOKS: Final = ("evaluation/", "served/")
"""Begin the names of what was measured of held-out rows, now and then."""


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="Of the job, and of the model that comes of it.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", exists=True, dir_okay=False, help="A YAML or JSON file of a spec, or of a chain's `stages`.")
    ] = None,
    method: Annotated[Literal["sft", "dpo", "orpo", "rft", "distill"] | None, typer.Option("--method", help="How; sft by default.")] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="What to train on: NAME, or NAME@VERSION.", autocompletion=complete.datasets)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The base model.", autocompletion=complete.models)] = None,
    begin: Annotated[str | None, typer.Option("--begin", help="Begin where this job ends.", autocompletion=complete.jobs)] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="How often each row comes; rft and distill have --set method.steps=N.")] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Rows of a step, or pairs; rft has method.groups_per_step, distill method.prompts_per_step.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="At its highest.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="At which rft draws answers; 1 by default.")] = None,
    zero_variance: Annotated[
        Literal["drop", "keep"] | None, typer.Option("--zero-variance", help="Whether rft counts groups rewarded alike; drop by default.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Of the adapter; 0 trains all parameters.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the adapter and the order of rows.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any other field, with dots: evaluation.every=10. Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the spec with all defaults, checked, and what it would take.")] = False,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", min=0.001, help="With --dry-run: the pace, where no job like it has ended here.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0.000001, help="With --dry-run: of a million tokens, for what it would cost.")] = None,
    price_per_hour: Annotated[float | None, typer.Option("--price-per-hour", min=0.000001, help="The same of an hour of this machine.")] = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Start a job, or the stages of a chain. A file says what flags can say; flags come after it, and count for every stage."""
    prices = {"tokens_per_s": tokens_per_s, "price_per_million": price, "price_per_hour": price_per_hour}
    _check_dry_run(dry_run, watch, prices)
    given: dict[str, Any] = read(file) if file else {}
    _put_all(given, {"name": name, "begin.job": begin})
    flags: dict[str, Any] = {"base_model": model, "method.kind": method, "rank": rank, "seed": seed}
    flags |= {"method.batches.epochs": epochs, "method.batches.rows": batch, "method.optimizer.learning_rate": learning_rate}
    flags |= {"method.temperature": temperature, "method.zero_variance": zero_variance}
    if dataset is not None:
        flags |= dict(zip(("data.dataset", "data.version"), dataset.split("@", 1), strict=False))
    with client_of(data_dir) as client:
        chain = STAGES in given
        specs = [_completed(client, stage, flags, options) for stage in (stages_of(given) if chain else [given])]
        if not dry_run:
            return _chain(client, specs, watch=watch, as_json=as_json) if chain else _started(client, specs[0], watch=watch, as_json=as_json)
        if chain:
            return _print([_planned(client, resolved, prices) for resolved in client.jobs.resolve_chain(specs)], as_json)
        return _print(_planned(client, client.jobs.resolve(specs[0]), prices), as_json)


@app.command("list")
def list_all(
    state: Annotated[JobState | None, typer.Option("--state", help="Only of this state.")] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Show all jobs, newest first."""
    with client_of(data_dir) as client:
        jobs = client.jobs.list(state=state)
    if as_json:
        return print_json(jobs)
    table = Table("NAME", "METHOD", "MODEL", "STATE", "STEP", "CREATED", "VERSION", box=None)
    for job in jobs:
        steps = f"{job.progress.step}/{job.progress.steps}" if job.progress.steps else "-"
        version = job.result.version[:12] if job.result else "-"
        table.add_row(job.spec.name, job.spec.method.kind, job.spec.base_model, job.state, steps, utc(job.created_us), version)
    console().print(table)


@app.command()
def show(job: JobArgument, watch: WatchOption = False, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show one job: where it stands, what it measured last, and what came of it."""
    with client_of(data_dir) as client:
        found = _follow(client, job, quiet=as_json) if watch else client.jobs.get(job)
        _show(client, found, as_json)
    if watch:
        _exit(found)


@app.command()
def events(job: JobArgument, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show what happened to a job."""
    with client_of(data_dir) as client:
        found = client.jobs.events(job)
    if as_json:
        return print_json(found)
    for event in found:
        typer.echo(f"{utc(event.created_us)}  {event.level:7}  {event.message}")


@app.command()
def points(job: JobArgument, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Show what a job measured, step by step: the main figures, and with --json all of them."""
    with client_of(data_dir) as client:
        found = client.jobs.points(job)
    if as_json:
        return print_json(found)
    names = _columns(found)
    table = Table("step", *names, box=None)
    for point in found:
        table.add_row(str(point.step), *(_cell(name, point.values.get(name)) for name in names))
    console().print(table)


@app.command()
def pause(job: JobArgument, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Have a job stand still, within seconds."""
    with client_of(data_dir) as client:
        _steered(client.jobs.pause(job), "pauses", as_json)


@app.command()
def resume(job: JobArgument, watch: WatchOption = False, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """Have a paused job go on where it was."""
    with client_of(data_dir) as client:
        found = client.jobs.resume(job)
        if watch:
            ended = _follow(client, job, quiet=as_json)
            _show(client, ended, as_json)
            return _exit(ended)
    _steered(found, "goes on", as_json)


@app.command()
def cancel(job: JobArgument, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR) -> None:
    """End a job without a result."""
    with client_of(data_dir) as client:
        _steered(client.jobs.cancel(job), "ends", as_json)


@app.command()
def clone(
    job: JobArgument,
    name: Annotated[str, typer.Argument(help="Of the new job.")],
    options: Annotated[list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Change a field. Repeatable.")] = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Start a job with another's spec, down to the seed and the version of the data."""
    with client_of(data_dir) as client:
        given = client.jobs.get(job).spec.model_dump(mode="json") | {"name": name}
        put_options(given, options)
        _started(client, _spec(given), watch=watch, as_json=as_json)


@app.command()
def eject(job: JobArgument, data_dir: DataDirOption = DATA_DIR) -> None:
    """Print a Python script that does the same over the public API: the same operations, and so the same weights, or says why not."""
    with client_of(data_dir) as client:
        typer.echo(script(client.jobs.get(job).spec, server_of(data_dir).url).rstrip())


@app.command()
def compare(
    jobs: Annotated[list[str], typer.Argument(help="Two jobs or more.")], as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR
) -> None:
    """Show how jobs differ: the fields of their specs that are not alike, and what came of them."""
    with client_of(data_dir) as client:
        found = [client.jobs.get(job) for job in jobs]
    flat = [_flat(job.spec.model_dump(mode="json")) for job in found]
    fields = [field for field in sorted(set().union(*flat)) if len({repr(each.get(field)) for each in flat}) > 1]
    measures = sorted({measure.name for job in found if job.result for measure in job.result.compared})
    if as_json:
        differing = {field: [each.get(field) for each in flat] for field in fields}
        return typer.echo(json.dumps({"jobs": [job.spec.name for job in found], "differ": differing, "results": [_result(job) for job in found]}))
    table = Table("", *(job.spec.name for job in found), box=None)
    for field in fields:
        table.add_row(field, *(str(each.get(field, "-")) for each in flat))
    table.add_section()
    table.add_row("state", *(job.state for job in found))
    for name in measures:
        of = [next((each for each in job.result.compared if each.name == name), None) if job.result else None for job in found]
        table.add_row(name, *(_after(each) for each in of))
    console().print(table)


def _steered(job: Job, does: str, as_json: bool) -> None:
    if as_json:
        return print_json(job)
    typer.echo(f"{job.spec.name} {job.state.words}" + (f", and {does} within seconds" if job.state is JobState.RUNNING else ""))


def _check_dry_run(dry_run: bool, watch: bool, prices: Mapping[str, float | None]) -> None:
    if not dry_run and any(prices.values()):
        raise InvalidInput("a pace and prices are for what a job would take: give --dry-run, too", field="dry_run")
    if dry_run and watch:
        raise InvalidInput("nothing is made with --dry-run, so there is nothing to follow: leave out --watch", field="watch")


def _completed(client: Client, stage: dict[str, Any], flags: Mapping[str, Any], options: Sequence[str] | None) -> JobSpec:
    """What a file says, and after it flags and options; the base model goes without saying where there is one."""
    _put_all(stage, flags)
    put_options(stage, options)
    if "base_model" not in stage and len(models := client.models()) == 1:
        stage["base_model"] = models[0].alias
    return _spec(stage)


def _spec(given: dict[str, Any]) -> JobSpec:
    given.setdefault("method", {}).setdefault("kind", "sft") if isinstance(given.get("method", {}), dict) else None
    return checked(JobSpec, given, _FLAGS)


def _put_all(given: dict[str, Any], flags: Mapping[str, Any]) -> None:
    for field, value in flags.items():
        if value is not None:
            put(given, field, value)


def _planned(client: Client, resolved: JobSpec, prices: Mapping[str, float | None]) -> dict[str, Any]:
    # What a stage takes does not depend on where it begins, which may not be there yet.
    estimate = client.jobs.estimate(resolved.model_copy(update={"begin": None}), **prices)
    return {"spec": resolved.model_dump(mode="json"), "estimate": estimate.model_dump(mode="json")}


def _started(client: Client, spec: JobSpec, *, watch: bool, as_json: bool) -> None:
    job = client.jobs.create(spec)
    if watch:
        job = _follow(client, job.id, quiet=as_json)
    _show(client, job, as_json)
    _exit(job)


def _chain(client: Client, specs: Sequence[JobSpec], *, watch: bool, as_json: bool) -> None:
    jobs = client.jobs.create_chain(specs)
    if watch:
        jobs = [_follow(client, job.id, quiet=as_json) for job in jobs]
    if as_json:
        print_json(jobs)
    else:
        for job in jobs:
            _show(client, job, as_json)
    for job in jobs:
        _exit(job)


def _follow(client: Client, job: str, *, quiet: bool = False) -> Job:
    if quiet:
        return client.jobs.wait(job)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[steps]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console(), transient=False) as progress:
        bar = progress.add_task("waits", total=None, steps="", last="")
        told = 0

        def changed(now: Job) -> None:
            nonlocal told
            found = client.jobs.events(job)
            for event in found[told:]:
                progress.console.print(f"{event.level:7} {event.message}")
            told = len(found)
            step, total = now.progress.step, now.progress.steps or None
            steps = f"{step}/{total}" if total else ""
            progress.update(bar, description=now.state, completed=step, total=total, steps=steps, last=_last(client, now))

        try:
            return client.jobs.wait(job, on_change=changed)
        except KeyboardInterrupt:
            name = client.jobs.get(job).spec.name
            progress.console.print(f"`{name}` goes on: `bloomery job show {name} --watch` follows it again, `bloomery job cancel {name}` ends it")
            raise


def _last(client: Client, job: Job) -> str:
    newest = client.jobs.points(job.id, after=max(-1, job.progress.step - 2))
    values = {name: value for point in newest for name, value in point.values.items()}
    return "  ".join(f"{name} {number(values[name])}" for name in _FIRST if name in values)


def _show(client: Client, job: Job, as_json: bool) -> None:
    if as_json:
        return print_json(job)
    screen = console()
    screen.print(f"{job.spec.name}  {job.state}" + (f": {job.reason}" if job.reason else ""))
    if job.state is JobState.PAUSED:
        screen.print(f"`bloomery job resume {job.spec.name}` has it go on")
    what = f"{job.spec.method.kind} on {job.spec.data.dataset} from {job.spec.base_model}"
    screen.print(what + (f", step {job.progress.step} of {job.progress.steps}, {job.progress.seconds:.0f} s" if job.progress.steps else ""))
    for line in _lineage(client, job):
        screen.print(line)
    if job.result is None:
        return screen.print(last) if (last := _last(client, job)) else None
    table = Table("", "before", "after", "difference [95 %]", "rows", box=None)
    for measure in job.result.compared:
        table.add_row(measure.name, f"{measure.before:.4g}", f"{measure.after:.4g}", _difference(measure), str(measure.rows))
    data = job.spec.data.dataset
    screen.print(table if job.result.compared else f"not compared: no rows are held out (`bloomery dataset split {data} --eval 0.1`)")
    if job.result.samples:
        screen.print(_samples(job.spec.name, job.result.samples))
    screen.print(f"fidelity {fidelity_words(job.result.fidelity)}")
    screen.print(f"version {job.result.version}, digest of the weights {job.result.digest}")
    screen.print(f"`bloomery deployment create NAME {job.spec.name}` serves it")


def _samples(name: str, samples: Sequence[JobSample]) -> Group:
    """Those that tell the most."""
    table = Table("", "", "", box=None, show_header=False)
    for sample in samples[:_SAMPLES]:
        rewards = {"before": sample.before_reward, "after": sample.after_reward}
        for place, field in enumerate(get_args(SampleField)):
            text: str | None = getattr(sample, field)
            if text is not None:
                said = f"{field}, reward {number(reward)}" if (reward := rewards.get(field)) is not None else field
                table.add_row(f"row {sample.row}" if place == 0 else "", said, harmless(shown(text, _SAMPLE_CHARS)))
    left = len(samples) - _SAMPLES
    return Group("held-out answers:", table, *([f"{left} more: `bloomery job show {name} --json`"] if left > 0 else []))


def _lineage(client: Client, job: Job) -> list[str]:
    """Where it begins, through all that came before, and what begins with it."""
    above: list[str] = []
    begin, after = job.spec.begin, client.jobs.list(after=job.id)
    while begin is not None:
        if begin.job is None:
            above.append(f"checkpoint {begin.checkpoint} of run {begin.run}")
            break
        before = client.jobs.get(begin.job)
        above.append(f"{before.spec.name} ({before.spec.method.kind}, {before.state})")
        begin = before.spec.begin
    gate = None if job.spec.begin is None else job.spec.begin.gate
    lines = [f"begins with {' < '.join(above)}"] if above else []
    lines += [f"if {_gate(gate)}"] if gate is not None else []
    return lines + [f"then {each.spec.name} ({each.spec.method.kind}, {each.state})" for each in reversed(after)]


def _gate(gate: Gate) -> str:
    return f"its {gate.measure} " + ("is better than what it began with" if gate.bound is None else f"has reached {gate.bound:g}")


def _difference(measure: Compared) -> str:
    if measure.difference_interval is None:
        return f"{measure.difference:+.4g}"
    low, high = measure.difference_interval
    verdict = "" if low <= 0 <= high else "  better" if (measure.difference > 0) == measure.higher_is_better else "  worse"
    return f"{measure.difference:+.4g} [{low:+.4g}, {high:+.4g}]{verdict}"


def _after(measure: Compared | None) -> str:
    if measure is None:
        return "-"
    interval = "" if measure.after_interval is None else f" [{measure.after_interval[0]:.4g}, {measure.after_interval[1]:.4g}]"
    return f"{measure.after:.4g}{interval}"


def _result(job: Job) -> Any:
    return None if job.result is None else job.result.model_dump(mode="json")


def _exit(job: Job) -> None:
    if job.state is JobState.FAILED:
        raise typer.Exit(1)


def _print(value: Any, as_json: bool) -> None:
    typer.echo(json.dumps(value) if as_json else yaml.safe_dump(value, sort_keys=False).rstrip())


def _columns(found: Sequence[JobPoint]) -> list[str]:
    there = {name for point in found for name in point.values}
    looks = sorted(name for name in there if name.startswith(_LOOKS) and name not in _SHOWN)
    return [*(name for name in _SHOWN if name in there), *looks]


def _cell(name: str, value: float | None) -> str:
    return size_words(round(value)) if name in _BYTES and value is not None else number(value)


def _flat(value: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {above.removesuffix("."): value}
    return {name: inner for key, each in value.items() for name, inner in _flat(each, f"{above}{key}.").items()}

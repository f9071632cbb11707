"""`bloomery eval inspect`: tasks of `inspect_ai` as they are, in the environment that has the package, which is not imported here."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Final

import typer

from bloomery.cli import complete
from bloomery.cli.evaluation import measured_words, show_differences
from bloomery.cli.inspect_log import PROVIDER, InspectedScorer, InspectedTask, inspected
from bloomery.cli.options import DATA_DIR, DataDirOption, UrlOption
from bloomery.cli.running import server_of
from bloomery.cli.show import JsonOption, number, print_json, print_table
from bloomery.types.errors import InvalidInput, NotFound

_MISSING: Final = "import importlib.util; print(*(name for name in ('inspect_ai', 'openai') if importlib.util.find_spec(name) is None))"
_RETRIES: Final = "6"
"""Of a request, some minutes altogether; by itself inspect never gives up a server that is away."""

_REASONS: Final = 5
"""Of failures that people are shown."""


def inspect(
    task: Annotated[str, typer.Argument(help="FILE.py, FILE.py@TASK or PACKAGE/TASK.")],
    models: Annotated[
        list[str],
        typer.Option("--model", help="A base model, a version or a deployment. Repeatable: they are paired.", autocompletion=complete.asked),
    ],
    options: Annotated[list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Of `inspect eval`, as they are: -- -T level=2.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many samples, the first ones.")] = None,
    python: Annotated[Path | None, typer.Option("--python", help="Of the environment with inspect-ai; by default Bloomery's own.")] = None,
    log_dir: Annotated[Path, typer.Option("--log-dir", help="Where inspect's logs go, each time in a folder of its own.")] = Path("logs"),
    as_json: JsonOption = False,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Run a task of inspect_ai, unmodified, with models of this server."""
    server = server_of(data_dir, url)
    python = python or Path(sys.executable)
    _check(python)
    log_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix="bloomery-", dir=log_dir))
    asked = list(dict.fromkeys(models))
    argv = [str(python), "-m", "inspect_ai", "eval", task, "--model", ",".join(f"{PROVIDER}{model}" for model in asked)]
    # Said here, too: whoever has a variable for all of inspect's models means others.
    argv += ["--model-base-url", f"{server.url}/v1", "--log-dir", str(folder), "--log-format", "json", "--max-retries", _RETRIES]
    # One model after the other, so that their times compare; and to the end, where a sample that failed is one without a score.
    argv += ["--max-tasks", "1", "--continue-on-fail", *(["--limit", str(limit)] if limit else []), *(options or [])]
    # What inspect shows goes to the standard error, and what came of it to the standard output. Ctrl-C reaches it, too, and it writes its logs then.
    environment = {**os.environ, "BLOOMERY_API_KEY": server.key, "BLOOMERY_BASE_URL": f"{server.url}/v1"}
    with subprocess.Popen(argv, env=environment, stdout=2) as child:
        status = child.wait()
    found = inspected(folder, asked)
    if not found:
        with suppress(OSError):  # It may hold logs of another format.
            folder.rmdir()
        raise InvalidInput(f"inspect_ai ended with status {status} and without a log in JSON; it said why above")
    if as_json:
        print_json(found)
    else:
        _show(found)
    told = {(each.model, each.status) for one in found for each in one.models}
    if status or told != {(model, "success") for model in asked}:
        raise typer.Exit(1)


def _check(python: Path) -> None:
    """Ask the environment what it lacks."""
    done = subprocess.run([str(python), "-c", _MISSING], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotFound(f"{python} is no Python that runs: {done.stderr.strip()}", field="python")
    if missing := done.stdout.split():
        how = f"`{python} -m pip install inspect-ai openai`, or --python PATH of an environment that has it"
        raise NotFound(f"there is no {' and no '.join(f'`{name}`' for name in missing)} in the environment of {python}: {how}", field="python")


def _show(found: Sequence[InspectedTask]) -> None:
    for task in found:
        typer.echo(task.task)
        scorers = [(each, of) for each in task.models for of in each.scorers]
        rows = [(each.model, of.scorer, _metrics(of), measured_words(of.mean), str(of.scored), str(of.invalid)) for each, of in scorers]
        print_table(("MODEL", "SCORER", "METRICS", "MEAN [95 %]", "SCORED", "INVALID"), rows)
        if task.differences:
            show_differences(task.differences)
        for each in task.models:
            tokens = f"{each.prompt_tokens} tokens read, {each.completion_tokens} written"
            typer.echo(f"{each.model}: {each.status}, {each.samples} samples, {tokens}, {number(each.seconds)} s, {each.log}")
            for reason, times in islice(({each.reason: 1} if each.reason else each.failures).items(), _REASONS):
                typer.echo(f"  {times} x {reason}")


def _metrics(scorer: InspectedScorer) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in scorer.metrics.items()) or "-"

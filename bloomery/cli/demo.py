"""`bloomery demo`: the whole loop on this machine, told with progress bars and closed with one table."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bloomery.cli.demo_server import Server, remove_leftovers, serving
from bloomery.client import Client
from bloomery.recipes import demo_rows
from bloomery.recipes.demo_rows import DemoRows
from bloomery.recipes.loop import LoopConfig, LoopReport, run_loop
from bloomery.recipes.sft import AdamConfig, SftConfig
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from bloomery.types.statistics import wilson

ANSWER_MARGIN_TOKENS = 4
FIRST = SftConfig(epochs=3, adam=AdamConfig(learning_rate=4e-3), batch_size=16)
SECOND = SftConfig(epochs=2, adam=AdamConfig(learning_rate=3e-3), batch_size=16)
PIPED_COLUMNS = 160
"""More than the table needs: a pipe has no width, and cells that wrap can be neither read nor searched."""


def demo(
    data: Annotated[Path | None, typer.Option(help="Your own CSV or JSONL: `text` and `label` columns, or chat `messages`.")] = None,
    model: Annotated[str, typer.Option(help="bloomery-tiny, or a directory that save_pretrained wrote.")] = "bloomery-tiny",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server and its page up afterwards.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Train, serve, collect, retrain and compare on this machine."""
    if json_file is not None and not json_file.parent.is_dir():
        raise InvalidInput(f"there is no directory {json_file.parent} for {json_file.name}: make it first", field="json")
    console = console_for(sys.stdout)
    for place in remove_leftovers(Path(tempfile.gettempdir())):
        console.print(f"removed {place}, which a killed demo had left", soft_wrap=True)
    started = time.monotonic()
    with serving(model, keep=keep) as server:
        report = run(server, data, Bars())
        seconds = time.monotonic() - started
        show(report, seconds, console)
        if json_file is not None:
            json_file.write_text(json.dumps(figures(report, seconds)) + "\n")
        if keep:
            still_up = f"\nStill up: {server.url}/#key={server.key}   stop it with: bloomery stop --data-dir {server.data_dir}"
            console.print(still_up, soft_wrap=True)


def console_for(output: TextIO) -> Console:
    """As wide as the terminal; elsewhere as wide as it takes."""
    return Console(file=output, width=None if output.isatty() else PIPED_COLUMNS)


def run(server: Server, data: Path | None, bars: "Bars") -> LoopReport:
    """One loop against a running server."""
    with Client(server.url, server.key) as client, bars:
        base = client.models()[0]
        chosen = demo_rows.from_stdlib() if data is None else demo_rows.from_file(client, data)
        tokenizer = ChatTokenizer.load(Path(base.path))
        if tokenizer.template_hash is None:
            raise InvalidInput(f"{base.path} has no chat template, and the demo chats: set tokenizer.chat_template and save it there", field="model")
        longest_answer = _longest_answer(chosen, tokenizer)
        if data is not None:
            demo_rows.check_fit(chosen.rows, tokenizer, base.context - longest_answer)
        config = LoopConfig(
            deployment="demo",
            base_model=base.alias,
            first=FIRST,
            second=SECOND,
            max_answer_tokens=longest_answer,
        )
        return run_loop(client, chosen.task, chosen.rows, tokenizer.render_training, config, bars.advance)


class Bars:
    """One progress bar per phase; where nobody could see it move, in a pipe or a file, one line when the phase is over."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._moving = self._output.isatty()
        columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, console=console_for(self._output), disable=not self._moving)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, phase: str, done: int, total: int | None, note: str) -> None:
        """Show how far a phase is; one that does not count its parts is one part."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=None, note="")
        task = self._tasks[phase]
        if total is not None:
            self._progress.update(task, completed=done, total=total, note=note)
        elif done:
            if self._progress.tasks[task].total is None:
                self._progress.update(task, completed=1, total=1)
            if not self._moving:
                print(_line(self._progress.tasks[task]), file=self._output, flush=True)


def _line(task: Task) -> str:
    """What its bar says at the end."""
    done = "done" if task.total in (None, 1) else f"{task.completed:.0f} of {task.total:.0f}"
    note = f", {task.fields['note']}" if task.fields["note"] else ""
    return f"{task.description}: {done} in {task.elapsed or 0.0:.1f} s{note}"


def show(report: LoopReport, seconds: float, output: Console) -> None:
    """The table, and what belongs beside it."""
    table = Table(title=f"{len(report.base)} held-out rows, the same for every column", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "base", "version 1", "version 2"):
        table.add_column(heading, justify="left" if not heading else "right")
    outcomes = (report.base, report.v1, report.v2)
    table.add_row("accuracy [95 %]", *(_share([row.correct for row in rows]) for rows in outcomes))
    table.add_row("invalid output", *(f"{sum(row.label is None for row in rows) / len(rows):.1%}" for rows in outcomes))
    table.add_row("bag of words", "", *(_share(report.neighbours[f"bag_of_words_{version}"]) for version in ("v1", "v2")))
    table.add_row("majority class", "", *(_share(report.neighbours[f"majority_{version}"]) for version in ("v1", "v2")))
    table.add_row("training rows", "", *(str(report.trained_rows[version]) for version in ("v1", "v2")))
    table.add_row("training tokens/s", "", *(f"{report.training[version].tokens_per_s:,.0f}" for version in ("v1", "v2")))
    table.add_row("seconds per step", "", *(f"{report.training[version].seconds_per_step:.2f}" for version in ("v1", "v2")))
    output.print(table)
    for line in _sentences(report, seconds):
        output.print(line, markup=False, soft_wrap=True)  # what the model says may look like markup


def figures(report: LoopReport, seconds: float) -> dict[str, object]:
    """The report as one JSON line for benchmarks."""
    outcomes = {"base": report.base, "v1": report.v1, "v2": report.v2}
    neighbours = {name: sum(right) / len(right) for name, right in report.neighbours.items()}
    latest = {name: neighbours[f"{name}_v2"] for name in ("majority", "bag_of_words")}
    return {
        "accuracy": {**latest, **{name: sum(row.correct for row in rows) / len(rows) for name, rows in outcomes.items()}},
        "invalid": {**dict.fromkeys(latest, 0.0), **{name: sum(row.label is None for row in rows) / len(rows) for name, rows in outcomes.items()}},
        "neighbours": neighbours,
        "held_out_rows": len(report.base),
        "trained_rows": report.trained_rows,
        "curation": report.curated.counts,
        "mcnemar": report.comparison._asdict(),
        "promoted": report.promoted,
        "seconds": {**report.seconds, "total": round(seconds, 1)},
        "train_tokens_per_s": report.training["v2"].tokens_per_s,
        "seconds_per_step": report.training["v2"].seconds_per_step,
        "swap_s": report.swap_s,
        "k3": report.parity.k3,
        "max_logprob_diff": report.parity.max_difference,
        "parity_tokens": report.parity.tokens,
    }


def _sentences(report: LoopReport, seconds: float) -> Iterator[str]:
    test = report.comparison
    verdict = "promoted" if report.promoted else "not promoted: not better beyond chance"
    yield f"Version 2 against 1: {test.gained} rows gained, {test.lost} lost, McNemar p = {test.p_value:.2g}: {verdict}."
    which = "version 2" if report.live.version == report.versions["v2"] else "version 1"
    yield f"The deployment now answers with {which} ({report.live.version}): {report.live.content}"
    yield f"Feedback on {report.trained_rows['traffic']} served rows was simulated from their labels (corrections, thumbs up and down, silence)."
    yield f"From optim_step to the first token of the new weights: {report.swap_s * 1000:.0f} ms (median)."
    same = report.parity
    yield f"Sampled against trainer log-probabilities: k3 {same.k3:.2g}, largest difference {same.max_difference:.2g}, {same.tokens} tokens."
    yield f"Everything took {seconds:.0f} s."


def _share(right: Sequence[bool]) -> str:
    interval = wilson(sum(right), len(right))
    return f"{sum(right) / len(right):.1%} [{interval.low * 100:.1f}, {interval.high * 100:.1f}]"


def _longest_answer(chosen: DemoRows, tokenizer: ChatTokenizer) -> int:
    answers = {question.answer for rows in chosen.rows for question in rows}
    return max(len(tokenizer.encode(answer)) for answer in answers) + ANSWER_MARGIN_TOKENS

"""`bloomery demo`: the whole loop on this machine, told with progress bars and closed with one table."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TextIO

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bloomery.client import Client
from bloomery.recipes import demo_rows
from bloomery.recipes.demo_rows import DemoRows
from bloomery.recipes.loop import LoopConfig, LoopReport, run_loop
from bloomery.recipes.sft import SftConfig
from bloomery.recipes.statistics import wilson
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput, Unavailable

READY_S = 900.0
"""A large model takes long to load; `up` gives up by itself much earlier when something is wrong."""
STOP_S = 120.0
UP_LOG = "up.log"
ANSWER_MARGIN_TOKENS = 4
FIRST = SftConfig(epochs=3, learning_rate=4e-3, batch_size=16)
SECOND = SftConfig(epochs=2, learning_rate=3e-3, batch_size=16)

console = Console()


class Server(NamedTuple):
    """A server that the demo started."""

    url: str
    key: str
    data_dir: Path


def demo(
    data: Annotated[Path | None, typer.Option(help="Your own CSV or JSONL: `text` and `label` columns, or chat `messages`.")] = None,
    model: Annotated[str, typer.Option(help="bloomery-tiny, or a directory that save_pretrained wrote.")] = "bloomery-tiny",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server and its page up afterwards.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Train, serve, collect, retrain and compare on this machine."""
    if json_file is not None and not json_file.parent.is_dir():
        raise InvalidInput(f"there is no directory {json_file.parent} for {json_file.name}: make it first", field="json")
    started = time.monotonic()
    with serving(model, keep=keep) as server:
        report = run(server, data, Bars())
        seconds = time.monotonic() - started
        show(report, seconds)
        if json_file is not None:
            json_file.write_text(json.dumps(figures(report, seconds)) + "\n")
        if keep:
            console.print(f"\nStill up: {server.url}/#key={server.key}   stop it with: bloomery stop --data-dir {server.data_dir}")


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


@contextlib.contextmanager
def serving(model: str, *, keep: bool) -> Iterator[Server]:
    """A server with a data directory of its own, stopped and removed at the end unless `keep`; a demo that is killed ends it too."""
    from bloomery.up.children import end_with

    place = Path(tempfile.mkdtemp(prefix="bloomery-demo-"))
    argv = [sys.executable, "-m", "bloomery.cli.main", "up", "--data-dir", str(place / "data"), "--port", "0", "--model", model]
    with (place / UP_LOG).open("w") as output:
        ends = None if keep else end_with(os.getpid(), signal.SIGTERM)
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=ends)
    left_up = False
    try:
        yield _when_ready(process, place)
        left_up = keep
    finally:
        if not left_up:
            process.terminate()
            process.wait(STOP_S)
            shutil.rmtree(place, ignore_errors=True)


class Bars:
    """One progress bar per phase."""

    def __init__(self, output: TextIO | None = None) -> None:
        columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, console=Console(file=output) if output else console)
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
        elif done and self._progress.tasks[task].total is None:
            self._progress.update(task, completed=1, total=1)


def show(report: LoopReport, seconds: float, output: Console = console) -> None:
    """The table, and what belongs beside it."""
    table = Table(title=f"{len(report.base)} held-out rows, the same for every column", box=box.SIMPLE_HEAD)
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
        output.print(line, markup=False)  # what the model says may look like markup


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


def _when_ready(process: "subprocess.Popen[bytes]", place: Path) -> Server:
    """`up` says its address when it is ready, and ends with the reason when it cannot be."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        said = (place / UP_LOG).read_text()
        if " is ready: " in said:
            url = said.partition(" is ready: ")[2].split()[0]
            return Server(url, (place / "data" / "api_key").read_text().strip(), place / "data")
        time.sleep(0.1)
    raise Unavailable(f"the server did not come up; it said:\n{(place / UP_LOG).read_text()[-2000:]}")

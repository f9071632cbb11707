"""`bloomery sync`: weight deltas between safetensors files, for trainers that are not ours."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from bloomery.cli.flags import Noun
from bloomery.cli.show import JsonOption, print_table, size_words
from bloomery.types.errors import InvalidInput

app = Noun(name="sync", help="What changed between two sets of weights, as a file, and back: safetensors in and out.", no_args_is_help=True)

Codec = Literal["auto", "fast", "fast+zstd", "tight", "raw", "planes"]
CodecOption = Annotated[
    Codec, typer.Option("--codec", help="How changes are written; auto takes what is shortest, piece by piece (docs/weight-sync.md).")
]
Form = Literal["bd1", "arc_v2", "arc_v3"]
FormOption = Annotated[
    Form, typer.Option("--format", help="bd1 is our own; the others are those of fireworks-delta-compression, a file for every file of a directory.")
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, max=256, help="Threads.")]
_WEIGHTS = "A safetensors file, or a directory with one or several."
_OUT = "A name that nothing has yet."


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help=f"The weights before. {_WEIGHTS}")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The weights after: the same tensors, in files that may be others.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help=f"The delta. {_OUT}")],
    codec: CodecOption = "auto",
    form: FormOption = "bd1",
    workers: WorkersOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Write what changed from one set of weights to another."""
    from bloomery.sync_files import actions, foreign

    if form != "bd1":
        _only_of_bd1(codec, workers)
        return _print_foreign(out, form, foreign.diff(old, new, out, form), as_json)
    with _progress() as progress:
        made = actions.diff(old, new, out, codec=codec, workers=workers, progress=progress)
    head = made.head
    if as_json:
        return _print(_object(out, head) | {"changed": made.changed, "differing": [*map(str, made.differing)], "seconds": made.seconds})
    share = made.changed / max(1, head.layout.elements)
    typer.echo(f"{out}: {size_words(head.size_bytes)}, {head.layout.size_bytes / head.size_bytes:,.1f} times smaller than the weights")
    typer.echo(f"{made.changed:,} of {head.layout.elements:,} elements changed ({share:.3%}); {made.seconds:.1f} s")
    if made.differing:
        typer.echo(f"not in the delta: {_names(made.differing)}, which differ too, or are on one side only")


@app.command()
def apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help=f"Weights that the first delta starts from, or that are behind some. {_WEIGHTS}")],
    deltas: Annotated[list[Path], typer.Argument(metavar="DELTA", help="Deltas that follow each other, in order.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help=f"The new weights, in files as BASE has them. {_OUT}")],
    workers: WorkersOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Write what becomes of weights by deltas; configs and tokenizers of their directory go along."""
    from bloomery.sync_files import actions

    with _progress() as progress:
        made = actions.apply(base, deltas, out, workers=workers, progress=progress)
    if as_json:
        left = [*map(str, made.left)]
        return _print(
            {"path": str(out), "files": made.files, "size_bytes": made.size_bytes, "root": made.root, "left": left, "seconds": made.seconds}
        )
    files = "1 file" if made.files == 1 else f"{made.files} files"
    typer.echo(f"{out}: {files}, {size_words(made.size_bytes)} of weights with root {made.root}; {made.seconds:.1f} s")
    if made.left:
        typer.echo(f"left out: {_names(made.left)}, which are no weights that deltas are of")


@app.command()
def merge(
    deltas: Annotated[list[Path], typer.Argument(metavar="DELTA", help="Deltas that follow each other, in order; the first may be a base.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help=f"The delta that does what all of them do. {_OUT}")],
    base: Annotated[Path | None, typer.Option("--base", help="The weights that the first delta starts from, which `tight` deltas need.")] = None,
    codec: CodecOption = "auto",
    workers: WorkersOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Write one delta that does what several do one behind the other."""
    from bloomery.sync_files import actions

    with _progress() as progress:
        made = actions.merge(deltas, out, base=base, codec=codec, workers=workers, progress=progress)
    if as_json:
        return _print(_object(out, made.head) | {"merged_bytes": made.size_bytes, "seconds": made.seconds})
    typer.echo(f"{out}: {size_words(made.head.size_bytes)}, instead of {size_words(made.size_bytes)} in {len(deltas)}; {made.seconds:.1f} s")


@app.command()
def inspect(
    delta: Annotated[Path, typer.Argument(metavar="FILE", help="A delta.")],
    base: Annotated[Path | None, typer.Option("--base", help="The weights that it starts from: then everything that changed is counted.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a delta consists of, what a change takes in it and could take at least; every tensor with --json."""
    from bloomery.sync_files.report import inspect as described

    found = described(delta, base)
    if as_json:
        return _print(found)
    (_show if found["format"] == "BD1" else _show_foreign)(found)


def _print(shown: dict[str, Any]) -> None:
    typer.echo(json.dumps(shown))


def _object(out: Path, head: Any) -> dict[str, Any]:
    """A delta that was written, for programs."""
    roots = {"old_root": str(head.old_root), "new_root": str(head.new_root)}
    return {"path": str(out), "size_bytes": head.size_bytes, "weights_bytes": head.layout.size_bytes, "elements": head.layout.elements, **roots}


def _show(found: dict[str, Any]) -> None:
    share = "" if found["changed_share"] is None else f" of {found['counted_elements']:,} ({found['changed_share']:.3%})"
    size = f"{size_words(found['size_bytes'])}, {found['ratio']:,.1f} times smaller than the weights ({size_words(found['weights_bytes'])})"
    typer.echo(f"{found['file']}: a {found['kind']} of {size}")
    typer.echo(f"layout    {found['layout']}, {len(found['tensors'])} tensors in {found['chunks']:,} chunks")
    typer.echo(f"from      {found['old_root']}")
    typer.echo(f"to        {found['new_root']}")
    # Chunks that are written whole do not say what of them changed, unless it was counted.
    counted = "" if found["counted_elements"] == found["elements"] else ", beside chunks that are written whole"
    typer.echo(f"changed   {found['changed']:,} elements{share}{_bits(found)}{counted}")
    for bound, words in (("order0", "without the old weights"), ("conditioned", "with them")):
        if (of := found["bounds"][bound]) is not None:
            typer.echo(f"at least  {of['bits_per_changed']:.2f} bits each {words} ({of['ratio']:,.1f} times smaller)")
    print_table(("CODEC", "CHUNKS", "ELEMENTS", "BYTES"), [(name, *(f"{value:,}" for value in of.values())) for name, of in found["codecs"].items()])


def _show_foreign(found: dict[str, Any]) -> None:
    ratio = "" if found["ratio"] is None else f", {found['ratio']:,.1f} times smaller than the weights ({size_words(found['weights_bytes'])})"
    typer.echo(f"{found['file']}: a delta of {found['format']}, {size_words(found['size_bytes'])}{ratio}, {len(found['tensors'])} tensors")
    known = found["changed"] is not None
    typer.echo(f"changed   {found['changed']:,} of {found['elements']:,} elements{_bits(found)}" if known else "changed   is known with --base alone")
    encodings: dict[str, list[int]] = {}
    for tensor in found["tensors"]:
        encodings.setdefault(tensor["encoding"], []).append(tensor["size_bytes"])
    print_table(("ENCODING", "TENSORS", "BYTES"), [(name, f"{len(sizes):,}", f"{sum(sizes):,}") for name, sizes in sorted(encodings.items())])


def _print_foreign(out: Path, form: Form, made: Any, as_json: bool) -> None:
    if as_json:
        return _print({"path": str(out), "format": form, **made._asdict()})
    ratio = made.weights_bytes / made.size_bytes
    typer.echo(f"{out}: {size_words(made.size_bytes)} of {form}, {ratio:,.1f} times smaller than the weights; {made.seconds:.1f} s")


def _only_of_bd1(codec: Codec, workers: int) -> None:
    """What the other formats have no such thing for is refused instead of left out."""
    for option, given in (("--codec", codec != "auto"), ("--workers", workers != 1)):
        if given:
            raise InvalidInput(f"{option} is for deltas of bd1", field=option)


def _bits(found: dict[str, Any]) -> str:
    return "" if found["bits_per_changed"] is None else f", in {found['bits_per_changed']:.2f} bits each"


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(str(path) for path in paths[:5]) + more


@contextmanager
def _progress() -> Iterator[Any]:
    """A line that moves where somebody can see it, beside what the command says."""
    columns = (TextColumn("{task.description:<7}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        tasks: dict[str, TaskID] = {}

        def told(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done)

        yield told

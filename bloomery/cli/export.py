"""`bloomery export`."""

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from bloomery.cli import complete
from bloomery.cli.options import DATA_DIR, DataDirOption, UrlOption
from bloomery.cli.running import came_of, client_of
from bloomery.client import Client
from bloomery.types.deployments import VersionFiles
from bloomery.types.errors import Conflict, NotFound

_CARD: Final = "README.md"
"""Where hubs look for a model card."""
_HINT: Final = {
    # The base's own config may name another dtype than the server computes in.
    "adapter": "peft.AutoPeftModelForCausalLM.from_pretrained({out!r}, dtype=torch.float32)",
    "merged": "transformers.AutoModelForCausalLM.from_pretrained({out!r})",
}


def export(
    weights: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A deployment, a job, a version, or tinker://RUN/sampler_weights/NAME.", autocompletion=complete.deployments
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="A directory that is not there yet.")],
    merged: Annotated[bool, typer.Option("--merged", help="Add the adapter to its base model: a whole model for transformers.")] = False,
    shard_gb: Annotated[
        float, typer.Option("--shard-gb", min=0.002, max=1000, help="Cut the weights of a whole model into files of this size.")
    ] = 5.0,
    url: UrlOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Write published weights as files: an adapter that peft loads, or a whole model that transformers loads, and their model card."""
    choice = {"form": "merged" if merged else None, "max_shard_bytes": int(shard_gb * 1e9)}
    target = out.expanduser()
    with client_of(data_dir, url) as client:
        try:
            listed = client.versions.files(weights, **choice)
        except NotFound:
            listed = client.versions.files(came_of(client, weights), **choice)
        _write(client, listed, target, choice)
    size = sum(file.size_bytes for file in listed.files)
    typer.echo(f"{target}: {len(listed.files)} files and a model card, {size / 1e6:.1f} MB, version {listed.version} of {listed.base_model}")
    typer.echo(f"load it with {_HINT[listed.form].format(out=str(target))}")


def _write(client: Client, listed: VersionFiles, target: Path, choice: dict[str, str | int | None]) -> None:
    """All files or no directory."""
    if target.exists():
        raise Conflict(f"{target} is there already: choose another directory")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        for file in listed.files:
            client.versions.download(listed.version, file.name, partial / file.name, **choice)
        (partial / _CARD).write_text(client.versions.card_text(listed.version), encoding="utf-8")
        partial.rename(target)
    finally:
        if partial.exists():
            for left in partial.iterdir():
                left.unlink()
            partial.rmdir()

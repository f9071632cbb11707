"""`bloomery backup` and `bloomery restore`."""

from pathlib import Path
from typing import Annotated

import typer

from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.config.data_dir import DataDir


def backup(
    file: Annotated[Path, typer.Argument(help="A new .tar.zst or .tar.gz; it holds the API key, so keep it private.")],
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Archive the data directory, whether the server runs or not."""
    from bloomery.up.backup import backup as make

    made = make(DataDir(data_dir.expanduser().resolve()), file)
    typer.echo(f"{file}: {made.files} files, {made.size_bytes / 1e6:.1f} MB")


def restore(file: Annotated[Path, typer.Argument(help="An archive of `bloomery backup`.")], data_dir: DataDirOption = DATA_DIR) -> None:
    """Unpack an archive into an empty data directory."""
    from bloomery.up.backup import restore as unpack

    root = data_dir.expanduser().resolve()
    unpacked = unpack(file, DataDir(root))
    typer.echo(f"{root}: {unpacked.files} files restored; start it with `bloomery up --data-dir {root}`")

"""`bloomery gc`."""

import typer

from bloomery.cli.options import DATA_DIR, DataDirOption
from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.types.resources import Collected


def gc(data_dir: DataDirOption = DATA_DIR) -> None:
    """Delete expired traffic and blobs that nothing refers to, whether the server runs or not."""
    collected = _collect(DataDir(data_dir.expanduser().resolve()))
    typer.echo(f"removed {collected.spans} spans and {collected.blobs} blobs ({collected.bytes / 1e6:.1f} MB)")


def _collect(data: DataDir) -> Collected:
    from bloomery.up.lock import holder
    from bloomery.up.offline import collect_garbage

    if server := holder(data):
        with Client(server.url, data.api_key.read_text().strip()) as client:
            return client.collect_garbage()
    return collect_garbage(data)

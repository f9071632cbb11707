"""The server that runs on a data directory, for commands that ask it."""

from pathlib import Path

from bloomery.client import Client
from bloomery.config.data_dir import DataDir


def client_of(data_dir: Path) -> Client:
    """As the holder of the data directory, whose key administers all projects."""
    from bloomery.up import control

    data = DataDir(data_dir.expanduser().resolve())
    return Client(control.running(data).url, data.api_key.read_text().strip())

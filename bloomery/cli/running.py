"""The server that runs on a data directory, for commands that ask it."""

import os
from pathlib import Path
from typing import NamedTuple

from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict, NotFound


class Server(NamedTuple):
    """Where it listens, and a key for it."""

    url: str
    key: str


def server_of(data_dir: Path, url: str | None = None) -> Server:
    """The one that runs on the data directory, with the key that administers all projects; or another, with the key of the environment."""
    if url is not None:
        return Server(url.rstrip("/"), os.environ.get("BLOOMERY_API_KEY", ""))
    from bloomery.up import control

    data = DataDir(data_dir.expanduser().resolve())
    return Server(control.running(data).url, data.api_key.read_text().strip())


def client_of(data_dir: Path, url: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 120.0) -> Client:
    """As the holder of the data directory, or of another server's key."""
    server = server_of(data_dir, url)
    return Client(server.url, server.key, timeout_s=timeout_s, patience_s=patience_s)


def came_of(client: Client, source: str) -> str:
    """Of a job the version that came of it; everything else is a version already, or names one."""
    try:
        job = client.jobs.get(source)
    except NotFound:
        return source
    if job.result is None:
        raise Conflict(f"job `{job.spec.name}` {job.state.words}, and no version has come of it", field="source")
    return job.result.version

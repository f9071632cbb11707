"""What needs no server: the lock of the data directory is held instead."""

import asyncio
from typing import Final

from bloomery.config.data_dir import DataDir
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.housekeeping.ephemeral import Ephemeral
from bloomery.services.housekeeping.garbage import Garbage
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.sync.chain.keys import read_keys
from bloomery.types.errors import NotFound
from bloomery.types.resources import Collected
from bloomery.up import layout, tables
from bloomery.up.lock import locked

_OWNER: Final = Principal(rows.DEFAULT_PROJECT, "command-line", SCOPES)


def collect_garbage(data: DataDir) -> Collected:
    """What `POST /api/v1/gc` does, without a server."""
    if not data.version.exists():
        raise NotFound(f"{data.root} is no data directory of Bloomery: nothing to collect")
    with locked(data):
        tables.check(data)
        layout.bring_up_to_date(data)
        return asyncio.run(_collect(data))


async def _collect(data: DataDir) -> Collected:
    with Database(data.database) as database:
        trusted = read_keys(data.chain_key).trusted
        return await Garbage(database, AsyncBlobs(Blobs(data.blobs)), Ephemeral(database, None), trusted=trusted).collect(_OWNER)

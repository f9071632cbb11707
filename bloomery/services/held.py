"""Weights that rows hold: a blob of weights and its manifest stay as long as one of `rows.WEIGHT_HOLDERS` names them."""

from collections.abc import Collection, Iterable
from typing import Final

from sqlalchemy import Connection, bindparam, select

from bloomery.store import rows
from bloomery.sync.publish import card_key, manifest_key
from bloomery.types.errors import Gone
from bloomery.types.probe import probe_key

_KEPT: Final = select(rows.checkpoint.c.id).where(rows.checkpoint.c.key == bindparam("kept")).limit(1)


def held_blobs(connection: Connection, keys: Collection[str] | None = None) -> frozenset[str]:
    """The blobs of weights that some row names, and their manifests, cards and probes: all there are, or only those of the weights under `keys`."""
    blobs: set[str] = set()
    for table in rows.WEIGHT_HOLDERS:
        # What a pending snapshot will hold has no key yet: its row has the empty one.
        query = select(table.c.key, table.c.version).where(table.c.key > "").distinct()
        if keys is not None:
            query = query.where(table.c.key.in_(keys))
        for key, version in connection.execute(query):
            blobs |= _blobs_of(key, version)
    return frozenset(blobs)


def held_versions(connection: Connection) -> frozenset[str]:
    """The versions of weights that some row names."""
    versions: set[str] = set()
    for table in rows.WEIGHT_HOLDERS:
        versions.update(connection.scalars(select(table.c.version).where(table.c.key > "", table.c.version.is_not(None)).distinct()))
    return frozenset(versions)


def let_go_blobs(connection: Connection, gone: Iterable[tuple[str, str | None]]) -> list[str]:
    """Of the blobs that deleted rows named, by their keys and versions, those that no other row names."""
    there = {(key, version) for key, version in gone if key}
    named = {blob for key, version in there for blob in _blobs_of(key, version)}
    return sorted(named - held_blobs(connection, {key for key, _ in there}))


def _blobs_of(key: str, version: str | None) -> set[str]:
    return {key} if version is None else {key, manifest_key(version), card_key(version), probe_key(version)}


def require_kept(connection: Connection, key: str | None) -> None:
    """Weights that are to be held from here on are still there: between finding and holding them they may have gone."""
    if key is not None and connection.execute(_KEPT, {"kept": key}).first() is None:
        raise Gone("these weights were let go, because they had no name and nobody held them: save them again, under a name if they shall stay")

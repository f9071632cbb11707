"""Keys to principals. Only hashes of keys are stored; the api is the only writer, so all of them are held in memory."""

import hashlib
import json
import secrets
from typing import Final

from sqlalchemy import Connection, delete, insert, select, update

from bloomery.services.principal import SCOPES, Principal
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import InvalidInput, Unauthorized
from bloomery.types.ids import new_id, now_us

PREFIX: Final = "tml-"
"""The tinker SDK refuses keys that start otherwise."""
DEVELOPMENT: Final = "development"


class Auth:
    """Checks keys; `load` first."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._principals: dict[str, Principal] = {}
        self._used_us: dict[str, int] = {}

    async def load(self, development_key: str) -> None:
        """Read all keys; the development key is the one given and no other."""
        await self._database.write(lambda connection: _set_development_key(connection, _hash(development_key)))
        self._principals = await self._database.read(_principals)

    async def check(self, key: str | None) -> Principal:
        """The principal behind a key."""
        if not key:
            raise Unauthorized("no API key: send it as `X-API-Key` or as `Authorization: Bearer`")
        principal = self._principals.get(_hash(key))
        if principal is None:
            raise Unauthorized("unknown API key: the development key is printed by `bloomery up` and lies in the data directory as `api_key`")
        self._used_us[principal.key_id] = now_us()
        return principal

    async def create(self, p: Principal, name: str, scopes: frozenset[str], *, project: str | None = None) -> str:
        """A fresh key, shown once."""
        p.require("admin")
        if unknown := scopes - SCOPES:
            raise InvalidInput(f"unknown scope `{min(unknown)}`: one of {', '.join(sorted(SCOPES))}", field="scopes")
        if name == DEVELOPMENT or not name:
            raise InvalidInput(f"a key cannot be called `{name}`", field="name")
        key = PREFIX + secrets.token_urlsafe(32)
        await self._database.write(lambda connection: _add(connection, project or p.project, name, _hash(key), scopes))
        self._principals = await self._database.read(_principals)
        return key

    async def note_use(self) -> None:
        """Store when keys were last used; called now and then, off the request path."""
        used, self._used_us = self._used_us, {}
        if used:
            await self._database.write(lambda connection: _note_use(connection, used))


def _hash(key: str) -> str:
    # Keys are long and random, so a fast hash is enough and there is nothing to salt.
    return hashlib.sha256(key.encode()).hexdigest()


def _principals(connection: Connection) -> dict[str, Principal]:
    return {row.hash: Principal(row.project, row.id, frozenset(json.loads(row.scopes))) for row in connection.execute(select(rows.api_key))}


def _set_development_key(connection: Connection, key_hash: str) -> None:
    _add_project(connection, rows.DEFAULT_PROJECT)
    mine = (rows.api_key.c.project == rows.DEFAULT_PROJECT, rows.api_key.c.name == DEVELOPMENT)
    connection.execute(delete(rows.api_key).where(*mine, rows.api_key.c.hash != key_hash))
    if connection.execute(select(rows.api_key.c.id).where(rows.api_key.c.hash == key_hash)).first() is None:
        _add(connection, rows.DEFAULT_PROJECT, DEVELOPMENT, key_hash, SCOPES)


def _add(connection: Connection, project: str, name: str, key_hash: str, scopes: frozenset[str]) -> None:
    _add_project(connection, project)
    values = {"id": new_id("key"), "project": project, "name": name, "hash": key_hash, "scopes": json.dumps(sorted(scopes)), "created_us": now_us()}
    connection.execute(insert(rows.api_key).values(values))


def _add_project(connection: Connection, project: str) -> None:
    if connection.execute(select(rows.project.c.id).where(rows.project.c.id == project)).first() is None:
        connection.execute(insert(rows.project).values(id=project, name=project, created_us=now_us()))


def _note_use(connection: Connection, used: dict[str, int]) -> None:
    for key_id, at_us in used.items():
        connection.execute(update(rows.api_key).where(rows.api_key.c.id == key_id).values(last_used_us=at_us))

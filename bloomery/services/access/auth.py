"""Keys to principals. Only hashes of keys are stored; the api is the only writer, so all of them are held in memory and a change counts at once.

A key belongs to a project, and a project is there as soon as a key of it is. An admin key gives out and takes back keys of its own project, with
any scopes; one of the default project does so for all, and so decides which projects there are.
"""

import asyncio
import hashlib
import json
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, delete, insert, select, update

from bloomery.services.access.principal import SCOPES, UNLIMITED, Allowance, Principal
from bloomery.services.access.repeats import Repeatable, note, was_done
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.store.events import record_event
from bloomery.types.errors import Conflict, InvalidInput, NotFound, Unauthorized
from bloomery.types.ids import expiry_us, new_id, now_us
from bloomery.types.keys import Key, NewKey, Scope, new_key
from bloomery.types.resources import Page

DEVELOPMENT: Final = "development"


class _Known(NamedTuple):
    """A stored key; `hash` is all that is left of its secret."""

    id: str
    project: str
    name: str
    hash: str
    scopes: frozenset[Scope]
    created_us: int
    expires_us: int | None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def principal(self) -> Principal:
        """Who calls with it."""
        return Principal(self.project, self.id, self.scopes, Allowance(self.requests_per_minute, self.tokens_per_minute))


class Auth:
    """Checks keys, gives them out and takes them back; `load` first."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._keys: dict[str, _Known] = {}
        """By hash."""
        self._used_us: dict[str, int] = {}
        """Latest use by id."""
        self._unstored: dict[str, int] = {}
        """What of it is not in the database yet."""
        self._lent: dict[str, Principal] = {}
        """Who calls with a key that is good for as long as it is lent: by its hash."""

    async def load(self, development_key: str) -> None:
        """Read all keys; the development key is the one given and no other."""
        await self._database.write(lambda connection: _set_development_key(connection, fingerprint(development_key)))
        stored = await self._database.read(lambda connection: connection.execute(select(rows.api_key)).all())
        self._keys = {row.hash: _known(row) for row in stored}
        self._used_us = {row.id: row.last_used_us for row in stored if row.last_used_us is not None}

    async def check(self, key: str | None) -> Principal:
        """The principal behind a key."""
        if not key:
            raise Unauthorized("no API key: send it as `X-API-Key` or as `Authorization: Bearer`")
        return await self.check_fingerprint(fingerprint(key))

    async def check_fingerprint(self, key_hash: str) -> Principal:
        """The principal behind a key that was shown before, if it is still good."""
        # One hash and one look-up by it, whatever is wrong with the key: the time tells nothing about those that there are, and no disk is touched.
        known = self._keys.get(key_hash)
        if known is None and (borrower := self._lent.get(key_hash)) is not None:
            return borrower
        if known is None:
            raise Unauthorized(
                "unknown API key, or one that was revoked: `bloomery key create` makes one, and the data directory has one in `api_key`"
            )
        if known.expires_us is not None and known.expires_us <= now_us():
            raise Unauthorized(f"this API key, `{known.name}`, has expired: ask for a new one")
        self._used_us[known.id] = self._unstored[known.id] = now_us()
        return known.principal

    def principal(self, key_id: str) -> Principal:
        """The principal behind the key of this id, for what goes on behind its request; Unauthorized where it is good no longer."""
        known = next((known for known in self._keys.values() if known.id == key_id), None)
        if known is not None and (known.expires_us is None or known.expires_us > now_us()):
            return known.principal
        borrower = next((borrower for borrower in self._lent.values() if borrower.key_id == key_id), None)
        if borrower is None:
            raise Unauthorized("the API key that this was asked with was revoked or has expired")
        return borrower

    def lend(self, key_hash: str, borrower: Principal) -> None:
        """Take the key with this hash for the borrower's until it is taken back. Nothing of it is stored here."""
        self._lent[key_hash] = borrower

    def take_back(self, key_hash: str) -> None:
        """Refuse a lent key from now on."""
        self._lent.pop(key_hash, None)

    async def mine(self, p: Principal) -> Key:
        """The key that the caller uses, without its secret."""
        return self._shown(self._of(p))

    async def give_up(self, p: Principal) -> None:
        """Refuse the key that the caller uses from now on."""
        known = self._of(p)
        _check_revocable(known)
        await asyncio.shield(self._remove(p, known))

    async def create(
        self,
        p: Principal,
        name: str,
        scopes: frozenset[Scope],
        *,
        project: str | None = None,
        ttl_s: int | None = None,
        allowance: Allowance = UNLIMITED,
        request: Repeatable | None = None,
    ) -> NewKey:
        """A fresh key, shown once: of a `request` that comes again it is only known that it made one, and Conflict says so."""
        project = _administered(p, project)
        if name == DEVELOPMENT or not name:
            raise InvalidInput(f"a key cannot be called `{name}`", field="name")
        key, now = new_key(), now_us()
        known = _Known(new_id("key"), project, name, fingerprint(key), scopes, now, expiry_us(ttl_s, now), *allowance)
        # Shielded, here and below: what is in memory follows what is stored, also when the caller has hung up meanwhile.
        await asyncio.shield(self._add(p, known, request))
        return NewKey(**self._shown(known).model_dump(), key=key)

    async def list(self, p: Principal, *, project: str | None = None, limit: int = 50, offset: int = 0) -> Page[Key]:
        """Keys without their secrets, oldest first: of one project, or of all that the caller administers."""
        mine = _administered(p, project)
        everywhere = project is None and p.project == rows.DEFAULT_PROJECT
        found = sorted((known for known in self._keys.values() if everywhere or known.project == mine), key=lambda known: known.id)
        page = [self._shown(known) for known in found[offset : offset + limit]]
        return Page(data=page, offset=offset, has_more=offset + limit < len(found))

    async def revoke(self, p: Principal, name: str, *, project: str | None = None) -> Key:
        """Refuse a key from now on; what it began before goes on. Its name is free again."""
        project = _administered(p, project)
        known = next((known for known in self._keys.values() if (known.project, known.name) == (project, name)), None)
        if known is None:
            ways = "`bloomery key list` shows those of all projects, and `--project` (`project` of a request) names another project"
            raise NotFound(f"project `{project}` has no key `{name}`: {ways}", field="name")
        _check_revocable(known)
        await asyncio.shield(self._remove(p, known))
        return self._shown(known)

    async def note_use(self) -> None:
        """Store when keys were last used; called now and then, off the request path."""
        used = dict(self._unstored)
        if used:
            await self._database.write(lambda connection: _note_use(connection, used))
            # Those of now, and not before: what cannot be written is written the next time.
            self._unstored = {key_id: at_us for key_id, at_us in self._unstored.items() if at_us > used.get(key_id, 0)}

    async def _add(self, p: Principal, known: _Known, request: Repeatable | None) -> None:
        await self._database.write(lambda connection: _add_once(connection, known, p, request))
        self._keys[known.hash] = known

    async def _remove(self, p: Principal, known: _Known) -> None:
        await self._database.write(lambda connection: _delete(connection, known, by=p.key_id))
        self._keys.pop(known.hash, None)

    def _of(self, p: Principal) -> _Known:
        known = next((known for known in self._keys.values() if known.id == p.key_id), None)
        if known is None:
            raise Unauthorized("this API key was revoked a moment ago")
        return known

    def _shown(self, known: _Known) -> Key:
        return Key(
            id=known.id,
            project=known.project,
            name=known.name,
            scopes=sorted(known.scopes),
            created_us=known.created_us,
            last_used_us=self._used_us.get(known.id),
            expires_us=known.expires_us,
            requests_per_minute=known.requests_per_minute,
            tokens_per_minute=known.tokens_per_minute,
        )


def fingerprint(key: str) -> str:
    """What is kept of a key."""
    # Keys are long and random, so a fast hash is enough and there is nothing to salt.
    return hashlib.sha256(key.encode()).hexdigest()


def _check_revocable(known: _Known) -> None:
    if known.name == DEVELOPMENT:
        raise Conflict("the development key is the file `api_key` of the data directory: replace that and start the server again", field="name")


def _administered(p: Principal, project: str | None) -> str:
    """The project whose keys are asked about. Whether another one exists is nothing that a key of this one is told."""
    p.require("admin")
    if project not in (None, p.project):
        p.require_server()
    return project or p.project


def _known(row: Row[Any]) -> _Known:
    scopes = frozenset(json.loads(row.scopes))
    limits = (row.requests_per_minute, row.tokens_per_minute)
    return _Known(row.id, row.project, row.name, row.hash, scopes, row.created_us, row.expires_us, *limits)


def _set_development_key(connection: Connection, key_hash: str) -> None:
    table = rows.api_key.c
    mine = (table.project == rows.DEFAULT_PROJECT) & (table.name == DEVELOPMENT)
    other = connection.execute(select(rows.api_key).where(table.hash == key_hash, ~mine)).one_or_none()
    if other is not None:
        # It may be in other hands, and the development key may do everything.
        raise Conflict(
            f"the development key is also key `{other.name}` of project `{other.project}`: choose another for this server", field="api_key"
        )
    connection.execute(delete(rows.api_key).where(mine, table.hash != key_hash))
    if connection.execute(select(table.id).where(mine)).first() is None:
        known = _Known(new_id("key"), rows.DEFAULT_PROJECT, DEVELOPMENT, key_hash, SCOPES, now_us(), None)
        _add(connection, known, by=known.id)


def _add_once(connection: Connection, known: _Known, p: Principal, request: Repeatable | None) -> None:
    if request is not None and was_done(connection, p, request):
        # The secret is stored nowhere, so nobody can be given it twice.
        what = f"key `{known.name}` of project `{known.project}` was made when this request came before, and its secret is shown once"
        raise Conflict(f"{what}: revoke it and make another, with a fresh `{request.header}`", field=request.header)
    _add(connection, known, by=p.key_id)
    if request is not None:
        note(connection, p, request, None)


def _add(connection: Connection, known: _Known, *, by: str) -> None:
    table = rows.api_key.c
    if connection.execute(select(table.id).where(table.project == known.project, table.name == known.name)).first() is not None:
        raise Conflict(f"project `{known.project}` has a key `{known.name}` already: revoke it first, or choose another name", field="name")
    if connection.execute(select(rows.project.c.id).where(rows.project.c.id == known.project)).first() is None:
        connection.execute(insert(rows.project).values(id=known.project, name=known.project, created_us=now_us()))
    connection.execute(insert(rows.api_key).values(known._asdict() | {"scopes": json.dumps(sorted(known.scopes))}))
    record_event(connection, known.project, "key.created", known.id, name=known.name, scopes=sorted(known.scopes), by=by)


def _delete(connection: Connection, known: _Known, *, by: str) -> None:
    connection.execute(delete(rows.api_key).where(rows.api_key.c.id == known.id))
    record_event(connection, known.project, "key.revoked", known.id, name=known.name, by=by)


def name_of(connection: Connection, p: Principal) -> str:
    """Of the caller's key; a job's process has none, and goes by its job."""
    found = connection.execute(select(rows.api_key.c.name).where(rows.api_key.c.id == p.key_id)).scalar_one_or_none()
    return found or p.key_id


def _note_use(connection: Connection, used: dict[str, int]) -> None:
    for key_id, at_us in used.items():
        connection.execute(update(rows.api_key).where(rows.api_key.c.id == key_id).values(last_used_us=at_us))

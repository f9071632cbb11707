"""Requests of `/api/v1` that change something and may come again, from a caller who got no answer.

What a request was answered is stored in the transaction that does what it asks. A repetition finds either both or neither, wherever the server died
and however many of them are in hand at once: the one writer does them one after the other, and whoever comes behind the first has its answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection, Select, bindparam, delete, insert, select

from bloomery.services.access.principal import Principal
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict
from bloomery.types.ids import now_us

HEADER: Final = "idempotency-key"
BELONGS: Final = "a key belongs to one path with its query, one body and the same `x-bloomery-` headers"
KEPT_S: Final = 86_400
LARGEST_ANSWER: Final = 1 << 18
"""Characters. Of one that is longer it is only known that it was given: a deployment shows all its revisions, and a copy for each adds up."""

Made = TypeVar("Made", bound=BaseModel)


@dataclass(frozen=True, eq=False, slots=True)
class Repeatable:
    """A request that may come again: the caller's key for it, a hash of what it asks for, and the header that the key came in."""

    key: str
    hash: str
    header: str = HEADER
    on_replay: Callable[[], object] = lambda: None
    """Called, on any thread, where what it asks for was done before, and it is answered what the first was."""


async def answer_before(database: Database, p: Principal, request: Repeatable | None, kind: type[Made]) -> Made | None:
    """What the request was answered when it came before. Asked ahead of work whose conditions may not hold any more, or that takes long."""
    if request is None:
        return None
    return await database.read(lambda connection: answered(connection, p, request, kind))


def answered(connection: Connection, p: Principal, request: Repeatable | None, kind: type[Made]) -> Made | None:
    """The same for who looks for more than that."""
    row = None if request is None else _row(connection, p, request)
    if request is None or row is None:
        return None
    if row.answer is None:
        raise _done_unseen(request, f"the answer is over the {LARGEST_ANSWER} characters that are kept")
    try:
        made = kind.model_validate_json(row.answer)
    except ValidationError:
        # Resources are closed, and this one was stored by a release that described it otherwise.
        raise _done_unseen(request, "the answer that another release of this server gave cannot be read") from None
    request.on_replay()
    return made


def once(p: Principal, request: Repeatable | None, kind: type[Made], change: Callable[[Connection], Made]) -> Callable[[Connection], Made]:
    """The change, which keeps its answer with the request; for one that was carried out it changes nothing and gives that answer."""
    if request is None:
        return change

    def changed_once(connection: Connection) -> Made:
        if (made := answered(connection, p, request, kind)) is not None:
            return made
        made = change(connection)
        note(connection, p, request, made.model_dump_json())
        return made

    return changed_once


def was_done(connection: Connection, p: Principal, request: Repeatable) -> bool:
    """Whether the request was carried out before; Conflict when its key was used for another one."""
    return _row(connection, p, request) is not None


def note(connection: Connection, p: Principal, request: Repeatable, answer: str | None) -> None:
    """The request was carried out. Without an answer it cannot be answered again."""
    kept = answer if answer is not None and len(answer) <= LARGEST_ANSWER else None
    # One of this name may be there that is too old to count.
    values = {"project": p.project, "key_id": p.key_id, "name": request.key, "request_hash": request.hash}
    connection.execute(_NOTE, values | {"answer": kept, "created_us": now_us()})


def forget_old(connection: Connection, now: int) -> None:
    """Drop what is older than requests are known."""
    connection.execute(delete(rows.answered).where(rows.answered.c.created_us < _since_us(now)))


def _done_unseen(request: Repeatable, why: str) -> Conflict:
    what = f"what is asked for with this `{request.header}` was done, and {why}"
    return Conflict(f"{what}: look at it with a GET, and take a fresh key for what is to be done again", field=request.header)


def _row(connection: Connection, p: Principal, request: Repeatable) -> Any:
    asked = {"project": p.project, "key_id": p.key_id, "name": request.key, "since": _since_us(now_us())}
    row = connection.execute(_STORED, asked).one_or_none()
    if row is not None and row.request_hash != request.hash:
        raise Conflict(f"`{request.header}` was used for another request: {BELONGS}, take a fresh one", field=request.header)
    return row


def _stored() -> Select[Any]:
    """Keys count within one API key."""
    table = rows.answered.c
    named = {"project": table.project, "key_id": table.key_id, "name": table.name}
    return select(rows.answered).where(*(column == bindparam(name) for name, column in named.items()), table.created_us >= bindparam("since"))


# Put together once: to do so takes longer than what they ask.
_STORED: Final = _stored()
_NOTE: Final = insert(rows.answered).prefix_with("OR REPLACE")


def _since_us(now: int) -> int:
    return now - KEPT_S * 1_000_000

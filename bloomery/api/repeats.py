"""Requests under `/api/v1` that change something and may be repeated: with the header `Idempotency-Key` each is carried out once.

Services store what they answered with what they changed (`services/access/repeats`), so a repetition finds it after the server died, too.
"""

from typing import Annotated

from fastapi import Depends, Header, Request

from bloomery.api.headers import answer_headers
from bloomery.api.idempotency import REPLAYED, check_key, hash_of_request
from bloomery.services.access.repeats import Repeatable
from bloomery.services.threads import off_loop

IdempotencyKey = Annotated[str | None, Header()]


async def again(request: Request, idempotency_key: IdempotencyKey = None) -> Repeatable | None:
    """The request as one that may come again, where its caller gave it a key."""
    if idempotency_key is None:
        return None
    check_key(idempotency_key)
    body = await request.body()
    return _repeatable(request, idempotency_key, await off_loop(len(body), hash_of_request, request.scope, body))


def again_of(request: Request, idempotency_key: str | None, digest: bytes) -> Repeatable | None:
    """The same of a body that is not in memory, by its hash."""
    if idempotency_key is None:
        return None
    check_key(idempotency_key)
    return _repeatable(request, idempotency_key, hash_of_request(request.scope, digest))


def _repeatable(request: Request, key: str, asked: bytes) -> Repeatable:
    added = answer_headers(request.scope)
    return Repeatable(key, asked.hex(), on_replay=lambda: added.append(lambda: {REPLAYED: "true"}))


Again = Annotated[Repeatable | None, Depends(again)]

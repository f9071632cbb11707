"""API keys: given out, listed without their secrets, taken back."""

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.services.access.principal import Allowance
from bloomery.types.keys import CreateKey, Key, NewKey
from bloomery.types.resources import Page

router = APIRouter(prefix="/keys", tags=["keys"])


@router.post("", status_code=201)
async def create(body: CreateKey, services: Svc, caller: Caller, request: Again) -> NewKey:
    """A fresh key; the answer is the only place where it is ever shown."""
    allowance, scopes = Allowance(body.requests_per_minute, body.tokens_per_minute), frozenset(body.scopes)
    return await services.auth.create(caller, body.name, scopes, project=body.project, ttl_s=body.ttl_s, allowance=allowance, request=request)


@router.get("")
async def list_all(services: Svc, caller: Caller, project: str | None = None, limit: Limit = 50, offset: Offset = 0) -> Page[Key]:
    """Keys of the caller's project, oldest first; an admin of the default project sees those of all, or of the one named."""
    return await services.auth.list(caller, project=project, limit=limit, offset=offset)


@router.delete("/{name}")
async def revoke(name: str, services: Svc, caller: Caller, project: str | None = None) -> Key:
    """Refuse a key from now on."""
    return await services.auth.revoke(caller, name, project=project)

"""Who a key belongs to: its exchange for a token that says so, and what the login of the `tinker` command asks."""

from typing import Any, Final

from fastapi import APIRouter, Request

from bloomery.api.credentials import presented_key
from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.services.access.identity import owner_of

_DIGITS: Final = 13
"""Of a key's id, the last and random ones: the contract wants a number, and JSON keeps 53 bits of one."""

router = APIRouter(route_class=TinkerRoute)


@router.post("/auth/token")
async def exchange(request: Request, services: Svc, caller: Caller) -> dict[str, str]:
    """A token that stands for the key for an hour."""
    return {"jwt": await services.identity.exchange(presented_key(request) or "")}


@router.get("/auth/apikey/me")
async def get_own_key(services: Svc, caller: Caller) -> dict[str, Any]:
    """What the presented key is."""
    key = await services.auth.mine(caller)
    owner = owner_of(key.project, key.name)
    return {
        "key_id": int(key.id[-_DIGITS:], 16),
        "name": key.name,
        "note": f"may {', '.join(key.scopes)}",
        "details": {"org_details": {"name": key.project}, "user_details": {"email": owner.email}},
    }


@router.delete("/auth/apikey/me")
async def delete_own_key(services: Svc, caller: Caller) -> dict[str, Any]:
    """Refuse the presented key from now on."""
    await services.auth.give_up(caller)
    return {}

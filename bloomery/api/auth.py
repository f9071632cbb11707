"""Who calls: the key of the request becomes a principal."""

from fastapi import Request

from bloomery.services.principal import Principal

_BEARER = "bearer "


async def caller(request: Request) -> Principal:
    """The principal behind `X-API-Key` or `Authorization: Bearer`."""
    principal: Principal = await request.app.state.services.auth.check(presented_key(request))
    return principal


def presented_key(request: Request) -> str | None:
    """The key as the caller sent it; `X-API-Key` wins."""
    if key := request.headers.get("x-api-key"):
        return key
    authorization = request.headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None

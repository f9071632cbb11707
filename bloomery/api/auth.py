"""Who calls: the key of a request becomes a principal, before anything else of the request is looked at."""

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.services.access.principal import Principal
from bloomery.types.errors import Unauthorized

_BEARER = "bearer "
KNOWN_CALLER = "bloomery.caller"
"""In the scope of a request that this process sends itself: whose it is. What comes over a socket writes nothing there."""


class Callers:
    """Notes who calls. A caller without a good key has nobody's ear: the body stays unread, and the route answers as its contract does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        if (known := scope.get(KNOWN_CALLER)) is not None:
            request.state.caller = known
            return await self._app(scope, receive, send)
        try:
            request.state.caller = await scope["app"].state.services.identity.check(presented_key(request))
        except Unauthorized as refusal:
            request.state.caller, receive = refusal, _without_body(receive)
        await self._app(scope, receive, send)


async def caller(request: Request) -> Principal:
    """The principal behind the key or token in `X-API-Key` or `Authorization: Bearer`."""
    found: Principal | Unauthorized = request.state.caller
    if isinstance(found, Unauthorized):
        raise found
    return found


def presented_key(request: Request) -> str | None:
    """The key as the caller sent it; `X-API-Key` wins."""
    if key := request.headers.get("x-api-key"):
        return key
    authorization = request.headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None


def _without_body(receive: Receive) -> Receive:
    told = False

    async def receive_nothing() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive_nothing

"""Who calls: the key of a request, or its login, becomes a principal before anything else of the request is looked at."""

from typing import Final

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.api.browser import caller_by_login, shown_login
from bloomery.api.credentials import presented_key
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.types.errors import Forbidden, Unauthorized

KNOWN_CALLER: Final = "bloomery.caller"
"""In the scope of a request that this process sends itself: whose it is. What comes over a socket writes nothing there."""
LOGIN: Final = "/api/v1/login"
"""Where browsers show a key, in the body."""


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
            request.state.caller = await who_calls(request)
        except (Forbidden, Unauthorized) as refusal:
            request.state.caller = refusal
            # But for who is about to say who he is.
            if (scope["method"], scope["path"]) != ("POST", LOGIN):
                receive = _without_body(receive)
        await self._app(scope, receive, send)


async def who_calls(request: Request) -> Principal:
    """The principal behind the key or token in `X-API-Key` or `Authorization: Bearer`, or without any behind the login in the cookie."""
    if (login := shown_login(request)) is not None:
        return await caller_by_login(request, login)
    services: Services = request.app.state.services
    return await services.identity.check(presented_key(request))


async def caller(request: Request) -> Principal:
    """Who calls, as it was found out when the request came."""
    found: Principal | Unauthorized | Forbidden = request.state.caller
    if not isinstance(found, Principal):
        raise found
    return found


def _without_body(receive: Receive) -> Receive:
    told = False

    async def receive_nothing() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive_nothing

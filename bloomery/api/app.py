"""The HTTP application: three contracts over one set of services, the page at `/`, and `/healthz`."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery import __version__
from bloomery.api import errors
from bloomery.api.auth import Callers
from bloomery.api.deps import Svc
from bloomery.api.routes import MAX_BODY_BYTES, bloomery, openai, tinker
from bloomery.services.core import Services
from bloomery.types.errors import InvalidInput
from bloomery.types.ids import new_id
from bloomery.ui import Asset, assets

SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_app(services: Services) -> FastAPI:
    """The whole HTTP surface over `services`; opening and closing them is the caller's business."""
    app = FastAPI(title="Bloomery", version=__version__, openapi_url="/api/v1/openapi.json", docs_url=None, redoc_url=None)
    app.state.services = services
    app.add_middleware(Callers)
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestId)
    errors.install(app)
    for router in (bloomery.router, tinker.router, tinker.oai.router, openai.router, _process_router(), _page_router()):
        app.include_router(router)
    return app


class RequestId:
    """Every response carries `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", new_id("request"))
            await send(message)

        await self._app(scope, receive, send_named if scope["type"] == "http" else send)


class BodyLimit:
    """A body that says it is too large is refused unread, in the caller's envelope; routers cut off those that do not say it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if not length.isascii() or not length.isdigit() or int(length) <= MAX_BODY_BYTES:
            return await self._app(scope, receive, send)
        refusal = InvalidInput(f"the body has {int(length) >> 20} MiB, at most {MAX_BODY_BYTES >> 20} are taken: send it in parts", field="body")
        await errors.respond(scope["path"], refusal)(scope, receive, send)


def _process_router() -> APIRouter:
    router = APIRouter()

    @router.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    async def healthz(services: Svc) -> JSONResponse:
        """200 once every engine answers, 503 with the names of those that do not yet."""
        waiting = [model.alias for model in services.models.all() if not model.ready]
        if waiting:
            return JSONResponse({"status": "starting", "waiting_for": waiting}, 503, headers={"retry-after": "1"})
        return JSONResponse({"status": "ok", "version": __version__})

    return router


def _page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, asset in assets().items():
        router.add_api_route(path, _serve(asset), methods=["GET", "HEAD"])
    return router


def _serve(asset: Asset) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(asset.content, media_type=asset.media_type, headers=SECURITY_HEADERS)

    return serve

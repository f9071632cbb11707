"""The HTTP application: three contracts over one set of services, the dashboard at `/`, and `/healthz`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Final

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST as METRICS_TYPE
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bloomery import __version__
from bloomery.api import errors
from bloomery.api.auth import LOGIN, Callers
from bloomery.api.deps import Caller, Svc
from bloomery.api.headers import AnswerHeaders
from bloomery.api.idempotency import Idempotent
from bloomery.api.in_process import ask
from bloomery.api.page import no_page, page_router
from bloomery.api.routes import FORMS, MAX_BODY_BYTES, bloomery, openai, tinker
from bloomery.api.routes.bloomery.login import MAX_BODY_BYTES as LOGIN_BODY_BYTES
from bloomery.api.routes.openai.requests import MAX_BODY_BYTES as OPENAI_BODY_BYTES
from bloomery.api.routes.tinker.futures import SampleFutures
from bloomery.api.routes.tinker.routed import KeptRouting
from bloomery.api.shortcut import Shortcut
from bloomery.services.core import Services
from bloomery.types.errors import TooLarge
from bloomery.ui import Asset, site

_DIGITS: Final = 18


def create_app(services: Services) -> FastAPI:
    """The whole HTTP surface over `services`; opening and closing them is the caller's business."""

    @asynccontextmanager
    async def answering_batches(app: FastAPI) -> AsyncIterator[None]:
        async with services.batch_runner.running(partial(ask, app)), _surface().lifespan_context(app):
            yield

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=answering_batches)
    app.state.services, app.state.document = services, Document(describe)
    app.state.sample_futures, app.state.kept_routing = SampleFutures(), KeptRouting()
    app.add_middleware(Idempotent, most_bytes=OPENAI_BODY_BYTES, standing=services.limits.headers, but_for=FORMS)
    app.add_middleware(Callers)
    app.add_middleware(BodyLimit)
    app.add_middleware(AnswerHeaders)
    errors.install(app, no_page(_site()))
    app.routes.extend(_surface().routes)
    return app


class Document:
    """The OpenAPI document. It takes long to make, so the first who asks for it has a thread do so, and everybody else is served meanwhile."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """As JSON."""
        if self._made is None:
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        # Who gives up leaves it to those who wait with him.
        return await asyncio.shield(self._made)


class BodyLimit:
    """A body that says it is too large is refused unread, in the caller's envelope; routers cut off those that do not say it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        # Further digits change nothing, and Python refuses to read thousands of them.
        told = int(length[:_DIGITS]) if length.isascii() and length.isdigit() else 0
        most = _most_bytes(scope["path"]) if scope["type"] == "http" else MAX_BODY_BYTES
        if told <= most:
            return await self._app(scope, receive, send)
        refusal = TooLarge(f"the body has {told >> 20} MiB, at most {most >> 20} are taken: send it in parts", field="body")
        if most == LOGIN_BODY_BYTES:
            refusal = TooLarge(f"the body has {told} bytes, at most {most} are taken: send the key alone", field="body")
        answer = tinker.refusal(Request(scope), refusal) if tinker.answers(scope) else errors.respond(scope["path"], refusal)
        await answer(scope, receive, send)


def _most_bytes(path: str) -> int:
    if path == LOGIN:
        return LOGIN_BODY_BYTES
    return OPENAI_BODY_BYTES if errors.speaks_openai(path) and not FORMS.fullmatch(path) else MAX_BODY_BYTES


@cache
def _surface() -> APIRouter:
    """All routes, which find their services by the request: what they take and give is worked out once, by the first application of a process."""
    surface = APIRouter()
    # They are tried in this order, and what is served has the least time to lose.
    for router in (openai.router, tinker.router, tinker.oai.router, bloomery.router, _process_router(), page_router(_site())):
        surface.include_router(router)
    surface.routes.insert(0, Shortcut([*surface.routes]))
    return surface


@cache
def _site() -> dict[str, Asset]:
    return site()


def describe() -> bytes:
    """What every route takes and gives, as an OpenAPI document in JSON."""
    return msgspec.json.encode(get_openapi(title="Bloomery", version=__version__, routes=_surface().routes))


def _process_router() -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.api_route("/api/v1/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
    async def openapi(request: Request) -> Response:
        """What every route takes and gives."""
        return Response(await request.app.state.document.get(), media_type="application/json")

    @router.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    async def healthz(services: Svc) -> JSONResponse:
        """200 once every engine answers, 503 with the names of those that do not yet; and of replicas which are to run, do, and stand still."""
        fleet = services.fleet
        replicas = {"wanted": sorted(fleet.wanted), "ready": fleet.ready, "silent": fleet.silent}
        runners = services.leases.runners
        waiting = [model.alias for model in services.models.all() if not model.ready]
        if waiting:
            return JSONResponse(
                {"status": "starting", "waiting_for": waiting, "replicas": replicas, "runners": runners}, 503, headers={"retry-after": "1"}
            )
        return JSONResponse({"status": "ok", "version": __version__, "replicas": replicas, "runners": runners})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(services: Svc, caller: Caller) -> Response:
        """What serving costs and how it goes, in Prometheus' text format."""
        caller.require("read")
        return Response(services.meters.exposition(), media_type=METRICS_TYPE)

    return router

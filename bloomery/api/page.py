"""The dashboard over HTTP: files that were read at the start, under a policy that lets in no script but their own."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from bloomery.api.errors import NoPage
from bloomery.ui import Asset

SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_NO_PAGES: Final = ("/api", "/v1", "/oai", "/ui", "/healthz", "/metrics")
"""What the address of something begins with that is for programs, whoever asks."""
_LASTING: Final = "public, max-age=31536000, immutable"
_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", re.IGNORECASE)


def page_router(site: Mapping[str, Asset]) -> APIRouter:
    """One route for each path, and none that looks at the disk: whatever else is asked for is not there."""
    router = APIRouter(include_in_schema=False)
    for path, asset in site.items():
        router.add_api_route(path, _serve(asset), methods=["GET", "HEAD"])
    return router


def no_page(site: Mapping[str, Asset]) -> NoPage:
    """What to answer to an address that there is not: to a browser that wants a page, one that says so; None to everybody else."""
    # The script that is the same for all pages says so, by the address.
    serve = _serve(site["/"], status=404)

    async def answer(request: Request) -> Response | None:
        path = request.url.path
        wants_page = request.method in ("GET", "HEAD") and "text/html" in request.headers.get("accept", "")
        if not wants_page or any(path == beginning or path.startswith(f"{beginning}/") for beginning in _NO_PAGES):
            return None
        return await serve(request)

    return answer


def _serve(asset: Asset, status: int = 200) -> Callable[[Request], Awaitable[Response]]:
    headers = {**SECURITY_HEADERS, "cache-control": _LASTING if asset.lasting else "no-cache", "vary": "accept-encoding"}

    async def serve(request: Request) -> Response:
        if asset.zipped is not None and _GZIP.search(request.headers.get("accept-encoding", "")):
            return Response(asset.zipped, status, media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})
        return Response(asset.content, status, media_type=asset.media_type, headers=headers)

    return serve

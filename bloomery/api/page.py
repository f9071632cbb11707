"""The dashboard over HTTP: files that were read at the start, under a policy that lets in no script but their own."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from bloomery.ui import Asset

SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_LASTING: Final = "public, max-age=31536000, immutable"
_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", re.IGNORECASE)


def page_router(site: Mapping[str, Asset]) -> APIRouter:
    """One route for each path, and none that looks at the disk: whatever else is asked for is not there."""
    router = APIRouter(include_in_schema=False)
    for path, asset in site.items():
        router.add_api_route(path, _serve(asset), methods=["GET", "HEAD"])
    return router


def _serve(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    headers = {**SECURITY_HEADERS, "cache-control": _LASTING if asset.lasting else "no-cache", "vary": "accept-encoding"}

    async def serve(request: Request) -> Response:
        if asset.zipped is not None and _GZIP.search(request.headers.get("accept-encoding", "")):
            return Response(asset.zipped, media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})
        return Response(asset.content, media_type=asset.media_type, headers=headers)

    return serve

"""Exported weights: addresses to download their files from, which need no key and work for an hour."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.times import shown_time

router = APIRouter(route_class=TinkerRoute)


@router.get("/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_weights_urls(run_id: str, name: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """An address for every file, under the host that the caller knows this server by."""
    offer = await services.external.offer(caller, run_id, name)
    urls = {file: str(request.url_for("download_external", token=offer.token, name=file)) for file in offer.names}
    return {"urls": urls, "expires": shown_time(offer.expires_s * 1_000_000)}


@router.api_route("/external_weights/{token}/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def download_external(token: str, name: str, services: Svc) -> StreamingResponse:
    """One file of an export."""
    file = await services.external.open(token, name)
    headers = {"content-length": str(file.size_bytes), "content-disposition": f'attachment; filename="{file.name}"'}
    return StreamingResponse(file.pieces(), media_type="application/octet-stream", headers=headers)

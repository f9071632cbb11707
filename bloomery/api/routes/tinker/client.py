"""What a client asks before it works: configuration, readiness, models; and the telemetry it reports."""

import logging
from typing import Any, Final

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker.bodies import Telemetry
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.types.errors import Unavailable

MIB: Final = 1 << 20

# The server is near: one request per training step however large, no compression, and buffers that never hold a step back.
# What the SDK may do differently one day by default is said too.
CONFIG: Final = {
    "fwdbwd_max_chunk_len": MIB,
    "fwdbwd_max_chunk_bytes_count": 64 * MIB,
    "fwdbwd_dispatch_bytes_semaphore_size": 256 * MIB,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    "sample_dispatch_bytes_semaphore_size": 64 * MIB,
    "inflight_response_bytes_semaphore_size": 256 * MIB,
    # A sample whose future an api restart has lost comes back through this retry.
    "sample_no_retries": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
}
DYNAMIC_CONFIG: Final = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
_LOUD: Final = ("ERROR", "CRITICAL")

log = logging.getLogger(__name__)
router = APIRouter(route_class=TinkerRoute)


@router.post("/client/config")
async def client_config(caller: Caller) -> dict[str, Any]:
    """Flags that the SDK reads once."""
    return dict(CONFIG)


@router.post("/client/dynamic_config")
async def client_dynamic_config(caller: Caller) -> dict[str, Any]:
    """Flags that the SDK reads again and again."""
    return dict(DYNAMIC_CONFIG)


@router.get("/healthz")
async def healthz(services: Svc) -> dict[str, str]:
    """Ready once every engine answers."""
    waiting = [model.alias for model in services.models.list() if not model.ready]
    if waiting:
        raise Unavailable(f"still starting: {', '.join(waiting)}")
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(services: Svc, caller: Caller) -> dict[str, Any]:
    """The base models, each trainable and sampleable."""
    models = [
        {"model_name": model.alias, "max_context_length": model.context, "trainable": True, "sampleable": True} for model in services.models.list()
    ]
    return {"supported_models": models}


@router.post("/telemetry")
async def telemetry(body: Telemetry, caller: Caller) -> dict[str, str]:
    """Errors that a client met go into the log, so that they can be seen beside the server's own."""
    for event in body.events:
        if event.get("severity") in _LOUD:
            log.warning("a client reports %.300r: %.500r", event.get("event_name") or event.get("event"), _gist(event))
    return {"status": "accepted"}


def _gist(event: dict[str, Any]) -> Any:
    # The rest of an event may hold the headers of a request, and so a key.
    data = event.get("event_data")
    return data.get("exception") if isinstance(data, dict) else event.get("error_message")

"""What a client asks before it works: configuration, readiness, models; and the telemetry it reports."""

import logging
from ipaddress import ip_address
from typing import Any, Final

from fastapi import APIRouter, Request

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker.bodies import Telemetry
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.types.checks import MAX_DATA
from bloomery.types.errors import Unavailable

MIB: Final = 1 << 20

# None of the requests that a batch is sent in is one that the door would refuse. What the SDK may do differently one day by default is said too.
CONFIG: Final = {
    "fwdbwd_max_chunk_len": MAX_DATA,
    "parallel_fwdbwd_chunks": True,
    "sample_dispatch_bytes_semaphore_size": 64 * MIB,
    "inflight_response_bytes_semaphore_size": 256 * MIB,
    # A sample whose future an api restart has lost comes back through this retry.
    "sample_no_retries": False,
    # Each of them holds a connection, and a process may often have a thousand files open. An engine samples 64 sequences at a time.
    "sample_max_concurrent_requests": 256,
    # One poll for all samples costs as much as a poll for each of so few, a single sample takes half as long again, and nobody wakes whoever still
    # waits when the client is closed.
    "sample_use_retrieve_futures": False,
    # Copies of a sampler that number themselves may choose the same number.
    "sample_join_sampling_session": True,
    # The key is sent once an hour, for a token; and the identity is read from that.
    "pjwt_auth_enabled": True,
}
# One request per training step of usual size, and buffers that never hold a step back.
NEAR: Final = {"fwdbwd_max_chunk_bytes_count": 64 * MIB, "fwdbwd_dispatch_bytes_semaphore_size": 256 * MIB, "proto_compress_fwdbwd": False}
# On a line of 2 Mbit/s all that is under way at a time arrives within the 120 s after which the SDK gives a request up and begins it anew.
FAR: Final = {"fwdbwd_max_chunk_bytes_count": 5_000_000, "fwdbwd_dispatch_bytes_semaphore_size": 20_000_000, "proto_compress_fwdbwd": True}
DYNAMIC_CONFIG: Final = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
MAX_LOGGED: Final = 20
"""Errors of one report that go into the log, which is everybody's."""
_LOUD: Final = ("ERROR", "CRITICAL")

log = logging.getLogger(__name__)
router = APIRouter(route_class=TinkerRoute)


@router.post("/client/config")
async def client_config(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """Flags that the SDK reads once. Batches are divided and compressed where they travel: on one machine that would only cost time."""
    return {**CONFIG, **(NEAR if _is_near(request) else FAR), "custom_loss_server_side": services.custom_losses.offered}


@router.post("/client/dynamic_config")
async def client_dynamic_config(caller: Caller) -> dict[str, Any]:
    """Flags that the SDK reads again and again."""
    return dict(DYNAMIC_CONFIG)


@router.get("/healthz")
async def healthz(services: Svc) -> dict[str, str]:
    """Ready once every engine answers."""
    waiting = [model.alias for model in services.models.all() if not model.ready]
    if waiting:
        raise Unavailable(f"still starting: {', '.join(waiting)}")
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(services: Svc, caller: Caller) -> dict[str, Any]:
    """The base models, each trainable and sampleable."""
    models = [
        {"model_name": model.alias, "max_context_length": model.context, "trainable": True, "sampleable": True}
        for model in services.models.list(caller)
    ]
    return {"supported_models": models}


@router.post("/telemetry")
async def telemetry(body: Telemetry, caller: Caller) -> dict[str, str]:
    """Errors that a client met go into the log, so that they can be seen beside the server's own."""
    loud = [event for event in body.events if event.get("severity") in _LOUD]
    for event in loud[:MAX_LOGGED]:
        log.warning("a client reports %.300r: %.500r", event.get("event_name") or event.get("event"), _gist(event))
    if len(loud) > MAX_LOGGED:
        log.warning("a client reports %d more errors, which are left out", len(loud) - MAX_LOGGED)
    return {"status": "accepted"}


def _gist(event: dict[str, Any]) -> Any:
    # The rest of an event may hold the headers of a request, and so a key.
    data = event.get("event_data")
    return data.get("exception") if isinstance(data, dict) else event.get("error_message")


def _is_near(request: Request) -> bool:
    """Whether the client is on this machine."""
    try:
        return request.client is None or ip_address(request.client.host).is_loopback
    except ValueError:
        return False

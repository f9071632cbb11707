"""Checkpoints that leave their run: published for other projects, or copied."""

from typing import Annotated, Any

from fastapi import APIRouter, Header

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.access import reader
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.names import model_name
from bloomery.services.weights.publishing import Destination, SessionSlot
from bloomery.types.errors import InvalidInput

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{folder}/{name}"
router = APIRouter(route_class=TinkerRoute)


@router.post(f"{CHECKPOINT}/publish")
async def publish(run_id: str, folder: str, name: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Let every project of this server read a checkpoint; again changes nothing."""
    await services.publishing.publish(caller, f"tinker://{run_id}/{folder}/{name}")
    return {}


@router.delete(f"{CHECKPOINT}/publish")
async def unpublish(run_id: str, folder: str, name: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Keep a checkpoint to its project again."""
    await services.publishing.unpublish(caller, f"tinker://{run_id}/{folder}/{name}")
    return {}


@router.post("/copy_weights")
async def copy_weights(
    body: bodies.CopyWeights,
    services: Svc,
    caller: Caller,
    x_idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header(max_length=4096)] = None,
) -> dict[str, str]:
    """Copy weights into a run that only holds them; repeated, the same copy."""
    match body.session_id, body.model_seq_id, body.destination_project_id:
        case str(session_id), int(number), None:
            await services.sessions.require_open(caller, session_id)
            to: SessionSlot | Destination = SessionSlot(session_id, number)
        case None, None, str(project):
            to = Destination(project, x_idempotency_key)
        case _:
            field = "destination_project_id"
            raise InvalidInput("copy into a project by `destination_project_id`, or into a session by `session_id` and `model_seq_id`", field=field)
    token = x_tinker_weights_access_token if body.weights_access_token is None else body.weights_access_token
    source = await services.checkpoints.find(await reader(services, caller, token), body.source_path)
    return {"tinker_path": await services.publishing.copy(caller, source, to, ttl_s=body.ttl_seconds, name_of=model_name)}

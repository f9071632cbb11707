"""Sessions: a client's life from its first request to its last."""

from typing import Any, Final

from fastapi import APIRouter, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.futures import Futures
from bloomery.api.routes.tinker.names import samples_of
from bloomery.services.principal import Principal
from bloomery.services.validate import check_labels
from bloomery.types.errors import NotSupported

MAX_PAGE: Final = 1000
_DISPLAY_NAME: Final = "bloomery.display_name"
"""Kept among the session's metadata, where no caller's own key begins like this."""

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_session")
async def create_session(body: bodies.CreateSession, services: Svc, caller: Caller) -> dict[str, Any]:
    """A client begins."""
    check_project(caller, body.project_id)
    metadata = dict(body.user_metadata or {})
    if body.display_name is not None:
        metadata[_DISPLAY_NAME] = body.display_name
    check_labels(None, metadata)
    session = await services.sessions.create(caller, tags=body.tags, user_metadata=metadata, sdk_version=body.sdk_version)
    return {"type": "create_session", "session_id": session.id}


@router.post("/session_heartbeat")
async def session_heartbeat(body: bodies.SessionRef, services: Svc, caller: Caller) -> dict[str, str]:
    """A client is still there; 410 tells one whose session was finished to stop."""
    await services.sessions.heartbeat(caller, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, body: bodies.FinishSession, services: Svc, caller: Caller, futures: Futures) -> dict[str, Any]:
    """A client ends, and the samples that it would have waited for; the first reason stays."""
    reason = body.reason.type or "unknown"
    await services.sessions.finish(caller, session_id, reason if body.detail is None else f"{reason}: {body.detail}")
    futures.cancel_all(samples_of(session_id), caller.project)
    return {}


@router.get("/sessions")
async def list_sessions(
    services: Svc, caller: Caller, limit: int = Query(20, ge=1, le=MAX_PAGE), offset: int = Query(0, ge=0, lt=1 << 63)
) -> dict[str, list[str]]:
    """Ids, newest first. A key sees its project, so what it owns and what it can reach are the same."""
    caller.require("read")
    return {"sessions": [session.id for session in await services.sessions.list(caller, limit=limit, offset=offset)]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """What a session made."""
    caller.require("read")
    session = await services.sessions.get(caller, session_id)
    metadata = dict(session.user_metadata)
    return {
        "display_name": metadata.pop(_DISPLAY_NAME, None),
        "user_metadata": metadata,
        "training_run_ids": list(await services.sessions.run_names(caller, session_id)),
        "sampler_ids": list(await services.sessions.samplers(caller, session_id)),
    }


def check_project(caller: Principal, project_id: str | None) -> None:
    """A key belongs to one project; naming another is a mistake or a wish for what is not offered yet."""
    if project_id not in (None, caller.project):
        raise NotSupported(f"`project_id` {project_id} is not this key's project `{caller.project}`: leave it out", field="project_id")

"""Sessions: a client's life from its first request to its last."""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.futures import Futures
from bloomery.api.routes.tinker.names import samples_of
from bloomery.api.routes.tinker.times import shown_time
from bloomery.services.access.identity import user_urn
from bloomery.services.access.principal import Principal
from bloomery.services.clients.session_search import Found, SessionCursor, SessionFilter
from bloomery.services.training.validate import check_labels
from bloomery.types.errors import Forbidden, NotSupported

MAX_PAGE: Final = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, lt=1 << 63)]
AccessScope = Literal["owned", "accessible"]
"""A key sees its project, so what it owns and what it can reach are the same."""

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_session")
async def create_session(body: bodies.CreateSession, services: Svc, caller: Caller) -> dict[str, Any]:
    """A client begins."""
    check_project(caller, body.project_id)
    metadata = body.user_metadata or {}
    check_labels(body.display_name, metadata)
    session = await services.sessions.create(
        caller, tags=body.tags, user_metadata=metadata, sdk_version=body.sdk_version, display_name=body.display_name
    )
    return {"type": "create_session", "session_id": session.id}


@router.post("/session_heartbeat")
async def session_heartbeat(body: bodies.SessionRef, services: Svc, caller: Caller) -> dict[str, str]:
    """A client is still there; 410 tells one whose session was finished to stop."""
    await services.sessions.heartbeat(caller, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, body: bodies.FinishSession, services: Svc, caller: Caller, futures: Futures) -> dict[str, Any]:
    """A client ends, and the samples that it would have waited for; the first reason stays."""
    reason = body.reason.type
    await services.sessions.finish(caller, session_id, reason if body.detail is None else f"{reason}: {body.detail}")
    futures.cancel_all(samples_of(session_id), caller.project)
    return {}


@router.get("/sessions")
async def list_sessions(
    services: Svc, caller: Caller, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned"
) -> dict[str, list[str]]:
    """Ids, newest first."""
    return {"sessions": [session.id for session in await services.sessions.list(caller, limit=limit, offset=offset)]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, services: Svc, caller: Caller, access_scope: AccessScope = "owned") -> dict[str, Any]:
    """What a session made."""
    session = await services.sessions.get(caller, session_id)
    return {
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
        "training_run_ids": list(await services.sessions.run_names(caller, session_id)),
        "sampler_ids": list(await services.sessions.samplers(caller, session_id)),
    }


@router.post("/sessions/search")
async def search_sessions(body: bodies.SearchSessions, services: Svc, caller: Caller) -> dict[str, Any]:
    """Sessions by name, metadata and status, newest first."""
    for project_id in body.project_ids or ():
        check_project(caller, project_id)
    if body.owner.type == "user" and user_urn(caller.project) not in body.owner.owner_urns:
        return {"sessions": []}
    cursor = body.cursor
    behind = None if cursor is None else SessionCursor(round(cursor.last_created_at.timestamp() * 1e6), cursor.last_session_id)
    page = await services.session_search.find(caller, _filter(body), behind=behind, limit=body.limit)
    shown = {"sessions": [_summary(found, caller) for found in page.sessions]}
    if page.next is None:
        return shown
    return shown | {"next_cursor": {"last_created_at": shown_time(page.next.created_us), "last_session_id": page.next.session_id}}


@router.put("/sessions/{session_id}/project")
async def move_session(session_id: str, body: bodies.MoveSession, services: Svc, caller: Caller) -> dict[str, Any]:
    """A session lies in the project of its key, and stays there."""
    await services.sessions.get(caller, session_id)
    if body.project_id != caller.project:
        raise Forbidden(
            f"session `{session_id}` stays in the project of the key that began it: begin one with a key of `{body.project_id}`",
            field="project_id",
        )
    return {}


def check_project(caller: Principal, project_id: str | None) -> None:
    """A key belongs to one project; naming another is a mistake or a wish for what is not offered yet."""
    if project_id not in (None, caller.project):
        raise NotSupported(f"`project_id` {project_id} is not this key's project `{caller.project}`: leave it out", field="project_id")


def _filter(body: bodies.SearchSessions) -> SessionFilter:
    words = tuple((body.display_name or "").split())
    if body.statuses is None:
        return SessionFilter(body.session_id, words, body.user_metadata)
    ended = [status.reasons for status in body.statuses if status.type == "client_finished"]
    reasons = None if None in ended else frozenset(reason for some in ended for reason in some or ())
    # Nobody cancels sessions here, and what fails is an operation: sessions of those states are none.
    active = any(status.type == "active" for status in body.statuses)
    return SessionFilter(body.session_id, words, body.user_metadata, active=active, finished=bool(ended), silent=False, reasons=reasons)


def _summary(found: Found, caller: Principal) -> dict[str, Any]:
    status: dict[str, Any] | None = {"type": "active"} if found.active else None
    if found.ended is not None:
        status = {"type": "client_finished", "reason": {"type": found.ended.reason}, "detail": found.ended.detail}
    return {
        "session_id": found.id,
        "created_at": shown_time(found.created_us),
        "owner": user_urn(caller.project),
        "project_id": caller.project,
        "status": status,
        "checkpoints_count": found.checkpoints,
        "checkpoint_storage_bytes": found.checkpoint_bytes,
        "display_name": found.display_name,
        "user_metadata": found.user_metadata,
    }

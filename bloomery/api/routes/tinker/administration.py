"""What an organization's administrators look at: the audit log, and what checkpoints take up. Nothing is billed here."""

from datetime import UTC, date, datetime
from typing import Any, Final, Literal

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.sessions import check_project
from bloomery.api.routes.tinker.times import shown_time
from bloomery.services.access.identity import user_urn
from bloomery.services.housekeeping.audit import Entry

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_ABOUT: Final = {"all": None, "checkpoints": "checkpoint", "projects": "project", "teams": "team", "organizations": "organization"}
_GIGABYTE: Final = 10**9
_DAY_US: Final = 86_400 * 1_000_000

router = APIRouter(route_class=TinkerRoute)


@router.get("/audit")
async def audit(services: Svc, caller: Caller, event_type: EventType = "all", day: date | None = None) -> dict[str, Any]:
    """What happened in the project on one day, UTC."""
    begins = datetime.combine(day or datetime.now(UTC).date(), datetime.min.time(), UTC)
    since_us = int(begins.timestamp()) * 1_000_000
    found = await services.audit.entries(caller, since_us=since_us, until_us=since_us + _DAY_US, about=_ABOUT[event_type])
    return {"entries": [_entry(entry) for entry in found]}


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_storage(services: Svc, caller: Caller, project_id: str | None = None) -> dict[str, Any]:
    """What the project's checkpoints take up; it costs nothing."""
    check_project(caller, project_id)
    stored = await services.audit.storage(caller)
    item = {
        "project_id": caller.project,
        "org_user_urn": user_urn(caller.project),
        "checkpoint_count": stored.checkpoints,
        "size_bytes": stored.size_bytes,
        "size_gigabytes": stored.size_bytes / _GIGABYTE,
    }
    return {"data": [item]}


def _entry(entry: Entry) -> dict[str, Any]:
    return {"timestamp": shown_time(entry.at_us), "event": entry.kind.replace(".", "_"), "event_details": {"subject": entry.subject, **entry.data}}

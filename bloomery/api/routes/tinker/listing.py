"""Looking at runs and at what they saved."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.sessions import check_project
from bloomery.api.routes.tinker.training import ADAMW
from bloomery.services.checkpoints import NAMED, CheckpointRow
from bloomery.services.core import Services
from bloomery.services.principal import Principal
from bloomery.services.run_rows import RunRow

MAX_PAGE: Final = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, lt=1 << 63)]

router = APIRouter(route_class=TinkerRoute)


@router.get("/training_runs")
async def list_training_runs(services: Svc, caller: Caller, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None) -> dict[str, Any]:
    """Runs, newest first."""
    check_project(caller, project_id)
    page = await services.runs.list(caller, limit=limit, offset=offset)
    runs = [await _training_run(services, caller, run) for run in page.runs]
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": page.total}}


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One run."""
    caller.require("read")
    return await _training_run(services, caller, await services.runs.get(caller, run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(run_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Everything that a run saved under a name, newest first."""
    run = await services.runs.get(caller, run_id)
    page = await services.checkpoints.list(caller, run_id=run.id, limit=MAX_PAGE)
    return {"checkpoints": [_checkpoint(row) for row in page.checkpoints]}


@router.get("/checkpoints")
async def list_checkpoints(services: Svc, caller: Caller, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Everything saved under a name, newest first."""
    page = await services.checkpoints.list(caller, limit=limit, offset=offset)
    cursor = {"offset": offset, "limit": limit, "total_count": page.total}
    return {"checkpoints": [_checkpoint(row) for row in page.checkpoints], "cursor": cursor}


@router.delete("/training_runs/{run_id}/checkpoints/{folder}/{name}")
async def delete_checkpoint(run_id: str, folder: str, name: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Forget a checkpoint."""
    await services.checkpoints.delete(caller, f"tinker://{run_id}/{folder}/{name}")
    return {}


@router.put("/training_runs/{run_id}/checkpoints/{folder}/{name}/ttl")
async def set_checkpoint_ttl(run_id: str, folder: str, name: str, body: bodies.TimeToLive, services: Svc, caller: Caller) -> dict[str, Any]:
    """Let a checkpoint expire, or keep it."""
    await services.checkpoints.set_ttl(caller, f"tinker://{run_id}/{folder}/{name}", body.ttl_seconds)
    return {}


@router.post("/weights_info")
async def weights_info(body: bodies.PathRef, services: Svc, caller: Caller) -> dict[str, Any]:
    """What saved weights belong to."""
    caller.require("read")
    found = await services.checkpoints.find(caller, body.tinker_path)
    run = await services.runs.get(caller, found.run_id)
    return {
        "base_model": run.base_model,
        "optimizer_config": {"type": ADAMW},
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "train_unembed": run.lora.train_unembed,
        "train_mlp": run.lora.train_mlp,
        "train_attn": run.lora.train_attn,
    }


async def _training_run(services: Services, caller: Principal, run: RunRow) -> dict[str, Any]:
    saved = (await services.checkpoints.list(caller, run_id=run.id, limit=MAX_PAGE)).checkpoints
    return {
        "training_run_id": run.tinker_id or run.id,
        "base_model": run.base_model,
        "model_owner": f"tml:organization_user:{run.project}",
        "is_lora": True,
        "corrupted": run.state == "broken",
        "lora_rank": run.lora.rank,
        "last_request_time": _time(run.updated_us),
        "last_checkpoint": next((_checkpoint(row) for row in saved if row.kind == NAMED), None),
        "last_sampler_checkpoint": next((_checkpoint(row) for row in saved if row.kind != NAMED), None),
        "user_metadata": dict(run.metadata),
    }


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    # Only what has a name is listed, so it has a path.
    path = row.path or ""
    return {
        "checkpoint_id": "/".join(path.split("/")[-2:]),
        "checkpoint_type": "training" if row.kind == NAMED else "sampler",
        "time": _time(row.created_us),
        "tinker_path": path,
        "size_bytes": row.size_bytes,
        "public": False,
        "user_metadata": dict(row.metadata),
        "expires_at": None if row.expires_us is None else _time(row.expires_us),
    }


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat()

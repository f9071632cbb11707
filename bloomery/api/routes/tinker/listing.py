"""Looking at runs and at what they saved."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.sessions import MAX_PAGE, AccessScope, Limit, Offset, check_project
from bloomery.api.routes.tinker.times import shown_time
from bloomery.api.routes.tinker.training import ADAMW
from bloomery.services.access.identity import user_urn
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.kinds import BROKEN, EXTERNAL, NAMED, SNAPSHOT
from bloomery.services.training.checkpoints import CheckpointRow
from bloomery.services.training.run_rows import RunRow

_TYPES: Final = {NAMED: "training", SNAPSHOT: "sampler", EXTERNAL: "external"}

router = APIRouter(route_class=TinkerRoute)


@router.get("/training_runs")
async def list_training_runs(
    services: Svc, caller: Caller, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned", project_id: str | None = None
) -> dict[str, Any]:
    """Runs, newest first."""
    check_project(caller, project_id)
    page = await services.runs.list(caller, limit=limit, offset=offset)
    return {
        "training_runs": await _training_runs(services, caller, page.runs),
        "cursor": {"offset": offset, "limit": limit, "total_count": page.total},
    }


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, services: Svc, caller: Caller, access_scope: AccessScope = "owned") -> dict[str, Any]:
    """One run."""
    (shown,) = await _training_runs(services, caller, [await services.runs.get(caller, run_id)])
    return shown


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(run_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Everything that a run saved under a name, newest first."""
    run = await services.runs.get(caller, run_id)
    saved: list[CheckpointRow] = []
    while True:
        page = await services.checkpoints.list(caller, run_id=run.id, limit=MAX_PAGE, offset=len(saved))
        saved += page.checkpoints
        if len(page.checkpoints) < MAX_PAGE:
            return {"checkpoints": [_checkpoint(row) for row in saved]}


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
    found = await services.checkpoints.find(caller, body.tinker_path)
    return {
        "base_model": found.base_model,
        "optimizer_config": {"type": ADAMW},
        "is_lora": found.lora.rank > 0,
        "lora_rank": found.lora.rank or None,
        "train_unembed": found.lora.train_unembed,
        "train_mlp": found.lora.train_mlp,
        "train_attn": found.lora.train_attn,
    }


async def _training_runs(services: Services, caller: Principal, runs: Sequence[RunRow]) -> list[dict[str, Any]]:
    latest = await services.checkpoints.latest(caller, [run.id for run in runs])
    return [_training_run(run, latest) for run in runs]


def _training_run(run: RunRow, latest: Mapping[tuple[str, str], CheckpointRow]) -> dict[str, Any]:
    checkpoint, sampler = (latest.get((run.id, kind)) for kind in (NAMED, SNAPSHOT))
    return {
        "training_run_id": run.tinker_id or run.id,
        "base_model": run.base_model,
        "model_owner": user_urn(run.project),
        "is_lora": run.lora.rank > 0,
        "corrupted": run.state == BROKEN,
        "lora_rank": run.lora.rank or None,
        "last_request_time": shown_time(run.updated_us),
        "last_checkpoint": None if checkpoint is None else _checkpoint(checkpoint),
        "last_sampler_checkpoint": None if sampler is None else _checkpoint(sampler),
        "user_metadata": dict(run.metadata),
    }


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    # Only what has a name is listed, so it has a path.
    path = row.path or ""
    return {
        "checkpoint_id": "/".join(path.split("/")[-2:]),
        "checkpoint_type": _TYPES[row.kind],
        "time": shown_time(row.created_us),
        "tinker_path": path,
        "size_bytes": row.size_bytes,
        "public": row.published_us is not None,
        "user_metadata": dict(row.metadata),
        "expires_at": None if row.expires_us is None else shown_time(row.expires_us),
    }

"""`/v1/models`: base models, deployments, and by its version or path any snapshot. What is ours to say is under the key `bloomery`."""

from typing import Any

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.services.core import Services
from bloomery.services.target import Target

router = APIRouter()


@router.get("/models")
async def list_models(services: Svc, caller: Caller) -> dict[str, Any]:
    """Everything with a name of its own."""
    bases = [base.alias for base in services.models.list(caller)]
    targets = [await services.sampling.resolve(caller, name) for name in [*bases, *await services.deployments.names(caller)]]
    return {"object": "list", "data": [_model(services, target) for target in targets]}


@router.get("/models/{name:path}")
async def get_model(name: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One model."""
    return _model(services, await services.sampling.resolve(caller, name))


def _model(services: Services, target: Target) -> dict[str, Any]:
    kind = "deployment" if target.deployment else "base" if target.weights.version == target.base_hash else "snapshot"
    ours = {
        "kind": kind,
        "version": target.weights.version,
        "base_hash": target.base_hash,
        "revision": target.revision,
        "context": services.models.size(target.base_hash).context,
    }
    # Names outlive what they stand for, so the time is that of this server.
    return {"id": target.display, "object": "model", "created": services.started_us // 1_000_000, "owned_by": "bloomery", "bloomery": ours}

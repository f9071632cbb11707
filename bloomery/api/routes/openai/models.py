"""`/v1/models`: base models, deployments, and by its version or path any snapshot. What is ours to say is under the key `bloomery`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.cursors import page_of
from bloomery.api.routes.openai.times import unix_s
from bloomery.services.core import Services
from bloomery.services.weights.target import Target
from bloomery.types.errors import InvalidInput

router = APIRouter()


@router.get("/models")
async def list_models(
    services: Svc,
    caller: Caller,
    after: str | None = None,
    limit: Annotated[int | None, Query(ge=1)] = None,
    order: Literal["asc", "desc"] = "asc",
) -> dict[str, Any]:
    """Everything with a name of its own that can be asked: base models, then deployments, oldest first; all of it unless `limit` says otherwise."""
    targets = await services.sampling.served(caller)
    return _cursor_page([_model(services, target) for target in (targets if order == "asc" else targets[::-1])], after, limit)


@router.get("/models/{name:path}")
async def get_model(name: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One model."""
    return _model(services, await services.sampling.resolve(caller, name))


def _cursor_page(items: Sequence[dict[str, Any]], after: str | None, limit: int | None) -> dict[str, Any]:
    """At most `limit` of these, behind the one with the id `after`."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidInput(f"`after` is `{after}`, which is not in the list: give the `last_id` of a page", field="after")
    rest = items[0 if after is None else ids.index(after) + 1 :]
    page = rest[:limit]
    return page_of(page, has_more=len(page) < len(rest))


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
    return {"id": target.display, "object": "model", "created": unix_s(services.started_us), "owned_by": "bloomery", "bloomery": ours}

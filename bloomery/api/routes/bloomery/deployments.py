"""Served names: create, promote, roll back."""

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.types.deployments import CreateDeployment, Deployment, Promote, Rollback, SetPrice, Swap
from bloomery.types.resources import Page

router = APIRouter(prefix="/deployments", tags=["deployments"])


@router.post("", status_code=201)
async def create(body: CreateDeployment, services: Svc, caller: Caller, request: Again) -> Deployment:
    """Serve a version under a new name."""
    return await services.cards.on(await services.deployments.create(caller, body.name, body.version, body.evidence, request=request))


@router.get("")
async def list_all(services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Deployment]:
    """All deployments, oldest first."""
    page = await services.deployments.list(caller, limit=limit, offset=offset)
    return page.model_copy(update={"data": [await services.cards.on(deployment) for deployment in page.data]})


@router.get("/{name}")
async def get(name: str, services: Svc, caller: Caller) -> Deployment:
    """One deployment with its revisions."""
    return await services.cards.on(await services.deployments.get(caller, name))


@router.get("/{name}/swaps")
async def swaps(name: str, services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Swap]:
    """Every time when another revision became live, the newest first."""
    return await services.deployments.swaps(caller, name, limit=limit, offset=offset)


@router.post("/{name}/promote")
async def promote(name: str, body: Promote, services: Svc, caller: Caller, request: Again) -> Deployment:
    """Make a version live as a new revision."""
    return await services.cards.on(await services.deployments.promote(caller, name, body.version, body.evidence, request=request))


@router.post("/{name}/rollback")
async def rollback(name: str, body: Rollback, services: Svc, caller: Caller, request: Again) -> Deployment:
    """Make an earlier revision live again."""
    return await services.cards.on(await services.deployments.rollback(caller, name, body.revision, request=request))


@router.post("/{name}/price")
async def set_price(name: str, body: SetPrice, services: Svc, caller: Caller, request: Again) -> Deployment:
    """Say what its tokens cost."""
    return await services.cards.on(await services.deployments.set_price(caller, name, body.price, request=request))

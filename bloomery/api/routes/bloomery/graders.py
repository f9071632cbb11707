"""Graders: make versions, look at them, run them."""

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.exchange import unless_gone
from bloomery.api.repeats import Again
from bloomery.api.routes import CLIENT_GONE
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.types.graders import (
    AttackGrader,
    CalibrateGrader,
    Calibration,
    CreateGrader,
    GraderAttack,
    GraderRun,
    GraderVersion,
    RunGrader,
    VersionNumber,
    WaiveGrader,
)
from bloomery.types.resources import Page

router = APIRouter(prefix="/graders", tags=["graders"])


@router.post("", status_code=201)
async def create(body: CreateGrader, services: Svc, caller: Caller, request: Again) -> GraderVersion:
    """A version under a name; the same grader again is the version that is there."""
    return await services.graders.create(caller, body, request=request)


@router.get("")
async def list_all(services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[GraderVersion]:
    """The newest version of every grader, by name."""
    return await services.graders.list(caller, limit=limit, offset=offset)


@router.get("/{name}")
async def get(name: str, services: Svc, caller: Caller, version: VersionNumber | None = None) -> GraderVersion:
    """A version of a grader; the newest, unless another is named."""
    return await services.graders.get(caller, name, version)


@router.get("/{name}/versions")
async def versions(name: str, services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[GraderVersion]:
    """All versions of a grader, oldest first."""
    return await services.graders.versions(caller, name, limit=limit, offset=offset)


@router.post("/{name}/run", response_model=GraderRun)
async def run(name: str, body: RunGrader, services: Svc, caller: Caller, request: Request) -> GraderRun | Response:
    """What a grader says of these rows."""
    found = await unless_gone(request.receive, services.graders.run(caller, name, body))
    return Response(status_code=CLIENT_GONE) if found is None else found


@router.post("/{name}/attack", response_model=GraderAttack)
async def attack(name: str, body: AttackGrader, services: Svc, caller: Caller, request: Request) -> GraderAttack | Response:
    """Whether a grader pays without competence on these rows, or on prompts of a data set."""
    found = await unless_gone(request.receive, services.attacks.attack(caller, name, body))
    return Response(status_code=CLIENT_GONE) if found is None else found


@router.get("/{name}/attacks")
async def attacks(
    name: str, services: Svc, caller: Caller, version: VersionNumber | None = None, limit: Limit = 50, offset: Offset = 0
) -> Page[GraderAttack]:
    """What came of attacks of a version on data sets, latest first."""
    return await services.attacks.list(caller, name, version=version, limit=limit, offset=offset)


@router.post("/{name}/waive")
async def waive(name: str, body: WaiveGrader, services: Svc, caller: Caller, request: Again) -> GraderVersion:
    """Have jobs take a version whatever attacks find."""
    return await services.graders.waive(caller, name, body, request=request)


@router.post("/{name}/calibrations", status_code=201, response_model=Calibration)
async def calibrate(name: str, body: CalibrateGrader, services: Svc, caller: Caller, again: Again, request: Request) -> Calibration | Response:
    """The card of a version, by what people say of these outputs."""
    found = await unless_gone(request.receive, services.calibrations.calibrate(caller, name, body, request=again))
    return Response(status_code=CLIENT_GONE) if found is None else found


@router.get("/{name}/calibrations")
async def calibrations(
    name: str, services: Svc, caller: Caller, version: VersionNumber | None = None, limit: Limit = 50, offset: Offset = 0
) -> Page[Calibration]:
    """Cards of a version, latest first."""
    return await services.calibrations.list(caller, name, version=version, limit=limit, offset=offset)

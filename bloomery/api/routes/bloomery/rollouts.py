"""Rollouts of a run's steps: recorded as msgpack by whoever trains, read as JSON."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from bloomery.api.deps import Caller, Svc
from bloomery.api.exchange import read_bytes
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.api.routes.bloomery.runs import BYTES, require_msgpack
from bloomery.services.training.rollouts import Order
from bloomery.types.resources import Page
from bloomery.types.rollouts import MAX_STEP, MAX_STEP_BYTES, RolloutFilter, RolloutPage, RolloutStep

JSONL: Final = "application/jsonl"
ROOM: Final = "leave groups out, and count them in `left_out`"
Step = Annotated[int, Path(ge=0, le=MAX_STEP)]
Few = Annotated[int, Query(ge=1, le=100)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]
From = Annotated[int | None, Query(alias="from", ge=0, le=MAX_STEP)]
To = Annotated[int | None, Query(alias="to", ge=0, le=MAX_STEP)]

router = APIRouter(prefix="/runs/{run_id}/rollouts", tags=["runs"])


async def wanted(
    min_reward: Reward = None,
    max_reward: Reward = None,
    trained: bool | None = None,
    search: Annotated[str | None, Query(min_length=1, max_length=1024)] = None,
    group: Annotated[int | None, Query(ge=0, lt=1 << 53)] = None,
) -> RolloutFilter:
    """What a query says of the rollouts that it wants."""
    return RolloutFilter(min_reward=min_reward, max_reward=max_reward, trained=trained, search=search, group=group)


Wanted = Annotated[RolloutFilter, Depends(wanted)]


@router.get("")
async def steps(run_id: str, services: Svc, caller: Caller, order: Order = "newest", limit: Limit = 50, offset: Offset = 0) -> Page[RolloutStep]:
    """Steps of a run whose rollouts are kept, and what came of them."""
    return await services.rollouts.steps(caller, run_id, order=order, limit=limit, offset=offset)


@router.get("/export", response_class=StreamingResponse, responses={200: {"content": {JSONL: {"schema": {"type": "string"}}}}})
async def export(run_id: str, services: Svc, caller: Caller, which: Wanted, first: From = None, last: To = None) -> StreamingResponse:
    """JSON Lines: one for each rollout of the steps `from` one `to` another, with prompt, answer, tokens and rewards."""
    lines = await services.rollouts.export(caller, run_id, which, first=first, last=last)
    return StreamingResponse(lines, media_type=JSONL, headers={"content-disposition": 'attachment; filename="rollouts.jsonl"'})


@router.get("/{step}", response_model=RolloutPage)
async def groups(run_id: str, step: Step, services: Svc, caller: Caller, which: Wanted, limit: Few = 10, offset: Offset = 0) -> Response:
    """The rollouts of a step by group, with texts, log-probabilities, advantages and versions token by token."""
    found = await services.rollouts.groups(caller, run_id, step, which, limit=limit, offset=offset)
    return Response(found, media_type="application/json")


@router.post("/{step}", status_code=201, openapi_extra={"requestBody": {"required": True, **BYTES}})
async def record(run_id: str, step: Step, request: Request, services: Svc, caller: Caller) -> RolloutStep:
    """Keep a `RecordedStep` as msgpack. The same again changes nothing, another one for the same step is a 409."""
    require_msgpack(request)
    return await services.rollouts.add(caller, run_id, step, await read_bytes(request, MAX_STEP_BYTES, ROOM))

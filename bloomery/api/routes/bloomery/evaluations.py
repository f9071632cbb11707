"""Evaluations: made, looked at item by item, compared, ended."""

from typing import Annotated

from fastapi import APIRouter, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.services.evaluations.paired import PairsWanted
from bloomery.types.evaluations import Evaluation, EvaluationItems, EvaluationSpec, EvaluationState, ItemStatus, Leaderboard
from bloomery.types.graders import VersionNumber
from bloomery.types.paired import PairedRows, PairOrder, PairShow
from bloomery.types.resources import Page, Split

After = Annotated[int, Query(ge=-1, lt=1 << 63)]
router = APIRouter(tags=["evaluations"])


@router.post("/evaluations", status_code=201)
async def create(body: EvaluationSpec, services: Svc, caller: Caller, request: Again) -> Evaluation:
    """An evaluation, which waits for its turn."""
    return await services.evaluations.create(caller, body, request=request)


@router.get("/evaluations")
async def list_all(services: Svc, caller: Caller, state: EvaluationState | None = None, limit: Limit = 50, offset: Offset = 0) -> Page[Evaluation]:
    """Evaluations, newest first."""
    return await services.evaluations.list(caller, state=state, limit=limit, offset=offset)


@router.get("/evaluations/{evaluation}")
async def get(evaluation: str, services: Svc, caller: Caller) -> Evaluation:
    """One, by its id or name."""
    return await services.evaluations.get(caller, evaluation)


@router.get("/evaluations/{evaluation}/items")
async def items(
    evaluation: str,
    services: Svc,
    caller: Caller,
    after: After = -1,
    limit: Limit = 50,
    status: ItemStatus | None = None,
    model: str | None = None,
) -> EvaluationItems:
    """Answers with their scores behind the number `after`."""
    return await services.evaluations.items(caller, evaluation, after=after, limit=limit, status=status, model=model)


@router.get("/evaluations/{evaluation}/pairs")
async def pairs(
    evaluation: str,
    services: Svc,
    caller: Caller,
    model: str | None = None,
    other: str | None = None,
    against: str | None = None,
    grader: str | None = None,
    show: PairShow = "all",
    order: PairOrder = "apart",
    limit: Limit = 50,
    offset: Offset = 0,
) -> PairedRows:
    """Two models on the same rows, of one evaluation or of two: where they differ, and how sure that is."""
    wanted = PairsWanted(model=model, other=other, against=against, grader=grader, show=show, order=order)
    return await services.pairs.compare(caller, evaluation, wanted, limit=limit, offset=offset)


@router.post("/evaluations/{evaluation}/cancel")
async def cancel(evaluation: str, services: Svc, caller: Caller, request: Again) -> Evaluation:
    """End it; what was answered and scored stays."""
    return await services.evaluations.cancel(caller, evaluation, request=request)


@router.delete("/evaluations/{evaluation}", status_code=204)
async def delete(evaluation: str, services: Svc, caller: Caller) -> None:
    """Forget one that has ended, with all its items."""
    await services.evaluations.delete(caller, evaluation)


@router.get("/leaderboard")
async def leaderboard(
    dataset: str,
    grader: str,
    services: Svc,
    caller: Caller,
    version: str | None = None,
    grader_version: VersionNumber | None = None,
    split: Split = "eval",
) -> Leaderboard:
    """Models by what a grader says of their answers to the rows of a version, best first."""
    return await services.evaluations.leaderboard(caller, dataset, grader, version=version, grader_version=grader_version, split=split)

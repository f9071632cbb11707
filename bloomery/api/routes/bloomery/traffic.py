"""Recorded traffic and the feedback on it."""

from typing import Annotated

from fastapi import APIRouter, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.services.data.span_rows import SpanKind
from bloomery.types.resources import Feedback, GiveFeedback, Page, Span, SpanDetail, TimeUs

_ALL = 500
Kinds = Annotated[tuple[SpanKind, ...], Query()]
"""Repeated: `kind=chat&kind=completion`."""

router = APIRouter(tags=["traffic"])


@router.get("/spans")
async def list_spans(
    services: Svc,
    caller: Caller,
    deployment: str | None = None,
    episode: str | None = None,
    kind: Kinds = (),
    since_us: TimeUs | None = None,
    until_us: TimeUs | None = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> Page[Span]:
    """Recorded inferences without their bodies, newest first."""
    return await services.traffic.list(
        caller, deployment=deployment, episode=episode, kinds=kind, since_us=since_us, until_us=until_us, limit=limit, offset=offset
    )


@router.get("/spans/{span_id}")
async def get_span(span_id: str, services: Svc, caller: Caller) -> SpanDetail:
    """One inference with its body and its feedback, newest first."""
    span = await services.traffic.get(caller, span_id)
    body = await services.traffic.body(caller, span_id)
    given = await services.feedback.list(caller, target=span_id, limit=_ALL)
    return SpanDetail(span=span, body=body, feedback=given.data)


@router.post("/feedback", status_code=201)
async def give_feedback(body: GiveFeedback, services: Svc, caller: Caller, request: Again) -> Feedback:
    """Judge a completion or an episode by its id."""
    return await services.feedback.give(caller, body, request=request)


@router.get("/feedback")
async def list_feedback(services: Svc, caller: Caller, target: str | None = None, limit: Limit = 50, offset: Offset = 0) -> Page[Feedback]:
    """Judgements, newest first."""
    return await services.feedback.list(caller, target=target, limit=limit, offset=offset)

"""Recorded traffic and the feedback on it."""

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.services.core import Services
from bloomery.services.data.span_filter import SpanFilter
from bloomery.types.resources import Feedback, GiveFeedback, Page, Span, SpanDetail, TimeUs
from bloomery.types.traffic import SpanKind, SpanOrder, SpanStatus, TrafficReport

_ALL = 500
Kinds = Annotated[tuple[SpanKind, ...], Query()]
"""Repeated: `kind=chat&kind=completion`."""

router = APIRouter(tags=["traffic"])


def _base_hash(services: Services, name: str) -> str:
    """Of a base by its name or hash; requests to one that is served no more are found by its hash."""
    if services.models.named(name) is None and re.fullmatch(r"[0-9a-f]{32}", name):
        return name
    return services.models.resolve(name).base_hash


async def _filter(
    services: Svc,
    deployment: str | None = None,
    base_model: str | None = None,
    episode: str | None = None,
    kind: Kinds = (),
    status: SpanStatus | None = None,
    version: str | None = None,
    since_us: TimeUs | None = None,
    until_us: TimeUs | None = None,
    min_cost_usd: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
) -> SpanFilter:
    return SpanFilter(
        deployment=deployment,
        base=None if base_model is None else _base_hash(services, base_model),
        episode=episode,
        kinds=kind,
        status=status,
        version=version,
        since_us=since_us,
        until_us=until_us,
        min_cost_usd=min_cost_usd,
    )


Wanted = Annotated[SpanFilter, Depends(_filter)]


@router.get("/spans")
async def list_spans(services: Svc, caller: Caller, wanted: Wanted, order: SpanOrder = "newest", limit: Limit = 50, offset: Offset = 0) -> Page[Span]:
    """Recorded inferences without their bodies."""
    return await services.traffic.list(caller, wanted, order=order, limit=limit, offset=offset)


@router.get("/spans/totals")
async def totals(services: Svc, caller: Caller, wanted: Wanted) -> TrafficReport:
    """What they come to: requests, tokens, time and cost."""
    return await services.traffic.totals(caller, wanted)


@router.get("/spans/{span_id}")
async def get_span(span_id: str, services: Svc, caller: Caller) -> SpanDetail:
    """One inference with its body, what its tokens say, and its feedback, newest first."""
    span = await services.traffic.get(caller, span_id)
    body = await services.traffic.body(caller, span_id)
    texts = await services.spelling.of(span.base_hash, body)
    given = await services.feedback.list(caller, target=span_id, limit=_ALL)
    return SpanDetail(span=span, body=body, texts=texts, feedback=given.data)


@router.post("/feedback", status_code=201)
async def give_feedback(body: GiveFeedback, services: Svc, caller: Caller, request: Again) -> Feedback:
    """Judge a completion or an episode by its id."""
    return await services.feedback.give(caller, body, request=request)


@router.get("/feedback")
async def list_feedback(services: Svc, caller: Caller, target: str | None = None, limit: Limit = 50, offset: Offset = 0) -> Page[Feedback]:
    """Judgements, newest first."""
    return await services.feedback.list(caller, target=target, limit=limit, offset=offset)

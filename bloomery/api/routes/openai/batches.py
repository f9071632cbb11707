"""`/v1/batches`: files of requests, each answered as if it had been sent alone, when there is time."""

import re
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.closed import Closed, checked
from bloomery.api.routes.openai.cursors import page_of
from bloomery.api.routes.openai.http import read_request
from bloomery.api.routes.openai.requests import parse
from bloomery.api.routes.openai.shapes import body_of
from bloomery.api.routes.openai.times import unix_s
from bloomery.types.batches import MAX_WINDOW_H, Batch, BatchState, NewBatch
from bloomery.types.errors import InvalidInput, NotSupported, shown

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,2})h", re.ASCII)
_NAMES: Final = {"input_file": "input_file_id", "output_life_s": "output_expires_after"}
_ENDS: Final = (BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED)
router = APIRouter(prefix="/batches")


class OutputExpiresAfter(Closed, frozen=True, kw_only=True):
    """When its files are deleted."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(Closed, frozen=True, kw_only=True):
    """Body of a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


@router.post("", openapi_extra=body_of(CreateBatch))
async def create(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """A batch, whose file is looked at next."""
    _, asked = await read_request(request, _asked)
    return _shown(await services.batches.create(caller, asked))


@router.get("")
async def list_batches(services: Svc, caller: Caller, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> dict[str, Any]:
    """Batches, newest first."""
    page = await services.batches.list(caller, after=after, limit=limit)
    return page_of(list(map(_shown, page.data)), has_more=page.has_more)


@router.get("/{batch}")
async def get(batch: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One batch."""
    return _shown(await services.batches.get(caller, batch))


@router.post("/{batch}/cancel")
async def cancel(batch: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Answer no more of it; what was answered is kept."""
    return _shown(await services.batches.cancel(caller, batch))


def _asked(body: dict[str, Any]) -> NewBatch:
    asked = parse(body, CreateBatch, {})
    if asked.endpoint not in ENDPOINTS:
        offered = ", ".join(f"`{endpoint}`" for endpoint in ENDPOINTS)
        raise NotSupported(f"`endpoint` is `{shown(asked.endpoint)}`: batches are answered for {offered}", field="endpoint")
    window = _WINDOW.fullmatch(asked.completion_window)
    if window is None or int(window[1]) > MAX_WINDOW_H:
        problem = f"`completion_window` is hours, `24h` or any other number to {MAX_WINDOW_H}"
        raise InvalidInput(f"{problem}, not `{shown(asked.completion_window)}`", field="completion_window")
    values = {"input_file": asked.input_file_id, "endpoint": asked.endpoint, "window_h": int(window[1]), "metadata": asked.metadata}
    life_s = None if asked.output_expires_after is None else asked.output_expires_after.seconds
    return checked(NewBatch, {**values, "output_life_s": life_s}, _NAMES)


def _shown(batch: Batch) -> dict[str, Any]:
    asked, counts = batch.asked, batch.counts
    at = {
        f"{state}_at": unix_s(batch.times_us.get(state)) for state in (BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING, *_ENDS)
    }
    problems = [{"code": each.code, "line": each.line, "message": each.message, "param": each.param} for each in batch.problems]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": asked.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": asked.input_file,
        "completion_window": f"{asked.window_h}h",
        "status": batch.state,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": unix_s(batch.created_us),
        "expires_at": unix_s(batch.expires_us),
        **at,
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "metadata": asked.metadata,
    }

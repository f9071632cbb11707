"""Training runs: created with JSON, driven by numbered msgpack operations, asked for results.

What saves or loads is named in JSON: under which keys it lies is the server's business.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3
from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import JSONResponse, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.meaning import hash_of, hash_of_named
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable
from bloomery.services.core import Services
from bloomery.services.kinds import NAMED, SNAPSHOT
from bloomery.services.serving.sampling import draw_seed
from bloomery.services.threads import off_loop
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import ForwardBackward, ForwardBackwardResult, LoraSpec, OptimStep
from bloomery.types.resources import Checkpoint, CreateRun, LoadFrom, Page, Run, RunMetrics, SaveCheckpointAs, SaveSnapshotAs, Submitted, Waiting
from bloomery.types.wire import encode

MSGPACK: Final = "application/msgpack"
MAX_WAIT_S: Final = 30.0
BYTES: Final[dict[str, Any]] = {"content": {MSGPACK: {"schema": {"type": "string", "format": "binary"}}}}
"""A body of msgpack, which the published document has no words for."""
_operations: Final[msgspec.msgpack.Decoder[ForwardBackward | OptimStep]] = msgspec.msgpack.Decoder(ForwardBackward | OptimStep)

Seq = Annotated[int, Path(ge=0, lt=1 << 63)]
After = Annotated[int, Query(ge=-1, lt=1 << 63)]
OWN_HEADER: Final = "x-idempotency-key"
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=256)]
OPERATION: Final = "/runs/{run_id}/operations/{seq}"
router = APIRouter(tags=["runs"])


@router.post("/runs", status_code=201)
async def create(body: CreateRun, services: Svc, caller: Caller, request: Again, x_idempotency_key: IdempotencyKey = None) -> Run:
    """Create a run; training starts when its first operation arrives. Repeated under the same key, the same run."""
    options = body.model_dump(exclude={"base_model", "name", "metadata", "seed"})
    lora = LoraSpec(**options, seed=draw_seed(body.seed))
    known = _known_by_meaning(body, request, x_idempotency_key)
    run = await services.runs.create(caller, base_model=body.base_model, lora=lora, metadata=body.metadata, name=body.name, request=known)
    return run.shown()


@router.get("/runs")
async def list_all(services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Run]:
    """Runs, newest first."""
    page = await services.runs.list(caller, limit=limit, offset=offset)
    return Page(data=[run.shown() for run in page.runs], offset=offset, has_more=offset + len(page.runs) < page.total)


@router.get("/runs/{run_id}")
async def get(run_id: str, services: Svc, caller: Caller) -> Run:
    """One run."""
    return (await services.runs.get(caller, run_id)).shown()


@router.get("/runs/{run_id}/metrics")
async def metrics(run_id: str, services: Svc, caller: Caller, after: After = -1) -> RunMetrics:
    """Metrics of the operations behind number `after`."""
    run = await services.runs.get(caller, run_id)
    return await services.run_metrics.series(caller, run.id, after=after)


@router.get("/runs/{run_id}/checkpoints")
async def checkpoints(run_id: str, services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Checkpoint]:
    """Named checkpoints and snapshots of a run, newest first."""
    run = await services.runs.get(caller, run_id)
    return await _saved(services, caller, offset=offset, run_id=run.id, limit=limit)


@router.get("/snapshots")
async def snapshots(services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Checkpoint]:
    """Named snapshots of all runs, newest first."""
    return await _saved(services, caller, offset=offset, kind=SNAPSHOT, limit=limit)


@router.post(OPERATION, status_code=202, openapi_extra={"requestBody": {"required": True, **BYTES}})
async def submit(run_id: str, seq: Seq, request: Request, services: Svc, caller: Caller) -> Submitted:
    """Submit a `ForwardBackward` or `OptimStep` as msgpack. Numbers have no gaps; the same again changes nothing, another body is a 409."""
    require_msgpack(request)
    payload = await request.body()
    operation = await off_loop(len(payload), _decode, payload)
    if isinstance(operation, ForwardBackward) and operation.custom is not None:
        services.custom_losses.require_offered()
    asked = await off_loop(len(payload), hash_of, operation)
    await services.runs.submit(caller, run_id, seq, operation, request=asked)
    return Submitted(run_id=run_id, seq=seq)


@router.post(f"{OPERATION}/checkpoint", status_code=202)
async def save_checkpoint(run_id: str, seq: Seq, body: SaveCheckpointAs, services: Svc, caller: Caller) -> Submitted:
    """Keep the resumable state under a name."""
    await services.runs.checkpoint(caller, run_id, seq, body.name, request=hash_of_named("checkpoint", body))
    return Submitted(run_id=run_id, seq=seq)


@router.post(f"{OPERATION}/snapshot", status_code=202)
async def save_snapshot(run_id: str, seq: Seq, body: SaveSnapshotAs, services: Svc, caller: Caller) -> Submitted:
    """Publish the weights for sampling."""
    await services.runs.snapshot(caller, run_id, seq, body.name, request=hash_of_named("snapshot", body))
    return Submitted(run_id=run_id, seq=seq)


@router.post(f"{OPERATION}/load", status_code=202)
async def load(run_id: str, seq: Seq, body: LoadFrom, services: Svc, caller: Caller) -> Submitted:
    """Begin where a named checkpoint ended; the first operation of a run only."""
    source = await services.checkpoints.named(caller, body.run_id, NAMED, body.name)
    await services.runs.load(caller, run_id, seq, source, optimizer=body.optimizer, request=hash_of_named("load", body))
    return Submitted(run_id=run_id, seq=seq)


@router.get(OPERATION, response_class=Response, responses={200: BYTES, 202: {"description": "No result yet", "model": Waiting}})
async def result(
    run_id: str, seq: Seq, services: Svc, caller: Caller, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0
) -> Response:
    """200 with the result as msgpack (of a failed operation too), or 202 with who is waited for while there is none after `wait` seconds."""
    found = await services.runs.result(caller, run_id, seq, wait)
    if found is None:
        return JSONResponse(Waiting(waiting_for=await services.runs.waiting_for(caller, run_id)).model_dump(), 202)
    size_bytes = found.output_bytes if isinstance(found, ForwardBackwardResult) else 0
    return Response(await off_loop(size_bytes, encode, found), media_type=MSGPACK)


async def _saved(services: Services, caller: Principal, *, offset: int, **choice: Any) -> Page[Checkpoint]:
    page = await services.checkpoints.list(caller, offset=offset, **choice)
    shown = [saved.shown() for saved in page.checkpoints]
    return Page(data=shown, offset=offset, has_more=offset + len(shown) < page.total)


def _known_by_meaning(body: CreateRun, request: Repeatable | None, own_key: str | None) -> Repeatable | None:
    """A run is found again by what its body means, under either header, as long as it is there."""
    meaning = blake3(json.dumps(body.model_dump(), sort_keys=True).encode()).hexdigest()
    if request is None:
        return None if own_key is None else Repeatable(own_key, meaning, OWN_HEADER)
    if own_key not in (None, request.key):
        raise InvalidInput(f"`{request.header}` and `{OWN_HEADER}` differ: give one of them", field=request.header)
    return replace(request, hash=meaning)


def require_msgpack(request: Request) -> None:
    """As which the body is read."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != MSGPACK:
        raise InvalidInput(f"send the body as {MSGPACK}", field="content-type")


def _decode(body: bytes) -> ForwardBackward | OptimStep:
    try:
        return _operations.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is neither a `ForwardBackward` nor an `OptimStep`: {error}", field="body") from None

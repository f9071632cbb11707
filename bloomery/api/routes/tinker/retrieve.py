"""Fetching results by long poll: an answer, or 408 after a while, upon which the SDK asks again at once."""

from typing import Any, Final

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes import LOGPROBS_HEADER, VERSION_HEADER
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.completions import Completion
from bloomery.api.routes.tinker.errors import TinkerRoute, failure
from bloomery.api.routes.tinker.futures import Futures, SampleAnswer, SampleFutures
from bloomery.api.routes.tinker.messages import CONTENT_TYPE, encode_forward_backward
from bloomery.api.routes.tinker.names import Creation, LossCreation, OperationFuture, SampleFuture, Unloading, parse_future, session_of
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.kinds import EXTERNAL, NAMED, SNAPSHOT
from bloomery.services.threads import off_loop
from bloomery.services.weights.versions import Version
from bloomery.types.drafted import KEPT_HEADER
from bloomery.types.errors import Gone, InvalidInput
from bloomery.types.generation import Weights
from bloomery.types.operations import (
    CheckpointResult,
    Failed,
    ForwardBackwardResult,
    LoadResult,
    OptimStepResult,
    Result,
    SnapshotResult,
)

HOLD_S: Final = 20.0
"""The SDK gives up a poll after 45 s and then pauses; an answer well before keeps it asking."""

router = APIRouter(route_class=TinkerRoute)


@router.post("/retrieve_future")
async def retrieve_future(body: bodies.RetrieveFuture, services: Svc, caller: Caller, futures: Futures) -> Response:
    """The result of an operation or a sample, as often as asked."""
    match parse_future(body.request_id):
        case Creation(model_id):
            run = await services.runs.get(caller, model_id)
            return JSONResponse({"type": "create_model", "model_id": run.tinker_id or run.id})
        case Unloading(model_id):
            await services.runs.get(caller, model_id)
            return JSONResponse({"type": "unload_model", "model_id": model_id})
        case LossCreation(loss_id):
            await services.custom_losses.get(caller, loss_id)
            return JSONResponse({"type": "create_custom_loss", "loss_id": loss_id})
        case SampleFuture() as future:
            return await _retrieve_sample(future, services, caller, futures)
        case OperationFuture() as future:
            return await _retrieve_operation(future, services, caller)


@router.post("/retrieve_futures")
async def retrieve_futures(body: bodies.RetrieveFutures, services: Svc, caller: Caller, futures: Futures) -> dict[str, Any]:
    """Which samples of a sampler's client ended; their answers are fetched one by one."""
    caller.require("infer")
    sampler = await services.sessions.get_sampling(caller, body.target.sampling_session_id)
    futures.forget(body.retrieved_request_ids, sampler.id)
    timeout_s = HOLD_S if body.timeout is None else min(body.timeout, HOLD_S)
    ended = await futures.ended(sampler.id, body.target.cloned_sampler_id, body.prev_cursor, timeout_s)
    return {"completions": [_completion(completion) for completion in ended.completions], "cursor": ended.cursor}


@router.post("/cancel_future")
async def cancel_future(body: bodies.FutureRef, caller: Caller, futures: Futures) -> dict[str, Any]:
    """Stop a sample that nobody waits for any more."""
    caller.require("infer")
    future = parse_future(body.request_id)
    if not isinstance(future, SampleFuture):
        raise InvalidInput("only samples can be cancelled: an operation of a run keeps its place in the order", field="request_id")
    futures.cancel(future, caller.project)
    return {}


def _completion(completion: Completion) -> dict[str, Any]:
    if completion.size is None:
        return {"state": "failed", "request_id": completion.request_id}
    return {"state": "finished", "request_id": completion.request_id, "response_payload_uncompressed_size": completion.size}


async def _retrieve_sample(future: SampleFuture, services: Services, caller: Principal, futures: SampleFutures) -> Response:
    caller.require("infer")
    answer = await futures.wait(future, caller.project, HOLD_S)
    services.sessions.note_asked(caller.project, future.sampling_session_id)
    match answer:
        case None:
            return _try_again("active", "the sample is in the making")
        case Failed() as failed:
            return JSONResponse(failure(failed))
        case SampleAnswer(body, version, mode, kept):
            told = {} if kept is None else {KEPT_HEADER: ",".join(map(str, kept))}
            return Response(body, media_type=CONTENT_TYPE, headers={VERSION_HEADER: version, LOGPROBS_HEADER: mode} | told)


async def _retrieve_operation(future: OperationFuture, services: Services, caller: Principal) -> Response:
    try:
        result = await services.runs.result(caller, future.model_id, future.seq, HOLD_S)
    except Gone as gone:
        # Upon a 410 the SDK says that the promise is broken, and not why.
        return JSONResponse(failure(gone))
    if result is None:
        run = await services.runs.get(caller, future.model_id)
        state = "active" if services.models.resolve(run.base_hash).ready else "paused_capacity"
        return _try_again(state, await services.runs.waiting_for(caller, future.model_id))
    return await _answer(result, future, services, caller)


async def _answer(result: Result, future: OperationFuture, services: Services, caller: Principal) -> Response:
    match result:
        case ForwardBackwardResult():
            return Response(await off_loop(result.output_bytes, encode_forward_backward, result), media_type=CONTENT_TYPE)
        case OptimStepResult(metrics=metrics):
            # Training loops merge these into rows of their own, which have a `step`: ours counts from 1 and over loads, theirs does not.
            return JSONResponse({"metrics": {"optimizer_step" if name == "step" else name: value for name, value in metrics.items()}})
        case CheckpointResult():
            name = await services.checkpoints.name_at(caller, future.model_id, NAMED, future.seq)
            return JSONResponse({"type": "save_weights", "path": f"tinker://{future.model_id}/weights/{name or future.about}"})
        case SnapshotResult():
            return JSONResponse(await _published(result, future, services, caller))
        case LoadResult():
            return JSONResponse({"type": "load_weights", "path": future.about, "model_id": future.model_id})
        case Failed() as failed:
            return JSONResponse(failure(failed))


async def _published(result: SnapshotResult, future: OperationFuture, services: Services, caller: Principal) -> dict[str, Any]:
    if future.export is not None:
        name = await services.checkpoints.name_at(caller, future.model_id, EXTERNAL, future.seq)
        path = f"tinker://{future.model_id}/external_weights/{name or future.export}"
        return {"type": "save_weights_external", "path": path, "size_bytes": result.size_bytes}
    answer = {"type": "save_weights_for_sampler"}
    if future.sampler is None:
        name = await services.checkpoints.name_at(caller, future.model_id, SNAPSHOT, future.seq)
        return answer | {"path": f"tinker://{future.model_id}/sampler_weights/{name or future.about}"}
    run = await services.runs.get(caller, future.model_id)
    version = Version(Weights(version=result.version, key=result.key), run.base_hash, run.base_model)
    session_id = session_of(future.model_id)
    if future.inflight:
        sampler = await services.sessions.follow(caller, session_id, future.sampler, version, run_id=run.id, saved=future.seq)
    else:
        sampler = await services.sessions.create_sampling(caller, session_id, future.sampler, version, None)
    return answer | {"sampling_session_id": sampler.id}


def _try_again(state: str, reason: str) -> Response:
    return JSONResponse({"type": "try_again", "queue_state": state, "queue_state_reason": reason}, 408)

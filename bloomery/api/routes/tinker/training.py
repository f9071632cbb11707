"""Runs and their operations.

A request that carries a number takes that place in the run's order whatever is wrong with the rest of it (`keeping_place`): later operations are on
their way already and must not wait for one that was turned away at the door.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies, messages
from bloomery.api.routes.tinker.errors import TinkerRoute, as_ours
from bloomery.api.routes.tinker.names import Creation, OperationFuture, model_name, session_of
from bloomery.services.core import Services
from bloomery.services.principal import Principal
from bloomery.services.sampling import draw_seed
from bloomery.types.errors import BloomeryError, InvalidInput, NotSupported
from bloomery.types.operations import AdamParams, Effect, LoraSpec, OptimStep, Rejected

ADAMW: Final = "adamw"

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_model")
async def create_model(body: bodies.CreateModel, services: Svc, caller: Caller) -> dict[str, Any]:
    """Create a LoRA run; asked again under the same number, the same run."""
    _check_optimizer(body.optimizer_config)
    if body.lora_config is None:
        raise NotSupported("a run without `lora_config` trains all parameters, which is not offered yet: send one", field="lora_config")
    await services.sessions.require_open(caller, body.session_id)
    name = model_name(body.session_id, body.model_seq_id)
    await services.runs.create(
        caller,
        base_model=body.base_model,
        lora=_lora(body.lora_config),
        metadata=body.user_metadata or {},
        session_id=body.session_id,
        tinker_id=name,
    )
    return Creation(name).accepted()


@router.post("/get_info")
async def get_info(body: bodies.ModelRef, services: Svc, caller: Caller) -> dict[str, Any]:
    """What a run trains. The tokenizer is named by its directory, which a client on this machine can load."""
    run = await services.runs.get(caller, body.model_id)
    return {
        "type": "get_info",
        "model_id": body.model_id,
        "model_name": run.base_model,
        "model_data": {"model_name": run.base_model, "tokenizer_id": services.models.resolve(run.base_hash).path},
        "optimizer_config": {"type": ADAMW},
        "is_lora": True,
        "lora_rank": run.lora.rank,
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """Compute a loss and, unless `forward_only`, its gradients."""
    if messages.CONTENT_TYPE not in request.headers.get("content-type", "") or request.headers.get("content-encoding"):
        raise InvalidInput(f"send an uncompressed body of content type {messages.CONTENT_TYPE}", field="content-type")
    message = await asyncio.to_thread(messages.parse_forward_backward, await request.body())
    future = OperationFuture(message.model_id, message.seq_id)
    async with keeping_place(services, caller, future, effect="none" if message.forward_only else "spoil"):
        operation = await asyncio.to_thread(messages.forward_backward, message)
        await services.runs.submit(caller, future.model_id, future.seq, operation)
    return future.accepted()


@router.post("/optim_step")
async def optim_step(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Apply the accumulated gradients."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future):
        operation = _optim_step(bodies.whole(body, bodies.OptimStep))
        await services.runs.submit(caller, future.model_id, future.seq, operation)
    return future.accepted()


@router.post("/save_weights")
async def save_weights(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Keep the resumable state under a name."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future):
        asked = bodies.whole(body, bodies.SaveWeights)
        await services.runs.checkpoint(
            caller,
            future.model_id,
            future.seq,
            asked.path,
            ttl_s=asked.ttl_seconds,
            overwrite=asked.overwrite,
            metadata=asked.user_metadata,
        )
        future = future.named(asked.path)
    return future.accepted()


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Publish the weights for sampling, under a name or for one sampler of the client."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future):
        asked = bodies.whole(body, bodies.SaveForSampler)
        future = _publication(asked, future)
        await services.runs.snapshot(caller, future.model_id, future.seq, asked.path, ttl_s=asked.ttl_seconds, metadata=asked.user_metadata)
    return future.accepted()


@router.post("/save_weights_external")
async def save_weights_external(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Refused, in its place."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future):
        raise NotSupported("external weights are not offered yet: save weights for the sampler, or a checkpoint")
    return future.accepted()


@router.post("/load_weights")
async def load_weights(body: bodies.LoadWeights, services: Svc, caller: Caller) -> dict[str, Any]:
    """Continue from a checkpoint, in a run that was just created or in a new one."""
    if body.model_id is not None and body.seq_id is not None and body.session_id is None:
        return await _load_into(body, OperationFuture(body.model_id, body.seq_id), services, caller)
    if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
        return await _create_from(body, model_name(body.session_id, body.model_seq_id), services, caller)
    raise InvalidInput("name the run by `model_id` and `seq_id`, or a new one by `session_id` and `model_seq_id`", field="model_id")


async def _load_into(body: bodies.LoadWeights, future: OperationFuture, services: Services, caller: Principal) -> dict[str, Any]:
    async with keeping_place(services, caller, future, effect="spoil"):
        _check_load(body)
        source = await services.checkpoints.find(caller, body.path)
        await services.runs.load(caller, future.model_id, future.seq, source, optimizer=body.optimizer)
    return future.named(body.path).accepted()


async def _create_from(body: bodies.LoadWeights, name: str, services: Services, caller: Principal) -> dict[str, Any]:
    _check_load(body)
    await services.sessions.require_open(caller, str(body.session_id))
    source = await services.checkpoints.find(caller, body.path)
    trained = await services.runs.get(caller, source.run_id)
    base_model = body.base_model or trained.base_model
    if services.models.resolve(base_model).base_hash != trained.base_hash:
        raise InvalidInput(f"`{body.path}` belongs to base model `{trained.base_model}`, not to `{base_model}`", field="base_model")
    await services.runs.create(
        caller,
        base_model=base_model,
        lora=trained.lora,
        metadata=body.user_metadata or {},
        session_id=body.session_id,
        tinker_id=name,
        begins_with_load=True,
    )
    await services.runs.load(caller, name, 0, source, optimizer=body.optimizer)
    return OperationFuture(name, 0).named(body.path).accepted()


@asynccontextmanager
async def keeping_place(services: Services, caller: Principal, future: OperationFuture, *, effect: Effect = "none") -> AsyncIterator[None]:
    """An operation that makes no sense is refused as the run's operation of that number: its future fails, later operations go on.

    `effect`: what becomes of the gradients that they build on.
    """
    try:
        yield
    except (BloomeryError, ValidationError) as error:
        ours = as_ours(error)
        if ours.category != "user":
            raise
        await services.runs.submit(caller, future.model_id, future.seq, Rejected(message=ours.message, effect=effect))


def _lora(asked: bodies.Lora) -> LoraSpec:
    return LoraSpec(
        rank=asked.rank, seed=draw_seed(asked.seed), train_attn=asked.train_attn, train_mlp=asked.train_mlp, train_unembed=asked.train_unembed
    )


def _optim_step(asked: bodies.OptimStep) -> OptimStep:
    _check_optimizer(asked.optimizer_params)
    if asked.adam_params is None:
        raise InvalidInput("an optimizer step needs `adam_params`", field="adam_params")
    numbers = asked.adam_params.model_dump(exclude={"type"})
    return OptimStep(adam=AdamParams(**{name: math.nan if value is None else value for name, value in numbers.items()}))


def _check_optimizer(asked: bodies.Optimizer | None) -> None:
    if asked is not None and asked.type != ADAMW:
        raise NotSupported(f"optimizer `{asked.type}` is not offered yet: use {ADAMW}", field="optimizer_config")


def _publication(asked: bodies.SaveForSampler, future: OperationFuture) -> OperationFuture:
    """The future of weights for sampling, which are for a name or for a sampler."""
    if asked.kind != "snapshot":
        raise NotSupported(f"weights of kind `{asked.kind}` are not offered yet: use kind `snapshot`", field="kind")
    match asked.path, asked.sampling_session_seq_id:
        case str(name), None:
            return future.named(name)
        case None, int(number):
            session_of(asked.model_id)
            return future.for_sampler(number)
    raise InvalidInput("give the weights a name in `path`, or a sampler in `sampling_session_seq_id`", field="path")


def _check_load(body: bodies.LoadWeights) -> None:
    _check_optimizer(body.optimizer_config)
    if body.weights_access_token is not None:
        raise NotSupported("`weights_access_token` is not offered yet: load weights of your own project", field="weights_access_token")

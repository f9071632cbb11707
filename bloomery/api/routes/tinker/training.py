"""Runs and their operations.

A request that carries a number takes that place in the run's order whatever is wrong with the rest of it (`keeping_place`): later operations are on
their way already and must not wait for one that was turned away at the door.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies, messages
from bloomery.api.routes.tinker.access import reader
from bloomery.api.routes.tinker.arriving import ArrivingRoute
from bloomery.api.routes.tinker.errors import TinkerRoute, as_ours
from bloomery.api.routes.tinker.loss_graphs import parse_custom_loss
from bloomery.api.routes.tinker.meaning import hash_of, hash_of_operation
from bloomery.api.routes.tinker.names import Creation, LossCreation, OperationFuture, Unloading, model_name, session_of
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.kinds import EXTERNAL, NAMED
from bloomery.services.serving.sampling import draw_seed
from bloomery.services.threads import off_loop
from bloomery.services.training.checkpoints import CheckpointRow
from bloomery.types.errors import BloomeryError, InvalidInput, NotSupported, shown
from bloomery.types.losses import CUSTOM, LOSSES
from bloomery.types.operations import AdamParams, Effect, LoraSpec, OptimStep, Rejected

ADAMW: Final = "adamw"
NOTICE: Final = "x-deprecation-note"
"""Header whose text the SDK writes into the client's log."""

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_model")
async def create_model(body: bodies.CreateModel, services: Svc, caller: Caller) -> dict[str, Any]:
    """Create a run; asked again under the same number, the same run. Without `lora_config` it trains all parameters, as with rank 0."""
    _check_optimizer(body.optimizer_config, "optimizer_config")
    await services.sessions.require_open(caller, body.session_id)
    name = model_name(body.session_id, body.model_seq_id)
    await services.runs.create(
        caller,
        base_model=body.base_model,
        lora=_lora(body.lora_config or bodies.Lora(rank=0)),
        metadata=body.user_metadata or {},
        session_id=body.session_id,
        tinker_id=name,
        asked=hash_of("create_model", body),
    )
    return Creation(name).accepted()


@router.post("/get_info")
async def get_info(body: bodies.ModelRef, services: Svc, caller: Caller) -> dict[str, Any]:
    """What a run trains. The tokenizer is named by its directory, which a client on this machine can load."""
    run = await services.runs.get(caller, body.model_id)
    base = services.models.resolve(run.base_hash)
    return {
        "type": "get_info",
        "model_id": body.model_id,
        "model_name": run.base_model,
        "model_data": {"arch": _arch(services, run.base_hash), "model_name": run.base_model, "tokenizer_id": base.path},
        "optimizer_config": {"type": ADAMW},
        "is_lora": run.lora.rank > 0,
        "lora_rank": run.lora.rank or None,
    }


@router.post("/unload_model")
async def unload_model(body: bodies.ModelRef, services: Svc, caller: Caller) -> dict[str, Any]:
    """Have the engine let go of a run; its next operation brings it back."""
    await services.runs.unload(caller, body.model_id)
    return Unloading(body.model_id).accepted()


async def forward_backward(request: Request, response: Response, services: Svc, caller: Caller) -> dict[str, Any]:
    """Compute a loss and, unless `forward_only`, its gradients."""
    if messages.CONTENT_TYPE not in request.headers.get("content-type", ""):
        raise InvalidInput(f"send a body of content type {messages.CONTENT_TYPE}", field="content-type")
    body = await request.body()
    parsed = await off_loop(len(body), messages.parse_forward_backward, body)
    message = parsed.message
    if (form := LOSSES.get(message.loss_fn)) is not None and form.notice is not None:
        response.headers[NOTICE] = form.notice
    if not message.model_id:
        raise InvalidInput("the message names no run: set `model_id`", field="model_id")
    future = OperationFuture(message.model_id, message.seq_id)
    async with keeping_place(services, caller, future, parsed.meaning, effect="none" if message.forward_only else "spoil") as asked_as:
        # Sparse tensors are filled in, which may be far more than was sent.
        operation = await off_loop(len(body) + parsed.filled_bytes, messages.forward_backward, parsed)
        if operation.loss == CUSTOM:
            operation = await services.custom_losses.attach(caller, operation)
        await services.runs.submit(caller, future.model_id, future.seq, operation, request=asked_as)
    return future.accepted()


router.add_api_route("/forward_backward", forward_backward, methods=["POST"], route_class_override=ArrivingRoute)


@router.post("/create_custom_loss")
async def create_custom_loss(body: bodies.CreateCustomLoss, services: Svc, caller: Caller) -> dict[str, Any]:
    """Keep a loss that `forward_backward` computes; asked again under the same number, the same loss."""
    await services.sessions.require_open(caller, body.session_id)
    services.custom_losses.require_offered()
    loss = await asyncio.to_thread(parse_custom_loss, body)
    loss_id = await services.custom_losses.create(caller, body.session_id, body.custom_loss_seq_id, loss)
    return LossCreation(loss_id).accepted()


@router.post("/optim_step")
async def optim_step(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Apply the accumulated gradients."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future, hash_of_operation("optim_step", body, bodies.OptimStep)) as asked_as:
        operation = _optim_step(bodies.whole(body, bodies.OptimStep))
        await services.runs.submit(caller, future.model_id, future.seq, operation, request=asked_as)
    return future.accepted()


@router.post("/save_weights")
async def save_weights(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Keep the resumable state under a name."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future, hash_of_operation("save_weights", body, bodies.SaveWeights)) as asked_as:
        asked = bodies.whole(body, bodies.SaveWeights)
        await services.runs.checkpoint(
            caller,
            future.model_id,
            future.seq,
            asked.path,
            ttl_s=asked.ttl_seconds,
            overwrite=asked.overwrite,
            metadata=asked.user_metadata,
            request=asked_as,
        )
        future = future.named(asked.path)
    return future.accepted()


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Publish the weights for sampling, under a name or for one sampler of the client."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future, hash_of_operation("save_weights_for_sampler", body, bodies.SaveForSampler)) as asked_as:
        asked = bodies.whole(body, bodies.SaveForSampler)
        future = _publication(asked, future)
        await services.runs.snapshot(
            caller, future.model_id, future.seq, asked.path, ttl_s=asked.ttl_seconds, metadata=asked.user_metadata, request=asked_as
        )
    return future.accepted()


@router.post("/save_weights_external")
async def save_weights_external(body: bodies.Numbered, services: Svc, caller: Caller) -> dict[str, Any]:
    """Export the weights for other programs."""
    future = OperationFuture(body.model_id, body.seq_id)
    async with keeping_place(services, caller, future, hash_of_operation("save_weights_external", body, bodies.SaveExternal)) as asked_as:
        asked = bodies.whole(body, bodies.SaveExternal)
        if asked.age_encryption_recipients:
            what = "encryption to `age_encryption_recipients` is not offered: leave it out, and encrypt what you download"
            raise NotSupported(what, field="age_encryption_recipients")
        await services.runs.snapshot(caller, future.model_id, future.seq, asked.path, kind=EXTERNAL, ttl_s=asked.ttl_seconds, request=asked_as)
        future = future.exporting(asked.path)
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
    async with keeping_place(services, caller, future, hash_of("load_weights", body), effect="spoil") as asked_as:
        _check_into(body)
        source = await _source(body, services, caller)
        await services.runs.load(caller, future.model_id, future.seq, source, optimizer=body.optimizer, request=asked_as)
    return future.named(body.path).accepted()


async def _create_from(body: bodies.LoadWeights, name: str, services: Services, caller: Principal) -> dict[str, Any]:
    _check_optimizer(body.optimizer_config, "optimizer_config")
    if body.optimizer and body.optimizer_config is not None:
        raise InvalidInput("`optimizer_config` is that of the checkpoint when its optimizer is loaded: leave it out", field="optimizer_config")
    await services.sessions.require_open(caller, str(body.session_id))
    asked_as, source = hash_of("load_weights", body), await _source(body, services, caller)
    base_model = body.base_model or source.base_model
    if services.models.resolve(base_model).base_hash != source.base_hash:
        raise InvalidInput(f"`{body.path}` belongs to base model `{source.base_model}`, not to `{base_model}`", field="base_model")
    await services.runs.create(
        caller,
        base_model=base_model,
        lora=source.lora,
        metadata=body.user_metadata or {},
        session_id=body.session_id,
        tinker_id=name,
        begins_with_load=True,
        asked=asked_as,
    )
    await services.runs.load(caller, name, 0, source, optimizer=body.optimizer, request=asked_as)
    return OperationFuture(name, 0).named(body.path).accepted()


@asynccontextmanager
async def keeping_place(
    services: Services, caller: Principal, future: OperationFuture, asked_as: bytes, *, effect: Effect = "none"
) -> AsyncIterator[bytes]:
    """An operation that makes no sense is refused as the run's operation of that number: its future fails, later operations go on.

    `asked_as`, which it gives, is the hash of the request: where another one has the number, this one has no place and is refused at once.
    `effect`: what becomes of the gradients that they build on.
    """
    try:
        yield asked_as
    except (BloomeryError, ValidationError) as error:
        ours = as_ours(error)
        if ours.category != "user":
            raise
        await services.runs.submit(caller, future.model_id, future.seq, Rejected(message=ours.message, effect=effect), request=asked_as)


def _lora(asked: bodies.Lora) -> LoraSpec:
    return LoraSpec(
        rank=asked.rank, seed=draw_seed(asked.seed), train_attn=asked.train_attn, train_mlp=asked.train_mlp, train_unembed=asked.train_unembed
    )


def _optim_step(asked: bodies.OptimStep) -> OptimStep:
    if asked.optimizer_params is not None:
        _check_optimizer(asked.optimizer_params, "optimizer_params")
        raise InvalidInput(f"the numbers of {ADAMW} go into `adam_params`", field="optimizer_params")
    if asked.adam_params is None:
        raise InvalidInput("an optimizer step needs `adam_params`", field="adam_params")
    numbers = asked.adam_params.model_dump(exclude={"type"})
    return OptimStep(adam=AdamParams(**{name: math.nan if value is None else value for name, value in numbers.items()}))


def _check_optimizer(asked: bodies.Optimizer | None, field: str) -> None:
    if asked is None:
        return
    if asked.type != ADAMW:
        raise NotSupported(f"`{field}`: optimizer `{shown(asked.type)}` is not offered: use {ADAMW}", field=field)
    if asked.extras:
        raise InvalidInput(f"`{field}.{shown(asked.extras[0])}`: {ADAMW} has no such field, its numbers come with every step", field=field)


def _publication(asked: bodies.SaveForSampler, future: OperationFuture) -> OperationFuture:
    """The future of weights for sampling, which are for a name or for a sampler."""
    if asked.kind not in ("snapshot", "inflight"):
        raise NotSupported(f"weights of kind `{shown(asked.kind)}` are not offered: use kind `snapshot` or `inflight`", field="kind")
    inflight = asked.kind == "inflight"
    match asked.path, asked.sampling_session_seq_id:
        case str(name), None if not inflight:
            return future.named(name)
        case None, int(number):
            session_of(asked.model_id)
            return future.for_sampler(number, inflight=inflight)
    raise InvalidInput("give the weights a name in `path`, or a sampler in `sampling_session_seq_id`, which those in flight need", field="path")


async def _source(body: bodies.LoadWeights, services: Services, caller: Principal) -> CheckpointRow:
    """The checkpoint to load, which the caller may read, or whoever the token stands for."""
    source = await services.checkpoints.find(await reader(services, caller, body.weights_access_token), body.path)
    if source.kind != NAMED:
        raise InvalidInput(f"`{body.path}` holds weights alone: load a `weights` path", field="path")
    return source


def _check_into(body: bodies.LoadWeights) -> None:
    """A run that is there already is what it was created as."""
    for field in ("base_model", "user_metadata", "optimizer_config"):
        if getattr(body, field) is not None:
            raise InvalidInput(f"`{field}` belongs to a new run: leave it out, or load with `session_id` and `model_seq_id`", field=field)


def _arch(services: Services, base_hash: str) -> str | None:
    """As the engine read it from the model, once there is one."""
    welcome = services.links[base_hash].welcome
    return None if welcome is None else welcome.base.model_type

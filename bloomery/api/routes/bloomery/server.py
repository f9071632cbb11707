"""The server itself: models, status, garbage collection."""

from collections.abc import Collection, Mapping
from typing import Literal

from fastapi import APIRouter

from bloomery import __version__
from bloomery.api.deps import Caller, Svc
from bloomery.config import EndpointConfig
from bloomery.services.core import Services
from bloomery.services.engines.link import EngineLink
from bloomery.types.resources import AgentShown, Collected, EndpointShown, EngineState, Model, Page, ReplicaState, Status

router = APIRouter(tags=["server"])


@router.get("/models")
async def models(services: Svc, caller: Caller) -> Page[Model]:
    """The base models that this server holds."""
    return Page(data=[Model(**base._asdict()) for base in services.models.list(caller)], offset=0, has_more=False)


@router.get("/endpoints")
async def endpoints(services: Svc, caller: Caller) -> Page[EndpointShown]:
    """Models elsewhere that the caller's project may ask; nothing of their keys."""
    return Page(data=[_endpoint(config) for config in services.endpoints.list(caller)], offset=0, has_more=False)


@router.get("/agents")
async def agents(services: Svc, caller: Caller) -> Page[AgentShown]:
    """Agents elsewhere that jobs of the caller's project may train."""
    shown = [AgentShown(name=each.name, url=each.url, timeout_s=each.timeout_s) for each in services.jobs.agents.list(caller)]
    return Page(data=shown, offset=0, has_more=False)


@router.get("/status")
async def status(services: Svc, caller: Caller) -> Status:
    """Engines, replicas, and the traffic recorder."""
    caller.require("read")
    return Status(
        version=__version__,
        started_us=services.started_us,
        engines=_engines(services),
        replicas=_replicas(services),
        traffic=services.traffic.state(),
    )


@router.post("/gc")
async def collect_garbage(services: Svc, caller: Caller) -> Collected:
    """Delete expired traffic and blobs that nothing refers to."""
    return await services.garbage.collect(caller)


def _endpoint(config: EndpointConfig) -> EndpointShown:
    return EndpointShown(name=config.name, base_url=config.base_url, models=config.models, timeout_s=config.timeout_s, concurrency=config.concurrency)


def _engines(services: Services) -> list[EngineState]:
    aliases: dict[str, list[str]] = {}
    for base in services.models.all():
        aliases.setdefault(base.base_hash, []).append(base.alias)
    links, stood_in = services.links, services.fleet.stood_in
    return [
        EngineState(base_hash=key, aliases=names, ready=links[key].ready, stands_in=key in stood_in, detail=links[key].detail())
        for key, names in aliases.items()
    ]


def _replicas(services: Services) -> list[ReplicaState]:
    fleet = services.fleet
    kinds: tuple[tuple[Literal["production", "rollouts"], Mapping[str, Mapping[str, EngineLink]], Collection[str]], ...]
    # Those for rollouts always run.
    kinds = (("production", fleet.replicas, fleet.wanted), ("rollouts", fleet.rollouts, fleet.rollouts))
    return [
        ReplicaState(name=name, serves=serves, base_hash=base_hash, wanted=base_hash in wanted, ready=link.ready, detail=link.detail())
        for serves, bases, wanted in kinds
        for base_hash, links in bases.items()
        for name, link in links.items()
    ]

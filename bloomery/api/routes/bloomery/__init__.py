"""Bloomery's own contract under `/api/v1`: what the client, the page, the command line and the recipes speak."""

from fastapi import APIRouter

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.api.routes.bloomery import (
    datasets,
    deployments,
    evaluations,
    graders,
    jobs,
    keys,
    live,
    login,
    rollouts,
    runs,
    samples,
    server,
    traffic,
    versions,
)

router = APIRouter(prefix="/api/v1", max_body_size=MAX_BODY_BYTES)
for part in (runs, rollouts, samples, versions, deployments, traffic, datasets, graders, evaluations, jobs, keys, login, server, live):
    router.include_router(part.router)

__all__ = ["router"]

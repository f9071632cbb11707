"""What the contract has and this server does not offer yet: said so, in words, to whoever asks."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter

from bloomery.api.deps import Caller
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.types.errors import NotSupported

REFUSED: Final = {
    ("GET", "/sessions/{session_id}/trace_export"): "export of traces: GET /api/v1/runs/{run_id}/metrics has the seconds of every operation",
    ("GET", "/billing/usage/events"): "usage by the hour, for nothing is billed: GET /api/v1/spans and the metrics of runs say what was used",
}

router = APIRouter(route_class=TinkerRoute, include_in_schema=False)


def _refuse(what: str) -> Callable[[Caller], Awaitable[None]]:
    async def refuse(caller: Caller) -> None:
        raise NotSupported(f"this server does not offer this yet: {what}")

    return refuse


for (method, path), what in REFUSED.items():
    router.add_api_route(path, _refuse(what), methods=[method])

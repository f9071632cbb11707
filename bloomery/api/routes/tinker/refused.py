"""What the contract has and this server does not offer yet: said so, in words, to whoever asks."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter

from bloomery.api.deps import Caller
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.types.errors import NotSupported

_CHECKPOINT: Final = "/training_runs/{run_id}/checkpoints/{folder}/{name}"
REFUSED: Final = {
    ("POST", "/create_custom_loss"): "losses that run on the server: `forward_backward_custom` with a function runs in the client and works",
    ("POST", "/copy_weights"): "copies of weights: load the checkpoint into a run of your own",
    ("POST", "/join_sampling_session"): "numbered clones of a sampler: clones that number themselves work",
    ("POST", "/retrieve_futures"): "retrieving many futures at once: retrieve each by itself",
    ("POST", f"{_CHECKPOINT}/publish"): "publishing of checkpoints: they stay in their project",
    ("DELETE", f"{_CHECKPOINT}/publish"): "publishing of checkpoints: they stay in their project",
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): "external weights",
    ("PUT", "/sessions/{session_id}/project"): "moving sessions between projects",
    ("GET", "/sessions/{session_id}/trace_export"): "export of traces",
    ("POST", "/sessions/search"): "searching sessions: list them",
    ("POST", "/auth/token"): "exchange of keys for tokens: use the key itself",
    ("GET", "/auth/apikey/me"): "looking at keys",
    ("DELETE", "/auth/apikey/me"): "deleting keys",
    ("GET", "/audit"): "audit logs",
    ("GET", "/billing/usage/events"): "billing: there is none",
    ("GET", "/billing/usage/checkpoints/current"): "billing: there is none",
}

router = APIRouter(route_class=TinkerRoute, include_in_schema=False)


def _refuse(what: str) -> Callable[[Caller], Awaitable[None]]:
    async def refuse(caller: Caller) -> None:
        raise NotSupported(f"this server does not offer this yet: {what}")

    return refuse


for (method, path), what in REFUSED.items():
    router.add_api_route(path, _refuse(what), methods=[method])

"""The contract of the `tinker` SDK.

`client` answers what a client asks before it works, `sessions` follow its life. `training` takes operations of runs, `sampling` begins samples;
both answer with futures (`names`), whose results `retrieve` fetches: from the journal, or from `futures` in memory. `routed` tells the routing of
samples, for which their answers have no place. `listing` looks at what is there, `publishing` shares it with others, `external` hands it to other
programs, `administration` adds it up; `identity` says whose a key is, and `refused` what is not offered. `bodies` are the JSON requests, which
`encoding` decompresses; `proto`, `tensors` and `messages` the binary ones, for which runs wait while they come in (`arriving`). Errors leave in this
contract's own form (`errors`). `oai` is the OpenAI contract in this contract's place.
"""

from typing import Final

from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import Scope

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.api.routes.tinker import (
    administration,
    client,
    external,
    identity,
    listing,
    oai,
    publishing,
    refused,
    retrieve,
    routed,
    sampling,
    sessions,
    training,
)
from bloomery.api.routes.tinker.errors import refusal
from bloomery.api.routes.tinker.futures import closing_futures

_PREFIX: Final = "/api/v1"
_PARTS: Final = (client, identity, sessions, training, sampling, retrieve, routed, listing, publishing, external, administration, refused)

router = APIRouter(prefix=_PREFIX, tags=["tinker"], lifespan=closing_futures, max_body_size=MAX_BODY_BYTES)
for part in _PARTS:
    router.include_router(part.router)


def answers(scope: Scope) -> bool:
    """Whether a request is for this contract, which shares its prefix with our own."""
    inner = {**scope, "path": scope["path"].removeprefix(_PREFIX), "root_path": ""}
    return inner["path"] != scope["path"] and any(route.matches(inner)[0] is Match.FULL for part in _PARTS for route in part.router.routes)


__all__ = ["answers", "oai", "refusal", "router"]

"""The contract of the `tinker` SDK.

`client` answers what a client asks before it works, `sessions` follow its life. `training` takes operations of runs, `sampling` begins samples;
both answer with futures (`names`), whose results `retrieve` fetches: from the journal, or from `futures` in memory. `listing` looks at what is
there, `refused` says what is not offered yet. `bodies` are the JSON requests; `proto`, `tensors` and `messages` the binary ones. Errors leave in
this contract's own form (`errors`).
"""

from fastapi import APIRouter

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.api.routes.tinker import client, listing, refused, retrieve, sampling, sessions, training
from bloomery.api.routes.tinker.futures import closing_futures

router = APIRouter(prefix="/api/v1", tags=["tinker"], lifespan=closing_futures, max_body_size=MAX_BODY_BYTES)
for part in (client, sessions, training, sampling, retrieve, listing, refused):
    router.include_router(part.router)

"""The OpenAI contract where the tinker contract has it, under `/oai/api/v1`: the same handlers as under `/v1`.

`model` is any name that is served there, a base model or a `tinker://` path of sampler weights among them.
"""

from fastapi import APIRouter, Depends

from bloomery.api.deps import metered
from bloomery.api.routes.openai import completions, embeddings, models, refused, responses

PREFIX = "/oai/api/v1"

router = APIRouter(prefix=PREFIX, tags=["tinker"])
for asked in (completions, responses, embeddings):
    router.include_router(asked.router, dependencies=[Depends(metered)])
router.include_router(models.router)
# Last, because it takes every path.
router.include_router(refused.router)

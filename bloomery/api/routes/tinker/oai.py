"""The OpenAI contract where the tinker contract has it, under `/oai/api/v1`: the same handlers as under `/v1`.

`model` is any name that is served there, a base model or a `tinker://` path of sampler weights among them.
"""

from fastapi import APIRouter

from bloomery.api.routes.openai import completions, models, refused

PREFIX = "/oai/api/v1"

router = APIRouter(prefix=PREFIX, tags=["tinker"])
router.include_router(completions.router)
router.include_router(models.router)
# Last, because it takes every path.
router.include_router(refused.router)

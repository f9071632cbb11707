"""The OpenAI contract under `/v1`: chat completions, completions, models.

`requests` says what may be asked and refuses the rest by name, `jobs` turns it into tokens for a target, `serving` samples and records, `choices`
turns tokens back into text, `answers` gives both contracts their shapes, `http` writes them out and stops when nobody listens any more. `refused`
answers for all that is not offered.
The id of an answer is the id of its recorded span, `system_fingerprint` the version of the weights that gave it.
"""

from fastapi import APIRouter

from bloomery.api.routes.openai import completions, models, refused

router = APIRouter(prefix="/v1", tags=["openai"])
router.include_router(completions.router)
router.include_router(models.router)
# Last, because it takes every path.
router.include_router(refused.router)

__all__ = ["router"]

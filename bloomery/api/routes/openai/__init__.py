"""The OpenAI contract under `/v1`: chat completions, completions, responses, embeddings, models, files, uploads, batches, jobs, graders, evals.

`requests` says what may be asked and refuses the rest by name, `prepared` turns it into tokens for a target, `serving` samples and records, `choices`
turns tokens back into text, `answers` gives both contracts their shapes, `http` writes them out and stops when nobody listens any more. `formats` is
the form that an answer must have, `tools` what may be called and what was. `responses` takes an input (`response_requests`), `response_words` makes a
conversation of it and `response_events` items and events of its answer; `embeddings` asks for vectors, `graders` for the score of an output.
`evals` evaluates, and `eval_requests` says how that is asked for.
`files` keeps what is trained on, which `uploads` takes in parts, `fine_tuning` trains on it and `fine_tuning_requests` says how that is asked for.
`batches` have a file of requests answered. `cursors` is the form of lists, `times` that of times, `shapes` tells the published document what routes
take, `refused` answers for all that is not offered.
The id of an answer is the id of its recorded span, `system_fingerprint` the version of the weights that gave it.
"""

from fastapi import APIRouter, Depends

from bloomery.api.deps import metered
from bloomery.api.routes.openai import batches, completions, embeddings, evals, files, fine_tuning, graders, models, refused, responses, uploads


def compose(prefix: str, tag: str) -> APIRouter:
    """All of the contract below a path."""
    composed = APIRouter(prefix=prefix, tags=[tag])
    for asked in (completions, responses, embeddings):
        composed.include_router(asked.router, dependencies=[Depends(metered)])
    composed.include_router(models.router)
    for router in (graders.router, files.router, uploads.router, batches.router, fine_tuning.router, evals.router):
        composed.include_router(router)
    # Last, because it takes every path.
    composed.include_router(refused.router)
    return composed


router = compose("/v1", "openai")

__all__ = ["compose", "router"]

"""Samples with drafts: what the SDK's contract has no place for, beside it and with the same answers."""

from typing import Final

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.futures import Futures
from bloomery.api.routes.tinker.routed import Routings
from bloomery.api.routes.tinker.sampling import Beside, ConsentHeader, EpisodeHeader, begin, in_words_of
from bloomery.types.drafted import DraftedSample, SampleBegun

_OURS: Final = {"sampling_params.seed": "seed", "sampling_params.stop": "stop"}
"""Fields that lie deeper in the Training API."""

router = APIRouter(tags=["samples"])


@router.post("/samples")
async def begin_drafted(
    body: DraftedSample,
    services: Svc,
    caller: Caller,
    futures: Futures,
    routings: Routings,
    consent: ConsentHeader = "none",
    episode: EpisodeHeader = None,
) -> SampleBegun:
    """Begin to sample; the same body under the same `seq_id` of the same sampler is the same sample."""
    params = {name: getattr(body, name) for name in ("max_tokens", "seed", "temperature", "top_k", "top_p", "stop")}
    asked = bodies.Sample(
        sampling_session_id=body.sampling_session_id,
        seq_id=body.seq_id,
        num_samples=len(body.drafts),
        prompt=bodies.ModelInput(chunks=[bodies.Chunk(type="encoded_text", tokens=body.prompt)]),
        sampling_params=bodies.SamplingParams(**params),
    )
    beside = Beside(consent=consent, episode=episode, drafts=tuple(map(tuple, body.drafts)))
    with in_words_of(_OURS):
        begun = await begin(asked, beside, services, caller, futures, routings)
    return SampleBegun(request_id=begun["request_id"])

"""Managed jobs: made, looked at and steered; given to runners, and what their processes say of them."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.services.jobs.card_text import markdown
from bloomery.types.estimates import JobEstimate, Prices
from bloomery.types.jobs import Chain, CreateChain, Job, JobEvent, JobPoints, JobSpec, JobState
from bloomery.types.leases import Claimed, ClaimJob, EndedJob, FinishJob, FollowedJobs, Released, ReleaseJobs, Reported, ReportJob
from bloomery.types.model_cards import CardForm, ModelCard
from bloomery.types.resources import Page

Since = Annotated[int, Query(ge=0, lt=1 << 63)]
After = Annotated[int, Query(ge=-1, lt=1 << 63)]
FormQuery = Annotated[CardForm, Query()]
MARKDOWN: Final = "text/markdown"
MARKDOWN_TOO: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {MARKDOWN: {"schema": {"type": "string"}}}}}
router = APIRouter(tags=["jobs"])


@router.post("/jobs", status_code=201)
async def create(body: JobSpec, services: Svc, caller: Caller, request: Again) -> Job:
    """A job, which waits for a process."""
    return await services.jobs.create(caller, body, request=request)


@router.post("/jobs/resolve")
async def resolve(body: JobSpec, services: Svc, caller: Caller) -> JobSpec:
    """The spec as a job would have it, with nothing left open; nothing is made."""
    return await services.jobs.resolve(caller, body)


@router.post("/jobs/estimate")
async def estimate(body: JobSpec, prices: Annotated[Prices, Query()], services: Svc, caller: Caller) -> JobEstimate:
    """What a job would take; nothing is made."""
    return await services.estimates.of(caller, body, prices)


@router.post("/chains", status_code=201)
async def create_chain(body: CreateChain, services: Svc, caller: Caller, request: Again) -> Chain:
    """Jobs of which each begins where one before it ends: all of them, or none."""
    return await services.chains.create(caller, body, request=request)


@router.post("/chains/resolve")
async def resolve_chain(body: CreateChain, services: Svc, caller: Caller) -> CreateChain:
    """The specs as the jobs would have them, with nothing left open; nothing is made."""
    return await services.chains.resolve(caller, body)


@router.get("/jobs")
async def list_all(
    services: Svc, caller: Caller, state: JobState | None = None, after: str | None = None, limit: Limit = 50, offset: Offset = 0
) -> Page[Job]:
    """Jobs, newest first; of those alone that begin where one ended."""
    return await services.jobs.list(caller, state=state, after=after, limit=limit, offset=offset)


@router.get("/jobs/{job}")
async def get(job: str, services: Svc, caller: Caller) -> Job:
    """One job, by its id or name."""
    return await services.jobs.get(caller, job)


@router.get("/jobs/{job}/points")
async def points(job: str, services: Svc, caller: Caller, after: After = -1) -> JobPoints:
    """What was measured behind step `after`."""
    return await services.jobs.points(caller, job, after=after)


@router.get("/jobs/{job}/events")
async def events(job: str, services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[JobEvent]:
    """What happened to a job, oldest first."""
    return await services.jobs.events(caller, job, limit=limit, offset=offset)


@router.get("/jobs/{job}/card", response_model=ModelCard, responses=MARKDOWN_TOO)
async def card(job: str, services: Svc, caller: Caller, form: FormQuery = "json") -> ModelCard | Response:
    """What is known of the model that came of it."""
    return _in_form(await services.model_cards.of_job(caller, job), form)


@router.get("/versions/{version:path}/card", response_model=ModelCard, responses=MARKDOWN_TOO)
async def card_of_version(version: str, services: Svc, caller: Caller, form: FormQuery = "json") -> ModelCard | Response:
    """What is known of a published version, whoever made it."""
    return _in_form(await services.model_cards.of_version(caller, version), form)


@router.post("/jobs/{job}/pause")
async def pause(job: str, services: Svc, caller: Caller, request: Again) -> Job:
    """Have it stand still, within seconds."""
    return await services.jobs.pause(caller, job, request=request)


@router.post("/jobs/{job}/resume")
async def resume(job: str, services: Svc, caller: Caller, request: Again) -> Job:
    """Have it go on where it was."""
    return await services.jobs.resume(caller, job, request=request)


@router.post("/jobs/{job}/cancel")
async def cancel(job: str, services: Svc, caller: Caller, request: Again) -> Job:
    """End it without a result."""
    return await services.jobs.cancel(caller, job, request=request)


@router.post("/jobs/{job}/report")
async def report(job: str, body: ReportJob, services: Svc, caller: Caller) -> Reported:
    """What its process did; the answer says what it is to do."""
    return await services.leases.report(caller, job, body)


@router.post("/jobs/{job}/finish")
async def finish(job: str, body: FinishJob, services: Svc, caller: Caller) -> Job:
    """How it ended, or that it stands still."""
    return await services.leases.finish(caller, job, body)


@router.post("/runners/claim")
async def claim(body: ClaimJob, services: Svc, caller: Caller) -> Claimed:
    """Take a job that waits."""
    return Claimed(lease=await services.leases.claim(caller, body.runner, body.wait_s, token=body.token))


@router.post("/runners/release")
async def release(body: ReleaseJobs, services: Svc, caller: Caller) -> Released:
    """Give back what this runner's processes had."""
    return Released(jobs=await services.leases.release(caller, body.runner))


@router.get("/runners/jobs")
async def followed(services: Svc, caller: Caller, since_us: Since) -> FollowedJobs:
    """Jobs of all projects that changed since."""
    return await services.followed.changed(caller, since_us=since_us)


@router.get("/runners/jobs/{job}/points")
async def followed_points(job: str, services: Svc, caller: Caller, since_us: Since) -> JobPoints:
    """What one of them was told to have measured after that, in the order in which it was."""
    return await services.followed.points(caller, job, since_us=since_us)


@router.post("/runners/ended/{job}")
async def ended(job: str, body: EndedJob, services: Svc, caller: Caller) -> Job:
    """A process ended, and how."""
    return await services.leases.ended(caller, job, body.epoch, body.words)


def _in_form(card: ModelCard, form: CardForm) -> ModelCard | Response:
    return card if form == "json" else Response(markdown(card), media_type=f"{MARKDOWN}; charset=utf-8")

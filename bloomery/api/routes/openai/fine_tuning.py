"""`/v1/fine_tuning/jobs`: managed jobs as OpenAI's contract has them.

All that can be refused is refused when a job is made, so none is ever `validating_files`.
"""

import re
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.cursors import page_of
from bloomery.api.routes.openai.fine_tuning_requests import REFUSED, CreateJob, parse_job
from bloomery.api.routes.openai.http import read_request
from bloomery.api.routes.openai.shapes import body_of
from bloomery.api.routes.openai.times import unix_s
from bloomery.services.access.principal import Principal
from bloomery.types.errors import InvalidInput
from bloomery.types.fine_tuning import FineTuned, FineTunedCheckpoint, Happened, renamed
from bloomery.types.ids import now_us
from bloomery.types.jobs import Job, JobEvent, JobState
from bloomery.types.methods import DirectPreference, Reinforcement, Supervised

Limit = Annotated[int, Query(ge=1, le=100)]
MOST_EVENTS: Final = 1000
_METADATA: Final = re.compile(r"metadata\[(?P<key>.*)\]", re.DOTALL)
_LEVELS: Final = {"warning": "warn"}
_CHECKPOINT_METRICS: Final = ("train_loss", "valid_loss")
router = APIRouter(prefix="/fine_tuning/jobs")


@router.post("", openapi_extra=body_of(CreateJob, refused={CreateJob: REFUSED}))
async def create(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """A job, which waits for a process."""
    _, asked = await read_request(request, parse_job)
    return _shown(await services.fine_tuning.create(caller, asked), caller)


@router.get("")
async def list_jobs(request: Request, services: Svc, caller: Caller, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
    """Jobs that were made here, newest first; `metadata[KEY]=VALUE` lists those alone that have it."""
    page = await services.fine_tuning.list(caller, after=after, limit=limit, metadata=_filter(request))
    return page_of([_shown(tuned, caller) for tuned in page.data], has_more=page.has_more)


@router.get("/{job}")
async def get(job: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One job."""
    return _shown(await services.fine_tuning.get(caller, job), caller)


@router.post("/{job}/pause")
async def pause(job: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Have it stand still, within seconds."""
    return _shown(await services.fine_tuning.pause(caller, job), caller)


@router.post("/{job}/resume")
async def resume(job: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Have it go on where it was."""
    return _shown(await services.fine_tuning.resume(caller, job), caller)


@router.post("/{job}/cancel")
async def cancel(job: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """End it without a result."""
    return _shown(await services.fine_tuning.cancel(caller, job), caller)


@router.get("/{job}/events")
async def events(
    job: str, services: Svc, caller: Caller, after: str | None = None, limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 20
) -> dict[str, Any]:
    """What happened and what was measured, newest first."""
    page = await services.fine_tuning.events(caller, job, after=after, limit=limit)
    return page_of(list(map(_event, page.data)), has_more=page.has_more)


@router.get("/{job}/checkpoints")
async def checkpoints(job: str, services: Svc, caller: Caller, after: str | None = None, limit: Limit = 10) -> dict[str, Any]:
    """Weights that it kept, newest first."""
    page = await services.fine_tuning.checkpoints(caller, job, after=after, limit=limit)
    return page_of([_checkpoint(job, kept) for kept in page.data], has_more=page.has_more)


def _filter(request: Request) -> dict[str, str]:
    wanted = {}
    for name, value in request.query_params.multi_items():
        if found := _METADATA.fullmatch(name):
            wanted[found["key"]] = value
        elif name == "metadata":
            raise InvalidInput("`metadata` is asked for key by key: `metadata[KEY]=VALUE`", field="metadata")
    return wanted


def _shown(tuned: FineTuned, caller: Principal) -> dict[str, Any]:
    asked, job = tuned.asked, tuned.job
    hyperparameters = _hyperparameters(tuned)
    method: dict[str, Any] = {"hyperparameters": hyperparameters} | ({} if asked.grader is None else {"grader": asked.grader})
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": unix_s(job.created_us),
        "error": _error(job),
        "estimated_finish": _estimated(job),
        "fine_tuned_model": None if job.result is None else job.result.version,
        "finished_at": unix_s(job.finished_us),
        "hyperparameters": hyperparameters if asked.method == "supervised" else {},
        "integrations": [],
        "metadata": asked.metadata,
        "method": {"type": asked.method, asked.method: method},
        "model": asked.model,
        "organization_id": caller.project,
        "result_files": [] if tuned.result_file is None else [tuned.result_file],
        "seed": job.spec.seed,
        "status": job.state,
        "suffix": asked.suffix,
        "trained_tokens": job.progress.tokens if job.state is JobState.SUCCEEDED else None,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
    }


def _hyperparameters(tuned: FineTuned) -> dict[str, Any]:
    """With numbers in the place of `auto`, where there are any."""
    asked, method = tuned.asked.hyperparameters, tuned.job.spec.method
    times = {"learning_rate_multiplier": asked.learning_rate_multiplier or 1.0}
    if isinstance(method, Reinforcement):
        common = {"n_epochs": asked.n_epochs or "auto", "batch_size": method.groups_per_step}
        others = {"compute_multiplier": asked.compute_multiplier or 1.0, "eval_interval": tuned.job.spec.evaluation.every or "auto"}
        return common | times | others | {"eval_samples": "auto", "reasoning_effort": "default"}
    assert isinstance(method, Supervised | DirectPreference)
    shown = {"n_epochs": int(method.batches.epochs), "batch_size": method.batches.rows} | times
    return shown | ({"beta": method.beta} if isinstance(method, DirectPreference) else {})


def _error(job: Job) -> dict[str, Any] | None:
    if job.state is not JobState.FAILED:
        return None
    return {"code": "job_failed", "message": job.reason or "the job failed", "param": None}


def _estimated(job: Job) -> int | None:
    left_s = job.progress.remaining_s
    return None if job.state is not JobState.RUNNING or left_s is None else unix_s(now_us()) + round(left_s)


def _event(happened: Happened) -> dict[str, Any]:
    common = {"id": happened.id, "object": "fine_tuning.job.event", "created_at": unix_s(happened.created_us)}
    what = happened.what
    if isinstance(what, JobEvent):
        return common | {"level": _LEVELS.get(what.level, what.level), "message": what.message, "data": what.data, "type": "message"}
    values = renamed(what.values)
    said = ", ".join(f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in values.items())
    return common | {"level": "info", "message": f"Step {what.step}: {said}", "data": {"step": what.step, **values}, "type": "metrics"}


def _checkpoint(job: str, kept: FineTunedCheckpoint) -> dict[str, Any]:
    values = renamed(kept.values)
    return {
        "id": kept.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": unix_s(kept.created_us),
        "fine_tuned_model_checkpoint": kept.version,
        "fine_tuning_job_id": job,
        "metrics": {"step": kept.step, **{name: values[name] for name in _CHECKPOINT_METRICS if name in values}},
        "step_number": kept.step,
    }

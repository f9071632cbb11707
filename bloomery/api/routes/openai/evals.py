"""`/v1/evals`: evals, their runs and what these came to, as OpenAI's contract has them. A run is an evaluation of this server."""

import json
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.cursors import page_of
from bloomery.api.routes.openai.eval_requests import (
    REFUSED_IN_PARAMS,
    ChangeEval,
    CreateEval,
    CreateRun,
    SamplingParams,
    parse_change,
    parse_eval,
    parse_run,
)
from bloomery.api.routes.openai.http import read_request
from bloomery.api.routes.openai.shapes import body_of
from bloomery.api.routes.openai.times import unix_s
from bloomery.types.errors import NotFound, shown
from bloomery.types.evals import Eval, EvalItems, EvalRun
from bloomery.types.evaluations import Evaluation, EvaluationItem, EvaluationState, ItemStatus, Score

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
RunStatus = Literal["queued", "in_progress", "completed", "canceled", "failed"]
_STATES: Final[dict[RunStatus, EvaluationState]] = {
    "queued": EvaluationState.QUEUED,
    "in_progress": EvaluationState.RUNNING,
    "completed": EvaluationState.SUCCEEDED,
    "canceled": EvaluationState.CANCELLED,
    "failed": EvaluationState.FAILED,
}
_STATUSES: Final[dict[EvaluationState, RunStatus]] = {state: status for status, state in _STATES.items()}
_ITEMS: Final[dict[str, ItemStatus]] = {"pass": "passed", "fail": "failed"}
_BETWEEN: Final = "-item-"
_SAMPLE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "output_text": {"type": "string"},
        "output_json": {},
        "output_tools": {"type": "array", "items": {"type": "object"}},
        "choices": {"type": "array", "items": {"type": "object"}},
    },
}
router = APIRouter(prefix="/evals")


@router.post("", status_code=201, openapi_extra=body_of(CreateEval))
async def create(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """An eval without runs."""
    _, asked = await read_request(request, parse_eval)
    return _eval(await services.evals.create(caller, asked))


@router.get("")
async def list_evals(
    services: Svc,
    caller: Caller,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
    order_by: Literal["created_at", "updated_at"] = "created_at",
) -> dict[str, Any]:
    """Evals, oldest first unless it is said otherwise."""
    page = await services.evals.list(caller, after=after, limit=limit, newest_first=order == "desc", by_update=order_by == "updated_at")
    return page_of(list(map(_eval, page.data)), has_more=page.has_more)


@router.get("/{eval_id}")
async def get(eval_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One eval."""
    return _eval(await services.evals.get(caller, eval_id))


@router.post("/{eval_id}", openapi_extra=body_of(ChangeEval))
async def change(eval_id: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """Give it another name, or other metadata."""
    _, asked = await read_request(request, parse_change)
    return _eval(await services.evals.change(caller, eval_id, name=asked.name, metadata=asked.metadata))


@router.delete("/{eval_id}")
async def delete(eval_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Forget it with its runs, which must have ended."""
    await services.evals.delete(caller, eval_id)
    return {"object": "eval.deleted", "deleted": True, "eval_id": eval_id}


@router.post("/{eval_id}/runs", status_code=201, openapi_extra=body_of(CreateRun, refused={SamplingParams: REFUSED_IN_PARAMS}))
async def create_run(eval_id: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """A run, which waits for its turn."""
    _, asked = await read_request(request, parse_run)
    return _run(await services.evals.run(caller, eval_id, asked), request)


@router.get("/{eval_id}/runs")
async def list_runs(
    eval_id: str,
    request: Request,
    services: Svc,
    caller: Caller,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: RunStatus | None = None,
) -> dict[str, Any]:
    """Runs, oldest first unless it is said otherwise."""
    state = None if status is None else _STATES[status]
    page = await services.evals.list_runs(caller, eval_id, after=after, limit=limit, newest_first=order == "desc", state=state)
    return page_of([_run(each, request) for each in page.data], has_more=page.has_more)


@router.get("/{eval_id}/runs/{run_id}")
async def get_run(eval_id: str, run_id: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """One run."""
    return _run(await services.evals.get_run(caller, eval_id, run_id), request)


@router.post("/{eval_id}/runs/{run_id}")
async def cancel_run(eval_id: str, run_id: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """End it."""
    return _run(await services.evals.cancel_run(caller, eval_id, run_id), request)


@router.post("/{eval_id}/runs/{run_id}/cancel")
async def cancel_run_by_name(eval_id: str, run_id: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """The same, as newer clients spell it."""
    return _run(await services.evals.cancel_run(caller, eval_id, run_id), request)


@router.delete("/{eval_id}/runs/{run_id}")
async def delete_run(eval_id: str, run_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Forget it; it must have ended."""
    await services.evals.delete_run(caller, eval_id, run_id)
    return {"object": "eval.run.deleted", "deleted": True, "run_id": run_id}


@router.get("/{eval_id}/runs/{run_id}/output_items")
async def list_items(
    eval_id: str,
    run_id: str,
    services: Svc,
    caller: Caller,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Literal["fail", "pass"] | None = None,
) -> dict[str, Any]:
    """What was answered, with the results of all criteria."""
    behind = -1 if after is None else _number(run_id, after, "after")
    wanted = None if status is None else _ITEMS[status]
    found = await services.evals.items(caller, eval_id, run_id, after=behind, limit=limit, newest_first=order == "desc", status=wanted)
    return page_of([_item(eval_id, run_id, found, each) for each in found.data], has_more=found.has_more)


@router.get("/{eval_id}/runs/{run_id}/output_items/{output_item_id}")
async def get_item(eval_id: str, run_id: str, output_item_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One of them."""
    found = await services.evals.item(caller, eval_id, run_id, _number(run_id, output_item_id, "output_item_id"))
    return _item(eval_id, run_id, found, found.data[0])


def _eval(found: Eval) -> dict[str, Any]:
    given = found.given
    properties = {"item": given.item_schema} | ({"sample": _SAMPLE_SCHEMA} if given.samples else {})
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "id": found.id,
        "object": "eval",
        "created_at": unix_s(found.created_us),
        "name": given.name or found.id,
        "data_source_config": {"type": "custom", "schema": schema},
        "testing_criteria": given.criteria,
        "metadata": given.metadata or {},
    }


def _run(run: EvalRun, request: Request) -> dict[str, Any]:
    evaluation, counts = run.evaluation, run.counts
    source = run.shown
    if run.rows is not None:
        content = [each.model_dump(exclude_none=True) for each in run.rows]
        source = source | {"source": {**source["source"], "content": content}}
    usage = {
        "model_name": run.model,
        "invocation_count": run.invocations,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "cached_tokens": 0,
        "total_tokens": run.prompt_tokens + run.completion_tokens,
    }
    of_criteria = zip(run.criteria, run.of_criteria, strict=True)
    return {
        "id": run.id,
        "object": "eval.run",
        "created_at": unix_s(evaluation.created_us),
        "eval_id": run.eval,
        "name": run.name,
        "model": run.model or "",
        "status": _STATUSES[evaluation.state],
        "data_source": source,
        "error": _error(evaluation),
        "metadata": run.metadata or {},
        "per_model_usage": [] if run.model is None else [usage],
        "per_testing_criteria_results": [{"testing_criteria": name, "passed": of.passed, "failed": of.failed} for name, of in of_criteria],
        "report_url": str(request.url.replace(path=f"/api/v1/evaluations/{run.id}", query="")),
        "result_counts": {"total": evaluation.progress.answers, "passed": counts.passed, "failed": counts.failed, "errored": counts.errored},
    }


def _error(evaluation: Evaluation) -> dict[str, Any] | None:
    return {"code": "evaluation_failed", "message": evaluation.reason or ""} if evaluation.state is EvaluationState.FAILED else None


def _item(eval_id: str, run_id: str, of: EvalItems, item: EvaluationItem) -> dict[str, Any]:
    """Criteria without a score are not among the results: what is wrong with them is the error of the sample."""
    params, answer = of.spec.params, item.answer
    scored = {score.grader: score for score in item.scores}
    of_criteria = [(name, scored.get(grader.label)) for name, grader in zip(of.criteria, of.spec.graders, strict=True)]
    results = [_result(name, score) for name, score in of_criteria if score is not None and score.result.error is None]
    asked = item.messages or ([] if item.prompt is None else [{"role": "user", "content": item.prompt}])
    said = answer.text or (json.dumps(answer.tools) if answer.tools else "")
    usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens, "cached_tokens": 0}
    return {
        "id": f"{run_id}{_BETWEEN}{item.number}",
        "object": "eval.run.output_item",
        "created_at": unix_s(item.created_us),
        "run_id": run_id,
        "eval_id": eval_id,
        "status": _item_status(item, len(of.criteria)),
        "datasource_item_id": item.row,
        "datasource_item": item.item,
        "results": results,
        "sample": {
            "input": [{"role": each["role"], "content": each.get("content") or ""} for each in asked],
            "output": [] if answer.error is not None else [{"role": "assistant", "content": said}],
            "finish_reason": answer.finish_reason or "",
            "model": of.model or "",
            "usage": usage | {"total_tokens": answer.prompt_tokens + answer.completion_tokens},
            "error": _sample_error(item, of_criteria),
            "temperature": params.temperature,
            "max_completion_tokens": params.max_tokens,
            "top_p": params.top_p,
            "seed": params.seed,
        },
    }


def _result(name: str, score: Score) -> dict[str, Any]:
    result = score.result
    more = {"reason": result.reason, "metrics": result.metrics or None, "labels": result.labels or None}
    shown = {"name": name, "score": result.score, "passed": bool(score.passed)}
    return shown | {field: value for field, value in more.items() if value is not None}


def _item_status(item: EvaluationItem, criteria: int) -> str:
    if item.answer.error is not None or any(score.result.error is not None for score in item.scores):
        return "error"
    if len(item.scores) < criteria:
        return "in_progress"
    return "pass" if all(score.passed for score in item.scores) else "fail"


def _sample_error(item: EvaluationItem, of_criteria: list[tuple[str, Score | None]]) -> dict[str, Any] | None:
    if item.answer.error is not None:
        return {"code": item.answer.error.kind, "message": item.answer.error.detail}
    for name, score in of_criteria:
        if score is not None and (error := score.result.error) is not None:
            return {"code": error.kind, "message": f"`{name}`: {error.detail}"}
    return None


def _number(run_id: str, item: str, field: str) -> int:
    of, _, number = item.rpartition(_BETWEEN)
    if of != run_id or not (number.isascii() and number.isdigit() and len(number) < 10):
        raise NotFound(f"no output item `{shown(item, 128)}` of run `{shown(run_id)}`", field=field)
    return int(number)

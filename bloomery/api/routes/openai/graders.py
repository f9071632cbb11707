"""`/v1/fine_tuning/alpha/graders`: run a grader on one output, or hear whether it is one; nothing is stored.

The published answer has no way to say that there is no score: it is 0 with a flag under `errors`. So it is here where the grader or the output is at
fault. Where somebody was away, which the published one has flags for, too, the request is refused with 503: asking again may help.
"""

import time
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.http import read_request, respond_whole
from bloomery.api.routes.openai.requests import parse
from bloomery.api.routes.openai.shapes import body_of
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.grading.graders import Tried
from bloomery.types.errors import Unavailable
from bloomery.types.graders import OutputRow
from bloomery.types.grading import GradeError

router = APIRouter(prefix="/fine_tuning/alpha/graders")

_FLAGS: Final = (
    "formula_parse_error",
    "invalid_variable_error",
    "model_grader_parse_error",
    "model_grader_refusal_error",
    "model_grader_server_error",
    "other_error",
    "python_grader_runtime_error",
    "python_grader_server_error",
    "sample_parse_error",
    "truncated_observation_error",
    "unresponsive_reward_error",
)
_DETAILS: Final = ("model_grader_server_error_details", "python_grader_runtime_error_details", "python_grader_server_error_type")


class ValidateRequest(Closed, frozen=True, kw_only=True):
    """Body of `validate`."""

    grader: dict[str, Any]


class RunRequest(Closed, frozen=True, kw_only=True):
    """Body of `run`: an output, and the fields of its row."""

    grader: dict[str, Any]
    model_sample: str
    item: dict[str, Any] | None = None


@router.post("/validate", openapi_extra=body_of(ValidateRequest))
async def validate(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """The grader, where it is one."""
    _, asked = await read_request(request, partial(parse, kind=ValidateRequest, refused={}))
    services.graders.check(caller, asked.grader, field="grader")
    return {"grader": asked.grader}


@router.post("/run", openapi_extra=body_of(RunRequest))
async def run(request: Request, services: Svc, caller: Caller) -> Response:
    """The reward of one output."""
    _, asked = await read_request(request, partial(parse, kind=RunRequest, refused={}))
    return await respond_whole(request, _run(services, caller, asked), {})


async def _run(services: Services, caller: Principal, asked: RunRequest) -> dict[str, Any]:
    began = time.monotonic()
    output = OutputRow(item=asked.item or {}, output=asked.model_sample)
    tried = await services.graders.attempt(caller, asked.grader, [output], field="grader")
    return _answer(tried, time.monotonic() - began)


def _answer(tried: Tried, seconds: float) -> dict[str, Any]:
    ((result, parts),) = tried.graded
    if result.error is not None and result.error.kind == "unavailable":
        raise Unavailable(result.error.detail)
    scores = {name: part.score for name, part in parts.items()}
    models = list(tried.tokens)
    return {
        "reward": 0.0 if result.score is None else result.score,
        "metadata": {
            "name": tried.grader.name,
            "type": tried.grader.spec.type,
            "errors": _errors(tried),
            "execution_time": seconds,
            "scores": scores,
            "token_usage": sum(tried.tokens.values()) if models else None,
            "sampled_model_name": models[0] if len(models) == 1 else None,
        },
        "sub_rewards": scores,
        "model_grader_token_usage_per_model": tried.tokens,
    }


def _errors(tried: Tried) -> dict[str, Any]:
    """Flags of whatever failed, also of graders in a multi one whose formula does without them."""
    ((result, parts),) = tried.graded
    told: dict[str, Any] = dict.fromkeys(_FLAGS, False) | dict.fromkeys(_DETAILS)
    failed = [(tried.grader.kinds[name], part.error) for name, part in parts.items() if part.error is not None]
    if not failed and result.error is not None:
        failed = [(tried.grader.spec.type, result.error)]
    for kind, error in failed:
        told |= _flags(kind, error)
    return told


def _flags(kind: str, error: GradeError) -> dict[str, Any]:
    if error.kind == "template":
        return {"sample_parse_error" if "sample.output_json" in error.detail else "invalid_variable_error": True}
    away = error.kind == "unavailable"
    if kind in ("python", "function") and away:
        return {"python_grader_server_error": True, "python_grader_server_error_type": error.kind}
    if kind in ("python", "function"):
        return {"python_grader_runtime_error": True, "python_grader_runtime_error_details": error.detail}
    if kind in ("score_model", "label_model") and away:
        return {"model_grader_server_error": True, "model_grader_server_error_details": error.detail}
    return {"model_grader_parse_error" if kind in ("score_model", "label_model") else "other_error": True}

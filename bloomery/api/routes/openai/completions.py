"""`/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.answers import ChatAnswers, CompletionAnswers
from bloomery.api.routes.openai.http import read_body, respond
from bloomery.api.routes.openai.jobs import chat_job, completion_job
from bloomery.api.routes.openai.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from bloomery.api.routes.openai.serving import Serving
from bloomery.api.routes.openai.shapes import body_of
from bloomery.services.core import Services
from bloomery.services.principal import Principal

router = APIRouter()


@router.post("/chat/completions", openapi_extra=body_of(ChatRequest))
async def chat_completions(request: Request, services: Svc, caller: Caller) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    return await respond(request, await serve_chat(services, caller, await read_body(request), request.headers))


@router.post("/completions", openapi_extra=body_of(CompletionRequest))
async def completions(request: Request, services: Svc, caller: Caller) -> Response:
    """Continue one or several prompts; with `stream` as server-sent events."""
    body = await read_body(request)
    job = await completion_job(services, caller, body, parse_completion(body), request.headers)
    return await respond(request, Serving(services, caller, CompletionAnswers(job)))


async def serve_chat(
    services: Services, caller: Principal, body: dict[str, Any], headers: Mapping[str, str], answer_id: str | None = None
) -> Serving:
    """The answer to a conversation in the making, under an id of its own or the one given."""
    job = await chat_job(services, caller, body, parse_chat(body), headers)
    return Serving(services, caller, ChatAnswers(job if answer_id is None else replace(job, id=answer_id)))

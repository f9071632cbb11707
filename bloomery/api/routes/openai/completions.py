"""`/v1/chat/completions` and `/v1/completions`."""

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.answers import ChatAnswers, CompletionAnswers
from bloomery.api.routes.openai.http import read_body, respond
from bloomery.api.routes.openai.jobs import chat_job, completion_job
from bloomery.api.routes.openai.requests import parse_chat, parse_completion
from bloomery.api.routes.openai.serving import Serving

router = APIRouter()


@router.post("/chat/completions")
async def chat_completions(request: Request, services: Svc, caller: Caller) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    body = await read_body(request)
    job = await chat_job(services, caller, body, parse_chat(body), request.headers)
    return await respond(request, Serving(services, caller, ChatAnswers(job)))


@router.post("/completions")
async def completions(request: Request, services: Svc, caller: Caller) -> Response:
    """Continue one or several prompts; with `stream` as server-sent events."""
    body = await read_body(request)
    job = await completion_job(services, caller, body, parse_completion(body), request.headers)
    return await respond(request, Serving(services, caller, CompletionAnswers(job)))

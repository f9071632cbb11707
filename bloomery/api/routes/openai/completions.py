"""`/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.answers import ChatAnswers, CompletionAnswers
from bloomery.api.routes.openai.http import read_request, respond
from bloomery.api.routes.openai.prepared import Prompts, most_pieces, prepare_chat, prepare_completion, prompts_of
from bloomery.api.routes.openai.requests import (
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    ChatRequest,
    CompletionRequest,
    Message,
    parse_chat,
    parse_completion,
)
from bloomery.api.routes.openai.serving import Serving
from bloomery.api.routes.openai.shapes import body_of
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services

router = APIRouter()


@router.post("/chat/completions", openapi_extra=body_of(ChatRequest, refused={ChatRequest: REFUSED_IN_CHAT, Message: REFUSED_IN_MESSAGES}))
async def chat_completions(request: Request, services: Svc, caller: Caller) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    body, asked = await read_request(request, partial(parse_chat, most=most_pieces(services)))
    return await respond(request, await serve_chat(services, caller, body, asked, request.headers))


@router.post("/completions", openapi_extra=body_of(CompletionRequest, refused={CompletionRequest: REFUSED_IN_COMPLETIONS}))
async def completions(request: Request, services: Svc, caller: Caller) -> Response:
    """Continue one or several prompts; with `stream` as server-sent events."""
    body, (asked, prompts) = await read_request(request, _completion)
    prepared = await prepare_completion(services, caller, body, asked, prompts, request.headers)
    return await respond(request, Serving(services, caller, CompletionAnswers(prepared)))


def _completion(body: dict[str, Any]) -> tuple[CompletionRequest, Prompts]:
    asked = parse_completion(body)
    return asked, prompts_of(asked.prompt)


async def serve_chat(
    services: Services, caller: Principal, body: dict[str, Any], asked: ChatRequest, headers: Mapping[str, str], answer_id: str | None = None
) -> Serving:
    """The answer to a conversation in the making, under an id of its own or the one given."""
    prepared = await prepare_chat(services, caller, body, asked, headers)
    return Serving(services, caller, ChatAnswers(prepared if answer_id is None else replace(prepared, id=answer_id)))

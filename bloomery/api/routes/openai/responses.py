"""`/v1/responses`, without a memory: a response is a chat completion in other words.

`response_requests` says what may be asked, `response_words` turns it into a conversation, which is answered as one, and `response_events` gives the
answer its shape.
"""

from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.completions import serve_chat
from bloomery.api.routes.openai.http import EventStream, Framing, read_request, respond_whole, version_headers
from bloomery.api.routes.openai.prepared import most_pieces
from bloomery.api.routes.openai.requests import ChatRequest, parse_chat
from bloomery.api.routes.openai.response_events import ResponseEvents
from bloomery.api.routes.openai.response_requests import REFUSED, InputMessage, ResponseRequest, parse_response
from bloomery.api.routes.openai.response_words import InOtherWords, in_other_words
from bloomery.api.routes.openai.shapes import body_of
from bloomery.types.ids import new_id

router = APIRouter()


class Asked(NamedTuple):
    """A request, and the chat completion that it is in other words."""

    response: ResponseRequest
    said: InOtherWords
    chat: ChatRequest


@router.post("/responses", openapi_extra=body_of(ResponseRequest, untagged=InputMessage, refused=REFUSED))
async def create_response(request: Request, services: Svc, caller: Caller) -> Response:
    """Answer an input; with `stream` as OpenAI's events."""
    body, (asked, said, chat) = await read_request(request, partial(_asked, most=most_pieces(services)))
    with said.telling():
        serving = await serve_chat(services, caller, said.body, chat, request.headers, new_id("resp"))
    headers = version_headers(serving.prepared.target)
    events = ResponseEvents(serving, body, said)
    if not asked.stream:
        return await respond_whole(request, events.whole(), headers)
    return EventStream(events.stream(), headers, Framing(_event, events.failed, b""))


def _asked(body: dict[str, Any], most: int) -> Asked:
    asked = parse_response(body, most)
    said = in_other_words(asked)
    with said.telling():
        return Asked(asked, said, parse_chat(said.body, most))


def _event(event: dict[str, Any]) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

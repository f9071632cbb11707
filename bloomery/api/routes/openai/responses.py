"""`/v1/responses`, without a memory: a response is a chat completion in other words.

The request becomes a conversation and is answered as one; `response_events` gives the answer its shape. What would need the server to remember
(`previous_response_id`, `conversation`, `background`) or to run tools of its own is refused by name.
"""

import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.completions import serve_chat
from bloomery.api.routes.openai.formats import JsonObject, NamedSchema, TextFormat
from bloomery.api.routes.openai.http import Framing, read_body, respond_stream, respond_whole, version_headers
from bloomery.api.routes.openai.requests import Few, Refused, SamplingFields, parse
from bloomery.api.routes.openai.response_events import ResponseEvents, whole
from bloomery.api.routes.openai.shapes import body_of
from bloomery.api.routes.openai.tools import ChosenFunction, FunctionTool, read_arguments
from bloomery.types.errors import BloomeryError, InvalidInput, NotSupported
from bloomery.types.ids import new_id

LOGPROBS: Final = "message.output_text.logprobs"
_FORGETS: Final = "nothing is remembered here: send the whole conversation as `input`"
_INSTEAD: Final[Mapping[str, str]] = {
    "previous_response_id": _FORGETS,
    "conversation": _FORGETS,
    "background": "wait for the answer, or read it as a stream",
    "prompt": "send the text of the prompt as `instructions` and `input`",
}
REFUSED_IN_RESPONSES: Final[Refused] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
}
_SAY_NOTHING: Final = ("phase", "namespace", "caller", "created_by")
"""Fields of items that the SDK sends back as null."""

router = APIRouter()


class Part(Closed, frozen=True, kw_only=True):
    """A piece of a message: text is the only kind."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    """These two as an answer had them: when it comes back, its text counts."""


class InputMessage(Closed, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None

    def chat(self) -> dict[str, Any]:
        """As a chat message."""
        return {"role": self.role, "content": _text(self.content)}


class FunctionCall(Closed, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    """The model asked for a call."""

    call_id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    arguments: str
    id: str | None = None
    status: str | None = None

    def chat(self) -> dict[str, Any]:
        """As one of the tool calls of a chat message."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class FunctionCallOutput(Closed, frozen=True, kw_only=True, tag="function_call_output", tag_field="type"):
    """What came of a call."""

    call_id: Annotated[str, Meta(min_length=1)]
    output: str | list[Part]
    id: str | None = None
    status: str | None = None

    def chat(self) -> dict[str, Any]:
        """As a chat message."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


Item = InputMessage | FunctionCall | FunctionCallOutput


class ResponseTool(FunctionTool, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """A tool that the caller runs."""

    def chat(self) -> dict[str, Any]:
        """As chat tools are written."""
        return {"type": "function", "function": _given(self, "name", "parameters", "description", "strict")}


class ResponseToolChoice(ChosenFunction, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """The tool that must be called."""


class ResponseJsonSchema(NamedSchema, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON that fits a schema, which is not left out here."""

    schema: dict[str, Any]


class TextConfig(Closed, frozen=True, kw_only=True):
    """What the answer looks like."""

    format: TextFormat | JsonObject | ResponseJsonSchema | None = None


class ResponseStreamOptions(Closed, frozen=True, kw_only=True):
    """Nothing of it is offered but what asks for nothing."""

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of `/v1/responses`; `seed` and `top_k` are our additions."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Few | None = None
    include: list[str] | None = None

    @property
    def shows_tokens(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


@router.post("/responses", openapi_extra=body_of(ResponseRequest))
async def create_response(request: Request, services: Svc, caller: Caller) -> Response:
    """Answer an input; with `stream` as OpenAI's events."""
    body = await read_body(request)
    asked = parse_response(body)
    try:
        serving = await serve_chat(services, caller, chat_body(asked), request.headers, new_id("resp"))
    except BloomeryError as error:
        raise _in_our_words(error) from error
    headers = version_headers(serving.job.target)
    if not asked.stream:
        return await respond_whole(request, _told_in_our_words(whole(serving, body)), headers)
    events = ResponseEvents(serving, body)
    return await respond_stream(request, events.stream(), headers, Framing(_event, lambda error: events.failed(_in_our_words(error)), b""))


def parse_response(body: Mapping[str, Any]) -> ResponseRequest:
    """The request for a response."""
    for name, instead in _INSTEAD.items():
        if body.get(name) not in (None, *REFUSED_IN_RESPONSES[name]):
            raise NotSupported(f"`{name}` is not offered: {instead}", field=name)
    _check_tools(body)
    asked = parse({**body, **_plain_items(body)}, ResponseRequest, REFUSED_IN_RESPONSES)
    if unknown := set(asked.include or ()) - {LOGPROBS}:
        raise NotSupported(f"`include`: `{min(unknown)}` is not offered, `{LOGPROBS}` is", field="include")
    if asked.stream_options is not None and not asked.stream:
        raise InvalidInput("`stream_options` needs `stream` to be true", field="stream_options")
    for index, item in enumerate(asked.input if isinstance(asked.input, list) else ()):
        if isinstance(item, FunctionCall):
            read_arguments(item.arguments, f"input.{index}.arguments")
    return asked


def chat_body(asked: ResponseRequest) -> dict[str, Any]:
    """The same as the body of a chat completion."""
    system = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    said = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else _messages(asked.input)
    fields = _given(asked, "model", "temperature", "top_p", "top_k", "seed", "stream", "metadata", "user", "store")
    fields |= {"messages": [*system, *said], "max_completion_tokens": asked.max_output_tokens}
    if asked.stream:
        fields["stream_options"] = {"include_usage": True}
    if asked.shows_tokens:
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.tools:
        fields |= {"tools": [tool.chat() for tool in asked.tools]} | _given(asked, "parallel_tool_calls")
    if asked.tool_choice is not None:
        fields["tool_choice"] = _choice(asked.tool_choice)
    if asked.text is not None and (form := asked.text.format) is not None:
        fields["response_format"] = _format(form)
    return fields


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Calls that follow each other, or a message of the assistant, are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, FunctionCall):
            messages.append(item.chat())
        elif messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(item.chat())
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [item.chat()]})
    return messages


def _plain_items(body: Mapping[str, Any]) -> dict[str, Any]:
    """Items with the type that they may leave out, and without what their senders add to say nothing."""
    items = body.get("input")
    if not isinstance(items, list):
        return {}
    return {"input": [_plain_item(index, item) for index, item in enumerate(items)]}


def _plain_item(index: int, item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if kind not in ("message", "function_call", "function_call_output"):
        raise NotSupported(f"`input.{index}.type`: items of type `{kind}` are not offered: leave it out", field=f"input.{index}.type")
    given = {name: value for name, value in item.items() if value is not None or name not in _SAY_NOTHING}
    return given | {"type": kind}


def _check_tools(body: Mapping[str, Any]) -> None:
    """Tools are functions that the caller runs; others are refused by their names."""
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        if isinstance(tool, dict) and tool.get("type") != "function":
            kind, instead = tool.get("type"), "the server runs none, give functions and run them yourself"
            raise NotSupported(f"`tools.{index}.type`: tools of type `{kind}` are not offered: {instead}", field=f"tools.{index}.type")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise NotSupported(f"`tool_choice.type`: a choice of type `{choice.get('type')}` is not offered: name a function", field="tool_choice.type")


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _choice(choice: str | ResponseToolChoice) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}


def _format(form: TextFormat | JsonObject | ResponseJsonSchema) -> dict[str, Any]:
    if isinstance(form, ResponseJsonSchema):
        return {"type": "json_schema", "json_schema": _given(form, "name", "schema", "description", "strict")}
    return {"type": "text" if isinstance(form, TextFormat) else "json_object"}


def _given(source: msgspec.Struct, *names: str) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name in names if (value := getattr(source, name)) is not None}


_NAMED: Final = re.compile(r"`([^`]+)`")
_THEIRS: Final = (
    (re.compile(r"^messages(\.[\w.]+)?$"), "input"),
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format(\.json_schema)?(?=\.|$)"), "text.format"),
    (re.compile(r"^(tools\.\d+|tool_choice)\.function(?=\.|$)"), r"\1"),
)


async def _told_in_our_words(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await answer
    except BloomeryError as error:
        raise _in_our_words(error) from error


def _in_our_words(error: BloomeryError) -> BloomeryError:
    """An error of a chat completion by the names that the caller used."""
    if error.category != "user" or error.code == "rate_limit_exceeded":
        return error
    message = _NAMED.sub(lambda named: f"`{_renamed(named[1])}`", error.message)
    return type(error)(message, field=None if error.field is None else _renamed(error.field))


def _renamed(field: str) -> str:
    for pattern, ours in _THEIRS:
        field = pattern.sub(ours, field)
    return field


def _event(event: dict[str, Any]) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

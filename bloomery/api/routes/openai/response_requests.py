"""What `/v1/responses` may be asked. What would need the server to remember, or to run tools of its own, is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.formats import JsonObject, NamedSchema, TextFormat
from bloomery.api.routes.openai.requests import Few, SamplingFields, asks_nothing, check_parts, check_pieces, parse, without_no_ops
from bloomery.api.routes.openai.shapes import Refused, RefusedIn
from bloomery.api.routes.openai.tools import ChosenFunction, FunctionTool, check_kinds, read_arguments
from bloomery.types.errors import InvalidInput, NotSupported, shown

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
REFUSED_IN_TEXT: Final[Refused] = {"verbosity": ("medium",)}
REFUSED_IN_ITEMS: Final[Refused] = {"phase": (), "namespace": (), "caller": (), "created_by": ()}
"""What the SDK sends back as null."""


_PartType = Literal["input_text", "output_text"]


class Part(Closed, frozen=True, kw_only=True):
    """A piece of a message: text is the only kind."""

    type: _PartType
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
        return {"type": "function", "function": given(self, "name", "parameters", "description", "strict")}


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
    """Body of `/v1/responses`; `seed`, `top_k` and `logprobs_mode` are our additions."""

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


REFUSED: Final[RefusedIn] = {ResponseRequest: REFUSED_IN_RESPONSES, TextConfig: REFUSED_IN_TEXT, **dict.fromkeys(get_args(Item), REFUSED_IN_ITEMS)}


def parse_response(body: Mapping[str, Any], most: int) -> ResponseRequest:
    """The request for a response to an input of at most so many pieces."""
    check_pieces(body.get("input"), most, "input")
    for name, instead in _INSTEAD.items():
        if not asks_nothing(body.get(name), REFUSED_IN_RESPONSES[name]):
            raise NotSupported(f"`{name}` is not offered: {instead}", field=name)
    check_kinds(body)
    asked = parse({**body, **_plain_items(body), **_plain_text(body)}, ResponseRequest, REFUSED_IN_RESPONSES)
    if unknown := set(asked.include or ()) - {LOGPROBS}:
        raise NotSupported(f"`include`: `{shown(min(unknown))}` is not offered, `{LOGPROBS}` is", field="include")
    if asked.stream_options is not None and not asked.stream:
        raise InvalidInput("`stream_options` needs `stream` to be true", field="stream_options")
    if asked.logprobs_mode and not asked.shows_tokens:
        raise InvalidInput(f"`logprobs_mode` needs `top_logprobs`, or `{LOGPROBS}` in `include`", field="logprobs_mode")
    for index, item in enumerate(asked.input if isinstance(asked.input, list) else ()):
        if isinstance(item, FunctionCall):
            read_arguments(item.arguments, f"input.{index}.arguments")
    return asked


def _plain_items(body: Mapping[str, Any]) -> dict[str, Any]:
    """Items with the type that they may leave out, and without what their senders add to say nothing."""
    items = body.get("input")
    if not isinstance(items, list):
        return {}
    return {"input": [_plain_item(index, item) for index, item in enumerate(items)]}


def _plain_text(body: Mapping[str, Any]) -> dict[str, Any]:
    text = body.get("text")
    return {"text": without_no_ops(text, TextConfig.__struct_fields__, REFUSED_IN_TEXT, "text.")} if isinstance(text, dict) else {}


def _plain_item(index: int, item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind not in ("message", "function_call", "function_call_output"):
        raise NotSupported(f"`input.{index}.type`: items of type `{shown(kind)}` are not offered: leave it out", field=f"input.{index}.type")
    for name in ("content", "output"):
        check_parts(item.get(name), get_args(_PartType), f"input.{index}.{name}")
    given = {name: value for name, value in item.items() if value is not None or name not in REFUSED_IN_ITEMS}
    return given | {"type": kind}


def given(source: msgspec.Struct, *names: str) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name in names if (value := getattr(source, name)) is not None}


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)

"""What `/v1` may be asked. Everything is checked here: unknown fields, and known ones that are not offered, are refused by name.

Fields that are not offered may be sent with the value that asks for nothing, because clients fill in their defaults.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from bloomery.types.errors import InvalidInput, NotSupported

MAX_BODY_BYTES: Final = 16 << 20
MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 256

Count = Annotated[int, Meta(ge=0)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class _Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not named is refused."""


class StreamOptions(_Closed, frozen=True, kw_only=True):
    """`include_usage` asks for a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Limit(NamedTuple):
    """How many tokens may be sampled, and the field that says so."""

    tokens: int | None
    field: str


class Asked(_Closed, frozen=True, kw_only=True):
    """The fields of both contracts. `top_k` is our addition; None is the default everywhere."""

    model: Annotated[str, Meta(min_length=1)]
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Count | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> Limit:
        """As the caller gave it."""
        return Limit(self.max_tokens, "max_tokens")


class TextPart(_Closed, frozen=True, kw_only=True):
    """Text is the only kind of content yet."""

    type: Literal["text"]
    text: str


class Message(_Closed, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """As chat templates know it: `developer` is the newer name of `system`, and parts are one text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Asked, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def limit(self) -> Limit:
        """As the caller gave it, by the newer name or by the older one."""
        return super().limit if self.max_completion_tokens is None else Limit(self.max_completion_tokens, "max_completion_tokens")


class CompletionRequest(Asked, frozen=True, kw_only=True):
    """Body of `/v1/completions`; a prompt is a text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None


Refused = Mapping[str, tuple[Any, ...]]
_REFUSED: Final[Refused] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
REFUSED_IN_COMPLETIONS: Final[Refused] = {**_REFUSED, "suffix": ("",)}
REFUSED_IN_CHAT: Final[Refused] = {
    **_REFUSED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "verbosity": (),
    "web_search_options": (),
}
REFUSED_IN_MESSAGES: Final[Refused] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
}

Request = TypeVar("Request", bound=Asked)


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """The request for a chat completion."""
    fields = _without_no_ops(body, ChatRequest.__struct_fields__, REFUSED_IN_CHAT)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [_message(index, message) for index, message in enumerate(messages)]
    request = _convert(fields, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidInput("`top_logprobs` needs `logprobs` to be true", field="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidInput("`max_tokens` is the older name of `max_completion_tokens`: give one of them", field="max_tokens")
    if request.limit.tokens == 0:
        raise InvalidInput(f"`{request.limit.field}` is at least 1", field=request.limit.field)
    return request


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """The request for a completion."""
    request = _convert(_without_no_ops(body, CompletionRequest.__struct_fields__, REFUSED_IN_COMPLETIONS), CompletionRequest)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise NotSupported("`best_of` is not offered: ask for `n` completions and choose", field="best_of")
    if request.echo and request.stream:
        raise NotSupported("`echo` is not offered with `stream`: ask for one of them", field="echo")
    if request.max_tokens == 0 and (request.n or 1) > 1:
        raise InvalidInput("`max_tokens` 0 only scores the prompt: leave `n` at 1", field="n")
    return request


def _message(index: int, message: Any) -> Any:
    return _without_no_ops(message, Message.__struct_fields__, REFUSED_IN_MESSAGES, f"messages.{index}.") if isinstance(message, dict) else message


def _without_no_ops(body: Mapping[str, Any], offered: Iterable[str], refused: Refused, path: str = "") -> dict[str, Any]:
    """The offered fields; the others must be known and ask for nothing."""
    kept = {}
    for name, value in body.items():
        if name in offered:
            kept[name] = value
        elif name not in refused:
            raise InvalidInput(f"unknown field `{path}{name}`: leave it out", field=path + name)
        elif value is not None and value not in refused[name]:
            raise NotSupported(f"`{path}{name}` is not offered yet: leave it out", field=path + name)
    return kept


_PLACE: Final = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"(?:unknown|required) field `(?P<name>[^`]+)`")


def _convert(fields: dict[str, Any], kind: type[Request]) -> Request:
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidInput("`stream_options` needs `stream` to be true", field="stream_options")
    if options is not None and options.include_obfuscation:
        raise NotSupported("`stream_options.include_obfuscation` is not offered: leave it out", field="stream_options.include_obfuscation")
    return request


def _invalid(message: str) -> InvalidInput:
    """The error with the path of the field, which is part of the message."""
    place = _PLACE.search(message)
    path = re.sub(r"\[(\d+)\]", r".\1", place["path"].replace("[...]", "")).lstrip(".") if place else ""
    text = message[: place.start()] if place else message
    named = _UNKNOWN.search(text)
    field = ".".join(part for part in (path, named["name"] if named else "") if part)
    return InvalidInput(f"`{field}`: {text[:1].lower()}{text[1:]}", field=field)

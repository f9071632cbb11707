"""What `/v1` may be asked. Everything is checked here: unknown fields, and known ones that are not offered, are refused by name.

Fields that are not offered may be sent with the value that asks for nothing, because clients fill in their defaults.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.formats import ResponseFormat, StructuredOutputs
from bloomery.api.routes.openai.shapes import Refused
from bloomery.api.routes.openai.tools import MAX_TOOLS, NAME, Tool, ToolCall, ToolChoice, check_kinds, check_tools
from bloomery.types.checks import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_SEED, MIN_REPETITION_PENALTY, MIN_SEED
from bloomery.types.errors import InvalidInput, NotSupported, shown
from bloomery.types.generation import LogprobsMode

MAX_BODY_BYTES: Final = 16 << 20
MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 256
MAX_PIECES: Final = 1 << 15
"""Messages, parts and calls of a conversation: to check and render more takes long, whatever the context."""

ModelName = Annotated[str, Meta(min_length=1)]
User = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0)]
Few = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=MIN_SEED, le=MAX_SEED)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_TOKEN_KEY: Final = r"^(0|[1-9][0-9]{0,9})$(?!\n)"
TokenKey = Annotated[str, Meta(pattern=_TOKEN_KEY)]
"""A token id as the key of an object, in its one spelling; in Python `$` is also before a last line break."""
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
_VARIABLE: Final = r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$(?!\n)"
VariableName = Annotated[str, Meta(pattern=_VARIABLE)]
MAX_VARIABLES_BYTES: Final = 1 << 16
"""Of all variables of a template, as JSON: they are switches, and what is to be read goes into messages."""


class StreamOptions(Closed, frozen=True, kw_only=True):
    """`include_usage` asks for a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Limit(NamedTuple):
    """How many tokens may be sampled, and the field that says so."""

    tokens: int | None
    field: str


class SamplingFields(Closed, frozen=True, kw_only=True):
    """The fields of whatever samples; None is the default everywhere. `top_k` and `logprobs_mode` are vLLM's, `seed` is not in OpenAI's responses."""

    model: ModelName
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """0 and -1 ask for all tokens: vLLM says either."""
    seed: Seed | None = None
    stream: bool | None = None
    user: User | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: bool | None = None
    logprobs_mode: LogprobsMode | None = None


class Asked(SamplingFields, frozen=True, kw_only=True):
    """The fields of both completions, and behind `stream_options` those of an engine, under the names that vLLM gave them."""

    max_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream_options: StreamOptions | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    prompt_logprobs: Few | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> Limit:
        """As the caller gave it."""
        return Limit(self.max_tokens, "max_tokens")


class TextPart(Closed, frozen=True, kw_only=True):
    """Text is the only kind of content yet: `_message` refuses the others."""

    type: Literal["text"]
    text: str


class Message(Closed, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """As chat templates know it: `developer` is the newer name of `system`, parts are one text, and arguments are objects."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.plain(f"messages.{index}.tool_calls.{place}") for place, call in enumerate(self.tool_calls)]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(Asked, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Few | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[VariableName, Any], Meta(max_length=32)] | None = None
    """Variables of the template, under the name that vLLM and SGLang have for them."""

    @property
    def limit(self) -> Limit:
        """As the caller gave it, by the newer name or by the older one."""
        return super().limit if self.max_completion_tokens is None else Limit(self.max_completion_tokens, "max_completion_tokens")


class CompletionRequest(Asked, frozen=True, kw_only=True):
    """Body of `/v1/completions`; a prompt is a text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: Few | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None


_OF_VLLM: Final[Refused] = {
    "return_token_ids": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_INSTEAD: Final[Mapping[str, str]] = {
    "return_token_ids": "POST /api/v1/samples takes and gives token ids",
    **{name: f'give `structured_outputs: {{"{name.removeprefix("guided_")}": ...}}`' for name in _OF_VLLM if name.startswith("guided_")},
}
REFUSED_IN_COMPLETIONS: Final[Refused] = {"suffix": ("",), **_OF_VLLM}
REFUSED_IN_CHAT: Final[Refused] = {
    **_OF_VLLM,
    "functions": ([],),
    "function_call": ("none", "auto"),
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
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    # What clients of models that think send back with every answer.
    "reasoning_content": (),
    "thinking_blocks": (),
}

Request = TypeVar("Request", bound=Asked)
Shape = TypeVar("Shape", bound=Closed)


def parse_chat(body: Mapping[str, Any], most: int) -> ChatRequest:
    """The request for a chat completion of at most so many pieces."""
    check_pieces(body.get("messages"), most, "messages")
    check_kinds(body)
    fields = without_no_ops(body, ChatRequest.__struct_fields__, REFUSED_IN_CHAT)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [_message(index, message) for index, message in enumerate(messages)]
    request = _convert(fields, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidInput("`top_logprobs` needs `logprobs` to be true", field="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidInput("`max_tokens` is the older name of `max_completion_tokens`: give one of them", field="max_tokens")
    if request.limit.tokens == 0:
        raise InvalidInput(f"`{request.limit.field}` is at least 1", field=request.limit.field)
    if request.logprobs_mode and not request.logprobs:
        raise InvalidInput("`logprobs_mode` needs `logprobs` to be true", field="logprobs_mode")
    if len(msgspec.json.encode(request.chat_template_kwargs)) > MAX_VARIABLES_BYTES:
        problem = f"`chat_template_kwargs` has more than {MAX_VARIABLES_BYTES >> 10} KiB as JSON"
        raise InvalidInput(f"{problem}: give less, and texts as messages", field="chat_template_kwargs")
    check_tools(request.tools, request.tool_choice)
    for index, said in enumerate(request.messages):
        _check_message(index, said)
    return request


def check_pieces(said: Any, most: int, field: str) -> None:
    """Refuse a conversation of too many pieces before any of them is looked at; whatever else it is, its shape will tell."""
    if not isinstance(said, list):
        return
    pieces = len(said) if len(said) > most else sum(map(_pieces, said))
    if pieces > most:
        raise InvalidInput(f"`{field}` has {pieces} messages, parts of them and calls, at most {most} are taken: send fewer", field=field)


def _pieces(message: Any) -> int:
    if not isinstance(message, dict):
        return 1
    return max(1, sum(len(part) for name in ("content", "tool_calls", "output") if isinstance(part := message.get(name), list)))


def _check_message(index: int, message: Message) -> None:
    """Content, unless something else is said; and what belongs to tools beside tools alone."""
    place, tool = f"messages.{index}", message.role == "tool"
    if message.content is None and not message.tool_calls:
        raise InvalidInput(f"`{place}.content` is missing: give a text, or text parts", field=f"{place}.content")
    if tool and message.tool_call_id is None:
        raise InvalidInput(f"`{place}.tool_call_id` is missing: say which call this answers", field=f"{place}.tool_call_id")
    for name, value, belongs in (
        ("tool_calls", message.tool_calls or None, message.role == "assistant"),
        ("tool_call_id", message.tool_call_id, tool),
    ):
        if value is not None and not belongs:
            raise NotSupported(f"`{place}.{name}` is not offered in a message of the role `{message.role}`: leave it out", field=f"{place}.{name}")


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """The request for a completion."""
    request = _convert(without_no_ops(body, CompletionRequest.__struct_fields__, REFUSED_IN_COMPLETIONS), CompletionRequest)
    shown, best_of = request.n or 1, request.best_of or request.n or 1
    if best_of < shown:
        raise InvalidInput(f"`best_of` is {best_of}: it must be at least `n`, which is {shown}", field="best_of")
    if best_of > shown and request.stream:
        raise InvalidInput("`best_of` cannot choose before all are finished: leave out `stream`", field="best_of")
    if request.max_tokens == 0 and best_of > 1:
        field = "n" if shown > 1 else "best_of"
        raise InvalidInput(f"`max_tokens` 0 only scores the prompt: leave `{field}` at 1", field=field)
    if request.logprobs_mode and request.logprobs is None:
        raise InvalidInput("`logprobs_mode` needs `logprobs`", field="logprobs_mode")
    if request.logprobs_mode == "processed_logprobs" and request.echo:
        problem = "`logprobs_mode`: `processed_logprobs` are of sampled tokens alone, and `echo` shows those of the prompt, which nobody drew"
        raise InvalidInput(f"{problem}: leave out `echo`, or ask for `raw_logprobs`", field="logprobs_mode")
    return request


def parse(body: Mapping[str, Any], kind: type[Shape], refused: Refused) -> Shape:
    """A request of another shape; `refused` are the fields that are known and not offered, with the values that ask for nothing."""
    return _checked(without_no_ops(body, kind.__struct_fields__, refused), kind)


def _message(index: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    check_parts(message.get("content"), ("text",), f"messages.{index}.content")
    return without_no_ops(message, Message.__struct_fields__, REFUSED_IN_MESSAGES, f"messages.{index}.")


def check_parts(content: Any, offered: tuple[str, ...], field: str) -> None:
    """Refuse parts of other types, which are images, sound and files; whatever else they are, their shape will tell."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in offered:
            place, known = f"{field}.{index}.type", " and ".join(f"`{each}`" for each in offered)
            raise NotSupported(
                f"`{place}`: parts of type `{shown(kind)}` are not offered, the models here read text alone: give parts of type {known}", field=place
            )


def without_no_ops(body: Mapping[str, Any], offered: Iterable[str], refused: Refused, path: str = "") -> dict[str, Any]:
    """The offered fields; the others must be known and ask for nothing."""
    kept = {}
    for name, value in body.items():
        if name in offered:
            kept[name] = value
        elif name not in refused:
            raise InvalidInput(f"unknown field `{path}{shown(name)}`: leave it out", field=path + shown(name))
        elif not asks_nothing(value, refused[name]):
            why = f": {_INSTEAD[name]}" if name in _INSTEAD else " yet: leave it out"
            raise NotSupported(f"`{path}{name}` is not offered{why}", field=path + name)
    return kept


def asks_nothing(value: Any, nothing: Iterable[Any]) -> bool:
    """Whether it is null or one of these; 0 is not false, whatever Python says."""
    return value is None or any(type(value) is type(each) and value == each for each in nothing)


_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_REASON_CHARS: Final = 300
_UNKNOWN: Final = re.compile(r"(?:unknown|required) field `(?P<name>[^`]+)`")


_IN_WORDS: Final[Mapping[str, str]] = {
    f"`str` matching regex {_TOKEN_KEY!r}": 'token ids in digits, as texts ("50")',
    f"`str` matching regex {_VARIABLE!r}": "names of variables: 1 to 64 letters of ASCII, digits and `_`, no digit first",
    f"`str` matching regex {NAME!r}": "1 to 64 letters of ASCII, digits, `_` and `-`",
}


def _checked(fields: dict[str, Any], kind: type[Shape]) -> Shape:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _convert(fields: dict[str, Any], kind: type[Request]) -> Request:
    request = _checked(fields, kind)
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidInput("`stream_options` needs `stream` to be true", field="stream_options")
    if options is not None and options.include_obfuscation:
        raise NotSupported("`stream_options.include_obfuscation` is not offered: leave it out", field="stream_options.include_obfuscation")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidInput("`prompt_logprobs` is told with a whole answer: leave out `stream`", field="prompt_logprobs")
    return request


def _invalid(message: str) -> InvalidInput:
    """The error with the path of the field, which is part of the message."""
    place = _PLACE.search(message)
    path = re.sub(r"\[(\d+)\]", r".\1", place["path"].replace("[...]", "")).lstrip(".") if place else ""
    text = message[: place.start()] if place else message
    for pattern, words in _IN_WORDS.items():
        text = text.replace(pattern, words)
    named = _UNKNOWN.search(text)
    field = ".".join(part for part in (path, shown(named["name"]) if named else "") if part)
    # It repeats values and names of fields of any length.
    return InvalidInput(f"`{field}`: {shown(text[:1].lower() + text[1:], _REASON_CHARS)}", field=field)

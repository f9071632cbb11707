"""What an agent asks and is answered, in the words of the OpenAI contract: bodies to messages, and sampled tokens to a message. Pure.

Answers are drawn from the whole distribution at the loop's temperature, because that is the one that losses compute. A field that asks for another
one is refused by name, and so is everything that is not known.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bloomery.render import ChatTokenizer
from bloomery.render.tools import CallReader, Function
from bloomery.types.errors import InvalidInput

Message = dict[str, Any]

_NOTED: Final = frozenset({"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream"})
_WITHOUT_EFFECT: Final = frozenset({"user", "metadata", "store", "stream_options"})
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (1,),
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
"""Offered with these values alone."""
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


class Asked(NamedTuple):
    """A request that can be served: messages and tools as chat templates know them."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int
    stream: bool


def read_request(body: Mapping[str, Any], model: str, most_tokens: int, temperature: float = 1.0) -> Asked:
    """What is asked of `model`, at the loop's temperature; an answer has at most `most_tokens`, whatever is asked for."""
    only = {**_ONLY, "temperature": (temperature,)}
    for name, value in body.items():
        if value is None or name in _NOTED or name in _WITHOUT_EFFECT:
            continue
        if name not in only:
            raise InvalidInput(f"`{name}` is not offered where answers are trained on: leave it out", field=name)
        if value not in only[name]:
            raise InvalidInput(f"`{name}` can only be {_shown(only[name][0])} where answers are trained on: leave it out", field=name)
    if body.get("model") != model:
        raise InvalidInput(f"the only model here is `{model}`: what others should answer goes to a client of theirs", field="model")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("`messages` is a list of at least one message", field="messages")
    limit = next((limit for name in ("max_completion_tokens", "max_tokens") if (limit := body.get(name)) is not None), most_tokens)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise InvalidInput(f"`max_completion_tokens` is {limit}: it must be a whole number, at least 1", field="max_completion_tokens")
    if not isinstance(stream := body.get("stream") or False, bool):
        raise InvalidInput("`stream` is true or false", field="stream")
    if (choice := body.get("tool_choice")) not in (None, "auto", "none"):
        raise InvalidInput("`tool_choice` can only be `auto` or `none` where answers are trained on", field="tool_choice")
    tools = [] if choice == "none" else [_tool(place, tool) for place, tool in enumerate(_list(body.get("tools"), "tools"))]
    return Asked([plain(place, message) for place, message in enumerate(messages)], tools, min(limit, most_tokens), stream)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(place: int, message: Any) -> Message:
    """A message as chat templates know it: parts are one text, the arguments of calls are objects, `developer` is `system`."""
    field = f"messages.{place}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
        raise InvalidInput(f"`{field}` needs a role: {', '.join(sorted(_ROLES))}", field=f"{field}.role")
    role = "system" if message["role"] == "developer" else message["role"]
    kept: Message = {"role": role, "content": _text(message.get("content"), f"{field}.content")}
    if calls := _list(message.get("tool_calls"), f"{field}.tool_calls"):
        kept["tool_calls"] = [_call(call, f"{field}.tool_calls.{number}") for number, call in enumerate(calls)]
    kept |= {name: message[name] for name in ("name", *(["tool_call_id"] if role == "tool" else [])) if message.get(name) is not None}
    if not isinstance(kept.get("name", ""), str):
        raise InvalidInput(f"`{field}.name` is a text", field=f"{field}.name")
    return kept


def write_message(tokenizer: ChatTokenizer, asked: Asked, answer: str, tokens: Sequence[int], *, stopped: bool) -> tuple[Message, str]:
    """The assistant's message that an agent gets for sampled tokens, and why it ended. Calls have ids that follow from the `answer`'s."""
    text, reason = tokenizer.decode(tokens[:-1] if stopped else tokens), "stop" if stopped else "length"
    message: Message = {"role": "assistant", "content": text, "refusal": None}
    if not asked.tools or tokenizer.dialect is None:
        return message, reason
    functions = [Function(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in asked.tools]
    heard = CallReader(tokenizer.dialect, functions).feed(text, final=True)
    calls: dict[int, dict[str, Any]] = {}
    for piece in heard.calls:
        named = {"name": piece.name or "", "arguments": ""}
        call = calls.setdefault(piece.number, {"id": _call_id(tokenizer, answer, piece.number, piece.name), "type": "function", "function": named})
        call["function"]["arguments"] += piece.arguments
    if not calls:
        return message | {"content": heard.text}, reason
    return message | {"content": heard.text or None, "tool_calls": list(calls.values())}, "tool_calls" if stopped else reason


def written_answer(before: Sequence[int], told: Sequence[int], ends: Collection[int]) -> tuple[int, ...]:
    """What a template writes of an answer, up to the token that ends it: the conversation `before` it, and `told` with it.

    Empty where it does not only append, or ends answers with no token of their own.
    """
    end = next((place for place in range(len(told) - 1, len(before) - 1, -1) if told[place] in ends), None)
    return () if end is None or tuple(told[: len(before)]) != tuple(before) else tuple(told[len(before) : end + 1])


def going_on(served: Sequence[int], behind: Sequence[int], ends: Collection[int]) -> tuple[int, ...] | None:
    """The prompt of an answer that goes on from one that was `served`, whose tokens stay as they were sampled.

    `behind` begins with the token by which the template ends that answer. None where the model ended it by another one.
    """
    if served[-1] not in ends:
        # Its length cut it off, and the template ends it.
        return (*served, *behind)
    return (*served, *behind[1:]) if served[-1] == behind[0] else None


def _call_id(tokenizer: ChatTokenizer, answer: str, number: int, name: str | None) -> str:
    assert tokenizer.dialect is not None
    if tokenizer.dialect.name_start:
        return f"{tokenizer.dialect.name_start}{name}:{number}"
    digits = f"{answer.rpartition('-')[2]}{number:03d}"
    return digits[-9:] if tokenizer.dialect.short_ids else f"call_{digits}"


def _list(value: Any, field: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise InvalidInput(f"`{field}` is a list", field=field)
    return value or []


def _text(content: Any, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidInput(f"`{field}` is a text, or a list of parts of the type `text`", field=field)
    return "".join(map(str, texts))


def _call(call: Any, field: str) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")
        kept = {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
    except (TypeError, KeyError, ValueError, RecursionError):
        raise InvalidInput(f"`{field}` needs an id and a function with its name and the text of its arguments, a JSON object", field=field) from None
    if not isinstance(arguments, dict):
        raise InvalidInput(f"`{field}.function.arguments` is not the text of a JSON object", field=f"{field}.function.arguments")
    return kept


def _tool(place: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidInput(f"`tools.{place}` is no function with a name", field=f"tools.{place}")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidInput(f"`tools.{place}.function.parameters` is no JSON schema", field=f"tools.{place}.function.parameters")
    if function.get("strict"):
        raise InvalidInput(f"`tools.{place}.function.strict` is not offered where answers are trained on", field=f"tools.{place}.function.strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "strict" and value is not None}}

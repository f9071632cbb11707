"""Records of files to rows: the public forms of each kind, and for those that are none a reason, a place and what would mend it.

`kind_of` says which kind a record looks like, `row_of` makes the row. Both raise `Broken`; nothing is guessed.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from bloomery.services.data.row import NOTHING, Message, Row
from bloomery.types import strict_json
from bloomery.types.datasets import RowKind

ROLES: Final = ("system", "user", "assistant", "tool")
MOST_WEIGHT: Final = 1e6
DEEPEST: Final = 64
"""Levels of objects and lists in a record: whoever reads it later recurses."""
_ALIASES: Final = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation"), "tool"),
}
"""What others call these roles."""
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "weight", "reasoning_content"})
_REASONING: Final = ("reasoning", "thinking", "thought", "reasoning_details")
_BESIDE: Final = frozenset({"messages", "tools", "weight", "parallel_tool_calls", "id", "metadata", "text", "label"})
"""Fields that a conversation may have beside: they make it no prompt for reinforcement learning."""
_SIDES: Final = (("preferred_output", "non_preferred_output"), ("chosen", "rejected"))


class Problem(NamedTuple):
    """Why a record is no row: a word for programs, a sentence, the field, and what would mend it."""

    reason: str
    message: str
    field: str | None = None
    suggestion: str | None = None


class Broken(Exception):
    """A record that is no row."""

    def __init__(self, reason: str, message: str, field: str | None = None, suggestion: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(reason, message, field, suggestion)


class Made(NamedTuple):
    """A row, and the fields of its record that rows of its kind do not have."""

    row: Row
    ignored: Collection[str]


def kind_of(record: Mapping[str, Any]) -> RowKind:
    """The kind that a record looks like."""
    if "messages" in record:
        messages = record["messages"]
        asks = isinstance(messages, list) and messages and isinstance(messages[-1], dict) and messages[-1].get("role") in ("user", "tool")
        # Other fields are there for graders; without any it is a conversation whose answer is missing.
        return "prompt" if asks and _other_fields(record, _BESIDE) else "chat"
    if any(name in record for names in _SIDES for name in names):
        return "preference"
    if "completion" in record:
        return "chat" if isinstance(record["completion"], list) else "completion"
    if "prompt" in record:
        return "prompt"
    if "text" in record or "label" in record:
        return "chat"
    raise _unknown(record)


def row_of(record: Mapping[str, Any], kind: RowKind) -> Made:
    """The row of that kind."""
    _check_depth(record)
    try:
        # Half of a surrogate pair can be written in JSON, and nowhere else.
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        field = next((name for name, value in record.items() if _has_half_pair(value)), None)
        raise Broken("not_unicode", f"`{field}` holds half a surrogate pair, which is not text", field) from None
    return _MAKERS[kind](record)


def _chat(record: Mapping[str, Any]) -> Made:
    if "messages" in record:
        if "text" in record or "label" in record:
            raise Broken("two_forms", "has both `messages` and `text` or `label`: keep one form", "messages")
        return _conversation(record, record["messages"], {"messages"})
    if isinstance(record.get("completion"), list):
        # TRL's form: the loss is on the completion alone.
        asked = [_silenced(message) for message in _listed(record.get("prompt"), "prompt")]
        return _conversation(record, [*asked, *_listed(record["completion"], "completion")], {"prompt", "completion"})
    if "text" in record or "label" in record:
        text, label = _labelled(record)
        messages = ({"content": text, "role": "user"}, {"content": label, "role": "assistant"})
        return Made(Row(messages, rest=_weight_of(record) or NOTHING), _other_fields(record, {"text", "label", "weight"}))
    raise _unlike("chat", record)


def _conversation(record: Mapping[str, Any], given: Any, read: set[str]) -> Made:
    messages = _messages(given, "messages")
    if messages[-1]["role"] != "assistant":
        raise Broken(
            "no_answer",
            "the last message must be the assistant's, because it is what the model learns to say",
            f"messages.{len(messages) - 1}.role",
            "add the answer as the last message; if these are prompts for reinforcement learning, give the kind `prompt`",
        )
    _check_asked(messages)
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
        raise Broken("nothing_to_learn", "every message of the assistant has the weight 0", "messages", "leave the row out, or give one the weight 1")
    rest = _tools_of(record) | _weight_of(record)
    return Made(Row(tuple(messages), rest=rest or NOTHING), _other_fields(record, read | {"tools", "weight"}))


def _preference(record: Mapping[str, Any]) -> Made:
    if not any(name in record for names in _SIDES for name in names):
        raise _unlike("preference", record)
    if any(name in record for name in _SIDES[0]):
        asked = record.get("input")
        if not isinstance(asked, dict):
            raise Broken("wrong_type", "`input` must be an object with `messages`", "input")
        messages = _messages(asked.get("messages"), "input.messages")
        rest = _tools_of(asked) | _weight_of(record)
        return _preferred(record, messages, rest, _SIDES[0], {"input", "weight"})
    prompt, chosen, rejected = record.get("prompt"), record.get("chosen"), record.get("rejected")
    rest = _tools_of(record) | _weight_of(record)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None and not isinstance(prompt, str):
            raise Broken("mixed_forms", "`prompt` must be a text where `chosen` and `rejected` are", "prompt")
        return _preferred_texts(record, prompt, chosen, rejected, rest)
    if prompt is not None:
        return _preferred(record, _messages(prompt, "prompt"), rest, _SIDES[1], {"prompt", "tools", "weight"})
    # Without a prompt both sides are whole conversations, and what they have in common was asked.
    sides = [_messages(record.get(name), name) for name in _SIDES[1]]
    common = next((place for place, (left, right) in enumerate(zip(*sides, strict=False)) if left != right), min(map(len, sides)))
    while common and sides[0][common - 1]["role"] == "assistant":
        common -= 1
    cut = {**record, "chosen": sides[0][common:], "rejected": sides[1][common:]}
    return _preferred(cut, sides[0][:common], rest, _SIDES[1], {"tools", "weight"})


def _preferred(record: Mapping[str, Any], asked: list[Message], rest: dict[str, Any], names: tuple[str, str], read: set[str]) -> Made:
    if not asked:
        raise Broken("no_prompt", f"`{names[0]}` and `{names[1]}` do not begin with the same question", names[0], "put what was asked into `prompt`")
    _check_asked(asked)
    if asked[-1]["role"] == "assistant":
        raise Broken("prompt_answered", "what is asked ends with the assistant's message: both answers come behind it", names[0])
    sides = [_answer(record.get(name), name) for name in names]
    if sides[0] == sides[1]:
        raise Broken("same_answers", f"`{names[0]}` and `{names[1]}` are the same: there is nothing to prefer", names[1], "leave the row out")
    rest = {"preferred": sides[0], "rejected": sides[1], **rest}
    return Made(Row(tuple(asked), kind="preference", rest=rest), _other_fields(record, {*names, *read}))


def _preferred_texts(record: Mapping[str, Any], prompt: str | None, chosen: str, rejected: str, rest: dict[str, Any]) -> Made:
    if prompt is None:
        common = next(
            (place for place, (left, right) in enumerate(zip(chosen, rejected, strict=False)) if left != right), min(len(chosen), len(rejected))
        )
        # The space before the word that differs belongs to that word, as tokenizers have it.
        common -= common > 0 and chosen[common - 1] == " "
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        _check_text(text, name)
    if chosen == rejected:
        raise Broken("same_answers", "`chosen` and `rejected` are the same: there is nothing to prefer", "rejected", "leave the row out")
    rest = {"prompt": prompt, "preferred": chosen, "rejected": rejected, **rest}
    return Made(Row((), kind="preference", rest=rest), _other_fields(record, {"prompt", "chosen", "rejected", "weight"}))


def _answer(given: Any, name: str) -> list[Message]:
    messages = _messages(given, name)
    for place, message in enumerate(messages):
        if message["role"] not in ("assistant", "tool"):
            raise Broken(
                "wrong_role", f"`{name}` holds a message of the role `{message['role']}`: an answer is the assistant's", f"{name}.{place}.role"
            )
        # Which is better is said of the whole answer.
        message.pop("weight", None)
    if messages[-1]["role"] != "assistant":
        raise Broken("no_answer", f"the last message of `{name}` must be the assistant's", f"{name}.{len(messages) - 1}.role")
    return messages


def _prompt(record: Mapping[str, Any]) -> Made:
    read = next((name for name in ("messages", "prompt", "text") if name in record), None)
    if read is None:
        raise _unlike("prompt", record)
    given = record[read]
    messages = _messages([{"role": "user", "content": given}] if isinstance(given, str) else given, read)
    _check_asked(messages)
    if messages[-1]["role"] == "assistant":
        suggestion = "move the answer into a field of its own, for graders to compare with"
        raise Broken("prompt_answered", "the last message is the assistant's, but a prompt ends where the model is to answer", read, suggestion)
    # A text stays among the fields: graders' templates name it, and reward functions of TRL get texts where their prompt is one.
    read_whole = {"tools"} if isinstance(given, str) else {"tools", read}
    item = {name: record[name] for name in record if name not in read_whole}
    return Made(Row(tuple(messages), kind="prompt", rest=_tools_of(record) | ({"item": item} if item else {})), ())


def _completion(record: Mapping[str, Any]) -> Made:
    if "completion" not in record:
        raise _unlike("completion", record)
    prompt, completion = record.get("prompt"), record.get("completion")
    if not isinstance(prompt, str | None):
        raise Broken("mixed_forms", "`prompt` must be a text where `completion` is", "prompt")
    _check_text(completion, "completion")
    rest = {"prompt": prompt or "", "completion": completion, **_weight_of(record)}
    return Made(Row((), kind="completion", rest=rest), _other_fields(record, {"prompt", "completion", "weight"}))


_MAKERS: Final[dict[RowKind, Callable[[Mapping[str, Any]], Made]]] = {
    "chat": _chat,
    "preference": _preference,
    "prompt": _prompt,
    "completion": _completion,
}


# Parts of rows


def _labelled(record: Mapping[str, Any]) -> tuple[str, str]:
    for column in ("text", "label"):
        if record.get(column) is None:
            raise Broken("missing_field", f"lacks `{column}`", column)
    text, label = record["text"], record["label"]
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise Broken("wrong_type", "`label` must be a text or a whole number", "label")
    _check_text(text, "text")
    _check_text(str(label), "label")
    return text, str(label)


def _listed(given: Any, field: str) -> list[Any]:
    if not isinstance(given, list):
        raise Broken("wrong_type", f"`{field}` must be a list of messages", field)
    return given


def _silenced(message: Any) -> Any:
    return {**message, "weight": 0} if isinstance(message, dict) and message.get("role") == "assistant" else message


def _messages(given: Any, field: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Broken("wrong_type", f"`{field}` must be a list of messages", field)
    calls: set[str] = set()
    return [_message(message, place, field, calls) for place, message in enumerate(given)]


def _message(given: Any, place: int, field: str, calls: set[str]) -> Message:
    name, field = f"message {place + 1}", f"{field}.{place}"
    if not isinstance(given, dict):
        raise Broken("wrong_type", f"{name} is not an object", field)
    role = _role(given, name, field)
    filled = {key for key, value in given.items() if value not in (None, [])}
    if unknown := filled - _MESSAGE_FIELDS:
        raise _unknown_field(min(unknown), name, field)
    kept: Message = {"content": _content(given.get("content"), name, f"{field}.content"), "role": role}
    for key, belongs in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("weight", "assistant"), ("tool_call_id", "tool")):
        if key in filled and role != belongs:
            raise Broken("misplaced_field", f"{name}: `{key}` is for messages of the role `{belongs}`", f"{field}.{key}", f"leave `{key}` out")
    if "tool_calls" in filled:
        kept["content"] = kept["content"] or None
        kept["tool_calls"] = _calls(given["tool_calls"], name, f"{field}.tool_calls", calls)
    if "weight" in filled and _message_weight(given["weight"], name, f"{field}.weight") == 0:
        kept["weight"] = 0
    for key in ("name", "reasoning_content", "tool_call_id"):
        if key in filled:
            if not isinstance(given[key], str):
                raise Broken("wrong_type", f"{name}: `{key}` must be a text", f"{field}.{key}")
            kept[key] = given[key]
    if "tool_call_id" in kept and kept["tool_call_id"] not in calls:
        problem = f"{name} answers the call `{kept['tool_call_id'][:64]}`, which no message before it makes"
        raise Broken("unknown_call", problem, f"{field}.tool_call_id", "give `tool_calls` of the assistant's message the same `id`")
    # Who calls a tool may say nothing beside, and a tool may have nothing to say.
    if role != "tool" and "tool_calls" not in kept:
        _check_text(kept["content"], f"{field}.content", name)
    return {key: kept[key] for key in sorted(kept) if kept[key] is not None}


def _role(message: Mapping[str, Any], name: str, field: str) -> str:
    role = message.get("role")
    if role == "developer":
        return "system"
    if role in ROLES:
        return str(role)
    meant = _ALIASES.get(role.lower() if isinstance(role, str) else "")
    suggestion = f"write `{meant}` for `{role}`" if meant else None
    if role is None and "from" in message:
        suggestion = "these are ShareGPT's names: write `role` for `from`, `content` for `value`, `user` for `human` and `assistant` for `gpt`"
    raise Broken("wrong_role", f"{name}: `role` must be one of {', '.join(ROLES)}", f"{field}.role", suggestion)


def _content(content: Any, name: str, field: str) -> str | None:
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                problem = f"{name}: `content` has a part that is no text"
                raise Broken("not_text", problem, f"{field}.{place}", "only parts of the type `text` can be trained on")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Broken("wrong_type", f"{name}: `content` must be a text", field)
    return content


def _calls(given: Any, name: str, field: str, known: set[str]) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise Broken("wrong_type", f"{name}: `tool_calls` must be a list", field)
    return [_call(call, name, f"{field}.{place}", known) for place, call in enumerate(given)]


def _call(given: Any, name: str, field: str, known: set[str]) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
        raise Broken("wrong_type", f"{name}: a call in `tool_calls` has no `function` with a `name`", field, f"write {form}")
    arguments = function.get("arguments")
    # Templates take objects, OpenAI's contract has their text.
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else "{}" if arguments in (None, "") else arguments
    if not isinstance(text, str) or not isinstance(_json_or_none(text), dict):
        problem = f"{name}: the `arguments` of a call are not the text of a JSON object"
        raise Broken("wrong_arguments", problem, f"{field}.function.arguments")
    call: dict[str, Any] = {}
    if (identity := given.get("id")) is not None:
        if not isinstance(identity, str):
            raise Broken("wrong_type", f"{name}: the `id` of a call must be a text", f"{field}.id")
        known.add(identity)
        call["id"] = identity
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _tools_of(record: Mapping[str, Any]) -> dict[str, Any]:
    tools = record.get("tools")
    if tools in (None, []):
        return {}
    if not isinstance(tools, list):
        raise Broken("wrong_type", "`tools` must be a list of functions", "tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, dict):
            form = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
            raise Broken("wrong_tool", f"tool {place + 1} is no function with a `name`", f"tools.{place}", f"write {form}")
    return {"tools": tools}


def _weight_of(record: Mapping[str, Any]) -> dict[str, Any]:
    weight = record.get("weight")
    if weight in (None, 1):
        return {}
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
        raise Broken("wrong_weight", f"`weight` of a row must be a number above 0, and {MOST_WEIGHT:g} at most", "weight")
    if weight == 0:
        raise Broken("nothing_to_learn", "the row has the `weight` 0", "weight", "leave it out")
    return {"weight": float(weight)}


def _message_weight(weight: Any, name: str, field: str) -> int:
    if isinstance(weight, bool) or weight not in (0, 1):
        suggestion = "1 is learned and 0 is not; a row may have any `weight` beside `messages`"
        raise Broken("wrong_weight", f"{name}: `weight` must be 0 or 1", field, suggestion)
    return int(weight)


def _check_asked(messages: list[Message]) -> None:
    if not any(message["role"] == "user" for message in messages):
        raise Broken("no_question", "no message is the user's", "messages")


def _check_text(text: Any, field: str, name: str | None = None) -> None:
    what = f"`{field}`" if name is None else f"{name}: `content`"
    if not isinstance(text, str):
        raise Broken("wrong_type" if text is not None else "missing_field", f"{what} must be a text", field)
    if not text.strip():
        raise Broken("empty", f"{what} is empty", field)


def _check_depth(record: Mapping[str, Any]) -> None:
    """Without recursion, which is what it is to save others from."""
    level: list[Any] = [record]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value) if isinstance(inner, dict | list)]
        if not level:
            return
    raise Broken("too_deep", f"it has objects and lists over {DEEPEST} levels deep")


def _other_fields(record: Mapping[str, Any], read: Collection[str]) -> set[str]:
    return {name for name, value in record.items() if value is not None} - set(read)


def _has_half_pair(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _json_or_none(text: str) -> Any:
    try:
        return strict_json.read(text)
    except (ValueError, RecursionError):
        return None


# What files often have instead


def _unknown(record: Mapping[str, Any]) -> Broken:
    if "conversations" in record:
        suggestion = (
            "this is ShareGPT's form: write `messages` with `role` (`user`, `assistant`) and `content` for `conversations` with `from` and `value`"
        )
        return Broken("unknown_form", "has `conversations` and no `messages`", "conversations", suggestion)
    if "instruction" in record:
        suggestion = "this is Alpaca's form: write `instruction` and `input` as the user's message and `output` as the assistant's in `messages`"
        return Broken("unknown_form", "has `instruction` and no `messages`", "instruction", suggestion)
    for asked, answered in (("question", "answer"), ("input", "output"), ("query", "response")):
        if asked in record and answered in record:
            suggestion = (
                f"write `messages` with `{asked}` as the user's and `{answered}` as the assistant's message, or rename them `prompt` and `completion`"
            )
            return Broken("unknown_form", f"has `{asked}` and `{answered}`, and no `messages`", asked, suggestion)
    forms = "`messages`; `input`, `preferred_output` and `non_preferred_output`; `chosen` and `rejected`; `prompt` and `completion`"
    return Broken("unknown_form", f"lacks `text` and `label`, and every other form of a row: {forms}")


def _unlike(kind: RowKind, record: Mapping[str, Any]) -> Broken:
    try:
        other = kind_of(record)
    except Broken as unknown:
        return unknown
    return Broken("mixed_kinds", f"is a `{other}` row and no `{kind}` row", None, "give every kind of rows a data set of its own")


def _unknown_field(key: str, name: str, field: str) -> Broken:
    suggestion = None
    if key in _REASONING:
        suggestion = f"write `reasoning_content` for `{key}`"
    elif key in ("value", "text"):
        suggestion = f"write `content` for `{key}`"
    elif key == "function_call":
        suggestion = "write `tool_calls`, a list of calls, each with its `id`"
    known = ", ".join(f"`{each}`" for each in sorted(_MESSAGE_FIELDS - {"role", "content"}))
    problem = f"{name}: `{key}` is not supported; a message has `role` and `content`, and may have {known}"
    return Broken("unknown_field", problem, f"{field}.{key}", suggestion)

"""Tools that a conversation may call: what its model must write for that, and what it wrote."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from bloomery.render import ChatTokenizer
from bloomery.render.tool_grammar import forced_calls, possible_calls
from bloomery.render.tools import CallReader, Dialect, Function
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Grammar
from bloomery.types.grammar import check_grammar

__all__ = ["AnswerCalls", "Function", "ToolUse", "checked_grammar", "tool_use", "whole_message"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The tools of one request, in the dialect of its model."""

    dialect: Dialect
    functions: Sequence[Function]
    callable: Sequence[int]
    """Which of them may be called now, by their places."""
    forced: bool
    """Whether the answer is calls and nothing else."""
    parallel: bool
    tokens: Mapping[str, int]
    spoken: Collection[int]
    """Tokens in text that are no pieces of it."""

    def reader(self) -> CallReader:
        """What reads one answer."""
        return CallReader(self.dialect, self.functions)

    def grammar(self, answer: Mapping[str, Any] | None) -> Grammar | None:
        """What holds the answer to it, where anything does; `answer` is the JSON schema of one that calls nothing."""
        functions = [self.functions[place] for place in self.callable]
        if self.forced:
            text = forced_calls(self.dialect, functions, self.tokens, parallel=self.parallel)
        elif self.guided(answer):
            text = possible_calls(self.dialect, functions, self.tokens, parallel=self.parallel, answer=answer, spoken=self.spoken)
        else:
            return None
        return Grammar(kind="lark", text=text, field="tools")

    def guided(self, answer: Mapping[str, Any] | None) -> bool:
        """Whether a grammar is needed."""
        return self.forced or answer is not None or not self.parallel or any(function.strict for function in self.functions)


def tool_use(tokenizer: ChatTokenizer, functions: Sequence[Function], *, named: str | None, forced: bool, parallel: bool) -> ToolUse:
    """Tools for the model of a tokenizer: one of them is called where that is `forced`, and none but the one that is `named`."""
    if tokenizer.dialect is None:
        raise InvalidInput("the chat template of this model teaches no way of calling tools that is known here: leave out `tools`", field="tools")
    callable_now = [place for place, function in enumerate(functions) if named in (None, function.name)]
    if not callable_now:
        raise InvalidInput(f"`tool_choice` names `{named}`, which is not among the `tools`", field="tool_choice")
    return ToolUse(
        dialect=tokenizer.dialect,
        functions=functions,
        callable=callable_now,
        forced=forced,
        parallel=parallel and named is None,
        tokens=tokenizer.added_tokens,
        spoken=tokenizer.spoken_tokens,
    )


class AnswerCalls:
    """The calls of one answer, in the contract's form. `key` is the answer's own: ids of calls follow from it, so that all who look see the same."""

    def __init__(self, use: ToolUse, key: str) -> None:
        self._use, self._key = use, key
        self._reader = use.reader()

    def delta(self, text: str, reason: str | None) -> dict[str, Any]:
        """What a stream says next of a message."""
        heard = self._reader.feed(text, final=reason is not None)
        calls: dict[int, dict[str, Any]] = {}
        for piece in heard.calls:
            begun = {} if piece.name is None else {"id": self._id(piece.number, piece.name), "type": "function"}
            call = calls.setdefault(piece.number, {"index": piece.number, **begun, "function": {}})
            if piece.name is not None:
                call["function"] |= {"name": piece.name, "arguments": ""}
            call["function"]["arguments"] = call["function"].get("arguments", "") + piece.arguments
        return ({"content": heard.text} if heard.text else {}) | ({"tool_calls": list(calls.values())} if calls else {})

    def reason(self, reason: str | None) -> str | None:
        """Why the answer ended. One that a `stop` of the caller cut off in a call asks for none: half of its arguments are missing."""
        return "tool_calls" if reason == "stop" and self._reader.called and not self._reader.cut_off else reason

    def _id(self, index: int, name: str) -> str:
        dialect = self._use.dialect
        if dialect.name_start:
            return f"{dialect.name_start}{name}:{index}"
        digest = blake3(f"{self._key}:{index}".encode()).hexdigest()
        return digest[:9] if dialect.short_ids else f"call_{digest[:24]}"


def whole_message(use: ToolUse, key: str, text: str, reason: str | None) -> tuple[dict[str, Any], str | None]:
    """A message in one piece, and why it ended."""
    calls = AnswerCalls(use, key)
    # An answer that was broken off is read like one that ended: what it began is shown as text.
    delta = calls.delta(text, reason or "abort")
    message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
    if "tool_calls" not in delta:
        return message | {"content": delta.get("content", "")}, reason
    made = [{key: value for key, value in call.items() if key != "index"} for call in delta["tool_calls"]]
    return message | {"tool_calls": made}, calls.reason(reason)


async def checked_grammar(wanted: Grammar | None, field: str, tools: ToolUse | None, answer: Mapping[str, Any] | None) -> Grammar | None:
    """What the answer must follow: the grammar that is `wanted` by the name of `field`, or that of the tools. Checked on a thread: it takes time."""
    return await asyncio.to_thread(_checked, wanted, field, tools, answer)


def _checked(wanted: Grammar | None, field: str, tools: ToolUse | None, answer: Mapping[str, Any] | None) -> Grammar | None:
    if wanted is not None:
        wanted = msgspec.structs.replace(wanted, field=field)
        check_grammar(wanted, field)
    if tools is None:
        return wanted
    if tools.guided(answer):
        for place in tools.callable:
            schema = msgspec.json.encode(tools.functions[place].parameters).decode()
            check_grammar(Grammar(kind="json_schema", text=schema), f"tools.{place}.function.parameters")
    return tools.grammar(answer)

"""Tools that a conversation may call: what its model must write for that, and what it wrote."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bloomery.render import ChatTokenizer
from bloomery.render.tool_grammar import forced_calls, possible_calls
from bloomery.render.tools import CallReader, Dialect, Function
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Grammar
from bloomery.types.grammar import check_grammar

__all__ = ["Function", "ToolUse", "checked_grammar", "tool_use"]


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

"""Rows of data sets as a model is trained on them: what a preview shows is what a job trains.

Pure functions of a row and a tokenizer. Messages and tools are given to the template as they are when the model is served.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bloomery.render.tokenizer import ChatTokenizer
from bloomery.render.training import Rendered
from bloomery.types.datasets import ChatRow, CompletionRow, PreferenceRow, PromptRow
from bloomery.types.errors import InvalidInput


class RenderedPair(NamedTuple):
    """Both answers to one question, each behind the same prompt; only the answers carry loss."""

    preferred: Rendered
    rejected: Rendered


def row_examples(tokenizer: ChatTokenizer, row: ChatRow | CompletionRow) -> list[Rendered]:
    """What is learned from a row, its weight included: one example, or one of each answer where the template rewrites earlier turns."""
    if isinstance(row, CompletionRow):
        return [tokenizer.render_completion(row.prompt, row.completion).times(row.weight)]
    examples = tokenizer.render_examples([plain_message(message) for message in row.messages], plain_tools(row.tools))
    return [example.times(row.weight) for example in examples]


def row_pair(tokenizer: ChatTokenizer, row: PreferenceRow) -> RenderedPair:
    """Both sides of a preference, without the row's weight, which is that of the pair."""
    return RenderedPair(_side(tokenizer, row, row.preferred), _side(tokenizer, row, row.rejected))


def row_prompt(tokenizer: ChatTokenizer, row: PromptRow) -> list[int]:
    """The tokens that ask for an answer."""
    return tokenizer.render_prompt([plain_message(message) for message in row.messages], tools=plain_tools(row.tools))


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a row as chat templates know it: the arguments of calls are objects, and who calls or thinks may say nothing beside."""
    if not (calls := message.get("tool_calls")):
        return {"content": "", **message}
    return {"content": "", **message, "tool_calls": [_plain_call(call) for call in calls]}


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools of a row as chat templates know them."""
    return [_plain_tool(tool["function"]) for tool in tools] if tools else None


def _side(tokenizer: ChatTokenizer, row: PreferenceRow, answer: list[dict[str, Any]] | str) -> Rendered:
    if isinstance(answer, str):
        return tokenizer.render_completion(row.prompt or "", answer)
    asked = [{**plain_message(message), "weight": 0} for message in row.messages]
    examples = tokenizer.render_examples([*asked, *map(plain_message, answer)], plain_tools(row.tools))
    if len(examples) > 1:
        problem = "the chat template of this model rewrites earlier turns, so an answer of several turns is no single sequence"
        raise InvalidInput(f"{problem}: give one message as the answer", field="preferred")
    return examples[0]


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    # Mistral's templates write ids, and every call that is served has one.
    named = {"id": call["id"]} if "id" in call else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": json.loads(function["arguments"] or "{}")}}


def _plain_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": told}

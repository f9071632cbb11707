"""A request for a response in the words of chat completions, and what goes wrong with that in the words of its caller."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from bloomery.api.routes.openai.formats import JsonObject, TextFormat
from bloomery.api.routes.openai.response_requests import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    ResponseJsonSchema,
    ResponseRequest,
    ResponseToolChoice,
    given,
)
from bloomery.types.errors import BloomeryError


class InOtherWords(NamedTuple):
    """The body of the chat completion, and for each field that is called otherwise there how its caller calls it.

    Fields are paths, and what lies below one has the names that it has below the other, unless it stands here itself.
    """

    body: dict[str, Any]
    names: dict[str, str]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Have errors of the chat completion name the caller's fields."""
        try:
            yield
        except BloomeryError as error:
            if (told := self.told(error)) is error:
                raise
            raise told from error

    def told(self, error: BloomeryError) -> BloomeryError:
        """An error of the chat completion, by the caller's name of its field."""
        if error.category != "user" or error.field is None or (field := self._name(error.field)) == error.field:
            return error
        return type(error)(error.message.replace(f"`{error.field}`", f"`{field}`"), field=field)

    def _name(self, field: str) -> str:
        known, below = field, ""
        while known and known not in self.names:
            known, _, last = known.rpartition(".")
            below = f".{last}{below}"
        return self.names[known] + below if known else field


def in_other_words(asked: ResponseRequest) -> InOtherWords:
    """The chat completion that asks the same."""
    names = {"messages": "input", "max_completion_tokens": "max_output_tokens", "tool_choice.function": "tool_choice"}
    names |= {"response_format": "text.format", "response_format.json_schema": "text.format"}
    fields = given(asked, "model", "temperature", "top_p", "top_k", "seed", "stream", "metadata", "user", "store")
    fields |= {"messages": _conversation(asked, names), "max_completion_tokens": asked.max_output_tokens}
    if asked.shows_tokens:
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0} | given(asked, "logprobs_mode")
    if asked.tools:
        fields |= {"tools": [tool.chat() for tool in asked.tools]} | given(asked, "parallel_tool_calls")
        names |= {f"tools.{index}.function": f"tools.{index}" for index in range(len(asked.tools))}
    if asked.tool_choice is not None:
        fields["tool_choice"] = _choice(asked.tool_choice)
    if asked.text is not None and (form := asked.text.format) is not None:
        fields["response_format"] = _format(form)
    return InOtherWords(fields, names)


def _conversation(asked: ResponseRequest, names: dict[str, str]) -> list[dict[str, Any]]:
    """The messages; their names are added to those there are."""
    messages = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    if messages:
        names |= {"messages.0": "instructions", "messages.0.content": "instructions"}
    if isinstance(asked.input, str):
        names |= {f"messages.{len(messages)}{part}": "input" for part in ("", ".content")}
        return [*messages, {"role": "user", "content": asked.input}]
    _add_items(asked.input, messages, names)
    return messages


def _add_items(items: Sequence[Item], messages: list[dict[str, Any]], names: dict[str, str]) -> None:
    """Calls that follow each other, or a message of the assistant, are one message."""
    for index, item in enumerate(items):
        theirs = f"input.{index}"
        if isinstance(item, FunctionCall):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                names[f"messages.{len(messages) - 1}"] = theirs
            calls = messages[-1].setdefault("tool_calls", [])
            ours = f"messages.{len(messages) - 1}.tool_calls.{len(calls)}"
            names |= {ours: theirs, f"{ours}.function": theirs, f"{ours}.id": f"{theirs}.call_id"}
            calls.append(item.chat())
            continue
        ours = f"messages.{len(messages)}"
        names[ours] = theirs
        if isinstance(item, FunctionCallOutput):
            names |= {f"{ours}.tool_call_id": f"{theirs}.call_id", f"{ours}.content": f"{theirs}.output"}
        messages.append(item.chat())


def _choice(choice: str | ResponseToolChoice) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}


def _format(form: TextFormat | JsonObject | ResponseJsonSchema) -> dict[str, Any]:
    if isinstance(form, ResponseJsonSchema):
        return {"type": "json_schema", "json_schema": given(form, "name", "schema", "description", "strict")}
    return {"type": "text" if isinstance(form, TextFormat) else "json_object"}

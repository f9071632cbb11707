"""Tools of the chat contract: what may be called, and what was called in the messages before."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from bloomery.api.routes.openai.closed import Closed
from bloomery.services.engines.models import Models
from bloomery.services.serving.tool_use import Function, ToolUse, tool_use
from bloomery.types import strict_json
from bloomery.types.errors import InvalidInput, NotSupported, shown

MAX_TOOLS: Final = 128
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}

NAME: Final = r"^[a-zA-Z0-9_-]{1,64}$(?!\n)"
Name = Annotated[str, Meta(pattern=NAME)]
"""In Python `$` is also before a last line break."""


class FunctionTool(Closed, frozen=True, kw_only=True):
    """A function of the caller's; without `parameters` it takes none."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Of its arguments, which are an object: one that allows any JSON would allow a text, and nobody could tell what it says."""
        return _NO_PARAMETERS if self.parameters is None else {"type": "object", **self.parameters}


class Tool(Closed, frozen=True, kw_only=True):
    """Functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        told = {"name": self.function.name, "description": self.function.description, "parameters": self.function.parameters}
        return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


class ChosenFunction(Closed, frozen=True, kw_only=True):
    """By its name."""

    name: Name


class NamedTool(Closed, frozen=True, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Closed, frozen=True, kw_only=True):
    """What was called; the arguments are the text of a JSON object."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class ToolCall(Closed, frozen=True, kw_only=True):
    """A call that the assistant made before."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction

    def plain(self, field: str) -> dict[str, Any]:
        """As chat templates know it, with the arguments as an object."""
        arguments = read_arguments(self.function.arguments, f"{field}.function.arguments")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def read_arguments(text: str, field: str) -> dict[str, Any]:
    """The arguments of a call that was made before; without any there is no text."""
    try:
        arguments = strict_json.read(text or "{}")
    except strict_json.NotFinite as error:
        raise InvalidInput(f"`{field}` is not the text of a JSON object: it holds {error}, which is no JSON number", field=field) from None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidInput(f"`{field}` is not the text of a JSON object", field=field)
    return arguments


def check_kinds(body: Mapping[str, Any]) -> None:
    """Tools are functions that the caller runs; others are refused by their names."""
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        _check_kind(tool, f"tools.{index}.type", "tools of type `{}` are not offered: the server runs none, give functions and run them yourself")
    _check_kind(body.get("tool_choice"), "tool_choice.type", "a choice of type `{}` is not offered: name a function")


def _check_kind(given: Any, field: str, refusal: str) -> None:
    """Refuse another type by its name; whatever else is wrong with it, its shape will tell."""
    kind = given.get("type") if isinstance(given, dict) else "function"
    if kind is None:
        raise InvalidInput(f"`{field}` is missing: it is `function`", field=field)
    if isinstance(kind, str) and kind != "function":
        raise NotSupported(f"`{field}`: {refusal.format(shown(kind))}", field=field)


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Tools with names of their own, and a choice among them."""
    for index, tool in enumerate(tools or ()):
        if tool.function.schema["type"] != "object":
            field = f"tools.{index}.function.parameters.type"
            raise InvalidInput(f"`{field}`: the arguments of a function are an object: give the type `object`", field=field)
    names = [tool.function.name for tool in tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools.{index}.function.name"
            raise InvalidInput(f"`{field}`: `{name}` is there already, each tool needs a name of its own", field=field)
    if not names and choice not in (None, "none", "auto"):
        raise InvalidInput("`tool_choice` needs `tools` to choose from", field="tool_choice")


def use_of(models: Models, base_hash: str, tools: Sequence[Tool] | None, choice: ToolChoice | None, *, parallel: bool) -> ToolUse | None:
    """The tools as the model may use them now; None where it may not, and then it is not told of them."""
    if not tools or choice == "none":
        return None
    functions = [Function(tool.function.name, tool.function.schema, bool(tool.function.strict)) for tool in tools]
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return tool_use(models.tokenizer(base_hash), functions, named=named, forced=choice not in (None, "auto"), parallel=parallel)

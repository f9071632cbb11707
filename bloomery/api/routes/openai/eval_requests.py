"""How evals and their runs are asked for, as what `services/evaluations/evals` takes; sources that are not here are refused by their names."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from bloomery.api.routes.openai.closed import Closed, checked
from bloomery.api.routes.openai.requests import parse, without_no_ops
from bloomery.api.routes.openai.shapes import Refused
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.evals import NewEval, NewRun

USUAL_SEED: Final = 42
USUAL_TOKENS: Final = 4096
SOURCE: Final = "data_source.source"
PARAMS: Final = "data_source.sampling_params"
_ROWS: Final = ("file_content", "file_id")
_CONFIGS_REFUSED: Final = ("logs", "stored_completions")
_RECORDED: Final = "curate recorded traffic into a data set (POST /api/v1/datasets/{name}/curate) and evaluate on it (POST /api/v1/evaluations)"
_OF_FUNCTIONS: Final = ("name", "description", "parameters")
_REFUSED_IN_FUNCTIONS: Final[Refused] = {"strict": (False,)}
REFUSED_IN_PARAMS: Final[Refused] = {
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
}


class DataSourceConfig(Closed, frozen=True, kw_only=True):
    """The schema of items, and whether there are samples beside them."""

    type: Literal["custom"]
    item_schema: dict[str, Any]
    include_sample_schema: bool | None = None


class CreateEval(Closed, frozen=True, kw_only=True):
    """Body of an eval."""

    data_source_config: DataSourceConfig
    testing_criteria: list[dict[str, Any]]
    name: str | None = None
    metadata: dict[str, str] | None = None


class ChangeEval(Closed, frozen=True, kw_only=True):
    """Body of a change."""

    name: str | None = None
    metadata: dict[str, str] | None = None


class Item(Closed, frozen=True, kw_only=True):
    """A row, and its sample where there is one."""

    item: dict[str, Any]
    sample: dict[str, Any] | None = None


class Source(Closed, frozen=True, kw_only=True):
    """Where rows are: in the request, or in a file."""

    type: Literal["file_content", "file_id"]
    content: list[Item] | None = None
    id: str | None = None


class InputMessages(Closed, frozen=True, kw_only=True):
    """What is asked of an item."""

    type: Literal["template", "item_reference"]
    template: list[dict[str, Any]] | None = None
    item_reference: str | None = None


class SamplingParams(Closed, frozen=True, kw_only=True):
    """How the model is sampled."""

    max_completion_tokens: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None


class DataSource(Closed, frozen=True, kw_only=True):
    """What a run asks, and whom."""

    type: Literal["jsonl", "completions", "responses"]
    source: Source
    input_messages: InputMessages | None = None
    model: str | None = None
    sampling_params: SamplingParams | None = None


class CreateRun(Closed, frozen=True, kw_only=True):
    """Body of a run."""

    data_source: DataSource
    name: str | None = None
    metadata: dict[str, str] | None = None


def parse_eval(body: dict[str, Any]) -> NewEval:
    """What is asked for."""
    config = body.get("data_source_config")
    if isinstance(config, dict) and config.get("type") in _CONFIGS_REFUSED:
        field = "data_source_config.type"
        raise NotSupported(f"`{field}`: `{config['type']}` is not offered: give a `custom` one, or {_RECORDED}", field=field)
    asked = parse(body, CreateEval, {})
    of = asked.data_source_config
    values: dict[str, Any] = {"name": asked.name, "item_schema": of.item_schema, "samples": bool(of.include_sample_schema)}
    return checked(NewEval, values | {"criteria": asked.testing_criteria, "metadata": asked.metadata}, {"criteria": "testing_criteria"})


def parse_change(body: dict[str, Any]) -> ChangeEval:
    """What is to be changed."""
    asked = parse(body, ChangeEval, {})
    values: dict[str, Any] = {"name": asked.name, "metadata": asked.metadata, "item_schema": {}, "criteria": [{}]}
    checked(NewEval, values, {})
    return asked


def parse_run(body: dict[str, Any]) -> NewRun:
    """What is asked for."""
    fields = _offered(body)
    asked = parse(fields, CreateRun, {})
    source, params = asked.data_source, asked.data_source.sampling_params or SamplingParams()
    _check(source)
    messages = source.input_messages
    told = {"max_tokens": params.max_completion_tokens, "temperature": params.temperature, "top_p": params.top_p, "seed": params.seed}
    usual = {"max_tokens": USUAL_TOKENS, "temperature": 1.0, "top_p": 1.0, "seed": USUAL_SEED}
    values = {
        "name": asked.name,
        "kind": source.type,
        "shown": _without_rows(fields["data_source"]),
        "rows": None if source.source.content is None else [msgspec.structs.asdict(each) for each in source.source.content],
        "file": source.source.id,
        "template": None if messages is None else messages.template,
        "item_reference": None if messages is None else messages.item_reference,
        "tools": None if params.tools is None else [_tool(tool, place) for place, tool in enumerate(params.tools)],
        "model": source.model,
        "params": usual | {name: value for name, value in told.items() if value is not None},
        "metadata": asked.metadata,
    }
    return checked(NewRun, values, {"params.max_tokens": f"{PARAMS}.max_completion_tokens", "params": PARAMS, "model": "data_source.model"})


def _offered(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what asks for nothing."""
    given = body.get("data_source")
    if not isinstance(given, dict):
        return body
    source, params = given.get("source"), given.get("sampling_params")
    if isinstance(source, dict) and source.get("type") in ("stored_completions", "responses"):
        field = f"{SOURCE}.type"
        raise NotSupported(f"`{field}`: `{source['type']}` is not offered: give rows as {' or '.join(_ROWS)}, or {_RECORDED}", field=field)
    if isinstance(params, dict):
        given = given | {"sampling_params": without_no_ops(params, SamplingParams.__struct_fields__, REFUSED_IN_PARAMS, f"{PARAMS}.")}
    return body | {"data_source": given}


def _check(given: DataSource) -> None:
    """What belongs together is there, and nothing beside it."""
    source, messages = given.source, given.input_messages
    for name, wanted, value in (("content", "file_content", source.content), ("id", "file_id", source.id)):
        if (value is not None) != (source.type == wanted):
            raise InvalidInput(f"`{SOURCE}.{name}` belongs to a source of type `{wanted}`, and to it alone", field=f"{SOURCE}.{name}")
    for name in ("model", "input_messages", "sampling_params"):
        value = getattr(given, name)
        if given.type == "jsonl" and value is not None:
            raise InvalidInput(f"`data_source.{name}`: nobody is asked where the type is `jsonl`: leave it out", field=f"data_source.{name}")
        if given.type != "jsonl" and value is None and name != "sampling_params":
            raise InvalidInput(f"`data_source.{name}` is missing: it says what is asked, and whom", field=f"data_source.{name}")
    if messages is not None:
        for name in ("template", "item_reference"):
            if (getattr(messages, name) is not None) != (messages.type == name):
                field = f"data_source.input_messages.{name}"
                raise InvalidInput(f"`{field}` belongs to messages of the type `{name}`, and to them alone", field=field)


def _without_rows(given: Mapping[str, Any]) -> dict[str, Any]:
    source = {name: value for name, value in given["source"].items() if name != "content"}
    return dict(given) | {"source": source}


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    """As chat completions have it; responses spell functions flat."""
    field = f"{PARAMS}.tools.{place}"
    if tool.get("type") != "function":
        raise NotSupported(f"`{field}.type`: only functions are offered", field=f"{field}.type")
    nested = tool.get("function")
    given, path = (nested, f"{field}.function.") if isinstance(nested, dict) else ({name: tool[name] for name in tool if name != "type"}, f"{field}.")
    function = without_no_ops(given, _OF_FUNCTIONS, _REFUSED_IN_FUNCTIONS, path)
    if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, dict):
        raise InvalidInput(f"`{field}` is no function: give it a `name`, and `parameters` as a JSON schema", field=field)
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}

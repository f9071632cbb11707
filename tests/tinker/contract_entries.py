"""The contract as the code has it: every route, every field that one takes, and every loss with its inputs and options."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from pydantic_core import PydanticUndefined
from starlette.routing import compile_path

from bloomery.api.routes import tinker
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.messages import RETURN_LOGPROBS, RETURN_ROUTING, RETURN_ROUTING_WEIGHTS, ROUTING, ROUTING_WEIGHTS
from bloomery.api.routes.tinker.proto import ForwardBackwardRequest
from bloomery.types.losses import CUSTOM, LOSSES, TARGETS

FORWARD_BACKWARD: Final = "POST /api/v1/forward_backward"
ANY_LOSS: Final = "any loss"
NO_DEFAULT: Final = object()
"""Of fields that say something whatever they say."""
_WHOLE: Final = {
    "/api/v1/optim_step": bodies.OptimStep,
    "/api/v1/save_weights": bodies.SaveWeights,
    "/api/v1/save_weights_for_sampler": bodies.SaveForSampler,
    "/api/v1/save_weights_external": bodies.SaveExternal,
}
"""What is in the bodies of which a route itself reads the number alone."""


class Entry(NamedTuple):
    """One row of the table: a field of a route or of a loss; or the place itself, where no field must be there to show it."""

    place: str
    field: str = ""


class Route(NamedTuple):
    """One method of a path. Its fields by their defaults: those of the body by their path in it, where `*` is any key, and those beside it."""

    name: str
    pattern: re.Pattern[str]
    body: Mapping[str, Any]
    beside: Mapping[str, Any]


@cache
def routes() -> tuple[Route, ...]:
    """In the order in which they are asked whether a request is theirs."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(tinker.router)
    app.include_router(tinker.oai.router)
    return tuple(
        Route(f"{method} {route.path}", compile_path(route.path)[0], _body(route), _beside([*takes.query_params, *takes.header_params]))
        for route in iter_route_contexts(app.routes)
        if (takes := route.dependant) is not None
        for method in sorted(route.methods or ())
    )


@cache
def entries() -> tuple[Entry, ...]:
    """All rows, in the order of the code."""
    places = {route.name: [*([] if NO_DEFAULT in route.body.values() else [""]), *route.body, *route.beside] for route in routes()}
    inputs, options = (TARGETS, ROUTING, ROUTING_WEIGHTS), (RETURN_ROUTING, RETURN_ROUTING_WEIGHTS, RETURN_LOGPROBS)
    places[ANY_LOSS] = [*map(input_field, inputs), *map(option_field, options)]
    for name, form in LOSSES.items():
        places[loss(name)] = [*map(input_field, (*form.inputs, *form.optional)), *map(option_field, form.options)]
    places[loss(CUSTOM)] = [""]
    return tuple(Entry(place, field) for place, fields in places.items() for field in fields)


def loss(name: str) -> str:
    """The place of a loss."""
    return f"loss {name}"


def input_field(name: str) -> str:
    """An input of every datum."""
    return f"loss_fn_inputs.{name}"


def option_field(name: str) -> str:
    """An option of a loss."""
    return f"loss_fn_config.{name}"


def _body(route: Any) -> dict[str, Any]:
    if route.path == FORWARD_BACKWARD.split()[1]:
        return dict.fromkeys(_message(ForwardBackwardRequest.DESCRIPTOR.fields), NO_DEFAULT)
    asked = [parameter.field_info.annotation for parameter in route.dependant.body_params]
    return {field: default for kind in asked for field, default in _fields(_WHOLE[route.path] if kind is bodies.Numbered else kind)}


def _fields(kind: type[bodies.Body], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in kind.model_fields.items():
        # Any body may say what it is, which its route knows. Of a chunk nothing else says it.
        if name == "type" and "type" not in inspect.get_annotations(kind) and kind is not bodies.Chunk:
            continue
        inner = list(_bodies_in(info.annotation))
        for each in inner:
            yield from _fields(each, f"{prefix}{name}.")
        if not inner:
            default = info.get_default(call_default_factory=True, validated_data={})
            chosen = (
                default is PydanticUndefined or name == "type" or (get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1)
            )
            yield f"{prefix}{name}", NO_DEFAULT if chosen else default


def _bodies_in(annotation: Any) -> Iterator[type[bodies.Body]]:
    if inspect.isclass(annotation) and issubclass(annotation, bodies.Body):
        yield annotation
    for each in get_args(annotation):
        yield from _bodies_in(each)


def _beside(parameters: Iterable[Any]) -> dict[str, Any]:
    return {parameter.alias: NO_DEFAULT if parameter.field_info.is_required() else parameter.field_info.default for parameter in parameters}


def _message(fields: Iterable[FieldDescriptor], prefix: str = "") -> Iterator[str]:
    """Paths of a message's fields; a choice of values is one path for each."""
    for field in fields:
        name = f"{prefix}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            field, name = field.message_type.fields_by_name["value"], f"{name}.*"
        if field.message_type is not None:
            yield from _message(field.message_type.fields, f"{name}.")
        elif field.enum_type is not None:
            yield from (f"{name}={value.name}" for value in field.enum_type.values if value.number)
        else:
            yield name

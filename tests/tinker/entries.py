"""What the contract consists of, read from the code: its routes, the fields that they take, and the losses with theirs."""

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple, get_args

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from google.protobuf.descriptor import Descriptor, FieldDescriptor  # type: ignore[import-untyped]
from pydantic_core import PydanticUndefined
from starlette.routing import compile_path

from bloomery.api.routes import tinker
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.messages import RETURN_ROUTING, ROUTING
from bloomery.api.routes.tinker.proto import ForwardBackwardRequest
from bloomery.types.losses import CUSTOM, LOSSES, TARGETS

FORWARD_BACKWARD: Final = "POST /api/v1/forward_backward"
ANY_LOSS: Final = "any loss"
ALWAYS: Final = object()
"""The default of a field that a request must have: whatever is sent says something."""
_WHOLE: Final = {
    "/api/v1/optim_step": bodies.OptimStep,
    "/api/v1/save_weights": bodies.SaveWeights,
    "/api/v1/save_weights_for_sampler": bodies.SaveForSampler,
    "/api/v1/save_weights_external": bodies.SaveExternal,
}
"""Operations, of whose body the route reads the number and the operation the rest."""


class Entry(NamedTuple):
    """A line of the table: a route or a loss itself, or a field of it."""

    place: str
    field: str = ""


class Route(NamedTuple):
    """One method of a path; `json`, `query` and `headers` are fields by their defaults."""

    name: str
    pattern: re.Pattern[str]
    json: Mapping[str, Any]
    query: Mapping[str, Any]
    headers: Mapping[str, Any]


@cache
def routes() -> tuple[Route, ...]:
    """In the order in which they are asked whether a request is theirs."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(tinker.router)
    app.include_router(tinker.oai.router)
    return tuple(
        Route(f"{method} {route.path}", compile_path(route.path)[0], _body(route), _parameters(found.query_params), _parameters(found.header_params))
        for route in iter_route_contexts(app.routes)
        if (found := route.dependant) is not None
        for method in sorted(route.methods or ())
    )


@cache
def entries() -> tuple[Entry, ...]:
    """All of the contract, in the order of the code."""
    found: list[Entry] = []
    for route in routes():
        found += [Entry(route.name), *(Entry(route.name, field) for field in (*route.json, *route.query, *route.headers))]
        if route.name == FORWARD_BACKWARD:
            found += [Entry(route.name, field) for field in _message(ForwardBackwardRequest.DESCRIPTOR)]
    for name, form in LOSSES.items():
        found.append(Entry(loss(name)))
        found += [Entry(loss(name), input_field(each)) for each in (*form.inputs, *form.optional)]
        found += [Entry(loss(name), option_field(option)) for option in form.options]
    return (*found, Entry(loss(CUSTOM)), *(Entry(ANY_LOSS, field) for field in (input_field(TARGETS), input_field(ROUTING), option_field(RETURN_ROUTING))))


def loss(name: str) -> str:
    """The place of a loss."""
    return f"loss {name}"


def input_field(name: str) -> str:
    """A datum's input."""
    return f"loss_fn_inputs.{name}"


def option_field(name: str) -> str:
    """A number of the operation."""
    return f"loss_fn_config.{name}"


def _body(route: Any) -> dict[str, Any]:
    kinds = [_WHOLE[route.path] if kind is bodies.Numbered else kind for kind in (each.field_info.annotation for each in route.dependant.body_params)]
    return {field: default for kind in kinds for field, default in _fields(kind)}


def _fields(kind: type[bodies.Body], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Those of a body and of the bodies in it, with their defaults."""
    for name, info in kind.model_fields.items():
        # A body may say which it is, and the route knows. What a chunk is, only its type says.
        if name == "type" and "type" not in inspect.get_annotations(kind) and kind is not bodies.Chunk:
            continue
        inner = list(_bodies_in(info.annotation))
        for each in inner:
            yield from _fields(each, f"{prefix}{name}.")
        if not inner:
            default = info.get_default(call_default_factory=True, validated_data={})
            yield f"{prefix}{name}", ALWAYS if default is PydanticUndefined else default


def _bodies_in(annotation: Any) -> Iterator[type[bodies.Body]]:
    if inspect.isclass(annotation) and issubclass(annotation, bodies.Body):
        yield annotation
    for each in get_args(annotation):
        yield from _bodies_in(each)


def _parameters(parameters: list[Any]) -> dict[str, Any]:
    return {each.alias: ALWAYS if each.field_info.is_required() else each.field_info.default for each in parameters}


def _message(kind: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in kind.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _value(field.message_type.fields_by_name["value"], f"{prefix}{field.name}")
        else:
            yield from _value(field, f"{prefix}{field.name}")


def _value(field: FieldDescriptor, name: str) -> Iterator[str]:
    if field.message_type is not None:
        yield from _message(field.message_type, f"{name}.")
    elif field.enum_type is not None:
        yield from (f"{name}={value.name}" for value in field.enum_type.values if value.number)
    else:
        yield name

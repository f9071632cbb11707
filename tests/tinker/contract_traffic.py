"""What tests send and how it is answered, heard where all their clients send: in httpx, through which the SDKs and plain requests go, whether the
server is in this process or in another."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import httpx
import httpx2
import pytest
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from bloomery.api.routes.tinker.encoding import decompress
from bloomery.api.routes.tinker.messages import CONTENT_TYPE
from bloomery.api.routes.tinker.proto import ForwardBackwardRequest
from tests.tinker.contract_entries import ANY_LOSS, Entry, Route, input_field, loss, option_field, routes

TAKEN: Final = "taken"
REFUSED: Final = "refused"
_RETRIEVE: Final = "POST /api/v1/retrieve_future"
_REFUSALS: Final = (400, 403)
_CATEGORIES: Final = {None: TAKEN, "user": REFUSED}
"""Of the answers to futures; what is the server's fault shows nothing."""


class Exchange(NamedTuple):
    """A request and its answer; the openai SDK brings a copy of httpx of its own."""

    request: Any
    response: Any

    @property
    def answer(self) -> dict[str, Any]:
        """The object that was answered; empty for anything else."""
        try:
            found = self.response.json()
        except (RuntimeError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@contextmanager
def listening() -> Iterator[list[Exchange]]:
    """All that is sent meanwhile, in whichever thread."""
    heard: list[Exchange] = []
    with pytest.MonkeyPatch.context() as patch:
        for library in (httpx, httpx2):
            patch.setattr(library.Client, "send", _heard(library.Client.send, heard))
            patch.setattr(library.AsyncClient, "send", _heard_later(library.AsyncClient.send, heard))
        yield heard


def outcomes(exchanges: Iterable[Exchange]) -> frozenset[tuple[Entry, str]]:
    """What was used, and whether it was taken or refused. A field is used by a request that says something else in it than its default."""
    routed = [(exchange, route) for exchange in exchanges if (route := _route_of(exchange)) is not None]
    retrieved = {
        json.loads(exchange.request.content)["request_id"]: _CATEGORIES.get(exchange.answer.get("category"))
        for exchange, route in routed
        if route.name == _RETRIEVE and exchange.response.status_code == 200
    }
    found = ((exchange, route, _outcome(exchange, retrieved)) for exchange, route in routed)
    return frozenset((entry, outcome) for exchange, route, outcome in found if outcome for entry in _used(exchange.request, route))


def _heard(send: Callable[..., Any], heard: list[Exchange]) -> Callable[..., Any]:
    def sending(client: Any, request: Any, **options: Any) -> Any:
        response = send(client, request, **options)
        heard.append(Exchange(request, response))
        return response

    return sending


def _heard_later(send: Callable[..., Any], heard: list[Exchange]) -> Callable[..., Any]:
    async def sending(client: Any, request: Any, **options: Any) -> Any:
        response = await send(client, request, **options)
        heard.append(Exchange(request, response))
        return response

    return sending


def _route_of(exchange: Exchange) -> Route | None:
    method, path = exchange.request.method, exchange.request.url.path
    return next((route for route in routes() if route.name.startswith(f"{method} ") and route.pattern.match(path)), None)


def _outcome(exchange: Exchange, retrieved: Mapping[str, str | None]) -> str | None:
    """None while nobody knows: what becomes of an operation, its future tells."""
    if exchange.response.status_code in _REFUSALS:
        return REFUSED
    if not exchange.response.is_success:
        return None
    future = exchange.answer.get("request_id")
    return TAKEN if future is None else retrieved.get(future)


def _used(request: Any, route: Route) -> Iterator[Entry]:
    yield Entry(route.name)
    said = _body(request)
    for field, default in route.body.items():
        path, _, wanted = field.partition("=")
        values = _at(said, path.split("."))
        if any(value == wanted if wanted else value != default for value in values):
            yield Entry(route.name, field)
    beside = {**request.headers, **request.url.params}
    yield from (Entry(route.name, field) for field, default in route.beside.items() if field in beside and beside[field] != str(default))
    if isinstance(said, dict) and "loss_fn" in said:
        yield from _used_of_losses(said)


def _body(request: Any) -> Any:
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        # It streams, and none of its fields is a row.
        return None
    try:
        content = decompress(request.content) if request.headers.get("content-encoding") == "zstd" else request.content
        if request.headers.get("content-type") == CONTENT_TYPE:
            return MessageToDict(ForwardBackwardRequest.FromString(content), preserving_proto_field_name=True)
        return json.loads(content)
    except (ValueError, DecodeError):
        return None


def _at(said: Any, path: list[str]) -> Iterator[Any]:
    """What stands at a path, in every item of the lists and under every key of the maps on the way."""
    if isinstance(said, list) and path:
        for item in said:
            yield from _at(item, path)
    elif not path:
        yield said
    elif isinstance(said, dict):
        for item in said.values() if path[0] == "*" else [said[path[0]]] if path[0] in said else []:
            yield from _at(item, path[1:])


def _used_of_losses(said: dict[str, Any]) -> Iterator[Entry]:
    name = loss(said["loss_fn"])
    inputs = {input_field(key) for datum in said.get("data", []) for key in datum.get("loss_fn_inputs", ())}
    options = {option_field(key) for key in (*said.get("loss_fn_config", ()), *said.get("loss_fn_config_v2", ()))}
    yield Entry(name)
    yield from (Entry(place, field) for field in inputs | options for place in (name, ANY_LOSS))

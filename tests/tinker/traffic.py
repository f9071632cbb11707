"""What tests say to a server and what it answers, seen where every client here sends: in httpx, through which the SDKs, our own client and plain
requests all go, whether the server is in this process or not."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import httpx

from bloomery.api.routes.tinker.encoding import decompress
from bloomery.api.routes.tinker.messages import CONTENT_TYPE
from bloomery.api.routes.tinker.proto import DecodeError, ForwardBackwardRequest
from tests.tinker.entries import ALWAYS, ANY_LOSS, FORWARD_BACKWARD, Entry, Route, input_field, loss, option_field, routes

Outcome = str
TAKEN: Final = "taken"
REFUSED: Final = "refused"
_RETRIEVE: Final = "POST /api/v1/retrieve_future"


class Exchange(NamedTuple):
    """A request and its answer."""

    request: httpx.Request
    response: httpx.Response

    @property
    def answer(self) -> Any:
        """What it says, if that is JSON."""
        try:
            return self.response.json()
        except (httpx.ResponseNotRead, ValueError):
            return None


@contextmanager
def watching(heard: Callable[[Exchange], None]) -> Iterator[None]:
    """Hear of every exchange, in whichever thread."""
    send, send_async = httpx.Client.send, httpx.AsyncClient.send

    def watched(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        response = send(self, request, **options)
        heard(Exchange(request, response))
        return response

    async def watched_async(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        response = await send_async(self, request, **options)
        heard(Exchange(request, response))
        return response

    httpx.Client.send, httpx.AsyncClient.send = watched, watched_async  # type: ignore[method-assign]
    try:
        yield
    finally:
        httpx.Client.send, httpx.AsyncClient.send = send, send_async  # type: ignore[method-assign]


def outcomes(exchanges: Iterable[Exchange]) -> set[tuple[Entry, Outcome]]:
    """Which entries were used, and how that ended. A field is used where it says something else than its default."""
    exchanges = list(exchanges)
    failed = {}
    for exchange, route in _routed(exchanges):
        if route.name == _RETRIEVE and exchange.response.status_code == 200:
            failed[json.loads(exchange.request.content)["request_id"]] = "error" in (exchange.answer or {})
    return {(entry, ended) for exchange, route in _routed(exchanges) if (ended := _ended(exchange, failed)) for entry in _used(exchange.request, route)}


def _routed(exchanges: list[Exchange]) -> Iterator[tuple[Exchange, Route]]:
    for exchange in exchanges:
        method, path = exchange.request.method, exchange.request.url.path
        for route in routes():
            if route.name.startswith(f"{method} ") and route.pattern.match(path):
                yield exchange, route
                break


def _ended(exchange: Exchange, failed: Mapping[str, bool]) -> Outcome | None:
    """An operation has ended when its future is retrieved; None while nobody knows."""
    status, answer = exchange.response.status_code, exchange.answer
    if status in (400, 403, 404, 410):
        return REFUSED
    if status >= 300:
        return None
    if isinstance(answer, dict) and "request_id" in answer:
        future = failed.get(answer["request_id"])
        return None if future is None else REFUSED if future else TAKEN
    return TAKEN


def _used(request: httpx.Request, route: Route) -> Iterator[Entry]:
    yield Entry(route.name)
    body = decompress(request.content) if request.headers.get("content-encoding") == "zstd" else request.content
    said = {route.name: route.query, route.name: route.headers}
    for defaults, given in ((route.query, request.url.params), (route.headers, request.headers)):
        yield from (Entry(route.name, field) for field, default in defaults.items() if field in given and given[field] != str(default))
    if request.headers.get("content-type") == CONTENT_TYPE:
        yield from _used_of_a_message(body)
    elif route.json:
        yield from (Entry(route.name, field) for field, default in route.json.items() if any(default is ALWAYS or value != default for value in _values(_json(body), field.split("."))))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _values(said: Any, path: list[str]) -> Iterator[Any]:
    """What stands at a path, in every item of the lists on the way."""
    if isinstance(said, list) and path:
        for item in said:
            yield from _values(item, path)
    elif not path:
        yield said
    elif isinstance(said, dict) and path[0] in said:
        yield from _values(said[path[0]], path[1:])


def _used_of_a_message(body: bytes) -> Iterator[Entry]:
    message = ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        return
    yield from (Entry(FORWARD_BACKWARD, field) for field in _present(message))
    yield Entry(loss(message.loss_fn))
    fields = {input_field(name) for datum in message.data for name in datum.loss_fn_inputs}
    fields |= {option_field(name) for name in (*message.loss_fn_config, *message.loss_fn_config_v2)}
    for place in (loss(message.loss_fn), ANY_LOSS):
        yield from (Entry(place, field) for field in fields)


def _present(message: Any, prefix: str = "") -> Iterator[str]:
    """Fields of a message that are not empty."""
    for field, value in message.ListFields():
        name = f"{prefix}{field.name}"
        if field.enum_type is not None:
            yield f"{name}={field.enum_type.values_by_number[value].name}"
            continue
        if field.message_type is None:
            yield name
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                yield name
                continue
            items = value.values()
        else:
            items = value if field.is_repeated else [value]
        for item in items:
            yield from _present(item, f"{name}.")

"""Where errors become answers: codes to HTTP statuses, in the envelope of the caller's contract.

`/v1` and `/oai/api/v1` answer as OpenAI does; everything else in Bloomery's own form. The routes of the tinker contract answer their errors
themselves, before they get here.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bloomery.types.errors import BloomeryError, Deadly, InvalidInput, NotFound, RateLimited, Stopped, TooLarge, misfit

STATUS: Final[Mapping[str, int]] = {
    "invalid": 400,
    "too_large": 413,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "gone": 410,
    "rate_limit_exceeded": 429,
    "not_supported": 400,
    "unavailable": 503,
    "corrupt": 500,
    "worker": 500,
    "internal": 500,
}
_RETRY_AFTER_S: Final = "1"
_NOT_AGAIN: Final = {"x-should-retry": "false"}
"""OpenAI's SDK repeats what was answered with a 5xx, unless this header forbids it."""
_OPENAI: Final = ("/v1", "/oai/api/v1")

NoPage = Callable[[Request], Awaitable[Response | None]]
"""What a request is answered whose address there is not; None where the envelope is."""

log = logging.getLogger(__name__)


def install(app: FastAPI, no_page: NoPage) -> None:
    """Answer every error of the app in its caller's envelope, but for who looks for a page."""
    app.add_exception_handler(BloomeryError, _answer_ours)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, partial(_answer_http, no_page))
    app.add_exception_handler(Exception, _answer_foreign)


def respond(path: str, error: BloomeryError) -> JSONResponse:
    """The answer to `error` for a request of `path`."""
    status = STATUS[error.code]
    body = openai_envelope(error) if speaks_openai(path) else own_envelope(error)
    return JSONResponse(body, status, headers=_advice(error, status))


def own_envelope(error: BloomeryError) -> dict[str, Any]:
    """Bloomery's own form."""
    return {"error": {"code": error.code, "message": error.message, "field": error.field}}


def openai_envelope(error: BloomeryError) -> dict[str, Any]:
    """OpenAI's form; also the shape of an error inside a stream."""
    return {"error": {"message": error.message, "type": _openai_type(error), "param": error.field, "code": _openai_code(error)}}


def invalid_input(problems: RequestValidationError) -> InvalidInput:
    """The first problem of a request body or query, with the path of its field."""
    first = problems.errors()[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return InvalidInput(f"the body is not JSON: {first['ctx']['error']}", field="body")
    if place[0] == "body" and len(place) > 1 and isinstance(problems.body, Mapping | list):
        return misfit({**first, "loc": first["loc"][1:]}, problems.body)
    field = ".".join(place[1:]) or place[0]
    return InvalidInput(f"`{field}`: {first['msg']}", field=field)


def _advice(error: BloomeryError, status: int) -> dict[str, str] | None:
    if isinstance(error, RateLimited):
        return {"retry-after": error.retry_after}
    if isinstance(error, Deadly):
        return _NOT_AGAIN
    return {"retry-after": _RETRY_AFTER_S} if status == 503 else None


def _openai_type(error: BloomeryError) -> str:
    if isinstance(error, RateLimited):
        return error.resource
    return "invalid_request_error" if STATUS[error.code] < 500 else "server_error"


def _openai_code(error: BloomeryError) -> str:
    if isinstance(error, NotFound) and error.field == "model":
        return "model_not_found"
    return "invalid_api_key" if error.code == "unauthorized" else error.code


def speaks_openai(path: str) -> bool:
    """Whether a path belongs to OpenAI's contract."""
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in _OPENAI)


async def _answer_ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BloomeryError)
    # Of a stopped run the log told when it was found.
    if error.category == "server" and not isinstance(error, Stopped):
        log.error("%s %s: %s", request.method, request.url.path, error.message, exc_info=error)
    return respond(request.url.path, error)


async def _answer_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return respond(request.url.path, invalid_input(error))


async def _answer_http(no_page: NoPage, request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and (page := await no_page(request)) is not None:
        return page
    refusal: BloomeryError = InvalidInput(f"{request.method} {request.url.path}: {error.detail}")
    if error.status_code == 404:
        refusal = NotFound(f"no route {request.method} {request.url.path}")
    elif error.status_code == 413:
        refusal = TooLarge("the body is larger than this route takes: send what it asks for and nothing else", field="body")
    answer = respond(request.url.path, refusal)
    answer.status_code = error.status_code
    return answer


async def _answer_foreign(request: Request, error: Exception) -> JSONResponse:
    # The traceback reaches the log through the server, which sees the exception again after this answer.
    return respond(request.url.path, BloomeryError(f"internal error ({type(error).__name__}); the api's log says more"))

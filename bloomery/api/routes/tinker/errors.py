"""Errors in the form of the tinker contract.

An operation that failed answers 200 with `error` and `category` when its future is retrieved. What cannot even be accepted answers 4xx, always with
a body. The SDK repeats 408, 409, 429 and every 5xx, for minutes and in silence, so those are for what waiting helps with and for nothing else.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.api.routes.tinker.encoding import decoded
from bloomery.types.errors import BloomeryError, InvalidInput, InvalidToken, RateLimited, Stopped, TooLarge, Unavailable, reason, shown
from bloomery.types.operations import Failed

_STATUS: Final = {"unauthorized": 401, "forbidden": 403, "not_found": 404, "gone": 410, "rate_limit_exceeded": 429, "unavailable": 503}
_REFUSED: Final = 400
_TOO_LARGE: Final = 413
"""Of the framework, for a body that became too large while it was read; this contract has no such status."""
_POLL: Final = "/retrieve_future"
_PACED: Final = (_POLL, "/asample")
"""Where the SDK repeats a 503 at once or gives up on it, but waits a little and goes on after a 429."""
_SLOW_DOWN: Final = 429
_THEIRS: Final = {
    "run_id": "model_id",
    "seq": "seq_id",
    "metadata": "user_metadata",
    "rank": "lora_config.rank",
    "train_attn": "lora_config.train_attn",
}
"""Fields that this contract calls otherwise."""
_THEIRS_AT: Final = {
    ("/create_session", "name"): "display_name",
    ("/search", "project_id"): "project_ids",
    ("/create_model", "seed"): "lora_config.seed",
    ("/create_sampling_session", "model"): "model_path",
    ("/weights_info", "path"): "tinker_path",
    ("/copy_weights", "path"): "source_path",
    **{("/asample", name): f"sampling_params.{name}" for name in ("max_tokens", "temperature", "top_k", "top_p")},
}
"""The same, where one word of ours is several of theirs."""
_INVALID_TOKEN: Final = {"www-authenticate": 'Bearer error="invalid_token"'}
"""Upon which the SDK exchanges its key for another token and asks again."""

log = logging.getLogger(__name__)


class TinkerRoute(APIRoute):
    """A route whose errors the SDK understands."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(await decoded(request))
            except HTTPException as error:
                if error.status_code == _TOO_LARGE:
                    return refusal(request, TooLarge(f"the body has over {MAX_BODY_BYTES >> 20} MiB: send it in parts", field="body"))
                if error.status_code != _REFUSED:
                    raise
                return refusal(request, InvalidInput(f"the body cannot be read: {error.detail}", field="body"))
            except Exception as error:
                return refusal(request, error)

        return answer


def refusal(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that was not accepted."""
    ours = as_ours(error)
    # Whoever is told to come again does so thousands of times, and of a stopped run the log told when it was found.
    if ours.category == "server" and not isinstance(ours, Unavailable | Stopped):
        log.error("%s %s: %s", request.method, request.url.path, ours.message, exc_info=error)
    body = {**failure(ours), "code": ours.code, "field": _field(ours.field or "", request.url.path)}
    return JSONResponse(body, _status(ours, request.url.path), headers=_advice(ours))


def _field(ours: str, path: str) -> str | None:
    """As this contract calls it."""
    return _THEIRS_AT.get((f"/{path.rpartition('/')[2]}", ours)) or _THEIRS.get(ours, ours) or None


def _advice(error: BloomeryError) -> dict[str, str] | None:
    if isinstance(error, RateLimited):
        return {"retry-after": error.retry_after}
    return _INVALID_TOKEN if isinstance(error, InvalidToken) else None


def _status(error: BloomeryError, path: str) -> int:
    if error.code == "unavailable" and path.endswith(_PACED):
        return _SLOW_DOWN
    if error.category == "server" and path.endswith(_POLL):
        # Whatever is wrong with the run is the outcome of its operation.
        return 200
    return _STATUS.get(error.code, _REFUSED)


def failure(error: BloomeryError | Failed) -> dict[str, str]:
    """How a failed operation looks when its future is retrieved."""
    return {"error": error.message, "category": error.category}


def as_ours(error: Exception) -> BloomeryError:
    """Any error as one of the tree."""
    if isinstance(error, BloomeryError):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        return _first_problem(error)
    return BloomeryError(f"internal error ({type(error).__name__}: {reason(error)}); the api's log says more")


def _first_problem(error: RequestValidationError | ValidationError) -> InvalidInput:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return InvalidInput(f"the body is not JSON: {first['ctx']['error']}", field="body")
    # FastAPI puts the part of the request before the field's own path.
    path = [shown(str(part)) for part in first["loc"] if part != "body"]
    # A field of the caller's own making may hold halves of characters, which no answer can carry.
    field = ".".join(path).encode(errors="backslashreplace").decode() or "body"
    return InvalidInput(f"`{field}`: {first['msg']}", field=field)

"""Paths of OpenAI's contract that this server does not have, whether the contract knows them or nobody does: refused with what to use instead."""

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse

from bloomery.api.deps import Caller
from bloomery.types.errors import NotFound, NotSupported

OFFERED: Final[Mapping[str, str]] = {
    "chat/completions": "POST",
    "completions": "POST",
    "responses": "POST",
    "embeddings": "POST",
    "models": "GET",
    "batches": "GET POST",
    "files": "GET POST",
    "uploads": "POST",
    "evals": "GET POST",
    "fine_tuning/jobs": "GET POST",
    "fine_tuning/alpha/graders/run": "POST",
    "fine_tuning/alpha/graders/validate": "POST",
}
"""What there is, with its methods. Any path below `models` names a model."""
_KEEP: Final = "keep the conversation in your program and send all of it to POST /v1/chat/completions"
_TEXT: Final = "the models here read and write text alone, with POST /v1/chat/completions; use another service for this"
_NONE: Final = "this server has no accounts to administer; its own contract is under /api/v1"
INSTEAD: Final[Mapping[str, str]] = {
    "assistants": _KEEP,
    "audio": _TEXT,
    "batches": "POST /v1/batches answers a file of requests, GET /v1/batches lists them; one is shown and cancelled by its id",
    "chat": "POST /v1/chat/completions answers a conversation, and GET /api/v1/spans lists the answers that were recorded",
    "chatkit": _KEEP,
    "completions": "POST /v1/completions continues a prompt",
    "containers": "nothing is executed here; run tools in your own program",
    "conversations": _KEEP,
    "edits": "ask for the edit with POST /v1/chat/completions",
    "embeddings": "POST /v1/embeddings turns texts into vectors",
    "engines": "GET /v1/models lists the models",
    "evals": "POST /v1/evals makes an eval, GET /v1/evals lists them; under the id of one, POST /v1/evals/{eval_id}/runs runs it",
    "files": "POST /v1/files takes a file, GET /v1/files lists them; one is shown, read and deleted by its id",
    "fine_tuning": "POST /v1/fine_tuning/jobs trains on a file, GET /v1/fine_tuning/jobs lists jobs, GET /v1/fine_tuning/jobs/{job} shows one with "
    "its events and checkpoints; POST /v1/fine_tuning/alpha/graders/run runs a grader and POST /v1/fine_tuning/alpha/graders/validate reads one",
    "fine-tunes": "POST /v1/fine_tuning/jobs trains on a file",
    "images": _TEXT,
    "live": _TEXT,
    "models": "GET /v1/models lists the models and GET /v1/models/{name} shows one; nothing is deleted under their names",
    "moderations": "ask a model that you trained to judge with POST /v1/chat/completions",
    "organization": _NONE,
    "projects": _NONE,
    "realtime": "POST /v1/chat/completions with `stream` gives an answer while it is written",
    "responses": "POST /v1/responses answers an input and remembers nothing; GET /api/v1/spans lists the answers that were recorded",
    "skills": "nothing is executed here; run tools in your own program",
    "threads": _KEEP,
    "uploads": "POST /v1/uploads begins an upload, which takes parts and is completed or cancelled under its id",
    "vector_stores": "search in your own program and send what it finds to POST /v1/chat/completions",
    "videos": _TEXT,
}
"""By the first part of a path."""
_OTHERWISE: Final = (
    "there are POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /v1/embeddings and GET /v1/models, "
    "and this server's own contract under /api/v1"
)

router = APIRouter(include_in_schema=False)


@router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
async def refuse(path: str, request: Request, caller: Caller) -> RedirectResponse:
    """The last route: whoever gets here asked for something that is not there."""
    if request.method in OFFERED.get(path.rstrip("/"), "").split():
        return RedirectResponse(request.url.replace(path=request.url.path.rstrip("/")))
    asked = f"{request.method} {request.url.path}"
    # The contract lies at two places: what is offered instead lies at the one that was asked.
    prefix = request.scope["path"].removesuffix(path).rstrip("/")
    if (instead := INSTEAD.get(path.partition("/")[0])) is not None:
        raise NotSupported(f"{asked} is not offered: {instead.replace(' /v1/', f' {prefix}/')}")
    raise NotFound(f"no route {asked}: {_OTHERWISE.replace(' /v1/', f' {prefix}/')}")

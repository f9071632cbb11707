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
}
"""What there is, with its method. Any path below `models` names a model."""
_KEEP: Final = "keep the conversation in your program and send all of it to POST /v1/chat/completions"
_TEXT: Final = "the models here read and write text alone, with POST /v1/chat/completions; use another service for this"
_DATA: Final = "send training rows to POST /api/v1/datasets/{name}/versions"
_NONE: Final = "this server has no accounts to administer; its own contract is under /api/v1"
INSTEAD: Final[Mapping[str, str]] = {
    "assistants": _KEEP,
    "audio": _TEXT,
    "batches": "send the requests to POST /v1/chat/completions side by side: they are sampled together",
    "chat": "POST /v1/chat/completions answers a conversation, and GET /api/v1/spans lists the answers that were recorded",
    "chatkit": _KEEP,
    "completions": "POST /v1/completions continues a prompt",
    "containers": "nothing is executed here; run tools in your own program",
    "conversations": _KEEP,
    "edits": "ask for the edit with POST /v1/chat/completions",
    "embeddings": "POST /v1/embeddings turns texts into vectors",
    "engines": "GET /v1/models lists the models",
    "evals": "ask the held-out questions with POST /v1/chat/completions, and give what came of it as `evidence` to "
    "POST /api/v1/deployments/{name}/promote",
    "files": _DATA,
    "fine_tuning": "create a run with POST /api/v1/runs and drive it with `bloomery.client` or the `tinker` SDK; docs/quickstart.md shows how",
    "fine-tunes": "create a run with POST /api/v1/runs and drive it with `bloomery.client` or the `tinker` SDK; docs/quickstart.md shows how",
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
    "uploads": _DATA,
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
    if OFFERED.get(path.rstrip("/")) == request.method:
        return RedirectResponse(request.url.replace(path=request.url.path.rstrip("/")))
    asked = f"{request.method} {request.url.path}"
    # The contract lies at two places: what is offered instead lies at the one that was asked.
    prefix = request.scope["path"].removesuffix(path).rstrip("/")
    if (instead := INSTEAD.get(path.partition("/")[0])) is not None:
        raise NotSupported(f"{asked} is not offered: {instead.replace(' /v1/', f' {prefix}/')}")
    raise NotFound(f"no route {asked}: {_OTHERWISE.replace(' /v1/', f' {prefix}/')}")

"""`/v1/files`: files to train on and to answer, and what came of both. What is made of a file holds its rows by itself."""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from bloomery.api.deps import Caller, Svc
from bloomery.api.forms import KIND, form_with_file
from bloomery.api.repeats import IdempotencyKey, again_of
from bloomery.api.routes import MAX_BODY_BYTES
from bloomery.api.routes.openai.closed import checked
from bloomery.api.routes.openai.cursors import page_of
from bloomery.api.routes.openai.times import unix_s
from bloomery.types.errors import InvalidInput, NotSupported, shown
from bloomery.types.files import MAX_LIFE_S, MIN_LIFE_S, File, NewFile

MAX_FILE_BYTES: Final = MAX_BODY_BYTES
PURPOSES_REFUSED: Final = {
    "assistants": "there are no assistants here",
    "user_data": "the models here read text that stands in the request",
    "vision": "the models here read text alone",
}
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            KIND: {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["fine-tune", "batch", "evals"]},
                        _ANCHOR: {"type": "string", "enum": ["created_at"]},
                        _SECONDS: {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S},
                    },
                }
            }
        },
    }
}
router = APIRouter(prefix="/files")


@router.post("", openapi_extra=_FORM)
async def create(request: Request, services: Svc, caller: Caller, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
    """A file of rows, which are all read before it is there, or of requests for a batch."""
    caller.require("train", "infer")
    async with form_with_file(request, services.datasets.scratch, MAX_FILE_BYTES) as form:
        given = _new_file(form.filename, form.fields)
        # Of what the form says: every sender of it chooses another boundary.
        again = again_of(request, idempotency_key, given.model_dump_json().encode() + form.content.digest)
        return shown_file(await services.files.create(caller, given, form.content.file, form.content.digest, request=again))


@router.get("")
async def list_files(
    services: Svc,
    caller: Caller,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Files, newest first."""
    page = await services.files.list(caller, purpose=purpose, after=after, limit=limit, oldest_first=order == "asc")
    return page_of([shown_file(file) for file in page.data], has_more=page.has_more)


@router.get("/{file}")
async def get(file: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """One file."""
    return shown_file(await services.files.get(caller, file))


@router.get("/{file}/content", response_class=StreamingResponse, responses={200: {"content": {"application/octet-stream": {}}}})
async def content(file: str, services: Svc, caller: Caller) -> StreamingResponse:
    """Its bytes."""
    found = await services.files.content(caller, file)
    return StreamingResponse(found.pieces(), media_type="application/octet-stream", headers={"content-length": str(found.file.size_bytes)})


@router.delete("/{file}")
async def delete(file: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Forget it; what was made of it stays."""
    gone = await services.files.delete(caller, file)
    return {"id": gone.id, "object": "file", "deleted": True}


def check_purpose(purpose: str | None) -> None:
    """Refuse files for what is not here."""
    if purpose in PURPOSES_REFUSED:
        raise NotSupported(f"`purpose`: files for `{purpose}` are not offered: {PURPOSES_REFUSED[purpose]}", field="purpose")


def _new_file(filename: str, fields: dict[str, str]) -> NewFile:
    unknown = next((name for name in fields if name not in ("purpose", _ANCHOR, _SECONDS)), None)
    if unknown is not None:
        raise InvalidInput(f"unknown field `{shown(unknown)}`: leave it out", field=shown(unknown))
    purpose, seconds = fields.get("purpose"), fields.get(_SECONDS)
    check_purpose(purpose)
    if fields.get(_ANCHOR, "created_at") != "created_at" or (_ANCHOR in fields) != (seconds is not None):
        raise InvalidInput("`expires_after` has the `anchor` `created_at`, and `seconds`", field="expires_after")
    if seconds is not None and not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise InvalidInput(f"`expires_after`: `seconds` is a number from {MIN_LIFE_S} to {MAX_LIFE_S}", field="expires_after")
    values = {"filename": filename, "purpose": purpose, "life_s": None if seconds is None else int(seconds)}
    return checked(NewFile, values, {"filename": "file", "life_s": "expires_after"})


def shown_file(file: File) -> dict[str, Any]:
    """A file as the contract has it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": unix_s(file.created_us),
        "expires_at": unix_s(file.expires_us),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }

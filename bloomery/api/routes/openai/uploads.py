"""`/v1/uploads`: files that come in parts."""

from typing import Any, Final, Literal

from fastapi import APIRouter, Request

from bloomery.api.deps import Caller, Svc
from bloomery.api.forms import KIND, form_with_file
from bloomery.api.repeats import IdempotencyKey, again_of
from bloomery.api.routes.openai.closed import Closed, checked
from bloomery.api.routes.openai.files import check_purpose, shown_file
from bloomery.api.routes.openai.http import read_request
from bloomery.api.routes.openai.requests import parse
from bloomery.api.routes.openai.shapes import body_of
from bloomery.api.routes.openai.times import unix_s
from bloomery.types.errors import InvalidInput, shown
from bloomery.types.files import MAX_PART_BYTES, NewUpload, Upload

DATA: Final = "data"
_FORM_BYTES: Final = 1 << 16
"""Of a form beside its part."""
_PART: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {KIND: {"schema": {"type": "object", "required": [DATA], "properties": {DATA: {"type": "string", "format": "binary"}}}}},
    }
}
router = APIRouter(prefix="/uploads")


class ExpiresAfter(Closed, frozen=True, kw_only=True):
    """When the file is deleted."""

    anchor: Literal["created_at"]
    seconds: int


class CreateUpload(Closed, frozen=True, kw_only=True):
    """Body of an upload."""

    bytes: int
    filename: str
    mime_type: str
    purpose: str
    expires_after: ExpiresAfter | None = None


class CompleteUpload(Closed, frozen=True, kw_only=True):
    """Body of its end."""

    part_ids: list[str]
    md5: str | None = None


@router.post("", openapi_extra=body_of(CreateUpload))
async def create(request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """An upload without parts, which is forgotten if it is not completed within an hour."""
    _, asked = await read_request(request, lambda body: parse(body, CreateUpload, {}))
    check_purpose(asked.purpose)
    life_s = None if asked.expires_after is None else asked.expires_after.seconds
    values = {"filename": asked.filename, "purpose": asked.purpose, "size_bytes": asked.bytes, "life_s": life_s}
    return _shown(await services.uploads.create(caller, checked(NewUpload, values, {"size_bytes": "bytes", "life_s": "expires_after"})))


@router.post("/{upload}/parts", openapi_extra=_PART)
async def add(upload: str, request: Request, services: Svc, caller: Caller, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
    """One more part."""
    caller.require("train")
    async with form_with_file(request, services.datasets.scratch, MAX_PART_BYTES + _FORM_BYTES, name=DATA) as form:
        if form.fields:
            unknown = shown(next(iter(form.fields)))
            raise InvalidInput(f"unknown field `{unknown}`: leave it out", field=unknown)
        again = again_of(request, idempotency_key, form.content.digest)
        part = await services.uploads.add(caller, upload, form.content.file, form.content.digest, request=again)
    return {"id": part.id, "object": "upload.part", "created_at": unix_s(part.created_us), "upload_id": upload}


@router.post("/{upload}/complete", openapi_extra=body_of(CompleteUpload))
async def complete(upload: str, request: Request, services: Svc, caller: Caller) -> dict[str, Any]:
    """The file of these parts, in this order."""
    _, asked = await read_request(request, lambda body: parse(body, CompleteUpload, {}))
    return _shown(await services.uploads.complete(caller, upload, asked.part_ids, asked.md5))


@router.post("/{upload}/cancel")
async def cancel(upload: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """Forget it."""
    return _shown(await services.uploads.cancel(caller, upload))


def _shown(upload: Upload) -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.given.size_bytes,
        "created_at": unix_s(upload.created_us),
        "expires_at": unix_s(upload.expires_us),
        "file": None if upload.file is None else shown_file(upload.file),
        "filename": upload.given.filename,
        "purpose": upload.given.purpose,
        "status": upload.state,
    }

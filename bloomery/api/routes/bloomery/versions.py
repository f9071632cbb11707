"""Published versions: files to take away, and how faithfully they are sampled."""

from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from bloomery.api.deps import Caller, Svc
from bloomery.services.weights.exports import MAX_SHARD_BYTES, ExportForm
from bloomery.types.deployments import VersionFile, VersionFiles
from bloomery.types.resources import Fidelity

FormQuery = Annotated[ExportForm | None, Query()]
ShardBytes = Annotated[int, Query(ge=1 << 20, lt=1 << 50)]
BYTES: Final = "application/octet-stream"
FILES: Final = "/versions/{version:path}/files"
FIDELITY: Final = "/versions/{version:path}/fidelity"
router = APIRouter(tags=["versions"])


@router.get(
    f"{FILES}/{{name}}", response_class=StreamingResponse, responses={200: {"content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}}
)
async def download(
    version: str, name: str, services: Svc, caller: Caller, form: FormQuery = None, max_shard_bytes: ShardBytes = MAX_SHARD_BYTES
) -> StreamingResponse:
    """The bytes of one file."""
    file = await services.exports.file(caller, version, form, name, max_shard_bytes=max_shard_bytes)
    headers = {"content-length": str(file.size_bytes), "content-disposition": f'attachment; filename="{file.name}"'}
    return StreamingResponse(file.pieces(), media_type=BYTES, headers=headers)


@router.get(FILES)
async def files(version: str, services: Svc, caller: Caller, form: FormQuery = None, max_shard_bytes: ShardBytes = MAX_SHARD_BYTES) -> VersionFiles:
    """What a version consists of as an adapter for `peft`, or merged as a model for `transformers`."""
    export = await services.exports.lay_out(caller, version, form, max_shard_bytes=max_shard_bytes)
    shown = [VersionFile(name=file.name, size_bytes=file.size_bytes) for file in export.files]
    return VersionFiles(
        version=export.version, kind=export.kind, form=export.form, base_model=export.base_model, base_hash=export.base_hash, files=shown
    )


@router.get(FIDELITY)
async def fidelity(version: str, services: Svc, caller: Caller) -> Fidelity:
    """The version's fidelity card."""
    return await services.cards.get(caller, version)


@router.post(FIDELITY)
async def measure_fidelity(version: str, services: Svc, caller: Caller) -> Fidelity:
    """The card, measured now."""
    return await services.cards.measure(caller, version)

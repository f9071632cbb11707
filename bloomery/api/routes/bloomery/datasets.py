"""Data sets: import, upload, validate, split, curate, read, and see in tokens."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again, IdempotencyKey, again_of
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.api.uploads import uploaded
from bloomery.services.data.row_tokens import MEASURED
from bloomery.types.datasets import (
    AnyRow,
    CreateDataset,
    Curate,
    Dataset,
    DatasetVersion,
    Estimate,
    ImportRows,
    RenderedRow,
    RowProblem,
    SplitChoice,
    TokenStatistics,
    UploadRows,
    ValidateRows,
    Validation,
    estimate,
)
from bloomery.types.resources import Page, Split

VERSION: Final = "/{name}/versions/{version}"
_BYTES: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
Few = Annotated[int, Query(ge=1, le=50)]
Context = Annotated[int | None, Query(ge=1, lt=1 << 31)]
Measure = Annotated[int, Query(ge=1, le=100_000)]
Positive = Annotated[float | None, Query(gt=0, allow_inf_nan=False)]

router = APIRouter(prefix="/datasets", tags=["datasets"])


@router.post("", status_code=201)
async def create(body: CreateDataset, services: Svc, caller: Caller, request: Again) -> Dataset:
    """An empty data set."""
    return await services.datasets.create(caller, body.name, request=request)


@router.get("")
async def list_all(services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Dataset]:
    """All data sets, oldest first."""
    return await services.datasets.list(caller, limit=limit, offset=offset)


@router.post("/validate", openapi_extra=_BYTES)
async def validate(given: Annotated[ValidateRows, Query()], services: Svc, caller: Caller, request: Request) -> Validation:
    """What an upload of the body would come to; nothing is stored."""
    caller.require("train")
    async with uploaded(request, services.datasets.scratch) as body:
        return await services.datasets.validate(caller, given, body.file, given.dataset)


@router.get("/{name}")
async def get(name: str, services: Svc, caller: Caller) -> Dataset:
    """A data set with its versions."""
    return await services.datasets.get(caller, name)


@router.delete("/{name}", status_code=204)
async def delete(name: str, services: Svc, caller: Caller) -> None:
    """Forget a data set with all its versions, unless a job that has not ended needs its rows."""
    await services.datasets.delete(caller, name)


@router.post("/{name}/versions", status_code=201)
async def import_rows(name: str, body: ImportRows, services: Svc, caller: Caller, request: Again) -> DatasetVersion:
    """A version of the rows of files; a broken row refuses all of them, unless it is to be skipped."""
    return await services.datasets.import_rows(caller, name, body, request=request)


@router.post("/{name}/upload", status_code=201, openapi_extra=_BYTES)
async def upload(
    name: str,
    given: Annotated[UploadRows, Query()],
    services: Svc,
    caller: Caller,
    request: Request,
    idempotency_key: IdempotencyKey = None,
) -> DatasetVersion:
    """The same of one file, which is the body."""
    caller.require("train")
    await services.datasets.get(caller, name)
    async with uploaded(request, services.datasets.scratch) as body:
        again = again_of(request, idempotency_key, body.digest)
        return await services.datasets.upload(caller, name, given, body.file, request=again)


@router.post("/{name}/curate", status_code=201)
async def curate(name: str, body: Curate, services: Svc, caller: Caller, request: Again) -> DatasetVersion:
    """The parent's rows and what judged traffic adds to them."""
    return await services.datasets.curate(caller, name, body, request=request)


@router.post(VERSION + "/split", status_code=201)
async def split(name: str, version: str, body: SplitChoice, services: Svc, caller: Caller, request: Again) -> DatasetVersion:
    """A version that holds out shares of the training rows of this one."""
    return await services.datasets.split(caller, name, version, body, request=request)


@router.get(VERSION + "/rows")
async def rows(name: str, version: str, services: Svc, caller: Caller, split: Split = "train", limit: Limit = 50, offset: Offset = 0) -> Page[AnyRow]:
    """Rows of one split, in order; `version` is its id or its manifest."""
    return await services.datasets.rows(caller, name, version, split, limit=limit, offset=offset)


@router.get(VERSION + "/rejected")
async def rejected(name: str, version: str, services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[RowProblem]:
    """Rows that the import of the version skipped, and why."""
    return await services.datasets.rejected(caller, name, version, limit=limit, offset=offset)


@router.get(VERSION + "/preview")
async def preview(
    name: str,
    version: str,
    model: str,
    services: Svc,
    caller: Caller,
    split: Split = "train",
    limit: Few = 5,
    offset: Offset = 0,
    context: Context = None,
) -> Page[RenderedRow]:
    """Rows as a base model is trained on them: token ids, their texts, and the weight of each in the loss."""
    return await services.row_tokens.preview(caller, name, version, model=model, split=split, limit=limit, offset=offset, context=context)


@router.get(VERSION + "/statistics")
async def statistics(
    name: str, version: str, model: str, services: Svc, caller: Caller, split: Split = "train", context: Context = None, measure: Measure = MEASURED
) -> TokenStatistics:
    """How long the rows are for a base model, and how often each label is given."""
    return await services.row_tokens.statistics(caller, name, version, model=model, split=split, context=context, measure=measure)


@router.get(VERSION + "/estimate")
async def estimate_epochs(
    name: str,
    version: str,
    model: str,
    services: Svc,
    caller: Caller,
    split: Split = "train",
    context: Context = None,
    measure: Measure = MEASURED,
    epochs: Annotated[float, Query(gt=0, le=1000)] = 1.0,
    tokens_per_s: Positive = None,
    price_per_million: Positive = None,
) -> Estimate:
    """What epochs over a split take."""
    measured = await services.row_tokens.statistics(caller, name, version, model=model, split=split, context=context, measure=measure)
    return estimate(measured, epochs, tokens_per_s=tokens_per_s, price_per_million=price_per_million)

"""Data sets: import, curate, read."""

from fastapi import APIRouter

from bloomery.api.deps import Caller, Svc
from bloomery.api.repeats import Again
from bloomery.api.routes.bloomery.paging import Limit, Offset
from bloomery.types.resources import CreateDataset, Curate, Dataset, DatasetRow, DatasetVersion, ImportRows, Page, Split

router = APIRouter(prefix="/datasets", tags=["datasets"])


@router.post("", status_code=201)
async def create(body: CreateDataset, services: Svc, caller: Caller, request: Again) -> Dataset:
    """An empty data set."""
    return await services.datasets.create(caller, body.name, request=request)


@router.get("")
async def list_all(services: Svc, caller: Caller, limit: Limit = 50, offset: Offset = 0) -> Page[Dataset]:
    """All data sets, oldest first."""
    return await services.datasets.list(caller, limit=limit, offset=offset)


@router.get("/{name}")
async def get(name: str, services: Svc, caller: Caller) -> Dataset:
    """A data set with its versions."""
    return await services.datasets.get(caller, name)


@router.post("/{name}/versions", status_code=201)
async def import_rows(name: str, body: ImportRows, services: Svc, caller: Caller, request: Again) -> DatasetVersion:
    """A version of the rows of files; a broken row refuses all of them."""
    return await services.datasets.import_rows(caller, name, body, request=request)


@router.post("/{name}/curate", status_code=201)
async def curate(name: str, body: Curate, services: Svc, caller: Caller, request: Again) -> DatasetVersion:
    """The parent's rows and what judged traffic adds to them."""
    return await services.datasets.curate(caller, name, body, request=request)


@router.get("/{name}/versions/{version}/rows")
async def rows(
    name: str, version: str, services: Svc, caller: Caller, split: Split = "train", limit: Limit = 50, offset: Offset = 0
) -> Page[DatasetRow]:
    """Rows of one split, in order; `version` is its id or its manifest."""
    return await services.datasets.rows(caller, name, version, split, limit=limit, offset=offset)

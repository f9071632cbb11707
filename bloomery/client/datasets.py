"""Data sets from Python: files in, versions and their rows out, and what training on them takes."""

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from bloomery.client.http import Http
from bloomery.types.datasets import (
    AnyRow,
    Curate,
    Dataset,
    DatasetVersion,
    Estimate,
    FileFormat,
    ImportRows,
    RenderedRow,
    RowProblem,
    SplitChoice,
    TokenStatistics,
    UploadRows,
    ValidateRows,
    Validation,
)
from bloomery.types.errors import InvalidInput
from bloomery.types.resources import Split

FORMATS: Final[Mapping[str, FileFormat]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_ROW: Final[TypeAdapter[AnyRow]] = TypeAdapter(AnyRow)
_Asked = TypeVar("_Asked", bound=BaseModel)
_PIECE_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 1800.0
"""For one answer: a large file is read, compared and written before there is any, which takes minutes for a million rows."""


class Datasets:
    """Immutable versions of rows under a name."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(self, name: str) -> Dataset:
        """An empty data set."""
        return Dataset.model_validate(self._http.post_once("/api/v1/datasets", {"name": name}))

    def add_version(
        self, name: str, splits: Mapping[Split, str], *, format: str = "jsonl", parent: str | None = None, **choice: Any
    ) -> DatasetVersion:
        """Import the content of one file per split; `choice` are the other fields of `ImportRows`."""
        body = ImportRows.model_validate({"format": format, "splits": dict(splits), "parent": parent, **choice})
        return self._post(f"/{name}/versions", body.model_dump(exclude_defaults=True))

    def upload(self, name: str, file: Path | bytes, *, format: FileFormat | None = None, **choice: Any) -> DatasetVersion:
        """Import one file, which is sent as it is; without a format its name says it. `choice` are the other fields of `UploadRows`."""
        given = _asked(UploadRows, format=format or format_of(file), **choice)
        return DatasetVersion.model_validate(self._send(f"/{name}/upload", file, given, self._http.once()))

    def validate(self, file: Path | bytes, *, format: FileFormat | None = None, dataset: str | None = None, **choice: Any) -> Validation:
        """What an upload of the file would come to, in a data set if one is named; nothing is stored."""
        given = _asked(ValidateRows, format=format or format_of(file), dataset=dataset, **choice)
        return Validation.model_validate(self._send("/validate", file, given, {}))

    def split(self, name: str, version: str, *, eval: float = 0.0, validation: float = 0.0, by: str | None = None) -> DatasetVersion:
        """A version that holds out shares of the training rows of another, group by group."""
        choice = _asked(SplitChoice, eval=eval, validation=validation, by=by)
        return self._post(f"/{name}/versions/{version}/split", choice.model_dump())

    def curate(self, name: str, parent: str, **choice: Any) -> DatasetVersion:
        """A version with rows made of judged traffic; `choice` are the other fields of `Curate`."""
        return self._post(f"/{name}/curate", Curate(parent=parent, **choice).model_dump())

    def get(self, name: str) -> Dataset:
        """One data set with its versions."""
        return Dataset.model_validate(self._http.get(f"/api/v1/datasets/{name}"))

    def delete(self, name: str) -> None:
        """Forget a data set with all its versions, unless a job that has not ended needs its rows."""
        self._http.request("DELETE", f"/api/v1/datasets/{name}")

    def rows(self, name: str, version: str, split: Split = "train", *, limit: int | None = None) -> list[AnyRow]:
        """The rows of a split in order, or the first `limit` of them."""
        return [_ROW.validate_python(item) for item in self._http.pages(_of(name, version, "rows"), split=split, limit=limit)]

    def read(self, name: str, version: str, split: Split = "train", *, start: int = 0) -> Iterator[AnyRow]:
        """The rows of a split from a place on, page by page as they are asked for: for splits that need not fit into memory."""
        return (_ROW.validate_python(item) for item in self._http.pages(_of(name, version, "rows"), split=split, start=start))

    def rejected(self, name: str, version: str, *, limit: int | None = None) -> list[RowProblem]:
        """Rows that the import of a version skipped, and why."""
        return [RowProblem.model_validate(item) for item in self._http.pages(_of(name, version, "rejected"), limit=limit)]

    def preview(
        self, name: str, version: str, *, model: str, split: Split = "train", limit: int = 5, offset: int = 0, context: int | None = None
    ) -> list[RenderedRow]:
        """Rows as a base model is trained on them: token ids, their texts, and which carry loss."""
        page = self._http.get(_of(name, version, "preview"), model=model, split=split, limit=limit, offset=offset, context=context)
        return [RenderedRow.model_validate(item) for item in page["data"]]

    def statistics(self, name: str, version: str, *, model: str, split: Split = "train", **choice: Any) -> TokenStatistics:
        """How long the rows are for a base model; `choice`: `context`, `measure` (at most so many rows)."""
        return TokenStatistics.model_validate(self._http.get(_of(name, version, "statistics"), model=model, split=split, **choice))

    def estimate(self, name: str, version: str, *, model: str, epochs: float = 1.0, split: Split = "train", **choice: Any) -> Estimate:
        """What epochs over a split take; `choice`: `context`, `measure`, `tokens_per_s`, `price_per_million`."""
        return Estimate.model_validate(self._http.get(_of(name, version, "estimate"), model=model, epochs=epochs, split=split, **choice))

    def list(self) -> list[Dataset]:
        """All data sets."""
        return [Dataset.model_validate(item) for item in self._http.pages("/api/v1/datasets")]

    def _post(self, path: str, body: dict[str, Any]) -> DatasetVersion:
        return DatasetVersion.model_validate(self._http.post_once(f"/api/v1/datasets{path}", body))

    def _send(self, path: str, file: Path | bytes, given: UploadRows, headers: dict[str, str]) -> Any:
        body = _Body(file)
        headers = {"content-type": "application/octet-stream", "content-length": str(body.size), **headers}
        query = given.model_dump(exclude_none=True, exclude_defaults=True) | {"format": given.format}
        return self._http.request(
            "POST", f"/api/v1/datasets{path}", params=query, content=body, headers=headers, repeatable=True, timeout=_PATIENCE_S
        ).json()


def format_of(file: Path | bytes) -> FileFormat:
    """What the name of a file says."""
    if isinstance(file, Path) and (format := FORMATS.get(file.suffix.lower())) is not None:
        return format
    raise InvalidInput(f"give the format of the rows: jsonl, csv or parquet, unless their file's name ends in {', '.join(FORMATS)}", field="format")


def _asked(kind: type[_Asked], /, **fields: Any) -> _Asked:
    """What is asked for; what makes no sense is told as the server would tell it."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or None
        raise InvalidInput(f"`{field}`: {first['msg']}" if field else first["msg"], field=field) from None


class _Body:
    """The bytes of a file, again from the beginning for every attempt to send them."""

    def __init__(self, file: Path | bytes) -> None:
        self._file = file
        self.size = len(file) if isinstance(file, bytes) else file.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with BytesIO(self._file) if isinstance(self._file, bytes) else self._file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                yield piece


def _of(name: str, version: str, what: str) -> str:
    return f"/api/v1/datasets/{name}/versions/{version}/{what}"

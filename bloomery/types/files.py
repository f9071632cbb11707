"""Files of OpenAI's contract: bytes under an id, for a purpose."""

from typing import Annotated, Final, Literal

from pydantic import Field

from bloomery.types.datasets import RowKind
from bloomery.types.resources import Resource

FilePurpose = Literal["fine-tune", "fine-tune-results", "batch", "batch_output", "evals"]
OF_BATCHES: Final[tuple[FilePurpose, ...]] = ("batch", "batch_output")
"""Those that whoever asks models may have."""
MIN_LIFE_S: Final = 3_600
MAX_LIFE_S: Final = 30 * 86_400


class NewFile(Resource):
    """What is said of a file that is uploaded."""

    filename: Annotated[str, Field(min_length=1, max_length=512)]
    purpose: Literal["fine-tune", "batch", "evals"]
    life_s: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)] | None = None
    """Seconds after which it is deleted; None: it stays until somebody deletes it."""


class File(Resource):
    """A file that is there."""

    id: str
    filename: str
    purpose: FilePurpose
    kind: RowKind | None
    """Of its rows, where it has any."""
    size_bytes: int
    created_us: int
    expires_us: int | None


class FilePage(Resource):
    """Some files."""

    data: list[File]
    has_more: bool


# Uploads: files that come in parts

MAX_PART_BYTES: Final = 64 << 20
MAX_UPLOAD_BYTES: Final = 1 << 30


class NewUpload(NewFile):
    """A file that is to come in parts."""

    size_bytes: Annotated[int, Field(ge=1, le=MAX_UPLOAD_BYTES)]


class UploadPart(Resource):
    """A part that is there."""

    id: str
    upload: str
    size_bytes: int
    created_us: int


class Upload(Resource):
    """An upload, and the file that came of it."""

    id: str
    given: NewUpload
    state: Literal["pending", "completed", "cancelled"]
    file: File | None
    created_us: int
    expires_us: int

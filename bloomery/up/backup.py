"""Archives of a data directory, made while the server runs or not, and restored into an empty one.

The archive must look like the disk after a power cut, for that is what a start can continue from. So files are hard-linked first (blobs are never
changed and journals only grow), then the database is copied, then files are linked again: all that the copied rows refer to is in one of the two
passes. Results are measured before operations, for a journal may lack the result of an operation and never the reverse.
"""

import os
import sqlite3
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from shutil import copyfileobj, rmtree
from typing import BinaryIO, Final, NamedTuple

import zstandard

from bloomery.config.data_dir import DataDir
from bloomery.disk.durable import sync_directory, sync_tree
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.up.layout import check_version

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_STAGED_BLOB: Final = "#"
# Neither format says at its end that it is the end.
_LAST: Final = "COMPLETE"
_TREES: Final = ("blobs", "runs")


class Archived(NamedTuple):
    """What an archive holds."""

    files: int
    size_bytes: int


def backup(data: DataDir, archive: Path) -> Archived:
    """Write a new archive, complete or not at all; it holds the development key and that of chains, so its mode is 0600."""
    if not archive.name.endswith((".tar.zst", ".tar.gz")):
        raise InvalidInput(f"{archive} must end in .tar.zst or .tar.gz", field="file")
    if archive.exists():
        raise Conflict(f"{archive} exists: choose another name", field="file")
    if not data.version.exists() or not data.database.exists():
        raise NotFound(f"{data.root} is no data directory of Bloomery: nothing to back up")
    with _staging(data) as staged, _written(archive) as file:
        sizes = _stage(data, staged)
        _pack(file, archive, staged, sizes)
    return Archived(len(sizes), archive.stat().st_size)


def restore(archive: Path, data: DataDir) -> Archived:
    """Unpack an archive into a data directory that is empty or does not exist."""
    if not archive.is_file():
        raise NotFound(f"there is no archive {archive}", field="file")
    if data.root.exists() and any(data.root.iterdir()):
        raise Conflict(f"{data.root} is not empty: restore into a new --data-dir, or move this one away first")
    staged = data.root.with_name(data.root.name + ".restoring")
    if staged.exists():
        raise Conflict(f"another restore is being made; if it was killed, remove {staged} and try again")
    staged.mkdir(mode=0o700, parents=True)
    try:
        files = _unpack(archive, staged)
        sync_tree(staged)
        if data.root.exists():
            data.root.rmdir()
        staged.rename(data.root)
    except BaseException:
        rmtree(staged)
        raise
    sync_directory(data.root.parent)
    return Archived(files, archive.stat().st_size)


def _stage(data: DataDir, staged: Path) -> dict[str, int]:
    """Freeze a consistent set of files in `staged`; their names in archive order, with how many bytes of each belong to it."""
    sizes = {"VERSION": data.version.stat().st_size, data.database.name: 0}
    os.link(data.version, staged / "VERSION")
    sizes |= _link(data, staged)
    _copy_database(data.database, staged / data.database.name)
    sizes[data.database.name] = (staged / data.database.name).stat().st_size
    sizes |= _link(data, staged)
    for key in (data.api_key, data.chain_key, data.chain_key_public):
        if key.exists():
            os.link(key, staged / key.name)
            sizes[key.name] = key.stat().st_size
    return sizes


def _link(data: DataDir, staged: Path) -> dict[str, int]:
    """One pass over blobs and journals."""
    sizes = {}
    files = [path for tree in _TREES for path in sorted((data.root / tree).rglob("*")) if _STAGED_BLOB not in path.name and not path.is_dir()]
    for path in sorted(files, key=lambda path: path.name.startswith("ops-")):
        name = str(path.relative_to(data.root))
        target = staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not target.exists():
                os.link(path, target)
            sizes[name] = target.stat().st_size
        except FileNotFoundError:
            # Deleted since it was listed: no row that will be copied refers to it, or the first pass has it.
            continue
    return sizes


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)


@contextmanager
def _staging(data: DataDir) -> Iterator[Path]:
    staged = data.root / ".backup"
    try:
        staged.mkdir(mode=0o700)
    except FileExistsError:
        raise Conflict(f"another backup is being made; if it was killed, remove {staged} and try again") from None
    try:
        yield staged
    finally:
        rmtree(staged)


@contextmanager
def _written(archive: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete and on disk."""
    partial = archive.with_name(archive.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(archive)
        sync_directory(archive.parent)
    finally:
        partial.unlink(missing_ok=True)


def _pack(file: BinaryIO, archive: Path, staged: Path, sizes: dict[str, int]) -> None:
    if archive.name.endswith(".gz"):
        with tarfile.open(fileobj=file, mode="w|gz") as tar:
            _add_all(tar, staged, sizes)
        return
    with zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        _add_all(tar, staged, sizes)


def _add_all(tar: tarfile.TarFile, staged: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = size, 0o600
        with (staged / name).open("rb") as content:
            tar.addfile(entry, content)
    tar.addfile(tarfile.TarInfo(_LAST))


def _unpack(archive: Path, target: Path) -> int:
    files, complete = 0, False
    with archive.open("rb") as file, _opened(file, archive) as tar:
        for entry in tar:
            if complete := entry.name == _LAST:
                break
            _unpack_one(tar, entry, archive, target, first=files == 0)
            files += 1
    if not complete or files == 0:
        raise InvalidInput(f"{archive} is damaged: its end is missing", field="file")
    return files


@contextmanager
def _opened(file: BinaryIO, archive: Path) -> Iterator[tarfile.TarFile]:
    magic = file.read(4)
    file.seek(0)
    try:
        if magic == _ZSTD_MAGIC:
            with zstandard.ZstdDecompressor().stream_reader(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                yield tar
        elif magic.startswith(_GZIP_MAGIC):
            with tarfile.open(fileobj=file, mode="r|gz") as tar:
                yield tar
        else:
            raise InvalidInput(f"{archive} is not an archive of `bloomery backup`", field="file")
    except (tarfile.TarError, zstandard.ZstdError, zlib.error, EOFError) as error:
        raise InvalidInput(f"{archive} is damaged: {error}", field="file") from None


def _unpack_one(tar: tarfile.TarFile, entry: tarfile.TarInfo, archive: Path, target: Path, *, first: bool) -> None:
    name = PurePosixPath(entry.name)
    content = tar.extractfile(entry) if entry.isreg() else None
    if content is None or name.is_absolute() or ".." in name.parts or (first and entry.name != "VERSION"):
        raise InvalidInput(f"{archive} holds `{entry.name}`, which `bloomery backup` does not write", field="file")
    path = target / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with content, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        copyfileobj(content, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    if first:
        check_version(path.read_text(), str(archive))

"""Objects (`types.objects`) in a folder of this machine or one that is mounted here, and in a bucket that speaks S3. Both behave the same.

What makes an object visible at once: a folder has a name linked to a file that is whole and synced, a bucket has one request. What makes one of many
writers win: `link` fails where a name exists, and `replace` holds a lock of the folder between its look and its rename; a bucket is asked with
`If-None-Match: *` and `If-Match`. A request that was answered with "it is there already" may have been repeated after its answer was lost, so what
is there is read before anybody is told that he lost. Neither is waited for without end: a bucket has a deadline for each request, and a folder, which
may be another machine's, has to go on within one; what was given up may be done later all the same.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import ObjectStore, S3Store

from bloomery.disk.durable import make_directory, sync_directory
from bloomery.store.patience import Patience, went_on
from bloomery.types.errors import BloomeryError, Corrupt, NotFound, Unavailable, reason
from bloomery.types.objects import Objects, Stored, check_key, is_key

_P = ParamSpec("_P")
_R = TypeVar("_R")
DEADLINE_S: Final = 30.0
_LOCK: Final = ".lock"
_STAGED: Final = "#"
"""In the names of files that are no objects yet: no key has it."""
_POLL_S: Final = 0.005
_PIECE_BYTES: Final = 16 << 20
"""That a file system reads or writes within the deadline."""
_LEAST_PART_BYTES: Final = 5 << 20
_MOST_PARTS: Final = 9000
"""Of an upload; S3 refuses more than 10,000."""


def _patiently(operation: Callable[Concatenate["Folder", _P], _R]) -> Callable[Concatenate["Folder", _P], _R]:
    """An operation of a folder that ends, or goes on, within its deadline."""

    @wraps(operation)
    def run(self: "Folder", /, *args: _P.args, **options: _P.kwargs) -> _R:
        return self.patience.within(lambda: operation(self, *args, **options), f"{self.name}: {operation.__name__} of `{args[0]}`")

    return run


class Folder:
    """Objects as files below a directory, which may be shared by many processes."""

    def __init__(self, root: Path, *, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s`: how long others may keep the lock of the folder, and how long the file system may do nothing."""
        self.name = f"folder `{root.name}`"
        self._root, self._deadline_s, self.patience = root, deadline_s, Patience(deadline_s)
        self.patience.within(lambda: make_directory(root), self.name)

    @_patiently
    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Objects`."""
        with self._naming(key), self._staged(key, data) as (staged, path):
            staged.replace(path)

    @_patiently
    def create(self, key: str, data: bytes) -> str | None:
        """See `Objects`."""
        with self._naming(key), self._staged(key, data) as (staged, path):
            try:
                path.hardlink_to(staged)
            except FileExistsError:
                return self._own(key, data)
            return _tag(staged.stat())

    @_patiently
    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """See `Objects`."""
        with self._naming(key), self._locked(key), self._staged(key, data) as (staged, path):
            if (found := self.head(key)) is None or found.tag != tag:
                return self._own(key, data)
            staged.replace(path)
            return _tag(path.stat())

    @_patiently
    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        """See `Objects`."""
        with self._naming(key), self._path(key).open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size > at_most:
                raise _too_large(self.name, key, found.st_size, at_most)
            return _read(file, found.st_size), _tag(found)

    @_patiently
    def part(self, key: str, start: int, stop: int) -> bytes:
        """See `Objects`."""
        with self._naming(key), self._path(key).open("rb") as file:
            file.seek(start)
            return _whole(_read(file, stop - start), self.name, key, start, stop)

    @_patiently
    def head(self, key: str) -> Stored | None:
        """See `Objects`."""
        with self._naming(key):
            try:
                found = self._path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return Stored(key, found.st_size, _tag(found), found.st_mtime_ns // 1000)

    @_patiently
    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        """See `Objects`."""
        with self._naming(folder):
            top = self._path(folder)
            below = (Path(place) / name for place, _, names in os.walk(top) for name in names)
            keys = sorted(path.relative_to(self._root).as_posix() for path in below)
        # What is deleted meanwhile is not there.
        return [found for key in keys if is_key(key) and key > after and (found := self.head(key)) is not None]

    @_patiently
    def delete(self, key: str) -> None:
        """See `Objects`."""
        with self._naming(key):
            path = self._path(key)
            with suppress(FileNotFoundError):
                path.unlink()
                sync_directory(path.parent)

    @_patiently
    def tidy(self, before_us: int) -> None:
        """See `Objects`."""
        with self._naming(_STAGED):
            for place, _, names in os.walk(self._root):
                went_on()
                for path in (Path(place) / name for name in names if _STAGED in name):
                    with suppress(FileNotFoundError):
                        if path.stat().st_mtime_ns // 1000 < before_us:
                            path.unlink()

    def _own(self, key: str, data: bytes) -> str | None:
        """The tag of what is there, where it is what was to be put."""
        try:
            there, tag = self.get(key, at_most=len(data))
        except (NotFound, Corrupt):
            return None
        return tag if there == data else None

    def _path(self, key: str) -> Path:
        check_key(key)
        path = self._root / key
        # A link that somebody put into a shared folder leads nowhere else either.
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise Corrupt(f"{self.name}: `{key}` would lie outside the folder: a link leads there")
        return path

    @contextmanager
    def _staged(self, key: str, data: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
        """A synced file beside the place that it may get; its name is durable at the end."""
        path = self._path(key)
        make_directory(path.parent)
        staged = path.with_name(f"{path.name}{_STAGED}{secrets.token_hex(8)}")
        try:
            with staged.open("xb") as file:
                view = memoryview(data).cast("B")
                # Each piece is on the disk before the next: what is left for the end may take longer than anybody waits.
                for start in range(0, max(1, len(view)), _PIECE_BYTES):
                    file.write(view[start : start + _PIECE_BYTES])
                    file.flush()
                    os.fsync(file.fileno())
                    went_on()
            yield staged, path
        finally:
            staged.unlink(missing_ok=True)
        sync_directory(path.parent)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        handle = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            deadline = time.monotonic() + self._deadline_s
            while not _try_lock(handle):
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{self.name}: somebody has kept the lock of the folder for {self._deadline_s:g} s, so `{key}` was not replaced"
                    )
                time.sleep(_POLL_S)
                went_on()
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"{self.name}: there is no object `{key}`") from error
        except OSError as error:
            raise Unavailable(f"{self.name}: `{key}`: {reason(error)}") from error


class BucketAccess(NamedTuple):
    """Where a bucket is, and who asks. Empty keys are those of the environment or of the machine's role, as AWS's own tools find them."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    """Of a store that is not AWS's; `http://` only where it says so itself."""
    region: str = "us-east-1"
    key_id: str = ""
    secret: str = ""


class Bucket:
    """Objects in a bucket."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        """`store` must have deadlines of its own, as that of `open_bucket` has."""
        self.name, self._store = name, store

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Objects`."""
        check_key(key)
        with self._naming(key):
            # A store is sent large ones in parts, straight from where they lie, and shows them when the last is there.
            obstore.put(self._store, key, data, chunk_size=part_bytes(len(data)))

    def create(self, key: str, data: bytes) -> str | None:
        """See `Objects`."""
        check_key(key)
        return self._settled(key, data, lambda: obstore.put(self._store, key, data, mode="create", use_multipart=False)["e_tag"])

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """See `Objects`."""
        check_key(key)
        return self._settled(key, data, lambda: obstore.put(self._store, key, data, mode={"e_tag": tag}, use_multipart=False)["e_tag"])

    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        """See `Objects`."""
        check_key(key)
        with self._naming(key):
            found = obstore.get(self._store, key)
            if found.meta["size"] > at_most:
                raise _too_large(self.name, key, found.meta["size"], at_most)
            return bytes(found.bytes()), _known(found.meta["e_tag"], self.name, key)

    def part(self, key: str, start: int, stop: int) -> bytes:
        """See `Objects`."""
        check_key(key)
        try:
            with self._naming(key):
                data = bytes(obstore.get_range(self._store, key, start=start, end=stop))
        except Unavailable:
            # Stores refuse a range behind the end in words of their own.
            if (found := self.head(key)) is not None and found.size < stop:
                data = b""
            else:
                raise
        return _whole(data, self.name, key, start, stop)

    def head(self, key: str) -> Stored | None:
        """See `Objects`."""
        check_key(key)
        try:
            with self._naming(key):
                found = obstore.head(self._store, key)
        except NotFound:
            return None
        return _stored(found, self.name)

    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        """See `Objects`."""
        check_key(folder)
        with self._naming(folder):
            entries = [entry for batch in obstore.list(self._store, folder, offset=after or None) for entry in batch]
        return sorted(_stored(entry, self.name) for entry in entries if is_key(entry["path"]))

    def delete(self, key: str) -> None:
        """See `Objects`."""
        check_key(key)
        with suppress(NotFound), self._naming(key):
            obstore.delete(self._store, key)

    def tidy(self, before_us: int) -> None:
        """Nothing to do: what is left of uploads that were broken off is invisible, and a rule of the bucket ends it."""

    def _settled(self, key: str, data: bytes, put: Callable[[], str | None]) -> str | None:
        """The tag of what was put under a condition; of one's own bytes too, where the store says that the condition does not hold."""
        with self._naming(key):
            try:
                return _known(put(), self.name, key)
            except (AlreadyExistsError, PreconditionError):
                pass
        try:
            there, tag = self.get(key, at_most=len(data))
        except (NotFound, Corrupt):
            return None
        return tag if there == data else None

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        try:
            yield
        except (BloomeryError, AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            raise NotFound(f"{self.name}: there is no object `{key}`") from error
        except (BaseError, OSError) as error:
            raise Unavailable(f"{self.name}: `{key}`: {reason(error)}") from error


class Prefixed:
    """The objects in a folder of others, under keys of their own."""

    def __init__(self, objects: Objects, folder: str) -> None:
        check_key(folder)
        self.name = f"`{folder}` of {objects.name}"
        self._objects, self._start = objects, f"{folder}/"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Objects`."""
        self._objects.put(self._start + key, data)

    def create(self, key: str, data: bytes) -> str | None:
        """See `Objects`."""
        return self._objects.create(self._start + key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """See `Objects`."""
        return self._objects.replace(self._start + key, data, tag)

    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        """See `Objects`."""
        return self._objects.get(self._start + key, at_most=at_most)

    def part(self, key: str, start: int, stop: int) -> bytes:
        """See `Objects`."""
        return self._objects.part(self._start + key, start, stop)

    def head(self, key: str) -> Stored | None:
        """See `Objects`."""
        found = self._objects.head(self._start + key)
        return None if found is None else self._own(found)

    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        """See `Objects`."""
        return [self._own(found) for found in self._objects.list(self._start + folder, after=after and self._start + after)]

    def delete(self, key: str) -> None:
        """See `Objects`."""
        self._objects.delete(self._start + key)

    def tidy(self, before_us: int) -> None:
        """See `Objects`; what is left over in other folders too."""
        self._objects.tidy(before_us)

    def _own(self, found: Stored) -> Stored:
        return found._replace(key=found.key.removeprefix(self._start))


def open_bucket(access: BucketAccess, *, deadline_s: float = DEADLINE_S, connect_s: float = 5.0) -> Bucket:
    """A bucket. Each request ends within twice `deadline_s` with all that is tried again: a try may begin until then, and last as long."""
    keys = {"access_key_id": access.key_id, "secret_access_key": access.secret} if access.key_id else {}
    place = {"endpoint": access.endpoint, "virtual_hosted_style_request": False} if access.endpoint else {}
    store = S3Store(
        access.bucket,
        prefix=access.prefix or None,
        region=access.region,
        client_options={
            "timeout": timedelta(seconds=deadline_s),
            "connect_timeout": timedelta(seconds=connect_s),
            "allow_http": access.endpoint.startswith("http://"),
        },
        retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=deadline_s)},
        **keys,  # type: ignore[arg-type]
        **place,  # type: ignore[arg-type]
    )
    return Bucket(store, f"bucket `{access.bucket}`")


def part_bytes(size: int) -> int:
    """Of the parts in which an object of that size is uploaded."""
    return max(_LEAST_PART_BYTES, -(-size // _MOST_PARTS))


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _tag(found: os.stat_result) -> str:
    """A file that was put is never written to again, so it is another whenever one of these is."""
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _stored(found: "obstore.ObjectMeta", name: str) -> Stored:
    moment = int(found["last_modified"].timestamp() * 1e6)
    return Stored(found["path"], found["size"], _known(found["e_tag"], name, found["path"]), moment)


def _known(tag: str | None, name: str, key: str) -> str:
    if tag is None:
        raise Unavailable(f"{name}: the store tells no tag of `{key}`, so nothing can be replaced under a condition: use one that does")
    return tag


def _read(file: BinaryIO, size: int) -> bytes:
    """At most so many bytes, piece by piece."""
    if size <= _PIECE_BYTES:
        return file.read(size)
    found = BytesIO()
    while piece := file.read(min(_PIECE_BYTES, size - found.tell())):
        found.write(piece)
        went_on()
    return found.getvalue()


def _whole(data: bytes, name: str, key: str, start: int, stop: int) -> bytes:
    if len(data) != stop - start:
        raise Corrupt(f"{name}: `{key}` ends before byte {stop}: of bytes {start} to {stop} there are {len(data)}")
    return data


def _too_large(name: str, key: str, size: int, at_most: int) -> Corrupt:
    return Corrupt(f"{name}: `{key}` has {size} bytes, and nothing of the kind has more than {at_most}")

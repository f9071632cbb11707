"""Blobs: everything large, under keys such as `checkpoints/run-.../12-ab.safetensors`.

`Blobs` is synchronous and serves the engine too; `AsyncBlobs` is what services do with it. A put is all or nothing and durable when it returns.
Keys are reached through rows only: nobody outside chooses one.
"""

import asyncio
import secrets
import stat
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.store import LocalStore, ObjectStore

from bloomery.disk.durable import make_directory, put_beside, sync_directory
from bloomery.obs.failpoints import failpoint
from bloomery.store.objects import Bucket, Folder, Prefixed
from bloomery.types.errors import Corrupt, NotFound
from bloomery.types.objects import Objects, check_key


class BlobInfo(NamedTuple):
    """What a listing says."""

    key: str
    size: int
    modified_us: int


class Blobs:
    """Blobs below a directory, or in a bucket given as an object store."""

    def __init__(self, root: Path | ObjectStore) -> None:
        self._root = root if isinstance(root, Path) else None
        self._store = LocalStore(root, mkdir=True) if isinstance(root, Path) else root

    @property
    def directory(self) -> Path | None:
        """Of this machine, in which blobs lie; None where they are in a bucket."""
        return self._root

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store `data`; an earlier blob of that key is replaced at once or not at all."""
        self.put_all({key: data})

    def put_all(self, blobs: Mapping[str, bytes | memoryview]) -> None:
        """Store several, each whole or not at all, which costs less than one by one."""
        if not blobs:
            return
        for key in blobs:
            check_key(key)
        if self._root is None:
            for key, data in blobs.items():
                obstore.put(self._store, key, bytes(data))
                failpoint("blob.written")
        else:
            _put_durably(self._root, blobs)

    def get(self, key: str) -> bytes:
        """The whole blob."""
        check_key(key)
        try:
            # A file is read without the interpreter's lock: whoever streams from another thread goes on.
            return bytes(obstore.get(self._store, key).bytes()) if self._root is None else (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"there is no blob `{key}`") from error

    def part(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of the blob, not empty."""
        check_key(key)
        try:
            return bytes(obstore.get_range(self._store, key, start=start, end=stop))
        except FileNotFoundError as error:
            raise NotFound(f"there is no blob `{key}`") from error

    def exists(self, key: str) -> bool:
        """Whether the blob is there."""
        check_key(key)
        try:
            obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        """Bytes of the blob."""
        check_key(key)
        try:
            return obstore.head(self._store, key)["size"] if self._root is None else _file_bytes(self._root / key)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no blob `{key}`") from error

    def delete(self, key: str) -> None:
        """Remove the blob; one that is gone already is fine."""
        check_key(key)
        if self.exists(key):
            obstore.delete(self._store, key)

    def delete_older(self, key: str, before_us: int) -> int | None:
        """Remove the blob unless it was written since, for equal content is put under equal keys; the bytes it had, None if nothing was removed."""
        check_key(key)
        try:
            found = obstore.head(self._store, key)
        except FileNotFoundError:
            return None
        if _microseconds(found["last_modified"]) >= before_us:
            return None
        obstore.delete(self._store, key)
        return found["size"]

    def objects(self, folder: str) -> Objects:
        """A folder of the same store, for what is written under conditions; listings of blobs below it are not of blobs."""
        check_key(folder)
        if self._root is not None:
            return Folder(self._root / folder)
        return Prefixed(Bucket(self._store, "the bucket of blobs"), folder)

    def list(self, prefix: str = "") -> list[BlobInfo]:
        """All blobs in the folder `prefix`, in the order of their keys."""
        if prefix:
            check_key(prefix)
        found = [entry for batch in obstore.list(self._store, prefix or None) for entry in batch]
        blobs = [BlobInfo(entry["path"], entry["size"], _microseconds(entry["last_modified"])) for entry in found]
        return sorted(blobs)


def _file_bytes(path: Path) -> int:
    """Asked of the system itself: a store of objects has threads of its own do so, and they may have to wait for a processor."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(path)
    return found.st_size


def _microseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6)


class AsyncBlobs:
    """What the event loop does with `Blobs`, on threads."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs

    async def put(self, key: str, data: bytes | memoryview) -> None:
        await asyncio.to_thread(self.blobs.put, key, data)

    async def put_all(self, blobs: Mapping[str, bytes | memoryview]) -> None:
        if blobs:
            await asyncio.to_thread(self.blobs.put_all, blobs)

    async def get(self, key: str) -> bytes:
        return await asyncio.to_thread(self.blobs.get, key)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self.blobs.delete, key)


def _put_durably(root: Path, blobs: Mapping[str, bytes | memoryview]) -> None:
    """Content, then name, then directory: a power cut leaves the old blob or the new one."""
    paths, own = {key: root / key for key in blobs}, root.resolve()
    directories = {path.parent for path in paths.values()}
    for directory in directories:
        if not directory.resolve().is_relative_to(own):
            raise Corrupt(f"blobs of `{directory.relative_to(root)}` would lie outside the data directory: a link leads there")
        make_directory(directory)
    for key, data in blobs.items():
        # Listings of the object store skip names that end in `#` and digits.
        put_beside(paths[key].with_name(f"{paths[key].name}#{secrets.randbelow(10**15)}"), paths[key], data)
        failpoint("blob.written")
    for directory in directories:
        sync_directory(directory)

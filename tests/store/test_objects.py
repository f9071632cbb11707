"""A folder and a bucket behave the same: what is put, created once, replaced under a condition, read in parts, listed and removed."""

import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from bloomery.store import objects as stored_objects
from bloomery.store.objects import Bucket, BucketAccess, Folder, open_bucket, part_bytes
from bloomery.sync.chain.objects import MAX_BYTES
from bloomery.types.errors import BloomeryError, Corrupt, InvalidInput, NotFound, Unavailable
from bloomery.types.objects import Objects
from tests.s3 import new_bucket

WRITERS = 8
ROUNDS = 10
REPLACES = 5


@pytest.fixture(params=["folder", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    makers: dict[str, Callable[[], Objects]] = {
        "folder": lambda: Folder(tmp_path / "objects"),
        "memory": lambda: Bucket(MemoryStore(), "memory"),
        "s3": lambda: new_bucket(request.getfixturevalue("s3")),
    }
    return makers[request.param]()


def test_an_object_comes_back_whole_or_in_parts_and_can_be_replaced_and_deleted(objects: Objects) -> None:
    objects.put("obj/a", b"one")
    objects.put("obj/a", memoryview(b"twelve"))
    data, tag = objects.get("obj/a", at_most=6)
    found = objects.head("obj/a")
    assert found is not None
    assert (data, found.key, found.size, found.tag) == (b"twelve", "obj/a", 6, tag)
    assert objects.part("obj/a", 2, 5) == b"elv"
    objects.delete("obj/a")
    objects.delete("obj/a")
    assert objects.head("obj/a") is None
    for read in (lambda: objects.get("obj/a", at_most=9), lambda: objects.part("obj/a", 0, 1)):
        with pytest.raises(NotFound, match="no object `obj/a`"):
            read()


def test_more_than_is_expected_is_not_read_and_less_is_told(objects: Objects) -> None:
    objects.put("obj/a", b"twelve")
    with pytest.raises(Corrupt, match=f"{objects.name}: `obj/a` has 6 bytes, and nothing of the kind has more than 5"):
        objects.get("obj/a", at_most=5)
    for start, stop in ((4, 9), (6, 9), (50, 60)):
        with pytest.raises(Corrupt, match=f"`obj/a` ends before byte {stop}"):
            objects.part("obj/a", start, stop)


def test_a_listing_has_the_keys_of_a_folder_in_order_and_only_those_behind(objects: Objects) -> None:
    for key in ("v/3", "v/1", "v/2", "other/1", "v/below/1"):
        objects.put(key, key.encode())
    assert [found.key for found in objects.list("v")] == ["v/1", "v/2", "v/3", "v/below/1"]
    assert [(found.key, found.size) for found in objects.list("v", after="v/2")] == [("v/3", 3), ("v/below/1", 9)]
    assert objects.list("nothing") == []
    assert objects.list("v")[0] == objects.head("v/1")


@pytest.mark.parametrize(
    "name", [".nfs0001", ".DS_Store", "Copy of 1", "below/.hidden", ".snapshot/1", "1~", "a" * 250 + "/" + "b" * 250 + "/" + "c" * 20]
)
def test_a_listing_skips_what_others_left_under_no_key(tmp_path: Path, s3: str, name: str) -> None:
    store = MemoryStore()
    folder, memory, bucket = Folder(tmp_path / "objects"), Bucket(store, "memory"), new_bucket(s3)
    foreign = tmp_path / "objects" / "v" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"foreign")
    for each in (store, bucket._store):
        obstore.put(each, f"v/{name}", b"foreign")
    for objects in (folder, memory, bucket):
        objects.put("v/1", b"one")
        assert [found.key for found in objects.list("v")] == ["v/1"]


def test_created_once_and_a_repeated_request_finds_its_own_object(objects: Objects) -> None:
    tag = objects.create("v/1", b"one")
    assert tag is not None
    assert objects.create("v/1", b"two") is None
    assert objects.create("v/1", b"longer") is None
    # As a store does by itself when an answer was lost.
    assert objects.create("v/1", b"one") == tag
    assert objects.get("v/1", at_most=9) == (b"one", tag)


def test_replaced_only_by_who_saw_the_newest(objects: Objects) -> None:
    first = objects.create("lease", b"one")
    assert first is not None
    second = objects.replace("lease", b"two", first)
    assert second not in (None, first)
    assert objects.replace("lease", b"three", first) is None
    assert objects.replace("lease", b"two", first) == second
    assert objects.replace("absent", b"one", first) is None
    assert objects.get("lease", at_most=9)[0] == b"two"
    assert objects.head("absent") is None


def test_what_is_put_is_not_copied_in_this_process(objects: Objects) -> None:
    data = memoryview(bytes(12 << 20)).toreadonly()
    tracemalloc.start()
    try:
        objects.put("obj/a", data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(data) / 4
    found = objects.head("obj/a")
    assert found is not None
    assert found.size == len(data)
    assert objects.part("obj/a", len(data) - 3, len(data)) == bytes(3)


@pytest.mark.parametrize("size", [0, 1, 5 << 20, 48 << 30, 49 << 30, MAX_BYTES])
def test_an_upload_has_no_more_parts_than_s3_takes_and_none_smaller(size: int) -> None:
    each = part_bytes(size)
    assert each >= 5 << 20
    assert -(-size // each) <= 10_000


def test_of_many_writers_at_once_one_creates(objects: Objects) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        for place in range(ROUNDS):
            contents = [f"{place}-{writer}".encode() for writer in range(WRITERS)]
            won = [
                data for data, tag in zip(contents, pool.map(lambda data, key=f"v/{place}": objects.create(key, data), contents), strict=True) if tag
            ]
            assert [objects.get(f"v/{place}", at_most=99)[0]] == won


def test_of_many_writers_at_once_one_replaces(objects: Objects) -> None:
    """Each tries until he has counted one up five times; if two replaced the same object, one of them would not be counted."""
    objects.create("count", b"0")

    def count(writer: int) -> None:
        done = 0
        while done < REPLACES:
            data, tag = objects.get("count", at_most=99)
            done += objects.replace("count", b"%d %d" % (int(data.split()[0]) + 1, writer), tag) is not None

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(count, range(WRITERS)))
    assert int(objects.get("count", at_most=99)[0].split()[0]) == WRITERS * REPLACES


@pytest.mark.parametrize("key", ["../a", "obj/../../a", "/etc/passwd", "obj//a", "obj/.hidden", "obj/a#1", "", "obj/" + "a" * 600])
def test_keys_that_climb_or_hide_are_refused(objects: Objects, key: str) -> None:
    for use in (
        lambda: objects.put(key, b""),
        lambda: objects.create(key, b""),
        lambda: objects.replace(key, b"", "tag"),
        lambda: objects.get(key, at_most=1),
        lambda: objects.part(key, 0, 1),
        lambda: objects.head(key),
        lambda: objects.list(key),
        lambda: objects.delete(key),
    ):
        with pytest.raises(InvalidInput, match="no key of an object"):
            use()


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    folder, outside = Folder(tmp_path / "objects"), tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    (tmp_path / "objects" / "obj").symlink_to(outside)
    for use in (
        lambda: folder.get("obj/a", at_most=9),
        lambda: folder.put("obj/b", b"x"),
        lambda: folder.list("obj"),
        lambda: folder.delete("obj/a"),
    ):
        with pytest.raises(Corrupt, match="outside the folder"):
            use()
    assert [path.name for path in outside.iterdir()] == ["a"]


def test_what_a_killed_put_left_is_no_object_and_is_tidied_when_it_is_old(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "objects")
    folder.put("obj/a", b"one")
    left = tmp_path / "objects" / "obj" / "b#0123"
    left.write_bytes(b"half")
    assert [found.key for found in folder.list("obj")] == ["obj/a"]
    written_us = left.stat().st_mtime_ns // 1000
    folder.tidy(written_us)
    assert left.exists()
    folder.tidy(written_us + 1)
    assert not left.exists()
    assert folder.get("obj/a", at_most=9)[0] == b"one"


def test_a_lock_that_somebody_keeps_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "objects", deadline_s=0.05)
    tag = folder.create("lease", b"one")
    assert tag is not None
    kept, over = threading.Event(), threading.Event()

    def keep() -> None:
        with folder._locked("lease"):
            kept.set()
            over.wait(60)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert kept.wait(60)
        with pytest.raises(Unavailable, match=r"folder `objects`: somebody has kept the lock of the folder for 0\.05 s, so `lease` was not replaced"):
            folder.replace("lease", b"two", tag)
    finally:
        over.set()
        thread.join()
    assert folder.replace("lease", b"two", tag) is not None


def test_a_store_that_answers_nobody_is_named_with_the_key_at_its_deadline() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        access = BucketAccess("bucket", endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}", key_id="a", secret="b")
        bucket = open_bucket(access, deadline_s=0.1)
        for use in (
            lambda: bucket.put("obj/a", b"x"),
            lambda: bucket.create("obj/a", b"x"),
            lambda: bucket.get("obj/a", at_most=1),
            lambda: bucket.part("obj/a", 0, 1),
            lambda: bucket.list("obj/a"),
        ):
            with pytest.raises(Unavailable, match="bucket `bucket`: `obj/a`"):
                use()


def test_errors_of_an_object_store_name_it_too(s3: str) -> None:
    missing = open_bucket(BucketAccess("there-is-none", endpoint=s3, key_id="a", secret="b"), deadline_s=5)
    with pytest.raises(BloomeryError, match=r"bucket `there-is-none`: .*`obj/a`"):
        missing.put("obj/a", b"x")


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """A file that nobody who opens it comes back from, as of a mount whose server is away; in the end all of them do."""
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def test_a_file_system_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "objects", deadline_s=0.2)
    with hanging(tmp_path / "objects" / "obj" / "a"):
        for read, name in ((lambda: folder.get("obj/a", at_most=9), "get"), (lambda: folder.part("obj/a", 0, 1), "part")):
            with pytest.raises(Unavailable, match=f"folder `objects`: {name} of `obj/a`: nothing happened for 0.2 s: whoever serves it is away"):
                read()
        folder.put("obj/b", b"there")
        assert folder.get("obj/b", at_most=9)[0] == b"there"


def test_objects_of_several_pieces_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_objects, "_PIECE_BYTES", 4)
    folder = Folder(tmp_path / "objects")
    for data in (b"", b"four", b"eleven more"):
        folder.put("obj/a", data)
        assert folder.get("obj/a", at_most=20)[0] == data
    assert folder.part("obj/a", 1, 10) == b"leven mor"

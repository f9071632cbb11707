import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.types.errors import Corrupt, InvalidInput, NotFound
from bloomery.types.objects import KEY, check_key


@pytest.fixture(params=["directory", "object store"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs" if request.param == "directory" else MemoryStore())


def test_a_blob_comes_back_and_can_be_replaced_and_deleted(blobs: Blobs) -> None:
    blobs.put("checkpoints/run-1/12-ab.safetensors", b"one")
    blobs.put("checkpoints/run-1/12-ab.safetensors", memoryview(b"two"))
    assert blobs.get("checkpoints/run-1/12-ab.safetensors") == b"two"
    assert blobs.exists("checkpoints/run-1/12-ab.safetensors")
    assert blobs.size("checkpoints/run-1/12-ab.safetensors") == 3
    blobs.delete("checkpoints/run-1/12-ab.safetensors")
    blobs.delete("checkpoints/run-1/12-ab.safetensors")
    assert not blobs.exists("checkpoints/run-1/12-ab.safetensors")
    with pytest.raises(NotFound, match="12-ab"):
        blobs.get("checkpoints/run-1/12-ab.safetensors")


def test_several_are_put_at_once_or_refused_before_the_first(blobs: Blobs) -> None:
    blobs.put_all({"bodies/a": b"one", "bodies/b": b"two", "manifests/c": b"three"})
    assert [blobs.get(blob.key) for blob in blobs.list()] == [b"one", b"two", b"three"]
    with pytest.raises(InvalidInput, match="no key of an object"):
        blobs.put_all({"bodies/d": b"four", "../e": b"five"})
    assert not blobs.exists("bodies/d")


def test_nothing_is_put_without_a_thread(blobs: Blobs) -> None:
    async def put() -> None:
        # Whoever uses a thread of this loop finds it closed.
        with ThreadPoolExecutor() as closed:
            asyncio.get_running_loop().set_default_executor(closed)
        await AsyncBlobs(blobs).put_all({})
        with pytest.raises(RuntimeError, match="shutdown"):
            await AsyncBlobs(blobs).put_all({"bodies/a": b"one"})

    asyncio.run(put())
    blobs.put_all({})
    assert blobs.list() == []


def test_a_folder_is_no_blob_and_a_blob_no_folder(blobs: Blobs) -> None:
    blobs.put("checkpoints/run-1", b"one")
    for key in ("checkpoints", "checkpoints/run-1/12"):
        for asked in (blobs.get, blobs.size):
            with pytest.raises(NotFound, match=f"no blob `{key}`"):
                asked(key)


def test_a_blob_that_was_written_since_is_not_deleted_as_an_old_one(blobs: Blobs) -> None:
    blobs.put("snapshots/a", b"four")
    (written,) = blobs.list("snapshots")
    assert blobs.delete_older("snapshots/a", written.modified_us) is None
    assert blobs.exists("snapshots/a")
    assert blobs.delete_older("snapshots/a", written.modified_us + 1) == 4
    assert not blobs.exists("snapshots/a")
    assert blobs.delete_older("snapshots/a", written.modified_us + 1) is None


def test_listing_names_keys_and_sizes_of_a_folder(blobs: Blobs) -> None:
    for key in ("bodies/b", "bodies/a", "manifests/c"):
        blobs.put(key, key.encode())
    assert [(blob.key, blob.size) for blob in blobs.list("bodies")] == [("bodies/a", 8), ("bodies/b", 8)]
    assert len(blobs.list()) == 3
    assert all(blob.modified_us > 1_600_000_000_000_000 for blob in blobs.list())


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.b", "a\\b", "a b", "a\n", "é", "a#1", "x" * 513])
def test_keys_that_climb_or_surprise_are_refused(blobs: Blobs, key: str) -> None:
    with pytest.raises(InvalidInput, match="no key of an object"):
        blobs.put(key, b"")


@settings(max_examples=200)
@given(st.text(alphabet="a./\\-#~ ", max_size=12))
def test_accepted_keys_stay_below_the_root(key: str) -> None:
    if not KEY.fullmatch(key):
        with pytest.raises(InvalidInput):
            check_key(key)
        return
    root = Path("/root-of-blobs")
    assert (root / key).resolve().is_relative_to(root)
    assert ".." not in (root / key).parts


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    blobs = Blobs(tmp_path / "blobs")
    (tmp_path / "blobs" / "bodies").symlink_to(tmp_path / "outside")
    with pytest.raises(Corrupt, match="link"):
        blobs.put("bodies/x", b"")


def test_a_half_written_blob_has_no_name(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.put("a/b", b"old")
    (tmp_path / "a" / "b#123").write_bytes(b"ha")
    assert [blob.key for blob in blobs.list()] == ["a/b"]
    assert blobs.get("a/b") == b"old"


def test_services_use_the_same_blobs_on_threads(tmp_path: Path) -> None:
    async def story(blobs: AsyncBlobs) -> None:
        await blobs.put("x/1", b"1")
        assert await blobs.get("x/1") == blobs.blobs.get("x/1") == b"1"
        await blobs.delete("x/1")
        assert not blobs.blobs.exists("x/1")

    asyncio.run(story(AsyncBlobs(Blobs(tmp_path))))

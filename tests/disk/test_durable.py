"""What is said to be written is on disk under its name, in directories whose names are on disk."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.config.data_dir import DataDir
from bloomery.disk.durable import write_privately
from bloomery.services.access.tokens import signing_key
from bloomery.up import layout
from bloomery.up.backup import backup, restore
from bloomery.up.keys import development_key
from tests.up.builders import data_dir


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[Path, set[str]]:
    """The names that each directory had when it was last synced, and of each file none."""
    found: dict[Path, set[str]] = {}
    fsync = os.fsync

    def noting(handle: int) -> None:
        fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        found[path] = {each.name for each in path.iterdir()} if path.is_dir() else set()

    monkeypatch.setattr(os, "fsync", noting)
    return found


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("api_key", lambda path: development_key(path, {})),
        ("signing_key", signing_key),
        ("VERSION", lambda path: layout.version_of(DataDir(path.parent))),
    ],
    ids=["api_key", "signing_key", "VERSION"],
)
def test_a_file_of_the_data_directory_is_there_after_a_power_cut(
    name: str, make: Callable[[Path], object], tmp_path: Path, synced: dict[Path, set[str]]
) -> None:
    make(tmp_path / name)
    assert list(synced) == [tmp_path / f"{name}.new", tmp_path]
    assert synced[tmp_path] == {name}
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_another_content_takes_the_place_of_the_one_before_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"second"):
        (tmp_path / "file.new").write_bytes(b"half")
        write_privately(path, data)
        assert (path.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (data, ["file"])


def test_what_cannot_be_written_leaves_the_content_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_privately(path, b"first")
    with pytest.raises(TypeError, match="bytes-like"):
        write_privately(path, "no bytes")  # type: ignore[arg-type]
    assert (path.read_bytes(), [each.name for each in tmp_path.iterdir()]) == (b"first", ["file"])


def test_a_new_data_directory_is_there_after_a_power_cut(tmp_path: Path, synced: dict[Path, set[str]]) -> None:
    layout.create(DataDir(tmp_path / "above" / "data"))
    assert synced == {tmp_path / "above": {"data"}, tmp_path: {"above"}}
    assert (tmp_path / "above" / "data").stat().st_mode & 0o777 == 0o700


def test_an_archive_and_what_is_restored_are_there_after_a_power_cut(tmp_path: Path, synced: dict[Path, set[str]]) -> None:
    data, archive, copy = data_dir(tmp_path / "data"), tmp_path / "saved.tar.zst", tmp_path / "copy"
    backup(data, archive)
    assert archive.name in synced[tmp_path]
    restore(archive, DataDir(copy))
    assert copy.name in synced[tmp_path]
    staged = tmp_path / "copy.restoring"
    for path in (copy, *copy.rglob("*")):
        assert synced[staged / path.relative_to(copy)] == ({each.name for each in path.iterdir()} if path.is_dir() else set())

import os
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.up.backup import backup, restore
from tests.up.builders import data_dir


def contents(root: Path) -> dict[str, bytes]:
    durable = [path for path in root.rglob("*") if path.is_file() and path.name != "lock" and not path.name.startswith("bloomery.db")]
    return {str(path.relative_to(root)): path.read_bytes() for path in durable}


def notes(data: DataDir) -> list[str]:
    with closing(sqlite3.connect(data.database)) as database:
        return [text for (text,) in database.execute("select text from note")]


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz"])
def test_a_backup_restores_everything_that_survives_a_restart(tmp_path: Path, suffix: str) -> None:
    data, copy, archive = data_dir(tmp_path / "data"), DataDir(tmp_path / "copy"), tmp_path / f"saved{suffix}"
    made, unpacked = backup(data, archive), restore(archive, copy)
    assert made.files == unpacked.files == len(contents(data.root)) + 1
    assert contents(copy.root) == contents(data.root)
    assert notes(copy) == ["kept"]
    assert archive.stat().st_mode & 0o777 == copy.api_key.stat().st_mode & 0o777 == 0o600
    assert not (data.root / ".backup").exists()


def test_a_backup_sees_what_is_committed_and_not_what_is_in_flight(tmp_path: Path) -> None:
    data, copy, archive = data_dir(tmp_path / "data"), DataDir(tmp_path / "copy"), tmp_path / "saved.tar.zst"
    staged = data.blobs / "checkpoints" / "run-1" / "4-cd.safetensors#77"
    staged.write_bytes(b"half")
    with closing(sqlite3.connect(data.database)) as live:
        live.execute("pragma journal_mode = wal")
        live.execute("insert into note values ('committed')")
        live.commit()
        live.execute("insert into note values ('open')")
        backup(data, archive)
    restore(archive, copy)
    assert notes(copy) == ["kept", "committed"]
    assert not list(copy.root.rglob("*#*"))


def test_a_journal_that_grows_meanwhile_is_cut_where_it_was_measured(tmp_path: Path) -> None:
    data, copy, archive = data_dir(tmp_path / "data"), DataDir(tmp_path / "copy"), tmp_path / "saved.tar.gz"
    growing = data.runs / "run-1" / "ops-000000000001.seg"
    code = "import sys\nwith open(sys.argv[1], 'ab', 0) as file:\n    while True:\n        file.write(b'x' * 1000)"
    with subprocess.Popen([sys.executable, "-c", code, str(growing)]) as writer:
        backup(data, archive)
        writer.kill()
    restore(archive, copy)
    saved = (copy.runs / "run-1" / "ops-000000000001.seg").read_bytes()
    assert growing.read_bytes().startswith(saved)


def test_restore_refuses_a_directory_in_use(tmp_path: Path) -> None:
    data, archive = data_dir(tmp_path / "data"), tmp_path / "saved.tar.zst"
    backup(data, archive)
    before = contents(data.root)
    with pytest.raises(Conflict, match="is not empty"):
        restore(archive, data)
    assert contents(data.root) == before


def test_what_a_killed_restore_left_is_named(tmp_path: Path) -> None:
    archive = tmp_path / "saved.tar.gz"
    backup(data_dir(tmp_path / "data"), archive)
    (tmp_path / "copy.restoring").mkdir()
    with pytest.raises(Conflict, match=r"remove .*copy\.restoring"):
        restore(archive, DataDir(tmp_path / "copy"))


def test_restore_refuses_an_archive_of_a_newer_version_and_leaves_nothing(tmp_path: Path) -> None:
    data, archive = data_dir(tmp_path / "data"), tmp_path / "saved.tar.zst"
    data.version.write_text("2\n")
    backup(data, archive)
    with pytest.raises(Conflict, match="newer Bloomery"):
        restore(archive, DataDir(tmp_path / "copy"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "saved.tar.zst"]


def crafted(archive: Path, *entries: tarfile.TarInfo) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        for entry in entries:
            tar.addfile(entry)
    return archive


def entry(name: str, **values: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "stranger",
    [
        entry("../escaped"),
        entry("/escaped"),
        entry("blobs/../../escaped"),
        entry("VERSION", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        entry("blobs/x"),
    ],
    ids=["climbs", "absolute", "climbs later", "link", "no version first"],
)
def test_restore_writes_nothing_that_backup_would_not(tmp_path: Path, stranger: tarfile.TarInfo) -> None:
    archive = crafted(tmp_path / "saved.tar.gz", stranger)
    with pytest.raises(InvalidInput, match="does not write"):
        restore(archive, DataDir(tmp_path / "copy"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved.tar.gz"]


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8bnot gzip at all", b"\x28\xb5\x2f\xfdnot zstd at all"])
def test_restore_tells_an_archive_from_other_files(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "saved.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(InvalidInput):
        restore(archive, DataDir(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz"])
@pytest.mark.parametrize("kept", [0.5, 0.9, 0.999])
def test_a_cut_off_archive_is_damaged(tmp_path: Path, suffix: str, kept: float) -> None:
    data, archive = data_dir(tmp_path / "data"), tmp_path / f"saved{suffix}"
    (data.blobs / "noise").write_bytes(os.urandom(100_000))
    backup(data, archive)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InvalidInput, match="is damaged"):
        restore(archive, DataDir(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_backup_refuses_names_it_would_overwrite_or_cannot_write(tmp_path: Path) -> None:
    data, archive = data_dir(tmp_path / "data"), tmp_path / "saved.tar.zst"
    archive.write_bytes(b"older")
    with pytest.raises(Conflict, match="exists: choose another name"):
        backup(data, archive)
    with pytest.raises(InvalidInput, match=r"must end in \.tar\.zst or \.tar\.gz"):
        backup(data, tmp_path / "saved.zip")
    assert archive.read_bytes() == b"older"


def test_backup_of_what_is_no_data_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no data directory"):
        backup(DataDir(tmp_path / "nowhere"), tmp_path / "saved.tar.zst")

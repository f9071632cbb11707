"""Files that stand in for memory: without a name, whole, and there for as long as somebody looks at them."""

import errno
import gc
import os
from pathlib import Path

import pytest

from bloomery.disk.mapped import mapped, mapped_file, nameless_file, room


def deleted(folder: Path) -> int:
    """How many mappings this process has of files in the folder that have no name."""
    return sum(f"{folder}/" in line and line.rstrip().endswith("(deleted)") for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_file_without_a_name_is_there_until_the_last_view_of_it_goes(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    with nameless_file(folder) as file:
        file.write(b"all of it")
        view = mapped_file(file)
        assert list(folder.iterdir()) == []
    part = view[4:]
    del view
    assert (bytes(part), part.readonly, deleted(folder)) == (b"of it", True, 1)
    del part
    gc.collect()
    assert deleted(folder) == 0


def test_room_is_written_to_and_is_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    view = room(10, tmp_path)
    view[:3] = b"abc"
    assert (bytes(view), list(tmp_path.iterdir())) == (b"abc" + bytes(7), [])


def test_a_disk_without_room_is_an_error_before_anybody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int, _start: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        room(10, tmp_path)


@pytest.mark.parametrize("content", [b"", b"whole"])
def test_a_file_is_mapped_whole_an_empty_one_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    handle = os.open(path, os.O_RDONLY)
    try:
        view = mapped(handle)
    finally:
        os.close(handle)
    assert bytes(view) == content

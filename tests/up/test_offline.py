import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bloomery.config.data_dir import DataDir
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, NotFound
from bloomery.up import layout
from bloomery.up.lock import Holder, locked
from bloomery.up.offline import collect_garbage


def test_garbage_is_collected_without_a_server(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    layout.create(data)
    with locked(data):
        layout.bring_up_to_date(data)
    old, young = data.blobs / "bodies" / "old", data.blobs / "bodies" / "young"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"1234")
    young.write_bytes(b"5678")
    os.utime(old, (0, 0))
    collected = collect_garbage(data)
    assert (collected.blobs, collected.bytes) == (1, 4)
    assert (old.exists(), young.exists()) == (False, True)


def test_garbage_of_a_directory_in_use_is_left_to_its_server(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    layout.create(data)
    with locked(data) as lock:
        layout.bring_up_to_date(data)
        lock.announce(Holder(pid=os.getpid(), host="127.0.0.1", port=8700, started_us=0, runtime_dir=""))
        with pytest.raises(Conflict, match="is in use by process"):
            collect_garbage(data)


def test_tables_of_a_newer_release_are_refused_in_words_of_our_own(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    layout.create(data)
    with locked(data):
        layout.bring_up_to_date(data)
    with Database(data.database):
        pass
    with closing(sqlite3.connect(data.database)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0999'")
    with pytest.raises(Conflict, match="written by a newer Bloomery"):
        collect_garbage(data)


def test_what_is_no_data_directory_has_no_garbage(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing to collect"):
        collect_garbage(DataDir(tmp_path))
    assert not list(tmp_path.iterdir())

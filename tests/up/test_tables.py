"""A database of an earlier release is brought up to date by `up` itself: no process that must be ready in time does it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from bloomery import __version__
from bloomery.config.data_dir import DataDir
from bloomery.store.database import Database
from bloomery.store.migrations import migrate
from bloomery.types.errors import Conflict, Corrupt
from bloomery.up import layout, tables
from bloomery.up.lock import locked
from tests.live import running_server


def test_tables_of_an_earlier_release_are_changed_and_that_is_said_first(tmp_path: Path) -> None:
    data, said = DataDir(tmp_path), []
    _older(data)

    def hear(line: str) -> None:
        said.append((line.partition(":")[0], _revision(data)))

    tables.bring_up_to_date(data, hear)
    newest = tables.newest_revision()
    assert said == [("the database is of an earlier release", "0019"), ("the tables are up to date", newest)]
    tables.bring_up_to_date(data, hear)
    assert len(said) == 2
    with Database(data.database):
        assert _revision(data) == newest


def test_tables_of_a_newer_release_are_refused_with_what_to_do_and_left_as_they_are(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    tables.check(data)
    with Database(data.database):
        pass
    tables.check(data)
    with closing(sqlite3.connect(data.database)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0999'")
    versions = f"tables 0999, this one, {__version__}, knows {tables.newest_revision()}"
    with pytest.raises(Conflict, match=rf"written by a newer Bloomery \({versions}\): upgrade Bloomery to use it, or restore a backup"):
        tables.check(data)
    assert _revision(data) == "0999"


def test_of_a_new_directory_and_of_a_database_without_tables_nothing_is_said(tmp_path: Path) -> None:
    data, said = DataDir(tmp_path), []
    tables.bring_up_to_date(data, said.append)
    assert not data.database.exists()
    data.database.touch()
    tables.bring_up_to_date(data, said.append)
    assert said == []


def test_what_is_no_database_is_told_as_that(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.database.write_bytes(b"no database at all" * 1000)
    with pytest.raises(Corrupt, match=r"bloomery\.db cannot be read"):
        tables.bring_up_to_date(data, print)


@pytest.mark.slow
def test_a_server_changes_them_before_its_processes_start(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    layout.create(data)
    with locked(data):
        layout.bring_up_to_date(data)
    _older(data)
    with running_server(data.root) as server:
        lines = (tmp_path / "data.up.log").read_text().splitlines()
        assert server.process.poll() is None
    changed, ready = (next(at for at, line in enumerate(lines) if words in line) for words in ("the tables are up to date", " is ready: "))
    assert changed < ready
    assert _revision(data) == tables.newest_revision()


def _older(data: DataDir) -> None:
    engine = create_engine(f"sqlite:///{data.database}")
    with engine.begin() as connection:
        migrate(connection, "0019")
    engine.dispose()


def _revision(data: DataDir) -> str:
    with closing(sqlite3.connect(data.database)) as database:
        (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(revision)

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, func, insert, select, update

from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.store.migrations import migrate
from bloomery.types.errors import Unavailable


def test_migrations_produce_exactly_the_tables_of_rows(tmp_path: Path) -> None:
    with Database(tmp_path / "migrated.db"):
        pass
    engine = create_engine(f"sqlite:///{tmp_path / 'direct.db'}")
    rows.metadata.create_all(engine)
    engine.dispose()
    assert _schema(tmp_path / "migrated.db") == _schema(tmp_path / "direct.db")


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_rows_of_an_earlier_schema_are_kept(tmp_path: Path, revision: str) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'db'}")
    with engine.begin() as connection:
        migrate(connection, revision)
        older = "INSERT INTO sampling_session (id, project, base_model, base_hash, version, key, created_us) VALUES ('s', 'p', 'm', 'b', 'v', 'k', 1)"
        connection.exec_driver_sql(older)
    engine.dispose()
    with Database(tmp_path / "db") as db:
        table = rows.sampling_session.c
        found = asyncio.run(db.read(lambda c: c.execute(select(table.id, table.key, table.follows_run, table.asked_us, table.gone_us)).all()))
    assert found == [("s", "k", None, None, None)]


def test_opening_again_keeps_the_rows(tmp_path: Path) -> None:
    with Database(tmp_path / "a b%c.db") as db:
        asyncio.run(db.write(_add("one")))
    with Database(tmp_path / "a b%c.db") as db:
        assert asyncio.run(db.read(_count)) == 1


def test_a_failing_write_is_undone_and_leaves_its_group_alone(tmp_path: Path) -> None:
    def broken(connection: Connection) -> None:
        _add("broken")(connection)
        raise RuntimeError("no")

    async def story(db: Database) -> list[object]:
        return await asyncio.gather(db.write(_add("a")), db.write(broken), db.write(_add("b")), return_exceptions=True)

    with Database(tmp_path / "db") as db:
        outcomes = asyncio.run(story(db))
        names = asyncio.run(db.read(lambda c: set(c.scalars(select(rows.project.c.id)))))
    assert [type(outcome) for outcome in outcomes] == [type(None), RuntimeError, type(None)]
    assert names == {"a", "b"}


def test_many_writes_keep_their_order(tmp_path: Path) -> None:
    seen: list[int] = []

    async def story(db: Database) -> None:
        await asyncio.gather(*(db.write(lambda c, n=n: seen.append(n)) for n in range(3000)))

    with Database(tmp_path / "db") as db:
        asyncio.run(story(db))
    assert seen == list(range(3000))


def test_a_full_disk_says_so_and_passes(tmp_path: Path) -> None:
    def limit(connection: Connection, pages: int) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    with Database(tmp_path / "db") as db:
        asyncio.run(db.write(lambda c: limit(c, 1)))
        with pytest.raises(Unavailable, match="is the disk full"):
            asyncio.run(db.write(_add("x" * 100_000)))
        asyncio.run(db.write(lambda c: limit(c, 1 << 20)))
        asyncio.run(db.write(_add("x" * 100_000)))
        assert asyncio.run(db.read(_count)) == 1


def test_readers_cannot_write(tmp_path: Path) -> None:
    with Database(tmp_path / "db") as db, pytest.raises(Exception, match="readonly"):
        asyncio.run(db.read(_add("x")))


def test_a_state_changes_only_from_the_expected_one(tmp_path: Path) -> None:
    def rename(old: str, new: str) -> bool:
        swap = update(rows.project).where(rows.project.c.id == "p", rows.project.c.name == old).values(name=new)
        return asyncio.run(db.write(lambda c: rows.changed(c, swap)))

    with Database(tmp_path / "db") as db:
        asyncio.run(db.write(_add("p")))
        assert rename("p", "q")
        assert not rename("p", "r")


def _add(name: str):  # type: ignore[no-untyped-def]
    return lambda connection: (connection.execute(insert(rows.project).values(id=name, name=name, created_us=1)), None)[1]


def _count(connection: Connection) -> int | None:
    return connection.scalar(select(func.count()).select_from(rows.project))


def _schema(path: Path) -> list[tuple[str, list[str]]]:
    """Every table and index with its parts; the place of a column in its table is nobody's business, and one that was added later stands last."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    connection.close()
    ours = [(name, " ".join(sql.split())) for name, sql in found if not name.startswith(("sqlite_", "alembic_"))]
    return [(name, sorted(re.split(r", (?![^(]*\))", sql.replace("( ", "(", 1).replace(" )", ")").removesuffix(")")))) for name, sql in ours]

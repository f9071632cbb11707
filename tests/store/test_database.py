import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Event, Semaphore

import pytest
from sqlalchemy import Connection, create_engine, delete, func, insert, select, update
from sqlalchemy.exc import OperationalError

from bloomery.store import rows
from bloomery.store.database import READERS, Database
from bloomery.store.migrations import migrate
from bloomery.types.errors import BloomeryError, Unavailable


def test_migrations_produce_exactly_the_tables_of_rows(tmp_path: Path) -> None:
    with Database(tmp_path / "migrated.db"):
        pass
    engine = create_engine(f"sqlite:///{tmp_path / 'direct.db'}")
    rows.metadata.create_all(engine)
    engine.dispose()
    assert _schema(tmp_path / "migrated.db") == _schema(tmp_path / "direct.db")


def test_the_log_says_in_one_line_what_a_migration_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "alembic")
    with Database(tmp_path / "db"):
        pass
    told = [record.getMessage() for record in caplog.records if "Running upgrade" in record.getMessage()]
    assert len(told) > 20
    assert [line for line in told if "\n" in line] == []


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


def test_jobs_of_an_earlier_schema_are_kept_and_found_by_their_change_and_none_of_them_pauses(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'db'}")
    job = {"id": "j", "project": "p", "name": "n", "method": "sft", "spec": "{}", "state": "queued", "wanted": "run", "epoch": 3, "deaths": 2}
    job |= {"progress": "{}", "created_us": 1, "updated_us": 2, "queued_us": 3}
    with engine.begin() as connection:
        migrate(connection, "0019")
        connection.exec_driver_sql(f"INSERT INTO job ({', '.join(job)}) VALUES ({', '.join('?' * len(job))})", tuple(job.values()))
    engine.dispose()
    with Database(tmp_path / "db") as db:
        query = select(rows.job).with_hint(rows.job, "INDEXED BY job_by_change", "sqlite").where(rows.job.c.updated_us > 1)
        (found,) = asyncio.run(db.read(lambda c: c.execute(query).all()))
    assert {name: value for name, value in found._mapping.items() if value is not None} == job


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


def test_a_write_that_fails_by_itself_is_undone(tmp_path: Path) -> None:
    def broken(connection: Connection) -> None:
        _add("broken")(connection)
        raise RuntimeError("no")

    with Database(tmp_path / "db") as db:
        with pytest.raises(RuntimeError, match="no"):
            asyncio.run(db.write(broken))
        asyncio.run(db.write(_add("a")))
        assert asyncio.run(db.read(lambda c: c.scalars(select(rows.project.c.id)).all())) == ["a"]


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
        with pytest.raises(Unavailable, match=r"`db` cannot be written \(database or disk is full\): is the disk full"):
            asyncio.run(db.write(_add("x" * 100_000)))
        asyncio.run(db.write(lambda c: limit(c, 1 << 20)))
        asyncio.run(db.write(_add("x" * 100_000)))
        assert asyncio.run(db.read(_count)) == 1


def test_of_a_group_that_a_full_disk_undid_nothing_is_stored(tmp_path: Path) -> None:
    async def story(db: Database) -> list[object]:
        begun, go_on = Event(), Event()
        first = asyncio.create_task(db.write(_blocking(begun, go_on)))
        assert await asyncio.to_thread(begun.wait, 60)
        group = [asyncio.create_task(db.write(_add(name))) for name in ("a", "x" * 100_000, "b")]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(first, *group, return_exceptions=True)

    with Database(tmp_path / "db") as db:
        asyncio.run(db.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1")))
        outcomes = asyncio.run(story(db))
        assert [type(outcome) for outcome in outcomes] == [type(None), *[Unavailable] * 3]
        assert asyncio.run(db.read(_count)) == 0


def test_a_database_that_another_process_holds_is_told_as_that_and_passes(tmp_path: Path) -> None:
    with Database(tmp_path / "db") as db:
        asyncio.run(db.write(lambda c: c.exec_driver_sql("PRAGMA busy_timeout = 1")))
        with closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(Unavailable, match=r"`db` is held by another process \(database is locked\)"):
                asyncio.run(db.write(_add("a")))
        asyncio.run(db.write(_add("a")))
        assert asyncio.run(db.read(_count)) == 1


def test_a_damaged_database_is_told_as_that(tmp_path: Path) -> None:
    with Database(tmp_path / "db") as db:
        asyncio.run(db.write(_add("a")))
        place = "SELECT (rootpage - 1) * page_size, page_size FROM sqlite_master, pragma_page_size WHERE name = 'project'"
        start, size = asyncio.run(db.read(lambda c: c.exec_driver_sql(place).one()))
    whole = (tmp_path / "db").read_bytes()
    (tmp_path / "db").write_bytes(whole[:start] + b"\xff" * size + whole[start + size :])
    with Database(tmp_path / "db") as db:
        for asked in (lambda: db.read(lambda c: c.execute(select(rows.project)).all()), lambda: db.write(_add("b"))):
            with pytest.raises(BloomeryError, match=r"`db` is damaged \(database disk image is malformed\): stop the server and restore a backup"):
                asyncio.run(asked())
    (tmp_path / "db").write_bytes(b"no database at all" * 1000)
    with pytest.raises(BloomeryError, match=r"`db` is damaged \(file is not a database\)"), Database(tmp_path / "db"):
        pass


def test_errors_of_a_statement_are_not_told_as_those_of_the_file(tmp_path: Path) -> None:
    with Database(tmp_path / "db") as db:
        for asked in (db.read, db.write):
            with pytest.raises(OperationalError, match="no such table: nowhere"):
                asyncio.run(asked(lambda c: c.exec_driver_sql("SELECT * FROM nowhere")))


def test_who_waits_too_long_for_his_turn_is_told_at_what_the_writer_is_and_changes_nothing(tmp_path: Path) -> None:
    async def story(db: Database) -> None:
        begun, go_on = Event(), Event()
        first = asyncio.create_task(db.write(_blocking(begun, go_on)))
        assert await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(Unavailable, match=r"`db` did not begin this change within 0.5 s; its writer has been at `_blocking` for \d+ s"):
            await db.write(_add("a"))
        go_on.set()
        await first

    async def readers(db: Database) -> None:
        begun, go_on = Semaphore(0), Event()

        def look(_: Connection) -> None:
            begun.release()
            assert go_on.wait(60)

        busy = [asyncio.create_task(db.read(look)) for _ in range(READERS)]
        for _ in busy:
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        with pytest.raises(Unavailable, match=f"`db` did not begin this query, as {READERS} others take long within 0.5 s"):
            await db.read(_count)
        go_on.set()
        await asyncio.gather(*busy)

    # Those who are first are to begin within it, however busy the machine is.
    with Database(tmp_path / "db", patience_s=0.5) as db:
        asyncio.run(story(db))
        asyncio.run(readers(db))
    with Database(tmp_path / "db") as db:
        assert asyncio.run(db.read(_count)) == 0


def test_who_is_cancelled_while_he_waits_for_his_turn_changes_nothing(tmp_path: Path) -> None:
    async def story(db: Database) -> None:
        begun, go_on = Event(), Event()
        first = asyncio.create_task(db.write(_blocking(begun, go_on)))
        assert await asyncio.to_thread(begun.wait, 60)
        second = asyncio.create_task(db.write(_add("a")))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first
        assert await db.read(_count) == 0

    with Database(tmp_path / "db") as db:
        asyncio.run(story(db))


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


def _blocking(begun: Event, go_on: Event):  # type: ignore[no-untyped-def]
    def change(_: Connection) -> None:
        begun.set()
        assert go_on.wait(60)

    return change


def _count(connection: Connection) -> int | None:
    return connection.scalar(select(func.count()).select_from(rows.project))


def _schema(path: Path) -> list[tuple[str, list[str]]]:
    """Every table and index with its parts; the place of a column in its table is nobody's business, and one that was added later stands last."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    connection.close()
    ours = [(name, " ".join(sql.split())) for name, sql in found if not name.startswith(("sqlite_", "alembic_"))]
    return [(name, sorted(re.split(r", (?![^(]*\))", sql.replace("( ", "(", 1).replace(" )", ")").removesuffix(")")))) for name, sql in ours]


def test_who_watches_hears_behind_each_commit_which_tables_it_changed(tmp_path: Path) -> None:
    told: list[frozenset[str]] = []

    def change(connection: Connection) -> None:
        connection.execute(update(rows.run).values(step=1))
        connection.execute(delete(rows.span).where(rows.span.c.id == "none"))

    def fail(connection: Connection) -> None:
        change(connection)
        raise ValueError("not today")

    async def story(db: Database) -> None:
        await db.write(change)
        with db.watched(told.append):
            await db.read(_count)
            await db.write(lambda connection: connection.execute(select(rows.run.c.id)).all())
            await db.write(change)
            with pytest.raises(ValueError, match="not today"):
                await db.write(fail)
            await db.write(
                lambda connection: connection.execute(insert(rows.project), [{"id": each, "name": each, "created_us": 1} for each in "ab"])
            )
        await db.write(lambda connection: connection.execute(update(rows.run).values(step=3)))

    with Database(tmp_path / "db") as db:
        asyncio.run(story(db))
    # Of the one that failed nothing was committed.
    assert told == [{"run", "span"}, {"project"}]


def test_who_watches_and_fails_keeps_nobody_from_his_answer(tmp_path: Path) -> None:
    def fail(_tables: frozenset[str]) -> None:
        raise RuntimeError("the loop is closed")

    async def story(db: Database) -> int:
        with db.watched(fail):
            await db.write(lambda connection: connection.execute(insert(rows.project).values(id="a", name="a", created_us=1)))
            return await db.write(lambda connection: connection.execute(update(rows.project).values(name="b")).rowcount)

    with Database(tmp_path / "db") as db:
        assert asyncio.run(story(db)) >= 1

"""What has changed is told to whoever watches, as topics, of which each listener holds those that it has not fetched."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy import insert

from bloomery.services.access.principal import Principal
from bloomery.services.clients import live
from bloomery.services.clients.live import TOPIC_OF, Live, Topic
from bloomery.services.listeners import Listeners
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Forbidden, Unavailable
from tests.store.template import migrated

READER = Principal("default", "key-1", frozenset({"read"}))
NOBODY_COMES_S = 0.01
SOON_S = 20.0


def play(directory: Path, story: Callable[[Live, Database, Listeners], Awaitable[None]]) -> None:
    async def run() -> None:
        processes = Listeners()
        told = Live()
        with Database(migrated(directory / "db")) as database, told.told_by(database, {"processes": [processes]}):
            await story(told, database, processes)

    asyncio.run(run())


def test_every_table_has_a_topic_or_none_and_every_topic_something_that_tells_it() -> None:
    assert TOPIC_OF.keys() == rows.metadata.tables.keys()
    assert {topic for topic in TOPIC_OF.values() if topic is not None} | {"processes"} == set(get_args(Topic))


def test_what_changed_since_it_was_asked_last_is_told_once_however_often_it_changed(tmp_path: Path) -> None:
    async def story(told: Live, database: Database, processes: Listeners) -> None:
        with told.listening(READER) as one, told.listening(READER) as other:
            for _ in range(1000):
                told.tell(("runs", "points"))
                processes.tell()
            await one.wait(SOON_S)
            assert one.take() == ["points", "processes", "runs"]
            assert one.take() == []
            await one.wait(NOBODY_COMES_S)
            assert one.take() == []
            told.tell(("keys",))
            assert other.take() == ["keys", "points", "processes", "runs"]
            assert one.take() == ["keys"]

    play(tmp_path, story)


def test_what_a_commit_changed_is_told(tmp_path: Path) -> None:
    async def story(told: Live, database: Database, processes: Listeners) -> None:
        with told.listening(READER) as listener:
            await database.write(lambda connection: connection.execute(insert(rows.project).values(id="p", name="p", created_us=1)))
            await listener.wait(SOON_S)
            assert listener.take() == ["keys"]

    play(tmp_path, story)


def test_so_many_watch_and_no_more_and_nobody_without_the_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_OF_A_PROJECT", 1)
    monkeypatch.setattr(live, "MOST", 2)

    async def story(told: Live, database: Database, processes: Listeners) -> None:
        with pytest.raises(Forbidden, match="`read` or `train`"), told.listening(READER._replace(scopes=frozenset({"infer"}))):
            pass
        with told.listening(READER):
            with pytest.raises(Unavailable, match="1 streams are open, 1 of this project"), told.listening(READER):
                pass
            too_many = pytest.raises(Unavailable, match="2 streams are open, 0 of this project")
            with told.listening(READER._replace(project="blue")), too_many, told.listening(READER._replace(project="red")):
                pass
        with told.listening(READER):
            pass

    play(tmp_path, story)


def test_who_watches_a_server_that_stops_is_told_so(tmp_path: Path) -> None:
    async def story(told: Live, database: Database, processes: Listeners) -> None:
        with told.listening(READER) as listener:
            told.close()
            await listener.wait(SOON_S)
            assert listener.over
            listener.take()
            await listener.wait(SOON_S)
        with pytest.raises(Unavailable, match="stopping"), told.listening(READER):
            pass

    play(tmp_path, story)

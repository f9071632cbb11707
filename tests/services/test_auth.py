import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from bloomery.services.auth import Auth
from bloomery.services.principal import SCOPES
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Forbidden, InvalidInput, Unauthorized

KEY = "tml-development-key-of-a-test"


def test_the_development_key_may_do_everything_in_the_default_project(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        principal = await auth.check(KEY)
        assert (principal.project, principal.scopes) == (rows.DEFAULT_PROJECT, SCOPES)

    play(tmp_path, story)


@pytest.mark.parametrize("key", [None, "", "tml-wrong", f"{KEY} ", KEY.upper()])
def test_other_keys_are_unknown(tmp_path: Path, key: str | None) -> None:
    async def story(auth: Auth, database: Database) -> None:
        with pytest.raises(Unauthorized):
            await auth.check(key)

    play(tmp_path, story)


def test_a_new_development_key_replaces_the_old_one(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        await auth.load("tml-another-development-key")
        await auth.check("tml-another-development-key")
        with pytest.raises(Unauthorized):
            await auth.check(KEY)

    play(tmp_path, story)


def test_a_created_key_has_its_scopes_and_project_and_outlives_a_restart(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        key = await auth.create(admin, "reader", frozenset({"read"}), project="elsewhere")
        again = Auth(database)
        await again.load(KEY)
        reader = await again.check(key)
        assert (reader.project, reader.scopes) == ("elsewhere", {"read"})
        with pytest.raises(Forbidden, match="train"):
            reader.require("train")
        with pytest.raises(Forbidden):
            await auth.create(reader, "more", frozenset({"admin"}))

    play(tmp_path, story)


def test_keys_have_known_scopes_and_names_of_their_own(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        with pytest.raises(InvalidInput, match="`fly`"):
            await auth.create(admin, "pilot", frozenset({"fly"}))
        for name in ("", "development"):
            with pytest.raises(InvalidInput, match="called"):
                await auth.create(admin, name, frozenset({"read"}))

    play(tmp_path, story)


def test_the_database_holds_no_key_and_knows_when_one_was_used(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        stored = await database.read(lambda connection: connection.execute(select(rows.api_key)).one())
        assert KEY not in str(stored)
        assert stored.last_used_us is None
        await auth.check(KEY)
        await auth.note_use()
        assert (await database.read(lambda connection: connection.execute(select(rows.api_key)).one())).last_used_us > 0

    play(tmp_path, story)


def play(directory: Path, story: Callable[[Auth, Database], Awaitable[None]]) -> None:
    async def run() -> None:
        with Database(directory / "db") as database:
            auth = Auth(database)
            await auth.load(KEY)
            await story(auth, database)

    asyncio.run(run())

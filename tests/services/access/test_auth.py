"""Keys: made once, known by their hashes, and refused from the moment they are taken back or expire."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

from bloomery.services.access.auth import Auth
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthorized
from tests.store.template import migrated

KEY = "tml-development-key-of-a-test"
READ = frozenset({"read"})


def test_the_development_key_may_do_everything_in_the_default_project(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        principal = await auth.check(KEY)
        assert (principal.project, principal.scopes) == (rows.DEFAULT_PROJECT, SCOPES)

    play(tmp_path, story)


@pytest.mark.parametrize("key", [None, "", "tml-wrong", f"{KEY} ", KEY.upper(), "ÿ" * 10_000])
def test_other_keys_are_unknown(tmp_path: Path, key: str | None) -> None:
    async def story(auth: Auth, database: Database) -> None:
        with pytest.raises(Unauthorized):
            await auth.check(key)

    play(tmp_path, story)


def test_a_wrong_key_costs_no_look_at_the_disk(tmp_path: Path) -> None:
    async def run() -> None:
        with Database(migrated(tmp_path / "db")) as database:
            auth = Auth(database)
            await auth.load(KEY)
        # The database is closed: whoever asked it would hear so.
        with pytest.raises(Unauthorized):
            await auth.check("tml-wrong")
        assert (await auth.check(KEY)).project == rows.DEFAULT_PROJECT

    asyncio.run(run())


def test_a_new_development_key_replaces_the_old_one(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        await auth.load("tml-another-development-key")
        await auth.check("tml-another-development-key")
        with pytest.raises(Unauthorized):
            await auth.check(KEY)
        assert len((await auth.list(await auth.check("tml-another-development-key"))).data) == 1

    play(tmp_path, story)


def test_a_key_that_was_given_out_does_not_become_the_development_key(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        reader = await auth.create(await auth.check(KEY), "reader", READ)
        with pytest.raises(Conflict, match="`reader` of project `default`"):
            await auth.load(reader.key)
        await auth.load(KEY)
        assert (await auth.check(reader.key)).scopes == READ

    play(tmp_path, story)


def test_a_created_key_has_its_scopes_and_project_and_outlives_a_restart(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await auth.create(admin, "reader", READ, project="elsewhere")
        assert made.key.startswith("tml-")
        again = Auth(database)
        await again.load(KEY)
        for checks in (auth, again):
            reader = await checks.check(made.key)
            assert (reader.project, reader.scopes, reader.key_id) == ("elsewhere", READ, made.id)
        with pytest.raises(Forbidden, match="lacks the scope `train`"):
            reader.require("train")
        with pytest.raises(Forbidden, match="`train` or `deploy`"):
            reader.require("train", "deploy")
        reader.require("train", "read")
        with pytest.raises(Forbidden):
            await auth.create(reader, "more", frozenset({"admin"}))

    play(tmp_path, story)


def test_keys_have_names_of_their_own(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        for name in ("", "development"):
            with pytest.raises(InvalidInput, match="called"):
                await auth.create(admin, name, READ)
        await auth.create(admin, "twice", READ)
        with pytest.raises(Conflict, match="`twice` already"):
            await auth.create(admin, "twice", READ)
        await auth.create(admin, "twice", READ, project="elsewhere")

    play(tmp_path, story)


def test_a_revoked_key_is_refused_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await auth.create(admin, "leaked", READ)
        await auth.check(made.key)
        assert (await auth.revoke(admin, "leaked")).id == made.id
        again = Auth(database)
        await again.load(KEY)
        for checks in (auth, again):
            with pytest.raises(Unauthorized, match="revoked"):
                await checks.check(made.key)
        with pytest.raises(NotFound, match="no key `leaked`"):
            await auth.revoke(admin, "leaked")
        fresh = await auth.create(admin, "leaked", READ)
        assert (await auth.check(fresh.key)).key_id != made.id
        with pytest.raises(Conflict, match="data directory"):
            await auth.revoke(admin, "development")

    play(tmp_path, story)


def test_a_caller_who_hangs_up_does_not_keep_a_key_alive(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await auth.create(admin, "leaked", READ)
        revoking = asyncio.create_task(auth.revoke(admin, "leaked"))
        await asyncio.sleep(0)
        revoking.cancel()
        async with asyncio.timeout(60):
            while await known_to(auth, made.key):
                await asyncio.sleep(0.002)
        assert [key.name for key in (await auth.list(admin)).data] == ["development"]

    play(tmp_path, story)


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await asyncio.gather(*(auth.create(admin, f"key-{number}", READ) for number in range(20)))
        await asyncio.gather(*(auth.revoke(admin, f"key-{number}") for number in range(0, 20, 2)))
        assert [await known_to(auth, key.key) for key in made] == [False, True] * 10

    play(tmp_path, story)


def test_a_key_is_refused_once_it_has_expired(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await auth.create(admin, "short", READ, ttl_s=3600)
        assert made.expires_us == made.created_us + 3600 * 1_000_000
        assert (await auth.check(made.key)).key_id == made.id
        past = update(rows.api_key).where(rows.api_key.c.id == made.id).values(expires_us=made.created_us)
        await database.write(lambda connection: connection.execute(past))
        await auth.load(KEY)
        with pytest.raises(Unauthorized, match="`short`, has expired"):
            await auth.check(made.key)
        assert (await auth.list(admin)).data[1].expires_us == made.created_us

    play(tmp_path, story)


def test_an_admin_knows_the_keys_of_its_project_and_that_of_the_default_project_all(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        lead = await auth.check((await auth.create(admin, "lead", frozenset({"admin"}), project="blue")).key)
        made = await auth.create(lead, "member", frozenset({"train", "infer"}))
        assert made.project == "blue"
        assert names((await auth.list(lead)).data) == names((await auth.list(lead, project="blue")).data) == ["blue/lead", "blue/member"]
        assert names((await auth.list(admin)).data) == ["default/development", "blue/lead", "blue/member"]
        assert names((await auth.list(admin, project="blue", limit=1)).data) == ["blue/lead"]
        assert (await auth.list(admin, limit=2)).has_more
        assert (await auth.list(admin, project="nowhere")).data == []
        # The same answer whether there is such a project or not.
        for project in ("default", "nowhere"):
            for attempt in (
                auth.create(lead, "spy", READ, project=project),
                auth.list(lead, project=project),
                auth.revoke(lead, "member", project=project),
            ):
                with pytest.raises(Forbidden, match="administers project `blue` alone"):
                    await attempt
        with pytest.raises(NotFound, match="project `blue` has no key `development`"):
            await auth.revoke(lead, "development")
        assert (await auth.revoke(admin, "member", project="blue")).project == "blue"
        with pytest.raises(Forbidden, match="lacks the scope `admin`"):
            await auth.list(Principal("default", "key-x", SCOPES - {"admin"}))

    play(tmp_path, story)


def test_the_database_holds_no_key_and_knows_when_one_was_used(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await auth.create(admin, "program", READ)
        everything = await database.read(lambda connection: str([connection.execute(select(table)).all() for table in rows.metadata.sorted_tables]))
        assert "program" in everything
        assert KEY not in everything
        assert made.key not in everything
        assert [key.last_used_us is None for key in (await auth.list(admin)).data] == [False, True]
        await auth.check(made.key)
        used_us = (await auth.list(admin)).data[1].last_used_us
        await auth.note_use()
        again = Auth(database)
        await again.load(KEY)
        assert (await again.list(admin)).data[1].last_used_us == used_us

    play(tmp_path, story)


def test_a_use_that_cannot_be_written_is_written_the_next_time(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        used_us = (await auth.list(admin)).data[0].last_used_us
        forbid = "CREATE TRIGGER refusing BEFORE UPDATE ON api_key BEGIN SELECT RAISE(ABORT, 'refused'); END"
        await database.write(lambda connection: connection.exec_driver_sql(forbid))
        with pytest.raises(Exception, match="refused"):
            await auth.note_use()
        await database.write(lambda connection: connection.exec_driver_sql("DROP TRIGGER refusing"))
        await auth.note_use()
        again = Auth(database)
        await again.load(KEY)
        assert used_us is not None
        assert (await again.list(admin)).data[0].last_used_us == used_us

    play(tmp_path, story)


def test_who_made_and_revoked_a_key_is_on_record(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        admin = await auth.check(KEY)
        made = await auth.create(admin, "program", READ, project="blue")
        await auth.revoke(admin, "program", project="blue")
        table = rows.event.c
        query = select(table.kind, table.data).where(table.project == "blue", table.subject == made.id).order_by(table.seq)
        found = await database.read(lambda connection: connection.execute(query).all())
        assert [row.kind for row in found] == ["key.created", "key.revoked"]
        assert json.loads(found[0].data) == {"name": "program", "scopes": ["read"], "by": admin.key_id}

    play(tmp_path, story)


def test_two_keys_of_a_project_cannot_have_one_name(tmp_path: Path) -> None:
    async def story(auth: Auth, database: Database) -> None:
        row = {"id": "key-2", "project": "default", "name": "development", "hash": "h", "scopes": "[]", "created_us": 1}
        with pytest.raises(Exception, match="UNIQUE"):
            await database.write(lambda connection: connection.execute(insert(rows.api_key), row))

    play(tmp_path, story)


async def known_to(auth: Auth, key: str) -> bool:
    """Whether it is accepted."""
    try:
        await auth.check(key)
    except Unauthorized:
        return False
    return True


def names(keys: list) -> list[str]:
    """`project/name` of each."""
    return [f"{key.project}/{key.name}" for key in keys]


def play(directory: Path, story: Callable[[Auth, Database], Awaitable[None]]) -> None:
    async def run() -> None:
        with Database(migrated(directory / "db")) as database:
            auth = Auth(database)
            await auth.load(KEY)
            await story(auth, database)

    asyncio.run(run())

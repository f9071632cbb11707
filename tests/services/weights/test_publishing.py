"""Published weights are read by others, copies are held by runs of their own, and samplers in flight move on."""

from pathlib import Path

import pytest

from bloomery.services.clients.session_search import SessionCursor, SessionFilter, SessionSearch
from bloomery.services.clients.sessions import Sessions
from bloomery.services.engines.models import Models
from bloomery.services.kinds import COPY, EXTERNAL, SNAPSHOT
from bloomery.services.training.checkpoints import CheckpointRow
from bloomery.services.weights.publishing import Destination, Publishing, SessionSlot
from bloomery.services.weights.versions import Version, Versions
from bloomery.store.blobs import Blobs
from bloomery.types.errors import Conflict, Forbidden, NotFound
from bloomery.types.generation import Weights
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import LORA, ME, STRANGER, Api, open_api, play


def name_of(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


async def saved(api: Api, name: str = "kept") -> CheckpointRow:
    run = await api.runs.create(ME, base_model="tiny", lora=LORA, metadata={"who": "me"}, tinker_id=f"session-0:train:{name}")
    await api.runs.checkpoint(ME, run.id, 1, name, metadata={"note": "x"})
    await api.results(run.id, 1)
    return await api.checkpoints.find(ME, f"tinker://session-0:train:{name}/weights/{name}")


def test_what_is_published_is_read_by_all_and_changed_by_none_but_its_owner(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            publishing, path = Publishing(api.database, api.checkpoints), str((await saved(api)).path)
            with pytest.raises(NotFound):
                await api.checkpoints.find(STRANGER, path)
            for _ in range(2):
                await publishing.publish(ME, path)
            assert (await api.checkpoints.find(STRANGER, path)).published_us is not None
            for change in (api.checkpoints.delete, publishing.publish, publishing.unpublish):
                with pytest.raises(NotFound):
                    await change(STRANGER, path)
            for _ in range(2):
                await publishing.unpublish(ME, path)
            with pytest.raises(NotFound):
                await api.checkpoints.find(STRANGER, path)
            assert [kind for kind in await api.events() if kind.startswith("checkpoint.")] == ["checkpoint.published", "checkpoint.unpublished"]

    play(tmp_path, story)


def test_a_copy_shares_the_blob_and_its_run_takes_no_operations(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            publishing, source = Publishing(api.database, api.checkpoints), await saved(api)
            session = await Sessions(api.database).create(ME, tags=[], user_metadata={}, sdk_version="x")
            path = await publishing.copy(ME, source, SessionSlot(session.id, 4), ttl_s=3600, name_of=name_of)
            assert path == f"tinker://{session.id}:train:4/weights/kept"
            assert await publishing.copy(ME, source, SessionSlot(session.id, 4), ttl_s=3600, name_of=name_of) == path
            copied = await api.checkpoints.find(ME, path)
            assert (copied.key, copied.digest, copied.step, copied.metadata) == (source.key, source.digest, source.step, source.metadata)
            assert copied.expires_us is not None
            run = await api.runs.get(ME, copied.run_id)
            assert (run.state, run.metadata, run.lora) == (COPY, {"who": "me"}, source.lora)
            for use in (api.runs.snapshot(ME, run.id, 1, "x"), api.runs.result(ME, run.id, 1, 0.0), api.runs.unload(ME, run.id)):
                with pytest.raises(Conflict, match="only holds a copy"):
                    await use
            with pytest.raises(Conflict, match="is taken"):
                await api.new_run(tinker_id=name_of(session.id, 4))
            with pytest.raises(Conflict, match="other weights"):
                await publishing.copy(ME, await saved(api, "other"), SessionSlot(session.id, 4), ttl_s=None, name_of=name_of)
            await api.checkpoints.delete(ME, str(source.path))
            heir = await api.runs.create(ME, base_model="tiny", lora=source.lora, metadata={}, begins_with_load=True)
            await api.runs.load(ME, heir.id, 0, copied, optimizer=True)
            await api.results(heir.id, 0)
            assert Blobs(tmp_path / "blobs").exists(copied.key)

    play(tmp_path, story)


def test_a_copy_into_a_project_is_made_once_for_a_request_and_by_who_may(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            publishing, source = Publishing(api.database, api.checkpoints), await saved(api)

            async def copy(p, project: str, request: str | None) -> str:
                return await publishing.copy(p, source, Destination(project, request), ttl_s=None, name_of=name_of)

            with pytest.raises(NotFound, match="no project"):
                await copy(ME, "default", "r")
            await api.database.write(
                lambda connection: connection.exec_driver_sql("INSERT INTO project VALUES ('default', 'd', 1), ('other', 'o', 1)")
            )
            paths = [await copy(ME, "default", request) for request in ("r", "r", "s", None, None)]
            assert paths[0] == paths[1]
            assert len(set(paths)) == 4
            # A session that says of itself what sessions of copies do is none.
            columns = "'session-9', project, '[\"copy:t\"]', user_metadata, sdk_version, 1, 1, NULL, NULL, NULL"
            tagged = f"INSERT INTO session SELECT {columns} FROM session LIMIT 1"
            await api.database.write(lambda connection: connection.exec_driver_sql(tagged))
            assert "session-9" not in await copy(ME, "default", "t")
            with pytest.raises(Conflict, match="the request `r` made a copy of other weights") as refused:
                await publishing.copy(ME, await saved(api, "other"), Destination("default", "r"), ttl_s=None, name_of=name_of)
            assert refused.value.field == "x-idempotency-key"
            theirs = await copy(ME, "other", "r")
            found = await api.checkpoints.find(STRANGER, theirs)
            assert (await api.runs.get(STRANGER, found.run_id)).metadata == {}
            with pytest.raises(NotFound):
                await api.checkpoints.find(ME, theirs)
            with pytest.raises(Forbidden):
                await copy(STRANGER, "default", "r")

    play(tmp_path, story)


def test_an_export_is_a_kind_of_its_own(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run(tinker_id="session-0:train:0")
            await api.runs.snapshot(ME, run.id, 1, "both")
            await api.runs.snapshot(ME, run.id, 2, "both", kind=EXTERNAL)
            await api.results(run.id, 1, 2)
            export = await api.checkpoints.find(ME, "tinker://session-0:train:0/external_weights/both")
            sampler = await api.checkpoints.named(ME, run.id, SNAPSHOT, "both")
            assert (export.kind, export.version, export.seq) == (EXTERNAL, sampler.version, 2)
            latest = await api.checkpoints.latest(ME, [run.id])
            assert {kind: row.seq for (_, kind), row in latest.items()} == {SNAPSHOT: 1, EXTERNAL: 2}
            versions = Versions(api.database, Models([fake_base(tmp_path)], {BASE: api.link}))
            await api.checkpoints.delete(ME, str(sampler.path))
            with pytest.raises(NotFound):
                await versions.find(ME, "tinker://session-0:train:0/sampler_weights/both")

    play(tmp_path, story)


def test_samplers_in_flight_go_forward_and_never_back(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            sessions, run = Sessions(api.database), await api.new_run()
            session = await sessions.create(ME, tags=[], user_metadata={}, sdk_version="x")

            async def follow(number: int, saved: int, version: str) -> None:
                weights = Version(Weights(version=version), BASE, "tiny")
                await sessions.follow(ME, session.id, number, weights, run_id=run.id, saved=saved)

            async def versions(*numbers: int) -> list[str]:
                return [(await sessions.get_sampling(ME, f"{session.id}:sample:{number}")).weights.version for number in numbers]

            await follow(0, 2, "two")
            assert await versions(0) == ["two"]
            await follow(1, 4, "four")
            assert await versions(0, 1) == ["four", "four"]
            # The answer to an earlier save is fetched again, or fetched late.
            await follow(0, 2, "two")
            await follow(2, 3, "three")
            assert await versions(0, 1, 2) == ["four"] * 3
            pinned = Version(Weights(version="fixed"), BASE, "tiny")
            await sessions.create_sampling(ME, session.id, 3, pinned, None)
            await follow(4, 6, "six")
            assert await versions(0, 1, 2, 3, 4) == ["six", "six", "six", "fixed", "six"]
            with pytest.raises(Conflict, match="other weights"):
                await follow(3, 8, "eight")

    play(tmp_path, story)


def test_a_search_reads_on_where_it_stopped(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            sessions, search = Sessions(api.database), SessionSearch(api.database)
            made = [
                await sessions.create(
                    ME, tags=[], user_metadata={"n": str(n % 2)}, sdk_version="x", display_name=f"Sweep {n}" if n < 4 else None
                )
                for n in range(6)
            ]  # fmt: skip
            await sessions.create(STRANGER, tags=[], user_metadata={}, sdk_version="x", display_name="Sweep theirs")
            await sessions.finish(ME, made[0].id, "errored: it broke: twice")
            run = await api.new_run(session_id=made[1].id)
            await api.runs.checkpoint(ME, run.id, 1, "kept")
            await api.results(run.id, 1)

            async def ids(wanted: SessionFilter, limit: int = 2) -> list[int]:
                found: list[int] = []
                behind: SessionCursor | None = None
                while True:
                    page = await search.find(ME, wanted, behind=behind, limit=limit)
                    found += [[session.id for session in made].index(each.id) for each in page.sessions]
                    behind = page.next
                    if behind is None:
                        return found

            assert await ids(SessionFilter()) == [5, 4, 3, 2, 1, 0]
            assert await ids(SessionFilter(words=("sweep",)), limit=1) == [3, 2, 1, 0]
            assert await ids(SessionFilter(words=("sweep", "2"))) == [2]
            assert await ids(SessionFilter(session_id=made[5].id, words=("sweep",), metadata={"n": "1"})) == [5, 3, 1]
            assert await ids(SessionFilter(active=False, silent=False, reasons=frozenset({"errored"}))) == [0]
            assert await ids(SessionFilter(active=False, silent=False, reasons=frozenset({"success"}))) == []
            assert await ids(SessionFilter(finished=False)) == [5, 4, 3, 2, 1]
            (broken,) = (await search.find(ME, SessionFilter(active=False, silent=False), behind=None, limit=5)).sessions
            assert broken.ended == ("errored", "it broke: twice")
            (counted,) = (await search.find(ME, SessionFilter(words=("sweep", "1")), behind=None, limit=5)).sessions
            assert (counted.checkpoints, counted.checkpoint_bytes > 0) == (1, True)

    play(tmp_path, story)

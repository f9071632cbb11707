import asyncio
import importlib
import pkgutil
import sqlite3
from pathlib import Path
from typing import get_type_hints

import pytest
from sqlalchemy import insert

from bloomery import services as package
from bloomery.config import ApiConfig
from bloomery.services.access.principal import SCOPES
from bloomery.services.core import Services
from bloomery.services.housekeeping.garbage import Garbage
from bloomery.store import rows
from tests.services.fake_engine import BASE, CONTEXT, FakeEngine, fake_base
from tests.services.runs_stage import LORA, operation, play, until


def test_the_cast_of_the_services_names_every_module() -> None:
    below = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__) if found.ispkg]
    for cast in (package, *map(importlib.import_module, below)):
        assert {module.name for module in pkgutil.iter_modules(cast.__path__) if f"`{module.name}`" not in str(cast.__doc__)} == set()


def test_everything_that_routes_may_call_is_there(tmp_path: Path) -> None:
    async def story(_: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            assert get_type_hints(Services).keys() <= vars(services).keys()

    play(tmp_path, story)


def test_a_clean_stop_leaves_nothing_to_replay(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        engine.checkpoint_every = 1000
        async with Services.open(config(tmp_path)) as services:
            caller = await services.auth.check((tmp_path / "api_key").read_text().strip())
            assert caller.scopes == SCOPES
            run = await services.runs.create(caller, base_model="tiny", lora=LORA, metadata={"a": "b"})
            for seq in range(1, 5):
                await services.runs.submit(caller, run.id, seq, operation(seq))
            assert await services.runs.result(caller, run.id, 4, 20) is not None
        await engine.crash()
        await engine.start()
        async with Services.open(config(tmp_path)) as services:
            await services.runs.submit(caller, run.id, 5, operation(5))
            assert await services.runs.result(caller, run.id, 5, 20) is not None
            assert [message.seq for message in engine.executed if message.replay] == []
            assert engine.opened[-1].last_seq == 4
            assert (await services.runs.get(caller, run.id)).metadata == {"a": "b"}

    play(tmp_path, story)


def test_what_rows_hold_is_claimed_when_a_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = asyncio.Event()

    async def claim(_: Garbage) -> None:
        claimed.set()

    monkeypatch.setattr(Garbage, "claim", claim)

    async def story(_: FakeEngine) -> None:
        async with Services.open(config(tmp_path)):
            await asyncio.wait_for(claimed.wait(), 120)

    play(tmp_path, story)


def test_a_chore_that_fails_at_a_stop_keeps_no_other_from_being_done(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            await services.auth.check((tmp_path / "api_key").read_text().strip())
            services.sessions.note_asked("p", "s")
            table = rows.sampling_session
            row = {"id": "s", "project": "p", "base_model": "tiny", "base_hash": BASE, "version": "v", "key": "k", "created_us": 1}
            with sqlite3.connect(tmp_path / "bloomery.db") as connection:
                connection.execute("CREATE TRIGGER refusing BEFORE UPDATE ON api_key BEGIN SELECT RAISE(ABORT, 'refused'); END")
                connection.execute(str(insert(table).values(row)), row)
            connection.close()
        with sqlite3.connect(tmp_path / "bloomery.db") as connection:
            assert connection.execute("SELECT asked_us IS NOT NULL FROM sampling_session").fetchall() == [(1,)]
            assert connection.execute("SELECT last_used_us FROM api_key").fetchall() == [(None,)]
        connection.close()

    play(tmp_path, story)


def test_models_are_listed_under_all_their_names_and_ready_when_their_engine_is(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        await engine.crash()
        async with Services.open(config(tmp_path)) as services:
            found = services.models.all()
            assert [(base.alias, base.base_hash, base.context, base.ready) for base in found] == [
                ("tiny", BASE, CONTEXT, False),
                ("Qwen/Qwen3-8B", BASE, CONTEXT, False),
            ]
            assert services.models.resolve("Qwen/Qwen3-8B").base_hash == BASE
            await engine.start()
            await until(lambda: all(base.ready for base in services.models.all()))
            assert services.models.tokenizer(BASE).template_hash is not None

    play(tmp_path, story)


def config(directory: Path) -> ApiConfig:
    (directory / "api_key").write_text("tml-development-key\n")
    models = tuple(fake_base(directory, alias) for alias in ("tiny", "Qwen/Qwen3-8B"))
    return ApiConfig(data_dir=str(directory), host="127.0.0.1", port=0, record="off", models=models)

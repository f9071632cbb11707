"""A base model and a deployment do not share a name: whichever comes second is refused."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import insert

from bloomery.config.data_dir import DataDir
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, Corrupt
from bloomery.up.base_models import CheckedModel
from bloomery.up.names import refuse_taken
from bloomery.up.start import UpOptions, up


def model(alias: str) -> CheckedModel:
    return CheckedModel(alias, Path("/models/some"), 1, 1, 1, 1)


def deploy(directory: Path, name: str, project: str) -> None:
    values = {"id": f"deployment-{name}", "project": project, "name": name, "base_model": "tiny", "base_hash": "b", "created_us": 1, "updated_us": 1}
    with Database(DataDir(directory).database) as database:
        asyncio.run(database.write(lambda connection: connection.execute(insert(rows.deployment), values)))


def test_a_base_model_cannot_have_the_name_of_a_deployment_of_any_project(tmp_path: Path) -> None:
    deploy(tmp_path, "router", "blue")
    deploy(tmp_path, "answers", "default")
    data = DataDir(tmp_path)
    for name, project in (("router", "blue"), ("answers", "default")):
        with pytest.raises(Conflict) as refused:
            refuse_taken([model("free"), model(name)], data)
        assert refused.value.field == "model"
        assert f"`{name}` is a deployment of project `{project}`" in refused.value.message
        assert "under another one, with --model OTHER-NAME=/models/some" in refused.value.message
    refuse_taken([model("free"), model("Router")], data)


def test_where_nothing_was_deployed_every_name_is_free(tmp_path: Path) -> None:
    refuse_taken([model("router")], DataDir(tmp_path))
    DataDir(tmp_path).database.touch()
    refuse_taken([model("router")], DataDir(tmp_path))
    DataDir(tmp_path).database.write_text("no database " * 100)
    with pytest.raises(Corrupt, match=r"bloomery\.db cannot be read"):
        refuse_taken([model("router")], DataDir(tmp_path))


def test_up_says_what_to_change_before_it_writes_anything(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text("1\n")
    deploy(tmp_path, "router", "default")
    options = UpOptions(
        data_dir=tmp_path,
        host="127.0.0.1",
        port=0,
        models=["router=bloomery-tiny"],
        record="full",
        dtype="float32",
        threads=1,
        custom_losses=False,
        max_waiting=1,
        replicas=0,
        rollout_replicas=0,
        plain=False,
        device="cpu",
        jobs=0,
        log_level="info",
    )
    with pytest.raises(Conflict, match="`router` is a deployment of project `default`"):
        up(options, {})
    assert {file.name for file in tmp_path.iterdir()} <= {"VERSION", "bloomery.db", "bloomery.db-wal", "bloomery.db-shm"}

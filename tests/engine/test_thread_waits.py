"""How long threads look for work before they sleep, by what a process is for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.config import EngineConfig, ModelConfig, to_json
from bloomery.engine.thread_waits import prepare_threads, thread_waits
from bloomery.types.protocol import Role

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
ENDS_WHERE_TORCH_BEGINS = f"""
import json, os, runpy, sys

module = sys.argv.pop(1)

def watch(event, arguments):
    if event == "import" and arguments[0] == "torch":
        print(json.dumps({{name: os.environ.get(name) for name in {NAMES}}}), flush=True)
        os._exit(0)

sys.addaudithook(watch)
runpy.run_module(module, run_name="__main__")
"""


def test_threads_of_an_engine_that_trains_look_longer_than_those_of_a_replica_and_neither_without_end():
    found = {}
    for role in ("engine", "replica"):
        found[role] = {}
        prepare_threads(found[role], role, 3)
        assert found[role]["OMP_NUM_THREADS"] == "3"
        assert found[role]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(found["replica"]["GOMP_SPINCOUNT"]) < int(found["engine"]["GOMP_SPINCOUNT"]) < 10_000


def test_what_the_user_set_stays():
    environment = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "1"}
    prepare_threads(environment, "engine", 2)
    assert environment == {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("role", ["engine", "replica"])
def test_an_engine_process_has_prepared_its_threads_when_torch_is_imported(tmp_path: Path, role: Role):
    model = ModelConfig(alias="small", path="", base_hash="b", dtype="float32", threads=3, socket="")
    config = tmp_path / "engine.json"
    config.write_text(to_json(EngineConfig(data_dir=str(tmp_path), model=model, role=role)))
    assert where_torch_begins("bloomery.engine", str(config)) == {"OMP_NUM_THREADS": "3", **thread_waits(role)}


def test_so_has_the_fidelity_command():
    found = where_torch_begins("bloomery.cli.main", "fidelity", "--threads", "3")
    assert found == {"OMP_NUM_THREADS": "3", **thread_waits("engine")}


def where_torch_begins(module: str, *arguments: str) -> dict[str, str | None]:
    """What stands in the environment of a program when it imports torch."""
    child = subprocess.run(
        [sys.executable, "-c", ENDS_WHERE_TORCH_BEGINS, module, *arguments],
        env={name: value for name, value in os.environ.items() if name not in NAMES},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str | None] = json.loads(child.stdout)
    return found

"""SIGKILL at every named step of a publication by a chain: whoever trains the run on publishes the same versions, and each can be read."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bloomery.sync.chain.plan import read_versions
from bloomery.sync.run_chain import chain_folder
from bloomery.types.generation import Weights
from tests.engine.chain_worker import VERSIONS
from tests.engine.test_chains import MOSTLY, RARELY, Loop

WORK_S = 240.0
DELTAS = ["chain.publish.delta@2", "chain.publish.merged@2"]
"""Of versions that are told from the one before."""
ALL = [
    "chain.lease.taken",
    "chain.object.started@2",
    "chain.object.put@3",
    "chain.publish.base",
    "chain.publish.committing@3",
    "chain.publish.committed@3",
    "engine.chain.published@3",
    "blob.written@2",
    "engine.snapshot.written@2",
]


def trained(folder: Path, learning_rate: float, killed_at: str = "") -> list[dict[str, Any]]:
    """What a process said that was to die there."""
    environment = {**os.environ, "BLOOMERY_FAILPOINTS": killed_at}
    command = [sys.executable, "-m", "tests.engine.chain_worker", str(folder), str(learning_rate)]
    done = subprocess.run(command, env=environment, timeout=WORK_S, capture_output=True)
    assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("learning_rate", "point"),
    [
        (RARELY, "chain.publish.committed@3"),
        *(pytest.param(RARELY, point, marks=pytest.mark.slow) for point in (*DELTAS, *ALL) if point != "chain.publish.committed@3"),
        *(pytest.param(MOSTLY, point, marks=pytest.mark.slow) for point in ("chain.object.put@3", "chain.publish.base", "engine.chain.published@3")),
    ],
)
def test_who_trains_on_behind_a_death_publishes_the_same_versions_and_each_can_be_read(learning_rate: float, point: str, tmp_path: Path) -> None:
    said = trained(tmp_path, learning_rate, killed_at=point)
    assert len(said) < VERSIONS
    before = [Loop(tmp_path).life().load(Weights(version=each["version"], key=each["key"])).version for each in said]
    assert before == [each["version"] for each in said]
    again = trained(tmp_path, learning_rate)
    assert again[: len(said)] == said
    assert [each["by_chain"] for each in again] == [True] * VERSIONS
    life = Loop(tmp_path).life()
    assert [life.load(Weights(version=each["version"], key=each["key"])).version for each in again] == [each["version"] for each in again]
    if learning_rate == RARELY:
        found = read_versions(life._blobs.objects(chain_folder("run-1")), "run-1", ())
        assert list(found) == list(range(VERSIONS)), "nothing is there twice"

"""kill -9 of everything that an asynchronous loop consists of, while its trainer is a version ahead: the replica that samples, the engine that
trains, the server before both, and the loop itself.

What is trained there depends on what was done first, so no other run is the same. Exact is this: every operation of the run is applied once, as it
was submitted, so that an undisturbed run of the same operations ends with the same weights; and every group is had once.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from bloomery.client import Client
from bloomery.recipes.async_grpo import AsyncGrpoConfig, train
from bloomery.recipes.grpo import StepReport
from bloomery.recipes.rollouts import Rollout
from bloomery.types.operations import ForwardBackward, Operation
from tests.live import LiveServer, running_server, wait_until
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL
from tests.test_docs import ROOT

CONFIG = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2, concurrency=3)
VICTIMS = (f"rollouts-{BASE}-0", f"engine-{BASE}", "loop", "api", "loop")
ROUNDS_BETWEEN = 3
PATIENCE_S = 300.0


class Noting(httpx.BaseTransport):
    """Leaves every operation in a folder before it goes out, under its number: one that is sent again with other content has not been taken."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._wire = folder, httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        _, _, operation = request.url.path.partition("/operations/")
        if request.method == "POST" and operation:
            number, _, kind = operation.partition("/")
            beside = self._folder / "being-written"
            beside.write_bytes(f"{kind}\n{request.headers['content-type']}\n".encode() + request.read())
            beside.replace(self._folder / f"{int(number):04d}")
        return self._wire.handle_request(request)

    def close(self) -> None:
        self._wire.close()


def grade(rollout: Rollout) -> float:
    """Every member of every group teaches something: none is the mean of its group."""
    return float(rollout.id.partition(".")[2]) ** 2


def run_loop(url: str, key: str, folder: Path, steps: int) -> None:
    """What the process of the loop does."""

    def tell(report: StepReport) -> None:
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(report.metrics) + "\n")

    (folder / "operations").mkdir(exist_ok=True)
    with Client(url, key, transport=Noting(folder / "operations"), patience_s=PATIENCE_S) as client:
        train(client, PROBLEMS, grade, CONFIG, folder / "cursor", steps=steps, on_step=tell)


def started(server: LiveServer, folder: Path, steps: int) -> "subprocess.Popen[bytes]":
    code = f"from pathlib import Path; from {__name__} import run_loop; run_loop({server.url!r}, {server.key!r}, Path({str(folder)!r}), {steps})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)


def rounds(folder: Path) -> int:
    cursor = folder / "cursor"
    return int(json.loads(cursor.read_text())["round"]) if cursor.exists() else 0


def operations(folder: Path) -> Iterator[tuple[int, str, str, bytes]]:
    """Number, kind, content type and content, in order."""
    for path in sorted((folder / "operations").glob("[0-9]*")):
        kind, content_type, content = path.read_bytes().split(b"\n", 2)
        yield int(path.name), kind.decode(), content_type.decode(), content


def undisturbed(server: LiveServer, folder: Path) -> str:
    """The digest of the weights of a run that was given the same operations, one after the other."""
    with Client(server.url, server.key) as client, httpx.Client(base_url=server.url, headers={"x-api-key": server.key}) as http:
        run = client.create_run(BASE, POLICY.rank, seed=POLICY.seed)
        for number, kind, content_type, content in operations(folder):
            path = f"/api/v1/runs/{run.id}/operations/{number}" + (f"/{kind}" if kind else "")
            http.post(path, content=content, headers={"content-type": content_type}).raise_for_status()
        return client.run(run.id).save_checkpoint("end").result().digest


def trained_rows(folder: Path) -> int:
    decoded: Sequence[Operation] = [
        msgspec.msgpack.decode(content, type=Operation) for _, _, content_type, content in operations(folder) if "msgpack" in content_type
    ]
    return sum(len(operation.data) for operation in decoded if isinstance(operation, ForwardBackward))


@pytest.mark.slow
def test_a_loop_whose_trainer_is_ahead_outlives_kills_of_all_that_it_consists_of_and_applies_every_operation_once(
    live_server: LiveServer, tmp_path: Path
) -> None:
    steps = ROUNDS_BETWEEN * (len(VICTIMS) + 1)
    with running_server(tmp_path / "data", "--rollout-replicas", "1") as server:
        loop = started(server, tmp_path, steps)
        try:
            for place, victim in enumerate(VICTIMS, start=1):
                wait_until(lambda place=place: rounds(tmp_path) >= ROUNDS_BETWEEN * place, PATIENCE_S)  # type: ignore[misc]
                os.kill(loop.pid if victim == "loop" else server.pid(victim), signal.SIGKILL)
                if victim == "loop":
                    loop.wait(120)
                    loop = started(server, tmp_path, steps)
            assert loop.wait(PATIENCE_S) == 0
        finally:
            loop.kill()
            loop.wait(120)
        told = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
        cursor = json.loads((tmp_path / "cursor").read_text())
        with Client(server.url, server.key, patience_s=PATIENCE_S) as client:
            run = client.run(cursor["run_id"])
            assert run.state().step == steps
            digest = run.save_checkpoint("end").result().digest
    assert max(step["lag/max"] for step in told) >= 1
    # A group that outlives two steps, as one may that is made again after a kill, is trained on without what is too old.
    too_old = CONFIG.max_head_offpolicy_versions
    assert all((step["lag/masked_share"] > 0) == (step["lag/max"] > too_old) for step in told)
    assert all(step["failures/lost"] == 0 for step in told)
    # Bits are held to what was served all the while.
    assert sum(step["agreement/scored_tokens"] for step in told) > 0
    # The file is of before the last step, whose groups it names.
    had = {*range(cursor["had_below"]), *cursor["had"], *cursor["batch"]}
    assert trained_rows(tmp_path) == SMALL.group_size * len(had)
    assert len(had) == cursor["had_below"] + len(cursor["had"]) + len(cursor["batch"])
    assert digest == undisturbed(live_server, tmp_path)

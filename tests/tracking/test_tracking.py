"""What jobs measure reaches the trackers of the server, by the packages as they were published: each step once, whoever is killed meanwhile."""

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, Job, JobPoint, JobSpec
from bloomery.types.methods import Batches, Supervised
from tests.jobs.test_methods_live import chat, lines, pairs
from tests.live import LiveServer, running_server, wait_until
from tests.tracking.setup import Series, around, python, read_back

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KINDS = ("tensorboard", "mlflow", "wandb")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("tracking")
    trackers = ("tensorboard", f"mlflow=sqlite:///{directory}/mlflow.db", "wandb=proved")
    options = [word for tracker in trackers for word in ("--track", tracker)]
    program = (str(python()), "-m", "bloomery.cli.main")
    with running_server(directory / "data", *options, env=around(), jobs=1, program=program) as server:
        with Client(server.url, server.key) as client:
            with_rows(client)
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, server.key) as client:
        yield client


def with_rows(client: Client) -> None:
    client.datasets.create("chats")
    client.datasets.add_version("chats", {"train": lines([chat(each) for each in pairs(64, 1)]), "eval": lines([chat(pairs(1, 9)[0])])})


def begun(client: Client, name: str, *, epochs: float = 2, tracking: bool = True) -> Job:
    method = Supervised(batches=Batches(epochs=epochs, rows=4))
    # Looked at behind steps that have gone by since.
    evaluation = Evaluation(every=3, answers=1, served_every=4)
    data = Data(dataset="chats")
    return client.jobs.create(
        JobSpec(name=name, base_model="bloomery-tiny", data=data, method=method, evaluation=evaluation, rank=4, seed=1, tracking=tracking)
    )


def told(server: LiveServer, kind: str) -> Path:
    return server.data_dir / "tracking" / kind / "told"


def wait_until_told(server: LiveServer, job: str) -> None:
    for kind in KINDS:
        wait_until(lambda kind=kind: (file := told(server, kind) / job).exists() and file.read_text() == "ended", 240)


def everywhere(server: LiveServer, job: Job) -> dict[str, Series]:
    places = {
        "tensorboard": str(server.data_dir / "tensorboard" / "default" / job.spec.name),
        "mlflow": f"sqlite:///{server.data_dir.parent}/mlflow.db",
        "wandb": str(server.data_dir / "tracking" / "wandb" / "files"),
    }
    return {kind: read_back(kind, place, job.id) for kind, place in places.items()}


def test_every_step_is_told_once_though_all_who_work_are_killed(server: LiveServer, client: Client) -> None:
    job = begun(client, "tracked")
    for step in (4, 12):
        wait_until(lambda step=step: client.jobs.get(job.id).progress.step >= step, 240)
        wait_until(lambda step=step: (told(server, "tensorboard") / job.id).exists(), 240)
        # Its processes, that of the job and those of the trackers, die with it.
        os.kill(server.pid("jobs"), signal.SIGKILL)
    ended = client.jobs.wait(job.id, 600)
    assert ended.state == "succeeded"
    wait_until_told(server, job.id)
    measured = client.jobs.points(job.id)
    assert [point.step for point in measured if "loss" in point.values] == list(range(1, 33))
    for kind, series in everywhere(server, job).items():
        assert {name: [step for step, _ in values] for name, values in series.items()} == steps(measured), kind
        for name, values in series.items():
            for (step, value), point in zip(values, (point for point in measured if name in point.values), strict=True):
                assert same(value, point.values[name]), (kind, name, step)


def steps(measured: list[JobPoint]) -> dict[str, list[int]]:
    names = {name for point in measured for name in point.values}
    return {name: [point.step for point in measured if name in point.values] for name in names}


def same(told: float, measured: float | None) -> bool:
    """TensorBoard keeps float32."""
    return math.isnan(told) if measured is None else told == pytest.approx(measured, rel=1e-6)


def test_a_job_may_be_told_nowhere(server: LiveServer, client: Client) -> None:
    hidden, after = begun(client, "hidden", epochs=0.25, tracking=False), begun(client, "shown", epochs=0.25)
    for job in (hidden, after):
        assert client.jobs.wait(job.id, 600).state == "succeeded"
    wait_until_told(server, after.id)
    for kind in KINDS:
        assert not (told(server, kind) / hidden.id).exists()
    assert not (server.data_dir / "tensorboard" / "default" / "hidden").exists()


def test_a_tracker_that_is_away_is_in_nobodys_way(tmp_path: Path) -> None:
    program = (str(python()), "-m", "bloomery.cli.main")
    impatient = around(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", MLFLOW_HTTP_REQUEST_TIMEOUT="1")
    with (
        running_server(tmp_path / "data", "--track", "mlflow=http://127.0.0.1:9", env=impatient, jobs=1, program=program) as server,
        Client(server.url, server.key) as client,
    ):
        with_rows(client)
        assert client.jobs.wait(begun(client, "undisturbed", epochs=0.25).id, 600).state == "succeeded"
        wait_until(lambda: "mlflow cannot be told what jobs measure" in server.logs())

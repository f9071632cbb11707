"""Looks at served weights beside a training, which does not wait for them, over the real api without a runner."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client, Sampler
from bloomery.jobs.guard import Guard
from bloomery.jobs.looping import JobCursor, looped
from bloomery.jobs.reporting import Reporter, Steered
from bloomery.jobs.served import Served
from bloomery.jobs.work import Work
from bloomery.recipes.grpo import OnStep, StepReport
from bloomery.recipes.policy import Policy
from bloomery.types.errors import InvalidInput, NotFound
from bloomery.types.jobs import Data, Evaluation, JobSpec
from tests.api.server import URL, Server, serving
from tests.live import wait_until

Measure = Callable[[Sampler], dict[str, float]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


@pytest.fixture
def work(server: Server, client: Client) -> Iterator[Work]:
    """What the process of a job has in hand, as far as looks need it."""
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": '{"text": "a", "label": "b"}', "eval": '{"text": "c", "label": "d"}'})
    client.jobs.create(JobSpec(name="a", base_model="tiny", data=Data(dataset="rows"), evaluation=Evaluation(served_every=2)))
    lease = client.runner("r").claim(0)
    assert lease is not None
    theirs = Client(URL, lease.token, transport=server.transport)
    with Reporter(theirs, lease.job, lease.lease_s) as reporter:
        tokenizer: Any = None
        guard = Guard(theirs, lease.job, reporter)
        yield Work(client=theirs, job=lease.job, cursor=None, reporter=reporter, tokenizer=tokenizer, guard=guard)


def is_told(client: Client, *points: tuple[int, float]) -> None:
    """Now or soon: the reporter tells what there is twice in a second."""
    expected = [(step, {"served/exact": value}) for step, value in points]
    wait_until(lambda: [(point.step, point.values) for point in client.jobs.points("a")] == expected)


def look_at(work: Work, measure: Measure, *steps: int) -> None:
    with Served(work, measure) as served:
        for step in steps:
            served.look(step, "tiny")


def test_looks_are_taken_one_after_the_other_and_told_at_their_steps(client: Client, work: Work) -> None:
    seen = iter((1.0, 2.0))
    look_at(work, lambda sampler: {"exact": next(seen)}, 2, 4)
    is_told(client, (2, 1.0), (4, 2.0))


def test_training_goes_on_while_somebody_looks(client: Client, work: Work) -> None:
    trained = threading.Event()

    def measure(_: Sampler) -> dict[str, float]:
        return {"exact": float(trained.wait(120))}

    with Served(work, measure) as served:
        served.look(2, "tiny")
        trained.set()
    is_told(client, (2, 1.0))


def test_what_was_told_before_is_not_looked_at_again(client: Client, work: Work) -> None:
    look_at(work, lambda _: {"exact": 1.0}, 2)
    is_told(client, (2, 1.0))
    look_at(work, lambda _: {"exact": 0.0}, 2, 4)
    is_told(client, (2, 1.0), (4, 0.0))


def test_a_training_that_is_steered_away_waits_for_no_look(client: Client, work: Work) -> None:
    begun, over = threading.Event(), threading.Event()

    def measure(_: Sampler) -> dict[str, float]:
        begun.set()
        over.wait(120)
        return {"exact": 1.0}

    def pause() -> None:
        with Served(work, measure) as served:
            served.look(2, "tiny")
            served.look(4, "tiny")
            assert begun.wait(120)
            raise Steered("pause")

    with pytest.raises(Steered):
        pause()
    assert not over.is_set()
    over.set()


def test_weights_that_are_gone_are_noted_and_what_else_goes_wrong_is_raised(client: Client, work: Work) -> None:
    def gone(_: Sampler) -> dict[str, float]:
        raise NotFound("no model `x`")

    look_at(work, gone, 2)
    wait_until(lambda: client.jobs.events("a")[-1].message == "step 2 was not looked at as it is served: no model `x`")

    def broken(_: Sampler) -> dict[str, float]:
        raise InvalidInput("a prompt is too long")

    with pytest.raises(InvalidInput, match="too long"):
        look_at(work, broken, 4)


def test_a_loop_looks_at_every_so_many_steps_and_at_what_a_process_that_died_had_not_seen(client: Client, work: Work) -> None:
    def begun(_: JobCursor, stepped: OnStep) -> Policy:
        for step in (1, 2, 3, 4):
            stepped(StepReport(step, "tiny", {"loss": 1.0}, ()))
        raise Steered("pause")

    def gone_on(*_: object) -> Policy:
        wait_until(lambda: [point.values.get("served/exact") for point in client.jobs.points("a")] == [None, 0.5, None, None])
        raise Steered("pause")

    held = threading.Event()

    def hold(_: Sampler) -> dict[str, float]:
        held.wait(120)
        return {}

    with pytest.raises(Steered):
        looped(work, 4, begun, hold, stopped="never")
    wait_until(lambda: [event.data.get("looked_at") for event in client.jobs.events("a")].count("tiny") == 1)
    assert all("served/exact" not in point.values for point in client.jobs.points("a"))
    with pytest.raises(Steered):
        looped(work, 4, gone_on, lambda _: {"exact": 0.5}, stopped="never")
    held.set()

"""What jobs have in common whose recipe keeps a cursor, over the real api without a runner."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from bloomery.client import Client
from bloomery.jobs.looping import looped
from bloomery.jobs.reporting import Reporter
from bloomery.jobs.work import FINAL, Work
from bloomery.types.jobs import Data, JobSpec
from tests.api.server import URL, Server, serving
from tests.live import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


class Watched(httpx.BaseTransport):
    """The way to the server; `waits` is set when somebody asks for the result of an operation."""

    def __init__(self, beneath: httpx.BaseTransport) -> None:
        self._beneath, self.waits = beneath, Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and "/operations/" in request.url.path:
            self.waits.set()
        return self._beneath.handle_request(request)


def test_what_a_process_was_publishing_when_it_died_is_waited_for_and_not_published_again(server: Server) -> None:
    client = server.client()
    client.datasets.create("rows")
    client.datasets.add_version("rows", {"train": '{"text": "a", "label": "b"}'})
    client.jobs.create(JobSpec(name="a", base_model="tiny", data=Data(dataset="rows")))
    lease = client.runner("r").claim(0)
    assert lease is not None
    run = client.create_run("tiny", 4, seed=1)
    run.save_checkpoint(FINAL).result()
    server.hold_engine(True)
    submitted = run.save_snapshot(FINAL)
    transport = Watched(server.transport)
    theirs = Client(URL, lease.token, transport=transport)
    reporter = Reporter(theirs, lease.job, lease.lease_s)
    others: Any = {"tokenizer": None, "guard": None}
    work = Work(client=theirs, job=lease.job, cursor=json.dumps({"run_id": run.id, "first": "tiny", "round": 1}), reporter=reporter, **others)

    def never(*_: object) -> Any:
        raise AssertionError("the loop is over")

    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(looped, work, 3, never, never, stopped="it stood still")
        wait_until(lambda: transport.waits.is_set() or loop.done())
        server.hold_engine(False)
        published = loop.result(120).published
    assert (published.run, published.version) == (run.id, submitted.result().version)
    assert len([kept for kept in run.checkpoints() if kept.name == FINAL]) == 2
    # Whoever ended the loop may have died before that was told.
    assert [event.message for event in reporter._events if "early" in event.message] == ["ended early at step 1: it stood still"]

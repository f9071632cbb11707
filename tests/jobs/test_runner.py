"""The runner's slots, over the real api, with words in place of processes."""

import threading
from pathlib import Path

import pytest

from bloomery.config import JobsConfig
from bloomery.jobs import runner
from bloomery.jobs.runner import Runner
from bloomery.types.jobs import Data, JobSpec
from bloomery.types.leases import Lease
from tests.api.server import URL, serving


def test_a_slot_outlives_whatever_a_job_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.01)
    given, two = list[str](), threading.Event()

    def process_of(lease: Lease) -> str:
        given.append(lease.job.spec.name)
        if len(given) == 1:
            raise ValueError("nobody thought of this")
        two.set()
        return "ended with status 0"

    with serving(tmp_path) as server:
        client = server.client()
        client.datasets.create("rows")
        client.datasets.add_version("rows", {"train": '{"text": "a", "label": "b"}'})
        for name in ("first", "second"):
            client.jobs.create(JobSpec(name=name, base_model="tiny", data=Data(dataset="rows")))
        working = Runner(JobsConfig(data_dir=str(tmp_path), url=URL, name="r", slots=1))
        monkeypatch.setattr(working, "_client", lambda patience_s: server.client(patience_s=patience_s))
        monkeypatch.setattr(working, "_process_of", process_of)
        thread = threading.Thread(target=working.run)
        thread.start()
        try:
            assert two.wait(120)
        finally:
            working.stop(0, None)
            thread.join(120)
        assert not thread.is_alive()
    assert given[:2] == ["first", "second"]
    assert "a slot failed, and goes on" in caplog.text

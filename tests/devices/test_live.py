"""A server whose engines and replicas compute on a GPU: what is trained there is what is served there, and a life that ends is gone on with."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from bloomery.client import Client
from tests.live import running_server, wait_until
from tests.services.runs_stage import datum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
BASE = "bloomery-tiny"
PROGRAM = (sys.executable, "-m", "bloomery.cli.main")


def test_what_is_trained_on_a_gpu_is_served_there(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", "--device", "cuda", replicas=1, program=PROGRAM) as server, Client(server.url, server.key) as client:
        digests = []
        for disturbed in (False, True):
            run = client.create_run(BASE, 8, seed=3)
            for number in range(4):
                run.forward_backward([datum([100 + number + place for place in range(20)])]).result()
                run.optim_step(1e-2).result()
                if disturbed and number == 1:
                    pid = server.pid("engine-bloomery-tiny")
                    os.kill(pid, signal.SIGKILL)
                    wait_until(lambda pid=pid: server.pids().get("engine-bloomery-tiny") not in (None, pid))  # type: ignore[misc]
            digests.append(run.save_checkpoint("end").result().digest)
        assert digests[0] == digests[1]
        version = run.save_snapshot("end").result().version
        assert client.versions.measure_fidelity(version).verdict == "pass"
        assert client.versions.fidelity(version).bit_equal == 1.0
        client.deployments.create("served", version)
        asked = OpenAI(base_url=f"{server.url}/v1", api_key=server.key)

        def answer(model: str) -> str | None:
            messages = [{"role": "user", "content": "how do I read a CSV file"}]
            return asked.chat.completions.create(model=model, messages=messages, seed=7, max_tokens=24).choices[0].message.content  # type: ignore[call-overload,no-any-return]

        first = answer("served")
        assert first == answer("served")
        os.kill(server.pid(next(name for name in server.pids() if name.startswith("replica"))), signal.SIGKILL)
        assert answer("served") == first

"""What a deployment promises by default, where its replica has fewer threads than the engine: an exact card, and streams that outlive it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest

from bloomery.client import Client
from bloomery.obs.machine import usable_cpus
from bloomery.recipes.sft import datum
from tests.live import LiveServer, alive, running_server, wait_until

REPLICA = "replica-bloomery-tiny-0"
NAME = "served"
TOKENS = 600
CARD_S = 300.0
_LOOK_S = 0.05
"""Between two looks at whether the replica is back: it needs seconds to answer."""


class Said(NamedTuple):
    """An answer, and the log-probability of each of its tokens."""

    text: str
    logprobs: list[float]


@pytest.mark.slow
@pytest.mark.skipif(usable_cpus() < 2, reason="with one processor everybody has one thread")
def test_a_replica_of_fewer_threads_gets_an_exact_card_and_the_engine_goes_on_with_its_stream(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", replicas=None, threads=None) as server, Client(server.url, server.key, patience_s=60) as client:
        version = trained(client)
        client.deployments.create(NAME, version)
        wait_until(lambda: client.deployments.get(NAME).fidelity is not None, CARD_S)
        card = client.deployments.get(NAME).fidelity
        assert card is not None
        assert (card.mode, card.verdict, card.max_abs, card.bit_equal) == ("exact", "pass", 0.0, 1.0)
        wait_until(lambda: serves(server, client))
        (engine,), (replica,) = client.status().engines, client.status().replicas
        assert engine.detail["numerics"] != replica.detail["numerics"], "they have as many threads, and nothing is shown"
        assert card.numerics == engine.detail["numerics"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=120) as sdk:
            expected = streamed(sdk, version, threading.Event())
            assert streamed(sdk, NAME, threading.Event()) == expected
            wait_until(lambda: proved_by_replica(client, version) is not None)
            held = proved_by_replica(client, version)
            assert held is not None
            # The trainer's word on the probe counts here too, and is not computed a second time.
            assert held["probe"]["expected"] == "published"
            struck = False
            while not struck:
                wait_until(lambda: serves(server, client))
                with killer(server) as begun:
                    assert streamed(sdk, NAME, begun) == expected
                    # Else the replica was at its end before it was killed, and the next stream is another chance.
                    struck = client.status().engines[0].stands_in


def serves(server: LiveServer, client: Client) -> bool:
    """Whether the replica that lives now answers."""
    (replica,) = client.status().replicas
    pid = server.pids().get(REPLICA)
    return replica.ready and pid is not None and alive(pid) and replica.detail["pid"] == pid


def proved_by_replica(client: Client, version: str) -> dict[str, Any] | None:
    """What the replica tells of how it proved a version, as soon as it has it."""
    (replica,) = client.status().replicas
    return replica.detail.get("proved_versions", {}).get(version)


def trained(client: Client) -> str:
    run = client.create_run("bloomery-tiny", rank=8, seed=1)
    run.forward_backward([datum(np.random.default_rng(0).integers(0, 1000, 40).tolist(), [1.0] * 40)])
    run.optim_step(3e-3)
    return run.save_snapshot("kept").result().version


def streamed(sdk: openai.OpenAI, model: str, begun: threading.Event) -> Said:
    """What a stream gives; `begun` is set as soon as there is anything."""
    text, logprobs = "", list[float]()
    asked = {"model": model, "prompt": "def main():", "seed": 1, "max_tokens": TOKENS, "logprobs": 1}
    for chunk in sdk.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
        begun.set()
        text += chunk.choices[0].text
        if (found := chunk.choices[0].logprobs) is not None:
            logprobs += found.token_logprobs or ()
    assert len(logprobs) == TOKENS
    return Said(text, logprobs)


@contextmanager
def killer(server: LiveServer) -> Iterator[threading.Event]:
    """When the event is set the replica is killed, and from then on whenever there is another."""
    begun, over = threading.Event(), threading.Event()

    def kill() -> None:
        begun.wait()
        while not over.is_set():
            if (pid := server.pids().get(REPLICA)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            over.wait(_LOOK_S)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield begun
    finally:
        over.set()
        begun.set()
        thread.join()

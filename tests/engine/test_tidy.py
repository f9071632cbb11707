"""Memory of an engine's sampler that stands empty: it is given back after a while, and at once where somebody lacks it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from bloomery.config import EngineConfig, ModelConfig
from bloomery.engine.executor import Connected, Executor, Stop
from bloomery.engine.hosted import CheckpointAfter
from bloomery.infer import cache
from bloomery.models import tiny
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, SampleFinished, SamplingParams, Weights
from bloomery.types.protocol import FromEngine, SamplerEvents
from tests.live import wait_until

ASKED = Generate(
    request_id="r", weights=Weights(version="b"), prompt=Array.of(np.arange(300, 900, dtype=np.int32)), params=SamplingParams(max_tokens=2, seed=1)
)


@contextmanager
def running(directory: Path, *, idle_s: float) -> Iterator[Executor]:
    """A replica that has answered."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    answered: SimpleQueue[SampleFinished] = SimpleQueue()

    def deliver(_: int, message: FromEngine) -> None:
        for event in message.events if isinstance(message, SamplerEvents) else ():
            if isinstance(event, SampleFinished):
                answered.put(event)

    served = ModelConfig(alias="tiny", path=str(tiny.PATH), base_hash="b", dtype="float32", threads=1, socket="")
    threads = torch.get_num_threads()
    executor = Executor(EngineConfig(data_dir=str(directory), model=served, role="replica"), inbox, deliver, CheckpointAfter())
    executor._sampler._idle_s = idle_s
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(executor.run)
        try:
            inbox.put(Connected(1))
            inbox.put(ASKED)
            answered.get(timeout=60)
            yield executor
        finally:
            inbox.put(Stop())
            ran.result(60)
            torch.set_num_threads(threads)


def empty_blocks(executor: Executor) -> int:
    blocks = executor._sampler._cache._blocks
    return blocks.capacity - len(blocks.held)


@pytest.fixture(autouse=True)
def little_is_worth_giving_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_KEEP_BYTES", 0)


def test_it_is_given_back_when_nobody_has_sampled_for_a_while(tmp_path: Path) -> None:
    with running(tmp_path, idle_s=0.01) as executor:
        wait_until(lambda: empty_blocks(executor) == 0)
        assert executor._sampler._cache.kept, "what is kept of the prompt stays"


def test_it_stays_for_the_next_burst_but_where_somebody_lacks_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, idle_s=3600) as executor:
        turns, tidy = [], executor._tidy
        monkeypatch.setattr(executor, "_tidy", lambda: (tidy(), turns.append(None)))
        wait_until(lambda: len(turns) > 0)
        assert empty_blocks(executor) > 0
        monkeypatch.setattr(executor._runs, "waits_for_memory", True, raising=False)
        wait_until(lambda: empty_blocks(executor) == 0)

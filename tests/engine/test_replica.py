"""A replica is the engine program without runs: it samples what the engine samples, bit for bit, and a stream moves to another when it dies."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from bloomery.services.engines.fleet import Group
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.serving.meters import Meters
from bloomery.services.serving.sampling import SampleStream
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, SampledToken, SamplingParams, Weights
from bloomery.types.operations import Failed
from bloomery.types.protocol import CloseRun, Drain, Drained, OperationDone, RunClosed
from tests.engine.harness import BASE, VOCAB, Engine, engine, history
from tests.live import wait_until
from tests.services.fake_engine import fake_base

TOKENS = 120


@pytest.fixture(scope="module")
def replicas(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    directories = [tmp_path_factory.mktemp(f"replica-{number}") for number in range(2)]
    # Whoever samples dies in the middle of its first stream by itself: from outside, a quick one would be done before it is killed.
    dies = {"BLOOMERY_FAILPOINTS": f"engine.decode.step@20:{directories[0] / 'died'}"}
    with engine(model, directories[0], role="replica", **dies) as one, engine(model, directories[1], role="replica", **dies) as other:
        yield [one, other]


def test_a_replica_refuses_runs_by_name_and_writes_nothing(replicas: list[Engine]) -> None:
    with replicas[0].connect() as api:
        assert api.welcome.role == "replica"
        opened = api.open("run-1")
        assert opened.error == "this process is a replica, which only samples: send what concerns runs to the engine of the base model"
        api.execute(0, *history(1))
        refused = api.wait(OperationDone)
        assert isinstance(refused.result, Failed)
        assert refused.result.message == opened.error
        api.send(CloseRun(run_id="run-1"))
        api.wait(RunClosed)
        api.send(Drain())
        api.wait(Drained)
    assert [path for path in (replicas[0].directory / "data").rglob("*") if path.is_file()] == []


def test_a_stream_moves_when_its_replica_is_killed_and_says_what_the_engine_would_have(
    replicas: list[Engine], shared: Engine, tmp_path: Path
) -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            links = [await stack.enter_async_context(EngineLink(BASE, one.socket, None)) for one in replicas]
            trainer = await stack.enter_async_context(EngineLink(BASE, shared.socket, asyncio.Queue()))
            for link in (*links, trainer):
                await link.wait_ready()
            assert len({link.welcome.numerics for link in (*links, trainer) if link.welcome}) == 1
            expected = [token async for token in stream(Group("the engine", [trainer]), trainer, tmp_path) if isinstance(token, SampledToken)]
            got = []
            async for event in stream(Group("the replicas", links), trainer, tmp_path):
                if isinstance(event, SampledToken):
                    got.append(event)
            assert [(token.token, token.logprob) for token in got] == [(token.token, token.logprob) for token in expected]
            assert len(got) == TOKENS

    asyncio.run(story())
    wait_until(lambda: sorted(one.process is not None and one.process.poll() is None for one in replicas) == [False, True])


def stream(group: Group, trainer: EngineLink, directory: Path) -> SampleStream:
    prompt = Array.of(np.random.default_rng(0).integers(0, VOCAB, 30).astype(np.int32))
    request = Generate(
        request_id="", weights=Weights(version=BASE), prompt=prompt, params=SamplingParams(max_tokens=TOKENS, seed=3), priority="production"
    )
    config = fake_base(directory)
    meters = Meters(Models([config], {config.base_hash: trainer}), {config.base_hash: {"engine": trainer}}, 64)
    return SampleStream(group, request, lambda: meters.request(config.base_hash, request, bounded=False))

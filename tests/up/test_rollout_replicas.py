"""Rollouts as their user meets them: sampled beside the engine that trains, with its bits, by a process that may die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from bloomery.client import Client
from bloomery.client.sampling import Sampled
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.agreement import promises_bits
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport
from tests.live import LiveServer, running_server, wait_until
from tests.recipes.loops import BASE, LONG, POLICY, PROBLEMS, SMALL, Grade, InTheMiddle, Record

ROLLOUTS, ENGINE = f"rollouts-{BASE}-0", f"engine-{BASE}"
TOKENS, SAMPLES = 200, 8
ALL_TOKENS = TOKENS * SAMPLES * len(PROBLEMS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running_server(tmp_path_factory.mktemp("rollouts") / "data", "--rollout-replicas", "1") as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, server.key, patience_s=60) as client:
        yield client


def trained(client: Client, directory: Path) -> str:
    """A version whose adapter does something."""
    config = GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2)
    return grpo.train(client, PROBLEMS, Record().grade, config, directory / "trained", steps=1).cursor.version


def rollouts(client: Client, version: str) -> list[Sampled]:
    sampler = client.sampler(version)
    asked = [sampler.sample(problem.prompt, max_tokens=TOKENS, seed=7, num_samples=SAMPLES, stop=[]) for problem in PROBLEMS]
    return [each.result() for each in asked]


def sampled(client: Client) -> dict[str, int]:
    """Tokens that each process sampled in its life, as it said last."""
    status = client.status()
    said = {ENGINE: status.engines[0].detail, **{replica.name: replica.detail for replica in status.replicas}}
    return {name: int(detail.get("tokens_sampled", 0)) for name, detail in said.items()}


def test_a_replica_samples_what_is_trained_and_gives_the_bits_of_the_engine(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", "--rollout-replicas", "1") as server, Client(server.url, server.key, patience_s=60) as client:
        (shown,) = client.status().replicas
        assert (shown.name, shown.serves, shown.wanted, shown.ready) == (ROLLOUTS, "rollouts", True, True)
        assert promises_bits(client.status(), BASE)
        version = trained(client, tmp_path)
        before = sampled(client)[ROLLOUTS]
        by_replica = rollouts(client, version)
        wait_until(lambda: sampled(client)[ROLLOUTS] - before >= ALL_TOKENS)
        assert sampled(client)[ENGINE] == 0
        assert server.stop() == 0
    with running_server(tmp_path / "data") as server, Client(server.url, server.key, patience_s=60) as client:
        assert client.status().replicas == []
        assert rollouts(client, version) == by_replica
        wait_until(lambda: sampled(client)[ENGINE] >= ALL_TOKENS)


def test_rollouts_and_judged_versions_outlive_a_replica_that_is_killed_in_the_middle_of_them(
    server: LiveServer, client: Client, tmp_path: Path
) -> None:
    version = trained(client, tmp_path)
    expected = rollouts(client, version)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=120) as sdk:
        judged = sdk.completions.create(model=version, prompt="import", max_tokens=TOKENS, seed=1).choices[0].text
        sampler, killed = client.sampler(version), server.pid(ROLLOUTS)
        asked = [sampler.sample(problem.prompt, max_tokens=TOKENS, seed=7, num_samples=SAMPLES, stop=[]) for problem in PROBLEMS]
        text = ""
        for chunk in sdk.completions.create(model=version, prompt="import", max_tokens=TOKENS, seed=1, stream=True):
            if not text:
                os.kill(killed, signal.SIGKILL)
            text += chunk.choices[0].text if chunk.choices else ""
    assert text == judged
    assert [each.result() for each in asked] == expected
    wait_until(lambda: server.pids().get(ROLLOUTS, killed) != killed and server.children()[ROLLOUTS]["state"] == "ready")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loop_loses_nothing_when_the_replica_dies_and_stays_on_policy_to_the_bit(
    server: LiveServer, client: Client, tmp_path: Path, asynchronous: bool
) -> None:
    wait_until(lambda: server.children()[ROLLOUTS]["state"] == "ready")
    reports: list[StepReport] = []

    def kill(report: StepReport) -> None:
        reports.append(report)
        if report.step in (1, 3):
            killed = server.pid(ROLLOUTS)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: server.pids().get(ROLLOUTS, killed) != killed and server.children()[ROLLOUTS]["state"] == "ready")

    if asynchronous:
        stale = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2, concurrency=4)
        async_grpo.train(client, PROBLEMS, Record().grade, stale, tmp_path / "cursor", steps=5, on_step=kill)
    else:
        plain = GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2)
        grpo.train(client, PROBLEMS, Record().grade, plain, tmp_path / "cursor", steps=5, on_step=kill)
        assert [report.metrics["ratio/largest_difference"] for report in reports] == [0] * 5
    assert [(report.metrics["failures/lost"], report.metrics["failures/retried"]) for report in reports] == [(0, 0)] * 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replica_killed_while_a_group_is_graded_and_another_in_flight_costs_neither_groups_nor_bits(
    server: LiveServer, client: Client, tmp_path: Path, asynchronous: bool
) -> None:
    wait_until(lambda: server.children()[ROLLOUTS]["state"] == "ready")
    killed = server.pid(ROLLOUTS)
    middle = InTheMiddle(1, lambda: os.kill(killed, signal.SIGKILL))

    def digest(by: Client, grade: Grade, path: Path) -> str:
        if asynchronous:
            # On policy, and so of the same bits whenever groups are done.
            fresh = AsyncGrpoConfig(policy=POLICY, rollouts=LONG, groups_per_step=2, concurrency=2, max_head_offpolicy_versions=0)
            policy = async_grpo.train(by, PROBLEMS, grade, fresh, path, steps=3)
        else:
            policy = grpo.train(by, PROBLEMS, grade, GrpoConfig(policy=POLICY, rollouts=LONG, groups_per_step=2), path, steps=3)
        return policy.run.save_checkpoint("end").result().digest

    record, expected = Record(), Record()
    with Client(server.url, server.key, transport=middle, patience_s=60) as mortal:
        disturbed = digest(mortal, middle.within(record.grade), tmp_path / "cursor")
    assert middle.killed
    wait_until(lambda: server.pids().get(ROLLOUTS, killed) != killed and server.children()[ROLLOUTS]["state"] == "ready")
    assert disturbed == digest(client, expected.grade, tmp_path / "other")
    assert record.seen == expected.seen

"""The demo's loop on a few rows, against the live server: the same story, shorter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.recipes import stdlib_docs
from bloomery.recipes.loop import Loop, LoopConfig, LoopReport, Rows, run_loop
from bloomery.recipes.sft import AdamConfig, SftConfig
from bloomery.recipes.task import routing_task
from bloomery.render import ChatTokenizer
from bloomery.types.statistics import Paired
from tests.live import LiveServer

PARTS = (64, 48, 40)
SHORT = SftConfig(epochs=1, adam=AdamConfig(learning_rate=4e-3), batch_size=16)
CONFIG = LoopConfig(deployment="little-loop", base_model="bloomery-tiny", first=SHORT, second=SHORT, concurrency=8)
TASK = routing_task(stdlib_docs.LABELS)


def few_rows() -> Rows:
    docs = stdlib_docs.build()
    splits = (docs.first, docs.traffic, docs.held_out)
    return Rows(*([TASK.ask(row.text, row.label) for row in split[:count]] for split, count in zip(splits, PARTS, strict=True)))


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        yield client


@pytest.fixture(scope="module")
def phases() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(client: Client, phases: list[str]) -> LoopReport:
    tokenizer = ChatTokenizer.load(Path(client.models()[0].path))

    def note(phase: str, done: int, total: int | None, text: str) -> None:
        if total is None and done:
            phases.append(phase)

    return run_loop(client, TASK, few_rows(), tokenizer.render_training, CONFIG, note)


def test_the_loop_takes_its_steps_in_order(report: LoopReport, phases: list[str]) -> None:
    assert phases == [
        *("import rows", "measure base", "train v1", "deploy", "measure v1", "traffic", "feedback", "parity", "curate"),
        *("train v2", "measure v2", "promote", "swap", "neighbours"),
    ]
    assert list(report.seconds) == phases


def test_every_answer_names_the_weights_it_came_from(report: LoopReport, client: Client) -> None:
    assert {row.version for row in report.base} == {client.models()[0].base_hash}
    assert {row.version for row in report.v1} == {report.versions["v1"]}
    assert {row.version for row in report.v2} == {report.versions["v2"]}
    assert report.versions["v1"] != report.versions["v2"]


def test_fine_tuning_teaches_the_format(report: LoopReport) -> None:
    assert all(row.label is None for row in report.base)
    assert sum(row.label is not None for row in report.v2) > len(report.v2) / 2


def test_sampled_log_probs_are_the_trainers(report: LoopReport) -> None:
    assert report.parity.tokens > 0
    assert report.parity[:2] == (0.0, 0.0)


def test_the_second_version_learns_from_traffic(report: LoopReport) -> None:
    counts = report.curated.counts
    judged = counts.get("traffic.correction", 0) + counts.get("traffic.confirmed", 0)
    assert counts["traffic.accepted"] == judged - counts.get("traffic.known", 0) > 0
    assert report.trained_rows["v1"] < report.trained_rows["v2"] == counts["train.rows"]


def test_what_is_live_follows_the_verdict(report: LoopReport, client: Client) -> None:
    live = client.deployments.get("little-loop").live.version
    assert report.promoted == report.comparison.better
    assert live == report.live.version == report.versions["v2" if report.promoted else "v1"]


@pytest.mark.slow
def test_a_version_that_is_not_better_is_not_promoted(report: LoopReport, client: Client) -> None:
    tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
    loop = Loop(client, TASK, tokenizer.render_training, CONFIG, lambda *_: None)
    before = client.deployments.get("little-loop").live.version
    other = next(version for version in report.versions.values() if version != before)
    answer = loop.promote_if_better(Paired(3, 3, 1.0), other, ask=few_rows().held_out[0])
    assert client.deployments.get("little-loop").live.version == before == answer.version

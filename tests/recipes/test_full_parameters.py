"""Reinforcement with all parameters: versions travel by the chain of the run without being asked, through a death, and to who comes late."""

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.recipes.grpo import StepReport, train
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import Ed25519Public
from bloomery.sync.chain.plan import read_versions
from bloomery.sync.run_chain import RunChain, chain_folder
from tests.live import running_server
from tests.recipes.loops import BASE, POLICY, PROBLEMS, Record
from tests.recipes.test_grpo import CONFIG

ALL = replace(CONFIG, policy=replace(POLICY, rank=0, learning_rate=1e-4))
STEPS = 4


def travelled(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in values.items() if name.startswith("sync/") and name != "sync/seconds"}


@pytest.mark.slow
def test_a_loop_of_all_parameters_goes_by_the_chain_and_ends_in_the_same_weights_though_its_engine_died(tmp_path: Path) -> None:
    record, expected = Record(), Record()
    data = tmp_path / "data"
    with running_server(data) as server, Client(server.url, server.key) as client:
        reports: list[StepReport] = []

        def kill(report: StepReport) -> None:
            reports.append(report)
            if report.step == 2:
                os.kill(server.pid(f"engine-{BASE}"), signal.SIGKILL)

        policy = train(client, PROBLEMS, record.grade, ALL, tmp_path / "cursor", steps=STEPS, on_step=kill)
        undisturbed = train(client, PROBLEMS, expected.grade, ALL, tmp_path / "other", steps=STEPS)
        digests = [each.run.save_checkpoint("end").result().digest for each in (policy, undisturbed)]
        assert digests[0] == digests[1]
        assert record.seen == expected.seen, "what was served was sampled from the same weights, and they were proved"
        blobs = Blobs(DataDir(data).blobs)
        chains = [RunChain.among(blobs.objects, each.run.id, trusted=()).sequences() for each in (policy, undisturbed)]
        assert len(chains[0]) > STEPS
        assert chains[0] == chains[1], "the same versions under the same numbers, none twice"
        metrics = policy.run.metrics()
        told = [each.values for each in metrics if "sync/bytes" in each.values]
        assert len(told) == len(chains[0])
        for values in told:
            raw, took, whole = (values[f"sync/{name}"] for name in ("raw_bytes", "bytes", "whole_bytes"))
            assert raw is not None and took is not None and whole is not None  # noqa: PT018
            assert raw <= took < 1.01 * whole < 1.02 * raw, "in float32 nearly all of it changes"
            assert values["sync/delta"] == 0
        by_step = {each.step: travelled(each.values) for each in metrics if "sync/bytes" in each.values}
        assert {report.step: travelled(report.metrics) for report in reports} == {step: by_step[step] for step in range(1, STEPS + 1)}

        # A replica holds nothing of the run before the first request of a deployment.
        version = policy.run.save_snapshot().result().version
        client.deployments.create("late", version)
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "which way?"}], "max_tokens": 6, "seed": 5}
        late, trainer = client.chat("late", **asked), client.chat(version, **asked)
        assert late["system_fingerprint"] == trainer["system_fingerprint"] == version
        assert late["choices"][0]["message"] == trainer["choices"][0]["message"]
        assert len(blobs.list("snapshots")) == 1, "only the last step's is whole, which has a name, and the same weights in both runs"
        assert "gave another result when it was replayed" not in server.logs()


RARELY = replace(CONFIG, policy=replace(POLICY, rank=0, learning_rate=1e-5))
"""In bfloat16 a few weights in a hundred change."""


@pytest.mark.slow
def test_in_bfloat16_deltas_travel_to_a_replica_and_lead_it_to_the_same_weights_though_the_engine_died(tmp_path: Path) -> None:
    record, expected = Record(), Record()
    data = tmp_path / "data"
    with (
        running_server(data, "--dtype", "bfloat16", "--rollout-replicas", "1", "--sign-chains") as server,
        Client(server.url, server.key) as client,
    ):

        def kill(report: StepReport) -> None:
            if report.step == 2:
                os.kill(server.pid(f"engine-{BASE}"), signal.SIGKILL)

        policy = train(client, PROBLEMS, record.grade, RARELY, tmp_path / "cursor", steps=STEPS, on_step=kill)
        undisturbed = train(client, PROBLEMS, expected.grade, RARELY, tmp_path / "other", steps=STEPS)
        assert server.children()[f"engine-{BASE}"]["restarts"] == 1
        assert policy.run.save_checkpoint("end").result().digest == undisturbed.run.save_checkpoint("end").result().digest
        assert record.seen == expected.seen, "what was made of deltas samples what was trained"
        told = [each.values for each in policy.run.metrics() if "sync/bytes" in each.values]
        assert [values["sync/delta"] for values in told[: STEPS + 1]] == [0, *[1] * STEPS], "the first is a base, and all behind it are deltas"
        for values in told[1 : STEPS + 1]:
            took, whole, changed = (values[f"sync/{name}"] for name in ("bytes", "whole_bytes", "changed"))
            assert took is not None and whole is not None and changed is not None  # noqa: PT018
            assert 0 < changed < 1 / 8
            assert took < whole / 10
        public = Ed25519Public(bytes.fromhex(DataDir(data).chain_key_public.read_text()))
        for each in (policy, undisturbed):
            objects = Blobs(DataDir(data).blobs).objects(chain_folder(each.run.id))
            versions = read_versions(objects, each.run.id, (public,))
            assert [link.manifest.old_root is None for link in versions.values()][: STEPS + 1] == [True, *[False] * STEPS]
        assert "gave another result when it was replayed" not in server.logs()

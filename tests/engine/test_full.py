"""Runs that train all parameters, in a real engine process: beside others, through deaths, and sampled."""

import signal
import time

import msgspec
import numpy as np
import pytest

from bloomery.engine.hosted import CheckpointAfter, HostedRun
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import RunChain, chain_folder
from bloomery.train.passes import compute
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, GenerateFailed, PromptScored, SampledToken, SampleFinished, SamplingParams, Weights
from bloomery.types.operations import (
    CheckpointResult,
    Datum,
    Failed,
    ForwardBackward,
    LoadCheckpoint,
    LoadResult,
    Operation,
    SaveCheckpoint,
    SaveSnapshot,
    SnapshotResult,
)
from bloomery.types.protocol import CheckpointWritten, Execute
from tests.engine.harness import BASE, VOCAB, Api, engine, failpoints, history, learn, step
from tests.train import builders

SNAPSHOT = SaveSnapshot(template_hash="t" * 32)
PASSING = msgspec.structs.replace(SNAPSHOT, announced=False)
SELDOM = 1e-10
"""A learning rate at which few elements change in float32."""
END = SaveCheckpoint(key="checkpoints/run-f/end.safetensors")


@pytest.fixture(scope="module")
def reference(references: dict[int, CheckpointResult]) -> CheckpointResult:
    return references[0]


def ask(request_id: str, weights: Weights, length: int = 40) -> Generate:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)
    params = SamplingParams(max_tokens=8, seed=5)
    return Generate(request_id=request_id, weights=weights, prompt=Array.of(tokens), params=params, prompt_logprobs=True)


def answered(api: Api, *requests: Generate) -> dict[str, tuple[list[int], np.ndarray]]:
    """Per request the sampled tokens, and the log-probabilities of the prompt and of them."""
    api.send(*requests)
    names = [request.request_id for request in requests]
    open_requests = set(names)

    def all_ended(event: object) -> bool:
        assert not isinstance(event, GenerateFailed), event
        if isinstance(event, SampleFinished):
            open_requests.discard(event.request_id)
        return not open_requests

    events = api.events(*names, until=all_ended)
    found = {}
    for name in names:
        tokens = [event for event in events if isinstance(event, SampledToken) and event.request_id == name]
        scored = next(event for event in events if isinstance(event, PromptScored) and event.request_id == name)
        logprobs = np.concatenate([scored.logprobs.numpy()[1:], np.array([token.logprob for token in tokens], np.float32)])
        found[name] = [token.token for token in tokens], logprobs
    return found


def scoring(request: Generate, tokens: list[int]) -> ForwardBackward:
    """The trainer's forward over a prompt and what was sampled."""
    whole = np.concatenate([request.prompt.numpy(), tokens])
    inputs = {"target_tokens": Array.of(whole[1:].astype(np.int64)), "weights": Array.of(np.ones(len(whole) - 1, np.float32))}
    datum = Datum(tokens=Array.of(whole[:-1].astype(np.int32)), inputs=inputs)
    return ForwardBackward(loss="cross_entropy", loss_config={}, data=(datum,), backward=False)


@pytest.mark.slow
def test_whole_models_and_adapters_train_together_and_are_sampled_with_the_trainers_bits(shared):
    with shared.connect() as api:
        runs = {"run-f": 0, "run-g": 0, "run-l": 8}
        for run_id, rank in runs.items():
            assert api.open(run_id, rank=rank).error is None
        for seq in range(3):
            for number, run_id in enumerate(runs):
                api.execute(2 * seq, learn(seed=10 * number + seq), step(), run_id=run_id)
        for run_id in runs:
            api.execute(6, SNAPSHOT, run_id=run_id)
        published = {run_id: api.done(6, run_id).result for run_id in sorted(runs)}
        assert all(isinstance(result, SnapshotResult) for result in published.values())
        requests = [ask(run_id, Weights(version=result.version, key=result.key)) for run_id, result in published.items()]
        found = answered(api, *requests, ask("base", Weights(version=BASE)))
        for request in requests:
            tokens, sampled = found[request.request_id]
            api.execute(7, scoring(request, tokens), run_id=request.request_id)
            assert np.array_equal(api.done(7, request.request_id).result.outputs[0]["logprobs"].numpy(), sampled)
        assert len({logprobs.tobytes() for _, logprobs in found.values()}) == 4
        api.close_runs(*runs)
        manifest = Manifest.from_json(shared.blobs.get(f"manifests/{published['run-f'].version}"))
        assert (manifest.kind, manifest.rank, manifest.base, manifest.parent) == ("full", 0, BASE, BASE)
        assert "model.layers.1.self_attn.q_norm.weight" in {entry.name for entry in manifest.tensors}


def test_a_checkpoint_begins_another_run(shared, reference):
    with shared.connect() as api:
        api.open("run-f", rank=0)
        api.open("run-l", rank=8)
        load = LoadCheckpoint(key=reference.key, optimizer=True)
        api.execute(0, load, run_id="run-f")
        assert api.done(0, "run-f").result == LoadResult(digest=reference.digest, step=4)
        api.execute(0, load, run_id="run-l")
        refused = api.done(0, "run-l").result
        assert isinstance(refused, Failed)
        assert "trained with rank=0, this run has rank=8" in refused.message
        api.close_runs("run-f", "run-l")


@pytest.mark.slow
def test_a_death_in_the_replay_after_a_death_changes_no_bit(model, tmp_path, reference):
    with engine(model, tmp_path) as one:
        with one.connect() as api:
            api.open("run-f", rank=0)
            api.execute(0, *history(2), run_id="run-f")
            checkpoint = api.wait(CheckpointWritten, lambda message: message.seq == 3)
            api.execute(4, *history(4)[4:7], run_id="run-f")
            lost = [api.done(seq, "run-f").result for seq in range(4, 7)]
        one.kill()
        one.start(**failpoints(tmp_path, "engine.operation.done@3"))
        for attempt in range(2):
            with one.connect() as api:
                assert api.open("run-f", checkpoint=checkpoint.key, last_seq=3, rank=0).error is None
                api.execute(4, *history(4)[4:7], run_id="run-f", replay=True)
                if attempt == 0:
                    assert one.died() == -signal.SIGKILL
                    one.start()
                    continue
                assert [api.done(seq, "run-f").result for seq in range(4, 7)] == lost
                api.execute(7, history(4)[7], END, run_id="run-f")
                assert api.done(8, "run-f").result.digest == reference.digest


def test_a_replica_that_comes_late_joins_the_chain_in_its_middle_and_follows_it(model, shared, tmp_path):
    """Versions without names, by their chain alone: a process that holds none reads a base and what changed since, and then only what changed."""
    with shared.connect() as api, engine(model, tmp_path, role="replica", beside=shared) as replica:
        assert api.open("run-late", rank=0).error is None
        seq = 0

        def publish(*lessons: Operation) -> SnapshotResult:
            nonlocal seq
            api.execute(seq, *lessons, PASSING, run_id="run-late")
            seq += len(lessons) + 1
            published = api.done(seq - 1, "run-late").result
            assert isinstance(published, SnapshotResult)
            assert not shared.blobs.exists(published.key)
            return published

        def sampled(by: Api, published: SnapshotResult) -> tuple[list[int], bytes]:
            request = ask(f"by-{seq}", Weights(version=published.version, key=published.key))
            tokens, logprobs = answered(by, request)[request.request_id]
            return tokens, logprobs.tobytes()

        base = publish()
        for number in range(5):
            middle = publish(learn(seed=number), step(SELDOM))
            assert not middle.travelled.whole
        found = [sampled(api, middle)]
        with replica.connect() as late:
            assert sampled(late, middle) == found[0]
            # Whoever is in the chain needs no base any more.
            chain = RunChain.among(shared.blobs.objects, "run-late", trusted=())
            state = Manifest.from_json(shared.blobs.get(manifest_key(base.version))).state
            shared.blobs.objects(chain_folder("run-late")).delete(chain.find(state).steps[0].object.key)
            newest = publish(learn(seed=5), step(SELDOM))
            found.append(sampled(api, newest))
            assert sampled(late, newest) == found[1]
        assert found[0] != found[1], "they are other weights"
        api.close_runs("run-late")


def test_a_damaged_model_is_never_sampled(shared):
    with shared.connect() as api:
        api.open("run-f", rank=0)
        api.execute(0, learn(), step(1e-3), SNAPSHOT, run_id="run-f")
        published = api.done(2, "run-f").result
        blob = bytearray(shared.blobs.get(published.key))
        blob[-1] ^= 1
        shared.blobs.put(published.key, bytes(blob))
        api.send(ask("r", Weights(version=published.version, key=published.key)))
        failed = api.events("r", until=lambda event: isinstance(event, GenerateFailed))[-1]
        assert f"does not hold version {published.version}: 1 tensors differ" in failed.message
        api.close_runs("run-f")


def test_a_checkpoint_that_takes_long_to_write_is_written_the_more_rarely(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def write(key: str, data: bytes) -> None:
        now[0] += 3.0

    hosted = HostedRun(builders.run(rank=0), write, last_seq=-1, checkpoint_after=CheckpointAfter())

    def due_after(seq: int, compute_s: float) -> bool:
        hosted.receive(Execute(run_id="run-1", seq=2 * seq, operation=builders.learn(builders.supervised([9]))))
        hosted.receive(Execute(run_id="run-1", seq=2 * seq + 1, operation=builders.step()))
        hosted.begin()
        hosted.resume(compute([hosted.share])[0], compute_s)
        hosted.begin()
        return hosted.checkpoint_due

    assert not due_after(0, 9.0)
    assert due_after(1, 2.0)
    assert hosted.checkpoint() is not None
    assert not due_after(2, 29.0)
    assert due_after(3, 2.0)

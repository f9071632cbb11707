"""The engine process over its socket: operations, sampling, deaths and connections."""

import signal
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bloomery.types.arrays import Array
from bloomery.types.generation import (
    Abort,
    Generate,
    GenerateFailed,
    PromptFound,
    PromptScored,
    SampledToken,
    SampleFinished,
    SamplingParams,
    Weights,
)
from bloomery.types.operations import (
    CheckpointResult,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardResult,
    LoadCheckpoint,
    LoadResult,
    OptimStepResult,
    Rejected,
    SaveCheckpoint,
    SaveSnapshot,
    SnapshotResult,
)
from bloomery.types.protocol import (
    Acknowledge,
    CheckpointWritten,
    Drain,
    Drained,
    EngineStatus,
    OpenRun,
    OperationDone,
    RunOpened,
    SamplerEvents,
)
from tests import elsewhere
from tests.engine.harness import BASE, DEVICE, VOCAB, Api, Engine, engine, failpoints, history, learn, spec, step

SAVE = SaveCheckpoint(key="checkpoints/run-1/named.safetensors")
SNAPSHOT = SaveSnapshot(template_hash="t" * 32)


def generate(request_id: str, *, weights: Weights | None = None, length: int = 20, **changes: object) -> Generate:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)
    params = SamplingParams(**{"max_tokens": 8, "seed": 5, **changes.pop("params", {})})
    return Generate(request_id=request_id, weights=weights or Weights(version=BASE), prompt=Array.of(tokens), params=params, **changes)


def ended(event: object) -> bool:
    return isinstance(event, SampleFinished | GenerateFailed)


def results(api: Api, first_seq: int, count: int) -> list[object]:
    return [api.done(seq).result for seq in range(first_seq, first_seq + count)]


@pytest.fixture(scope="module")
def reference(references: dict[int, CheckpointResult]) -> CheckpointResult:
    return references[8]


def needs_bits(api):
    """A device that is not there has the products of the processor's library, and some processors' depend on their company: the probe tells."""
    if DEVICE == elsewhere.NAME and not api.welcome.bit_exact:
        pytest.skip("products of few rows depend on their company here")


@pytest.mark.slow
def test_the_welcome_tells_who_the_engine_is(shared):
    with shared.connect() as api:
        welcome = api.welcome
        assert welcome.pid == shared.process.pid
        assert (welcome.base.base_hash, welcome.base.model_type, welcome.base.vocab_size, welcome.base.context) == (BASE, "qwen3", VOCAB, 1024)
        assert welcome.base.dtype == "float32"
        assert welcome.base.parameters > 10_000
        assert len(welcome.numerics) == 16
        assert welcome.bit_exact or DEVICE == elsewhere.NAME
        assert api.wait(EngineStatus).queued_operations == 0


@pytest.mark.slow
def test_a_run_trains_and_its_snapshot_is_sampled_with_the_trainers_bits(shared):
    with shared.connect() as api:
        needs_bits(api)
        assert api.open("run-s").error is None
        api.execute(0, *history(3), SNAPSHOT, run_id="run-s")
        done = [api.done(seq, "run-s") for seq in range(7)]
        assert [type(each.result) for each in done] == [ForwardBackwardResult, OptimStepResult] * 3 + [SnapshotResult]
        assert all(each.seconds > 0 and not each.replay for each in done)
        published = done[-1].result
        assert shared.blobs.exists(f"manifests/{published.version}")
        weights = Weights(version=published.version, key=published.key)
        request = generate("r", weights=weights, length=40, prompt_logprobs=True)
        api.send(request)
        events = api.events("r", until=ended)
        tokens = [event for event in events if isinstance(event, SampledToken)]
        assert [token.position for token in tokens] == list(range(8))
        sampled = np.array([token.logprob for token in tokens], np.float32)
        whole = np.concatenate([request.prompt.numpy(), [token.token for token in tokens]])
        targets = Array.of(whole[1:].astype(np.int64))
        inputs = {
            "target_tokens": targets,
            "logprobs": Array.of(np.concatenate([np.zeros(39, np.float32), sampled])),
            "advantages": Array.of(np.concatenate([np.zeros(39, np.float32), np.ones(8, np.float32)])),
        }
        datum = Datum(tokens=Array.of(whole[:-1].astype(np.int32)), inputs=inputs)
        api.execute(7, ForwardBackward(loss="importance_sampling", loss_config={}, data=(datum,)), run_id="run-s")
        trained = api.done(7, "run-s").result
        scored = next(event for event in events if isinstance(event, PromptScored)).logprobs.numpy()
        assert np.array_equal(trained.outputs[0]["logprobs"].numpy(), np.concatenate([scored[1:], sampled]))
        assert (trained.metrics["k3:sum"], trained.metrics["logprob_diff:max"], trained.metrics["ratio:sum"]) == (0.0, 0.0, 8.0)
        # The base answers otherwise, under its own version.
        api.send(generate("base", length=40))
        base = [event.logprob for event in api.events("base", until=ended) if isinstance(event, SampledToken)]
        assert base != [token.logprob for token in tokens]
        api.close_runs("run-s")


def test_what_a_draft_had_right_is_told_in_one_event(shared):
    with shared.connect() as api:
        needs_bits(api)
        asked = generate("plain", length=40)
        api.send(asked)
        *plain, _ = api.events("plain", until=ended)
        draft = tuple(token.token for token in plain)
        api.send(msgspec.structs.replace(asked, request_id="kept", drafts=((*draft[:-1], (draft[-1] + 1) % VOCAB),)))
        *found, kept, last, _ = api.events("kept", until=ended)
        assert all(isinstance(event, PromptFound) for event in found)
        told = [msgspec.structs.replace(token, request_id="plain", kept=False) for token in (*kept.apart(), last)]
        assert (len(kept.tokens), told) == (len(draft) - 1, plain)


@pytest.mark.parametrize("rank", [0, 8])
def test_the_same_history_gives_the_same_digest_in_any_company(shared, references, rank):
    with shared.connect() as api:
        api.open("run-a", rank=rank)
        api.open("run-b", rank=8)
        for seq, operation in enumerate(history(4)):
            api.execute(seq, operation, run_id="run-a")
            api.execute(seq, learn((90, 100, 80), seed=seq + 50) if seq % 2 == 0 else step(0.5), run_id="run-b")
        api.send(generate("r", params={"max_tokens": 60}))
        api.execute(8, SaveCheckpoint(key="checkpoints/run-a/end.safetensors"), run_id="run-a")
        assert api.done(8, "run-a").result.digest == references[rank].digest
        api.send(Abort(request_id="r"))
        api.close_runs("run-a", "run-b")
        seqs = [message.seq for message in api.seen if isinstance(message, OperationDone) and message.run_id == "run-a"]
        assert seqs == list(range(9))


def test_user_errors_fail_their_operation_and_spoil_the_step(shared):
    with shared.connect() as api:
        api.open("run-u")
        bad = learn((12,))
        outside = Array.of(np.full(12, VOCAB, np.int32))
        bad_data = (Datum(tokens=outside, inputs=bad.data[0].inputs),)
        api.execute(
            0, ForwardBackward(loss="cross_entropy", loss_config={}, data=bad_data), step(), learn(), step(), Rejected(message="no"), run_id="run-u"
        )
        found = [api.done(seq, "run-u").result for seq in range(5)]
        assert [type(result) for result in found] == [Failed, Failed, ForwardBackwardResult, OptimStepResult, Failed]
        assert {result.category for result in found if isinstance(result, Failed)} == {"user"}
        assert str(VOCAB - 1) in found[0].message
        api.close_runs("run-u")


def test_a_run_that_cannot_be_opened_says_why(shared):
    with shared.connect() as api:
        opened = api.open("run-x", checkpoint="checkpoints/run-x/none.safetensors")
        assert "there is no blob `checkpoints/run-x/none.safetensors`" in opened.error
        shared.blobs.put("checkpoints/run-x/broken.safetensors", b"broken")
        assert "cannot be read" in api.open("run-x", checkpoint="checkpoints/run-x/broken.safetensors").error
        stranger = msgspec.structs.replace(spec("run-x"), base_hash="c" * 32)
        api.send(OpenRun(spec=stranger, checkpoint=None, last_seq=-1))
        assert f"on base model {'c' * 32}, this engine holds {BASE}" in api.wait(RunOpened).error
    with shared.connect() as api:
        assert "run-x" not in api.welcome.runs


def test_a_bad_request_fails_alone(shared):
    with shared.connect() as api:
        lost = Weights(version="f" * 32, key="snapshots/none.safetensors")
        api.send(generate("lost", weights=lost), generate("other", weights=Weights(version="e" * 32)), generate("good"))
        events = api.events("lost", "other", "good", until=lambda event: isinstance(event, SampleFinished))
        failures = {event.request_id: event for event in events if isinstance(event, GenerateFailed)}
        assert failures.keys() == {"lost", "other"}
        assert failures["lost"].category == failures["other"].category == "user"
        assert "there is no blob" in failures["lost"].message
        assert "names no weights" in failures["other"].message


def test_nonsense_on_the_socket_ends_the_connection_only(shared):
    with shared.connect() as api:
        api.send_bytes(b"\x05\x00\x00\x00hello")
        api.until_silence()
    with shared.connect() as api:
        api.send(generate("r"))
        assert isinstance(api.events("r", until=ended)[-1], SampleFinished)


def test_opening_a_held_run_again_replaces_it(shared):
    with shared.connect() as api:
        api.open("run-o")
        api.execute(0, *history(1), run_id="run-o")
        api.done(1, "run-o")
        api.open("run-o")
        api.execute(0, *history(1), run_id="run-o")
        assert api.done(1, "run-o").result.metrics["step"] == 1
        api.close_runs("run-o")


def test_closing_a_run_checkpoints_it_and_drops_it(shared):
    with shared.connect() as api:
        api.open("run-c")
        api.execute(0, *history(1), learn(backward=False), learn(), run_id="run-c")
        api.done(3, "run-c")
        api.close_runs("run-c")
        # The gradients of operation 3 are in the last one.
        written = [message for message in api.seen if isinstance(message, CheckpointWritten)]
        assert [(message.run_id, message.seq) for message in written] == [("run-c", 1), ("run-c", 2), ("run-c", 3)]
        assert written[0].digest == written[1].digest == written[2].digest
        api.close_runs("run-c")
    with shared.connect() as api:
        assert "run-c" not in api.welcome.runs
        api.open("run-c", checkpoint=written[2].key, last_seq=3)
        api.execute(4, step(), run_id="run-c")
        resumed = api.done(4, "run-c").result
        api.open("run-c", checkpoint=written[1].key, last_seq=2)
        api.execute(3, learn(), step(), run_id="run-c")
        assert api.done(4, "run-c").result == resumed
        assert resumed.metrics["step"] == 2
        api.close_runs("run-c")


def test_a_load_is_checkpointed_at_once(shared, reference):
    with shared.connect() as api:
        api.open("run-l")
        api.execute(0, LoadCheckpoint(key=reference.key, optimizer=True), run_id="run-l")
        loaded = api.done(0, "run-l").result
        assert loaded == LoadResult(digest=reference.digest, step=4)
        written = api.wait(CheckpointWritten)
        assert (written.run_id, written.seq, written.digest) == ("run-l", 0, reference.digest)
        api.close_runs("run-l")


@pytest.mark.slow
def test_an_engine_without_a_model_says_why_and_exits(tmp_path):
    (tmp_path / "empty").mkdir()
    one = Engine(tmp_path / "empty", tmp_path)
    one.start()
    assert one.died() == 1
    assert "has no config.json" in one.log()


def test_results_are_sent_again_until_acknowledged(shared, reference):
    with shared.connect() as api:
        api.open("run-r")
        api.execute(0, LoadCheckpoint(key=reference.key, optimizer=True), learn(), run_id="run-r")
        kept = [api.wait(OperationDone) for _ in range(2)]
        api.send(Acknowledge(run_id="run-r", seq=0))
    with shared.connect() as api:
        assert api.welcome.runs == {"run-r": 1}
        again = [api.wait(OperationDone), api.wait(CheckpointWritten)]
        assert again[0] == kept[1]
        assert (again[1].run_id, again[1].seq) == ("run-r", 0)
        api.send(Acknowledge(run_id="run-r", seq=1))
        # An operation that the engine knows already is not executed a second time.
        api.execute(1, learn(), step(), run_id="run-r")
        assert api.done(2, "run-r").result.metrics["step"] == 5
    with shared.connect() as api:
        api.close_runs("run-r")
        assert not [message for message in api.seen if isinstance(message, OperationDone)]


def test_a_newer_connection_replaces_the_older_and_drops_its_requests(shared):
    with shared.connect() as old:
        old.send(generate("r", params={"max_tokens": 900}))
        old.wait(SamplerEvents)
        with shared.connect() as new:
            old.until_silence()
            new.send(generate("r", params={"max_tokens": 3}))
            assert len(new.events("r", until=ended)) == 4


def test_a_drain_finishes_what_was_begun_and_rests_until_somebody_connects(shared):
    long = learn((200,) * 12)
    with shared.connect() as api:
        api.open("run-d")
        api.execute(0, *history(1), learn(backward=False), long, run_id="run-d")
        api.done(2, "run-d")
        api.send(Drain())
        api.wait(Drained)
        written = [message.seq for message in api.seen if isinstance(message, CheckpointWritten)]
        finished = [message.seq for message in api.seen if isinstance(message, OperationDone)][-1]
        assert written == sorted({1, 2, finished})
    with shared.connect() as api:
        assert api.welcome.runs == {"run-d": finished}
        api.execute(3, long, step(), run_id="run-d")
        assert api.done(4, "run-d").result.metrics["step"] == 2
        api.close_runs("run-d")


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(shared, reference):
    obstacle = shared.directory / "data" / "blobs" / "checkpoints" / "run-f"
    obstacle.write_text("a file where a directory should be")
    with shared.connect() as api:
        api.open("run-f")
        api.execute(0, LoadCheckpoint(key=reference.key, optimizer=True), *history(1), run_id="run-f")
        assert api.done(2, "run-f").result.metrics["step"] == 5
        assert "run run-f: no checkpoint could be written" in shared.log()
        obstacle.unlink()
        api.close_runs("run-f")
        assert [message.seq for message in api.seen if isinstance(message, CheckpointWritten) and message.run_id == "run-f"] == [2]


def test_status_counts_tokens(shared):
    with shared.connect() as api:
        before = api.wait(EngineStatus, lambda status: status.running_sequences + status.waiting_sequences + status.queued_operations == 0)
        api.open("run-t")
        api.execute(0, learn((40, 30)), run_id="run-t")
        api.send(generate("r"))
        after = api.wait(EngineStatus, lambda status: status.tokens_sampled == before.tokens_sampled + 8 and status.queued_operations == 0)
        assert after.tokens_trained == before.tokens_trained + 70
        assert (after.running_sequences, after.waiting_sequences) == (0, 0)
        api.close_runs("run-t")


@pytest.mark.slow
def test_killed_and_restored_from_a_checkpoint_it_replays_to_the_same_digest(model, tmp_path, reference):
    with engine(model, tmp_path) as one:
        with one.connect() as api:
            api.open()
            api.execute(0, *history(2))
            before = results(api, 0, 4)
            checkpoint = api.wait(CheckpointWritten, lambda message: message.seq == 3)
            api.execute(4, *history(4)[4:7])
            lost = results(api, 4, 3)
        one.kill()
        one.config = replace(one.config, checkpoint_s=1000.0)
        one.start()
        with one.connect() as api:
            assert api.welcome.runs == {}
            assert api.open(checkpoint=checkpoint.key, last_seq=3).error is None
            api.execute(4, *history(4)[4:7], replay=True)
            assert results(api, 4, 3) == lost
            assert all(message.replay for message in api.seen if isinstance(message, OperationDone))
            api.execute(7, history(4)[7], SAVE)
            assert results(api, 7, 2)[1].digest == reference.digest
            assert not any(isinstance(message, CheckpointWritten) for message in api.seen)
            # A stop signal checkpoints what was not.
            assert one.signal(signal.SIGTERM) == 0
            written = [message for message in api.until_silence() if isinstance(message, CheckpointWritten)]
            assert [message.seq for message in written] == [8]
            assert one.blobs.exists(written[0].key)
        assert "Traceback" not in one.log()
        assert len(before) == 4


@pytest.mark.parametrize(
    "point",
    [
        "engine.operation.done@6",
        pytest.param("engine.operation.started@6", marks=pytest.mark.slow),
        pytest.param("engine.checkpoint.written@2", marks=pytest.mark.slow),
        pytest.param("engine.result.sent@6", marks=pytest.mark.slow),
    ],
)
def test_a_death_at_any_point_changes_no_bit(model, tmp_path, reference, point):
    with engine(model, tmp_path, **failpoints(tmp_path, point)) as one:
        with one.connect() as api:
            api.open()
            api.execute(0, *history(4), SAVE)
            checkpoints = [message for message in api.until_silence() if isinstance(message, CheckpointWritten)]
        assert one.died() == -signal.SIGKILL
        last = checkpoints[-1]
        one.start()
        with one.connect() as api:
            api.open(checkpoint=last.key, last_seq=last.seq)
            api.execute(last.seq + 1, *[*history(4), SAVE][last.seq + 1 :], replay=True)
            assert results(api, last.seq + 1, 8 - last.seq)[-1].digest == reference.digest


@pytest.mark.slow
def test_deaths_while_sampling_and_publishing_leave_the_same_tokens_and_one_version(model, tmp_path):
    with engine(model, tmp_path, **failpoints(tmp_path, "engine.decode.step@5", "engine.snapshot.written")) as one:
        with one.connect() as api:
            api.send(generate("r", params={"max_tokens": 12}))
            first = [event for message in api.until_silence() if isinstance(message, SamplerEvents) for event in message.events]
        assert one.died() == -signal.SIGKILL
        one.start()
        with one.connect() as api:
            api.send(generate("r", params={"max_tokens": 12}))
            again = api.events("r", until=ended)
            assert first == again[: len(first)]
            # What was written down last may not have reached the socket.
            assert len(first) <= 4
            assert len(again) == 13
            api.open()
            api.execute(0, *history(1), SNAPSHOT)
            api.until_silence()
        assert one.died() == -signal.SIGKILL
        written = [info.key for info in one.blobs.list("manifests")]
        one.start()
        with one.connect() as api:
            api.open()
            api.execute(0, *history(1), SNAPSHOT)
            assert [f"manifests/{results(api, 0, 3)[2].version}"] == written


@pytest.mark.slow
def test_runs_take_turns_and_samples_come_in_between(shared):
    with shared.connect() as api:
        api.open("run-long")
        api.open("run-short")
        api.execute(0, learn((200,) * 12), run_id="run-long")
        api.execute(0, *history(2), run_id="run-short")
        api.send(generate("r", params={"max_tokens": 4}))
        api.done(0, "run-long")
        before = api.seen
        assert [message.seq for message in before if isinstance(message, OperationDone) and message.run_id == "run-short"] == [0, 1, 2, 3]
        assert any(ended(event) for message in before if isinstance(message, SamplerEvents) for event in message.events)
        api.close_runs("run-long", "run-short")

"""Resuming: a run that was interrupted is, bit for bit, the run that was not."""

from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.models.decoder import Decoder
from bloomery.models.tensor_bytes import Packed
from bloomery.train.checkpoint import Lineage
from bloomery.types.errors import Conflict, Corrupt
from bloomery.types.operations import CheckpointResult, Failed, LoadResult, SaveCheckpoint, SaveSnapshot
from tests.train import builders
from tests.train.builders import finish, learn, load, step, supervised, train

MODEL = builders.decoder()


@pytest.fixture(scope="module")
def model() -> Decoder:
    return MODEL


def history():
    """Operations of six steps with their own hyper-parameters, a snapshot in the middle and a failure near the end."""
    operations = []
    for index in range(6):
        operations += [learn(supervised([20, 33], seed=index)), learn(supervised([50], seed=10 + index))]
        operations.append(step(1e-2 / (index + 1), weight_decay=0.01 * index, grad_clip_norm=float(index)))
        if index == 2:
            operations.append(SaveSnapshot(template_hash="t"))
        if index == 3:
            # Gradients wait while the same weights are published under two templates.
            operations += [learn(supervised([9])), SaveSnapshot(template_hash="t"), SaveSnapshot(template_hash="u"), step()]
        if index == 4:
            operations.append(learn(()))
    return [*operations, SaveSnapshot(template_hash="t")]


HISTORY = history()


RANKS = (8, 0)


@cache
def undisturbed(rank: int = 8):
    """Results, digest and checkpoint of the run that nothing interrupted."""
    trained = builders.run(MODEL, rank=rank)
    return train(trained, HISTORY), trained.weights_digest(), trained.checkpoint_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@settings(max_examples=12, deadline=None)
@given(cut=st.integers(0, len(HISTORY)))
def test_a_run_restored_anywhere_ends_with_the_same_bits(rank, cut):
    results, digest, state = undisturbed(rank)
    trained = builders.run(MODEL, rank=rank)
    # As an engine does: a checkpoint may be taken at any moment, and the operations since the last moment of rest run again.
    done = 0
    for index, operation in enumerate(HISTORY[:cut]):
        finish(trained, operation)
        done = index + 1 if trained.at_rest else done
    restored = builders.run(MODEL, rank=rank)
    restored.restore(trained.checkpoint_bytes())
    assert train(restored, HISTORY[done:]) == results[done:], "results, versions included, are those of the undisturbed run"
    assert restored.weights_digest() == digest
    assert restored.checkpoint_bytes() == state


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@settings(max_examples=12, deadline=None)
@given(cut=st.integers(0, len(HISTORY)))
def test_a_run_restored_from_between_the_operations_of_a_step_ends_with_the_same_bits_and_computes_none_again(rank, cut):
    results, digest, state = undisturbed(rank)
    trained = builders.run(MODEL, rank=rank)
    train(trained, HISTORY[:cut])
    restored = builders.run(MODEL, rank=rank)
    restored.restore(trained.checkpoint_bytes(unfinished=True))
    assert restored.at_rest == trained.at_rest
    assert restored.checkpoint_bytes(unfinished=True) == trained.checkpoint_bytes(unfinished=True)
    assert train(restored, HISTORY[cut:]) == results[cut:]
    assert restored.weights_digest() == digest
    assert restored.checkpoint_bytes() == state


def test_only_gradients_that_wait_and_only_where_asked_make_a_checkpoint_larger(model):
    shelf = builders.MemoryShelf()
    trained = builders.run(model, shelf)
    train(trained, HISTORY[:3])
    behind_a_step = trained.checkpoint_bytes(unfinished=True)
    assert behind_a_step == trained.checkpoint_bytes()
    train(trained, [HISTORY[3], SaveCheckpoint(key="named")])
    between = trained.checkpoint_bytes(unfinished=True)
    # What a caller saves is as of the last step, to the bit.
    assert shelf.blobs["named"] == behind_a_step
    names = set(Packed(between)) - set(Packed(behind_a_step))
    assert names == {f"gradient/{name}" for name, _ in trained.weights.named(trained.weights.gradients)}
    trained.weights.clear_gradients()
    trained.restore(between)
    assert trained.checkpoint_bytes(unfinished=True) == between


def test_states_are_named_apart_as_their_bytes_are(model):
    trained = builders.run(model)
    known = {}
    for operation in (*HISTORY[:9], learn(supervised([9]), backward=False), learn(()), learn(supervised([9])), step()):
        for unfinished in (False, True):
            data = trained.checkpoint_bytes(unfinished=unfinished)
            assert known.setdefault(trained.state(unfinished=unfinished), data) == data
        finish(trained, operation)
    assert len(set(known.values())) == len(known)


def test_a_named_checkpoint_loads_without_what_waits_for_a_step_in_an_automatic_one(model):
    shelf = builders.MemoryShelf()
    trained, other = builders.run(model, shelf), builders.run(model, shelf)
    train(trained, HISTORY[:4])
    shelf.write("automatic", trained.checkpoint_bytes(unfinished=True))
    finish(other, load("automatic"))
    assert other.at_rest
    assert not other.weights.gradients.any()


@pytest.mark.parametrize("rank", RANKS)
def test_equal_states_have_equal_checkpoint_bytes(model, rank):
    left, right = builders.run(model, rank=rank), builders.run(model, rank=rank)
    train(left, HISTORY[:3])
    train(right, HISTORY[:3])
    assert left.checkpoint_bytes() == right.checkpoint_bytes()


@pytest.mark.parametrize("rank", RANKS)
def test_saving_changes_nothing(model, rank):
    saving, quiet = builders.run(model, rank=rank), builders.run(model, rank=rank)
    for operation in HISTORY[:6]:
        train(saving, [operation, SaveCheckpoint(key="x")])
        finish(quiet, operation)
    assert saving.checkpoint_bytes() == quiet.checkpoint_bytes()


@pytest.mark.parametrize("rank", RANKS)
def test_a_checkpoint_loads_into_another_run(model, rank):
    shelf = builders.MemoryShelf()
    first, second = builders.run(model, shelf, rank=rank), builders.run(model, shelf, run_id="run-2", seed=99, rank=rank)
    train(first, HISTORY[:3])
    saved = finish(first, SaveCheckpoint(key="checkpoints/a"))
    assert saved == CheckpointResult(key="checkpoints/a", digest=first.weights_digest(), size_bytes=len(shelf.blobs["checkpoints/a"]), step=1)
    assert finish(second, load("checkpoints/a")) == LoadResult(digest=saved.digest, step=1)
    assert train(second, HISTORY[3:6]) == train(first, HISTORY[3:6])
    assert second.weights_digest() == first.weights_digest()


def test_without_the_optimizer_the_weights_come_alone(model):
    shelf = builders.MemoryShelf()
    first, second = builders.run(model, shelf), builders.run(model, shelf)
    train(first, [*HISTORY[:3], SaveCheckpoint(key="a")])
    train(second, HISTORY[3:9])
    assert finish(second, load("a", optimizer=False)) == LoadResult(digest=first.weights_digest(), step=0)
    train(first, HISTORY[3:6])
    train(second, HISTORY[3:6])
    assert second.weights_digest() != first.weights_digest(), "Adam's moments matter"


def test_loading_forgets_gradients_and_failures(model):
    shelf = builders.MemoryShelf()
    trained, fresh = builders.run(model, shelf), builders.run(model, shelf)
    train(trained, [*HISTORY[:3], SaveCheckpoint(key="a"), HISTORY[3], learn(())])
    assert not trained.at_rest
    train(trained, [load("a"), *HISTORY[3:6]])
    train(fresh, HISTORY[:6])
    assert trained.weights_digest() == fresh.weights_digest()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4}, "trained with rank=8, this run has rank=4: create a run with rank=8"),
        ({"rank": 0}, "trained with rank=8, this run has rank=0"),
        ({"train_mlp": False}, "train_mlp=True"),
        ({"alpha": 16.0}, "alpha=32"),
    ],
)
def test_a_checkpoint_of_another_shape_is_a_clear_user_error_and_changes_nothing(model, lora, message):
    shelf = builders.MemoryShelf()
    train(builders.run(model, shelf), [*HISTORY[:3], SaveCheckpoint(key="a")])
    other = builders.run(model, shelf, **lora)
    before = other.checkpoint_bytes()
    failed = finish(other, load("a"))
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert message in failed.message
    assert other.checkpoint_bytes() == before


def test_a_checkpoint_of_another_base_is_refused(model):
    source, other = builders.run(model), builders.run(model)
    other.spec = msgspec.structs.replace(other.spec, base_hash="c" * 32)
    with pytest.raises(Conflict, match=f"base model {'b' * 32}, this run to {'c' * 32}"):
        other.restore(source.checkpoint_bytes())


def test_a_damaged_checkpoint_of_a_whole_model_is_noticed(model):
    damaged = flipped(undisturbed(0)[2], 0.5)
    with pytest.raises(Corrupt, match="checkpoint `restored` is damaged"):
        builders.run(model, rank=0).restore(damaged)


def flipped(data: bytes, position: float) -> bytes:
    changed = bytearray(data)
    changed[int(position * (len(data) - 1))] ^= 0x10
    return bytes(changed)


DAMAGE = {
    "empty": lambda data: b"",
    "something else": lambda data: b"nonsense",
    "cut short": lambda data: data[:-4],
    "a bit of the header": lambda data: flipped(data, 0.001),
    "a bit in the middle": lambda data: flipped(data, 0.5),
    "the last byte": lambda data: flipped(data, 1.0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_corrupt_and_changes_nothing(model, damage):
    data = DAMAGE[damage](undisturbed()[2])
    trained = builders.run(model)
    before = trained.checkpoint_bytes()
    with pytest.raises(Corrupt, match="checkpoint"):
        trained.restore(data)
    assert trained.checkpoint_bytes() == before


def test_publishing_the_same_weights_again_keeps_their_parent():
    lineage = Lineage(version="base")
    assert lineage.parent_of("w1") == "base"
    lineage = Lineage(version="v1", content="w1", parent="base")
    assert lineage.parent_of("w1") == "base"
    assert lineage.parent_of("w2") == "v1"

"""Versions of whole models that travel as what changed: what is served is what was trained, however it came there."""

import dataclasses
import errno
import mmap
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from bloomery.config.data_dir import DataDir
from bloomery.engine import chains
from bloomery.engine.chains import Chains
from bloomery.engine.ledger import MAX_REPLAY_DEATHS, InHand, Ledger
from bloomery.engine.shelf import BlobShelf
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.load import stored_tensors
from bloomery.models.packed import is_packed
from bloomery.store.blobs import Blobs
from bloomery.store.objects import Folder
from bloomery.sync import run_chain, torch_weights
from bloomery.sync.chain import manifest as manifests
from bloomery.sync.chain.keys import NO_KEYS, Ed25519Private, Keys
from bloomery.sync.chain.manifest import Manifest as ChainManifest
from bloomery.sync.chain.objects import keep
from bloomery.sync.chain.plan import read_versions
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.codec import layout as layout_module
from bloomery.sync.codec.delta import Delta
from bloomery.sync.codec.layout import Layout
from bloomery.sync.live import Published
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import RunChain, Target, chain_folder
from bloomery.sync.torch_weights import TorchWeights
from bloomery.train import snapshot
from bloomery.train.run import TrainableRun
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Unavailable
from bloomery.types.generation import Weights
from bloomery.types.operations import SnapshotResult
from bloomery.types.protocol import Execute
from bloomery.types.tensor_file import TensorSpec
from tests.engine.test_opening_wait import BASE, WHOLE, Stage
from tests.sync.codec.hostile import tampered
from tests.train.builders import BASE_HASH, SAVE, decoder, learn, run, step, supervised, train

PASSING = msgspec.structs.replace(SAVE, announced=False)
"""A version without a name, as loops publish in every step."""
RARELY, MOSTLY = 1e-5, 3e-2
"""Learning rates at which few elements in bfloat16 change, and most."""


class Loop:
    """A run and the shelf that it publishes to."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.bfloat16, keys: Keys = NO_KEYS) -> None:
        self.base, self.blobs, self.keys = decoder(dtype=dtype), Blobs(directory), keys
        self.shelf = self.life()
        self.run: TrainableRun = run(self.base, self.shelf, rank=0)

    def life(self) -> BlobShelf:
        """What a new process has: nothing in memory."""
        return BlobShelf(self.blobs, self.base, base_hash=BASE_HASH, numerics="test", keys=self.keys)

    def publish(self, learning_rate: float = RARELY, *, steps: int = 1, save: object = PASSING) -> SnapshotResult:
        lessons = [learn(supervised([20, 40])), step(learning_rate)] * steps
        found = train(self.run, [*lessons, save])[-1]
        assert isinstance(found, SnapshotResult)
        return found

    def bits(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.run.weights.published().items()}


def weights(result: SnapshotResult) -> Weights:
    return Weights(version=result.version, key=result.key)


def same(decoder_tensors: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> bool:
    return decoder_tensors.keys() == trained.keys() and all(torch.equal(decoder_tensors[name], trained[name]) for name in trained)


@pytest.mark.parametrize("learning_rate", [RARELY, MOSTLY])
def test_what_a_reader_of_every_version_and_one_who_comes_late_have_is_what_was_trained(learning_rate: float, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    reader = loop.life()
    kept = []
    for place in range(7):
        published = loop.publish(learning_rate, steps=min(place, 1))
        assert not loop.blobs.exists(published.key)
        assert published.travelled is not None
        assert published.travelled.whole == (place == 0 or learning_rate == MOSTLY)
        for shelf in (loop.shelf, reader):
            loaded = shelf.load(weights(published))
            assert same(stored_tensors(loaded.decoder), loop.bits())
            assert loaded.proof is not None
            kept.append(loaded)
        late = loop.life().load(weights(published))
        assert same(stored_tensors(late.decoder), loop.bits())


def test_a_replica_that_keeps_packed_matrices_alone_makes_the_next_version_of_them(tmp_path: Path) -> None:
    loop = Loop(tmp_path, torch.float32)
    first = loop.publish(0.0, steps=0)
    replica = loop.life()
    sampler = Sampler(loop.base, replica, form=Form(packed=True), alone=True)
    replica.kept_as = sampler.computed_with
    held = replica.load(weights(first))
    assert is_packed(held.decoder)
    second = loop.publish(1e-9)
    reads: list[str] = []
    whole = replica._chains.whole
    replica._chains.whole = lambda manifest: reads.append(manifest.version) or whole(manifest)  # type: ignore[method-assign,func-returns-value]
    served = replica.load(weights(second))
    assert reads == [], "nothing was read from a base"
    assert served.proof is not None
    assert served.proof.root == Manifest.from_json(loop.blobs.get(manifest_key(second.version))).state


def test_of_a_version_that_is_whole_nothing_of_the_one_in_memory_is_copied_or_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    reader = loop.life()
    before = reader.load(weights(loop.publish(steps=0)))
    published = loop.publish(MOSTLY)
    monkeypatch.setattr(chains.live, "Published", refuse(AssertionError("it was copied")))
    monkeypatch.setattr(Delta, "changes", refuse(AssertionError("it was compared")))
    for shelf in (reader, loop.life()):
        assert same(stored_tensors(shelf.load(weights(published)).decoder), loop.bits())
    assert not same(stored_tensors(before.decoder), loop.bits())


def test_of_a_tensor_of_many_chunks_each_chunk_moves_its_own_elements_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(dataclasses.replace(decoder().config, vocab_size=50_000), dtype=torch.bfloat16).requires_grad_(False)
    tensors = stored_tensors(model)
    into = TorchWeights(tensors)
    assert into.layout.hash == Layout.of({name: TensorSpec("BF16", tuple(tensor.shape)) for name, tensor in tensors.items()}).hash
    assert into.layout.chunk_count > 3
    moved: list[int] = []
    bits = torch_weights._bits
    monkeypatch.setattr(torch_weights, "_bits", lambda flat: moved.append(flat.numel()) or bits(flat))  # type: ignore[func-returns-value]
    for chunk in into.layout.chunks():
        into.write_all(chunk, np.arange(chunk.numel, dtype=np.uint16))
        into.write(chunk, np.array([0, chunk.numel - 1], np.uint32), np.array([7, 8], np.uint16))
        found = into.read(chunk)
        assert np.array_equal(found[1:-1], np.arange(1, chunk.numel - 1, dtype=np.uint16))
        assert found[[0, -1]].tolist() == [7, 8]
    assert sum(moved) == into.layout.elements


def test_the_weights_are_kept_once_for_the_next_version_and_the_last_whole_one_is_that_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    copied: list[int] = []
    kept = chains._kept
    monkeypatch.setattr(chains, "_kept", lambda blob, scratch: copied.append(len(blob)) or kept(blob, scratch))  # type: ignore[func-returns-value]
    found = [loop.publish(MOSTLY, steps=min(place, 1)) for place in range(2)]
    assert copied == []
    found += [loop.publish(RARELY) for _ in range(2)]
    assert copied == [version.size_bytes for version in found[2:]]
    assert [version.travelled.whole for version in found if version.travelled is not None] == [True, True, False, False]
    assert same(stored_tensors(loop.life().load(weights(found[-1])).decoder), loop.bits())
    versions = read_versions(loop.blobs.objects(chain_folder("run-1")), "run-1", ()).values()
    assert all(step.parts is None for link in versions for step in link.manifest.steps), "nobody fetches parts of a base here"


def test_weights_that_get_a_name_behind_their_step_are_not_told_from_those_before_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    loop.publish(steps=0)
    passing = loop.publish()
    monkeypatch.setattr(RunChain, "read", refuse(AssertionError("a whole model was read")))
    (named,) = train(loop.run, [SAVE])
    assert isinstance(named, SnapshotResult)
    assert (named.key, named.travelled) == (passing.key, passing.travelled)
    assert loop.blobs.exists(named.key)


def test_steps_go_on_while_a_chain_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = [], Event()

    def slow(*_: object, **__: object) -> None:
        begun.append(True)
        assert goes_on.wait(30)

    monkeypatch.setattr(chains, "sweep", slow)
    monkeypatch.setattr(chains, "_SWEPT_EVERY", 1)
    loop = Loop(tmp_path)
    found = [loop.publish(steps=min(place, 1)) for place in range(3)]
    assert all(version.travelled is not None for version in found)
    assert not goes_on.is_set()
    goes_on.set()
    sweeping = loop.shelf._chains._writers["run-1"]._sweeping
    assert sweeping is not None
    sweeping.join(30)
    assert len(begun) == 1, "one at a time"


def test_a_version_that_newer_bases_left_behind_is_found_by_a_replay_until_a_sweep_has_begun_to_let_it_go(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    first, *_ = [loop.publish(MOSTLY, steps=min(place, 1)) for place in range(4)]
    manifest = Manifest.from_json(loop.blobs.get(manifest_key(first.version)))
    written, blob = loop.shelf._chains, bytes(Chains(loop.blobs, NO_KEYS).whole(manifest))
    chain = RunChain.among(loop.blobs.objects, "run-1", trusted=())
    before = chain.sequences()
    assert written.publish(manifest, blob) == first.travelled
    assert chain.sequences() == before
    writer = written._writers["run-1"]
    writer._sweep()
    written.publish(manifest, blob)
    assert chain.sequences() == {**before, manifest.state: len(before)}, "it may go before anybody claims it"


def test_a_version_with_a_name_lies_whole_beside_the_chain_and_the_next_one_is_told_from_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.publish(steps=0)
    named = loop.publish(save=SAVE)
    assert loop.blobs.exists(named.key)
    after = loop.publish()
    assert after.travelled is not None
    assert not after.travelled.whole
    assert after.travelled.changed is not None
    assert 0 < after.travelled.changed < 1 / 8
    assert after.travelled.bytes < after.size_bytes / 10
    assert sum(after.travelled.codecs.values()) < after.travelled.bytes


def test_the_blob_that_a_chain_gives_is_the_one_that_would_have_been_stored(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = [loop.publish(steps=min(place, 1)) for place in range(3)]
    manifest = Manifest.from_json(loop.blobs.get(manifest_key(found[-1].version)))
    assert manifest.kind == "full"
    blob = Chains(loop.blobs, NO_KEYS).whole(manifest)
    assert blob == snapshot.write(loop.run.weights)
    assert isinstance(blob.obj, mmap.mmap), "it need not be in memory"
    assert not [path for path in tmp_path.iterdir() if path.is_file()], "and goes with who reads it"
    with pytest.raises(Corrupt, match="is not `snapshots/another`"):
        Chains(loop.blobs, NO_KEYS).whole(msgspec.structs.replace(manifest, key="snapshots/another"))


def test_a_new_life_of_the_engine_goes_on_with_the_chain_where_the_last_one_was(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    before = [loop.publish(steps=min(place, 1)) for place in range(2)]
    objects = loop.blobs.objects(chain_folder("run-1"))
    epochs = [link.manifest.epoch for link in read_versions(objects, "run-1", ()).values()]
    loop.run._shelf = loop.shelf = loop.life()
    repeated = train(loop.run, [PASSING])[-1]
    assert isinstance(repeated, SnapshotResult)
    assert (repeated.key, repeated.travelled) == (before[-1].key, before[-1].travelled), "a replay says what was said before"
    after = loop.publish()
    assert after.travelled is not None
    assert not after.travelled.whole, "it told what changed since the version before its death"
    versions = read_versions(objects, "run-1", ())
    assert list(versions) == [0, 1, 2]
    assert versions[2].manifest.epoch > max(epochs)


def given_up(stage: Stage) -> None:
    """What is known to have been done kills every engine that replays it."""
    stage.runs.obey(Execute(run_id="run-1", seq=1, operation=step(), replay=True))
    stage.work()


def opened_in_vain(stage: Stage) -> None:
    """The run is opened anew, by an api that knows its history better, and cannot be."""
    stage.open("run-1", WHOLE, base_hash="c" * 32)


def out_of_memory(stage: Stage) -> None:
    """It is opened anew, and others have the memory that it needs."""
    stage.free = 0
    stage.open("run-1", WHOLE)


@pytest.mark.parametrize("end", [given_up, opened_in_vain, out_of_memory])
def test_another_engine_writes_at_once_to_the_chain_of_a_run_that_is_not_trained_here_any_more(end: Callable[[Stage], None], tmp_path: Path) -> None:
    blobs, at_once = Blobs(tmp_path / "blobs"), PublishConfig(patience_s=0.0)
    for _ in range(MAX_REPLAY_DEATHS):
        Ledger(DataDir(tmp_path).in_hand(BASE)).enter([InHand("run-1", 1)])
    stage = Stage(tmp_path)
    stage.open("run-1", WHOLE)
    stage.runs.obey(Execute(run_id="run-1", seq=0, operation=PASSING))
    stage.work()
    objects = blobs.objects(chain_folder("run-1"))
    with pytest.raises(Unavailable, match="`engine` keeps the lease"):
        Publisher.open(objects, "run-1", holder="another", config=at_once)
    end(stage)
    assert stage.runs.executed == {}
    assert stage.shelf._chains._writers == {}, "and what it kept of the weights is gone"
    with Publisher.open(objects, "run-1", holder="another", config=at_once) as publisher:
        assert publisher.newest is not None
        assert publisher.newest.manifest.sequence == 0


def test_where_a_chain_takes_nothing_the_blob_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path)
    loop.publish(steps=0)
    newest = loop.blobs.directory / chain_folder("run-1") / "v" / f"{0:012d}"
    newest.write_bytes(b"{}")
    loop.run._shelf = loop.shelf = loop.life()
    published = loop.publish()
    assert published.travelled is None
    assert "is no manifest of a chain" in caplog.text
    assert same(stored_tensors(loop.life().load(weights(published)).decoder), loop.bits())


def test_where_a_chain_can_be_opened_no_more_or_the_disk_is_full_the_blob_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(chains.Publisher, "open", refuse(Conflict("the folder holds the chain of another run")))
        foreign = loop.publish(steps=0)
    with monkeypatch.context() as patch:
        patch.setattr(chains.Publisher, "publish", refuse(OSError(errno.ENOSPC, "No space left on device")))
        full = loop.publish()
    for published in (foreign, full):
        assert published.travelled is None
        assert loop.blobs.exists(published.key)
    assert "holds the chain of another run" in caplog.text
    assert "No space left on device" in caplog.text
    assert loop.publish().travelled is not None, "there is room again"


KEY, ANOTHER_KEY = Ed25519Private(bytes(range(32))), Ed25519Private(bytes(32))


def test_with_a_key_versions_are_signed_and_a_chain_that_somebody_else_wrote_to_is_neither_read_nor_gone_on_with(tmp_path: Path) -> None:
    loop = Loop(tmp_path, keys=Keys(KEY, (KEY.public,)))
    found = [loop.publish(steps=min(place, 1)) for place in range(3)]
    chain = tmp_path / chain_folder("run-1")
    sampled = {name: torch.zeros_like(tensor) for name, tensor in loop.bits().items()}
    with Receiver.open(Folder(chain), TorchWeights(sampled), "run-1", folder=tmp_path / "reader", trusted=[KEY.public]) as receiver:
        assert receiver.join() == 2
    assert same(sampled, loop.bits()), "whoever has the public key alone can follow"
    assert same(stored_tensors(loop.life().load(weights(found[-1])).decoder), loop.bits())
    path = chain / manifests.key(1)
    signed = ChainManifest.from_json(path.read_bytes(), "here")
    unsigned = msgspec.structs.replace(signed, signed_by="", signature="")
    for forged, says in ((unsigned, "is not signed"), (unsigned.signed(ANOTHER_KEY), f"`{ANOTHER_KEY.name}` signed it, and only what")):
        path.write_bytes(forged.to_json())
        with pytest.raises(Corrupt, match=rf"the chain of run run-1 is not what it was: .*{says}"):
            loop.life().load(weights(found[-1]))
    loop.shelf = loop.life()
    loop.run = run(loop.base, loop.shelf, rank=0)
    assert loop.publish(steps=0, save=PASSING).travelled is None, "it lies there as a blob, and the chain as it was"
    assert path.read_bytes() == forged.to_json()
    path.write_bytes(signed.to_json())
    assert loop.life().load(weights(found[-1])).proof is not None


def refuse(error: Exception) -> Callable[..., None]:
    def raising(*_: object, **__: object) -> None:
        raise error

    return raising


class ChainFault(NamedTuple):
    """One way in which a chain led to other weights, or nowhere; put in before version `new` is asked for, by whoever holds the one before `old`."""

    name: str
    """As `docs/rl.md` has it."""
    inject: Callable[[pytest.MonkeyPatch, "Synced"], None]
    says: str


class Synced(NamedTuple):
    """A run of three versions, and a reader of its first."""

    loop: Loop
    reader: BlobShelf
    old: SnapshotResult
    new: SnapshotResult
    chain: Path
    copy: Path
    """The chain as it was before the newest version."""


def synced(directory: Path) -> Synced:
    loop = Loop(directory / "blobs")
    chain, copy = directory / "blobs" / chain_folder("run-1"), directory / "copy"
    first, reader = loop.publish(steps=0), loop.life()
    held.append(reader.load(weights(first)))
    old = loop.publish()
    held.append(reader.load(weights(old)))
    shutil.copytree(chain, copy)
    loop.publish()
    return Synced(loop, reader, old, loop.publish(), chain, copy)


held: list[Model] = []
"""Models that stay in memory, as those of requests do."""


def applied_twice(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """A delta is put on weights that have it."""
    apply = run_chain._apply

    def twice(delta: Delta, into: Target) -> None:
        apply(delta, into)
        apply(delta, into)

    patch.setattr(run_chain, "_apply", twice)


def skipped(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """The first of two deltas is left out."""
    way = RunChain.way
    patch.setattr(RunChain, "way", lambda chain, root, have: list(way(chain, root, have))[1:])


def of_another_run(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """In the run's folder lies the chain of another one, which begins with the same weights."""
    other = run(made.loop.base, made.loop.shelf, rank=0, run_id="run-2")
    train(other, [PASSING, *[learn(supervised([9])), step(RARELY), PASSING] * 4])
    shutil.rmtree(made.chain)
    shutil.copytree(made.chain.parent / "run-2", made.chain)


def object_of_another_run(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """Under the name of the newest delta lies that of another run."""
    other = run(made.loop.base, made.loop.shelf, rank=0, run_id="run-2")
    train(other, [PASSING, learn(supervised([9])), step(RARELY), PASSING])
    foreign = newest_delta(made.chain.parent / "run-2")
    newest_delta(made.chain).write_bytes(foreign.read_bytes())


def torn_object(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """The newest delta ends in the middle."""
    path = newest_delta(made.chain)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def put_back(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """An older copy of the chain is put in its place."""
    made.reader.load(weights(made.new))
    made.reader._loaded.clear()
    shutil.rmtree(made.chain)
    shutil.copytree(made.copy, made.chain)


def another_version_in_memory(patch: pytest.MonkeyPatch, made: Synced) -> None:
    """What is in memory, and is told apart from, is not the version that it is held for."""
    base = made.loop.base
    patch.setattr(chains.live, "Published", lambda decoder: Published(base))


def newest_delta(chain: Path) -> Path:
    manifests = read_versions(Folder(chain), chain.name, ())
    return chain / manifests[max(manifests)].manifest.steps[0].object.key


NOT_THOSE = "the weights in memory are not those of version|was put on weights that are not version"
CHAIN_FAULTS = (
    ChainFault("a delta applied twice", applied_twice, NOT_THOSE),
    ChainFault("a delta left out", skipped, NOT_THOSE),
    ChainFault("the chain of another run", of_another_run, "is of run `run-2`, not of `run-1`"),
    ChainFault("a delta of another run", object_of_another_run, "is not what its name says|and nothing of the kind has more"),
    ChainFault("a torn delta", torn_object, "is not what its name says"),
    ChainFault("an older copy of the chain", put_back, "an old copy of the chain was put back"),
    ChainFault("another version in memory", another_version_in_memory, NOT_THOSE),
)


@pytest.mark.parametrize("fault", CHAIN_FAULTS, ids=[fault.name.replace(" ", "-") for fault in CHAIN_FAULTS])
def test_what_a_chain_does_wrong_is_caught_before_it_is_served(fault: ChainFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = synced(tmp_path / "sound")
    assert same(stored_tensors(sound.reader.load(weights(sound.new)).decoder), sound.loop.bits())
    broken = synced(tmp_path / "broken")
    with monkeypatch.context() as patch:
        fault.inject(patch, broken)
        with pytest.raises(BloomeryError, match=fault.says):
            broken.reader.load(weights(broken.new))


def test_of_a_few_hundred_deltas_that_lie_no_model_is_served_and_the_one_in_memory_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is vouched for by its manifest, and read beside the version before it and without one."""
    monkeypatch.setattr(layout_module, "CHUNK_ELEMENTS", 4096)
    rng, loop = random.Random(5), Loop(tmp_path)
    reader, first = loop.life(), loop.publish(steps=0)
    served, old_bits = reader.load(weights(first)), loop.bits()
    newest, new_bits = loop.publish(), loop.bits()
    chain = loop.blobs.objects(chain_folder("run-1"))
    sound = read_versions(chain, "run-1", ())
    manifest = sound[1].manifest
    delta, base = (chain.get(sound[at].manifest.steps[0].object.key, at_most=10**7)[0] for at in (1, 0))
    ends = Counter[str]()
    for place in range(300):
        step = msgspec.structs.replace(manifest.steps[0], object=keep(chain, tampered(delta, rng.choice((delta, base)), rng)))
        chain.put(manifest.key, msgspec.structs.replace(manifest, steps=(step,)).to_json())
        shelf = loop.life()
        if place % 4:
            shelf._loaded |= reader._loaded
        try:
            loaded = shelf.load(weights(newest))
        except BloomeryError as error:
            ends[type(error).__name__] += 1
            ends["put on"] += bool(re.search(f"{NOT_THOSE}|is not `snapshots/", error.message))
        else:
            # Another way to say the same.
            ends["served"] += 1
            assert same(stored_tensors(loaded.decoder), new_bits)
        assert same(stored_tensors(served.decoder), old_bits)
        chain.delete(step.object.key)
    assert ends["Corrupt"] > 200
    assert ends["put on"] > 20
    keep(chain, delta)
    chain.put(manifest.key, manifest.to_json())
    assert same(stored_tensors(reader.load(weights(newest)).decoder), new_bits)

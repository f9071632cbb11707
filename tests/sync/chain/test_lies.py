"""Objects and manifests that are what they claim in all but one thing: what meets each, and that nothing else has to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain import decode, flipping, parts
from bloomery.sync.chain.decode import Decoded
from bloomery.sync.chain.download import Downloads, FetchConfig
from bloomery.sync.chain.keys import HmacKey
from bloomery.sync.chain.manifest import Manifest, Step, key
from bloomery.sync.chain.objects import keep
from bloomery.sync.chain.plan import read_versions
from bloomery.sync.chain.publisher import Publisher
from bloomery.sync.chain.receiver import ReceiveConfig, Receiver
from bloomery.sync.chain.repair import Rebuilder
from bloomery.sync.chain.staging import STAGED, Staged
from bloomery.sync.codec.container import Head
from bloomery.sync.codec.delta import Delta, encode
from bloomery.sync.codec.layout import Chunk, Layout, MemoryWeights
from bloomery.sync.codec.numbers import Changes
from bloomery.sync.state_hash import StateHash, hash_elements
from bloomery.types.errors import Conflict, Corrupt, Forbidden
from bloomery.types.objects import Objects
from bloomery.types.tensor_file import TensorSpec
from tests.sync.chain.models import LAYOUT, OTHER, RUN, copied, empty, same, version, which
from tests.sync.chain.test_receiver import CONFIG, after, flipped_bit, leading_elsewhere, object_of, publish, reader
from tests.sync.codec.hostile import Opened


@pytest.mark.parametrize("signer", [HmacKey(b"another of sixteen"), None], ids=["another key", "nobody"])
def test_what_another_key_signed_under_the_name_of_the_right_one_is_refused(objects: Objects, tmp_path: Path, signer: HmacKey | None) -> None:
    right = HmacKey(b"secret of sixteen")
    with Publisher.open(objects, RUN, holder="trainer", config=CONFIG, signer=right) as publisher:
        for number in range(4):
            publisher.publish(version(number - 1) if number else None, version(number))
    with Receiver.open(objects, empty(), RUN, folder=tmp_path / "reader", trusted=[right]) as receiver:
        assert receiver.join() == 3
        after(objects, signed_by=right.name, signature="")
        forged = Manifest.from_json(objects.get(key(4), at_most=10**6)[0], "here")
        if signer is not None:
            objects.put(key(4), msgspec.structs.replace(forged, signature=signer.sign(forged.to_sign)).to_json())
        with pytest.raises(Forbidden, match="is not signed, and only what" if signer is None else f"was not signed by `{right.name}`: its signature"):
            receiver.stage()
        assert (receiver.sequence, receiver.staged, which(receiver.weights)) == (3, None, 3)
        objects.put(key(4), msgspec.structs.replace(forged, signature=right.sign(forged.to_sign)).to_json())
        assert receiver.stage() == 4
        receiver.flip()
        assert which(receiver.weights) == 4


@pytest.mark.parametrize("refused", [True, False], ids=["as it is", "where chunks are believed"])
@pytest.mark.parametrize("based", [False, True], ids=["a delta", "a base"])
def test_a_payload_that_leads_elsewhere_becomes_no_version_in_a_join(
    based: bool, refused: bool, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is held against its record, and all of them together against the manifest."""
    publish(folder, 3)
    if based:
        after(folder, base=4, old_root=None, **based_on(folder, leading_elsewhere_from_nothing()))
    else:
        after(folder, **object_of(folder, leading_elsewhere()))
    if not refused:
        monkeypatch.setattr(decode, "changes", believed)
    with reader(folder, tmp_path) as receiver:
        with pytest.raises(
            Corrupt, match="chunk 0 comes to state .*, and should come to" if refused else "what was decoded comes to state .*, and version 4 is"
        ):
            receiver.join()
        assert (receiver.sequence, which(receiver.weights)) == (None, None)
        with pytest.raises(Conflict, match="join first"):
            receiver.stage()
        assert receiver.join(3) == 3
        assert which(receiver.weights) == 3


def test_what_is_decoded_comes_to_what_the_manifest_says_or_is_not_staged(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(folder, 3)
    with reader(folder, tmp_path) as receiver:
        receiver.join()
        after(folder, **object_of(folder, leading_elsewhere()))
        monkeypatch.setattr(flipping, "changes", believed)
        with pytest.raises(Corrupt, match=r"what was decoded comes to state .*, and version 4 is"):
            receiver.stage()
        assert (receiver.sequence, receiver.staged, which(receiver.weights)) == (3, None, 3)
        assert not list((tmp_path / "reader").glob(f"{STAGED}*"))


def believed(delta: Delta, chunk: Chunk, before: Decoded) -> Changes | None:
    """What an object makes of a chunk, by whoever holds it against nothing."""
    return delta.changes(chunk.number, before.bits, before.state) if delta.records[chunk.number].changed else None


def leading_elsewhere_from_nothing() -> bytes:
    """A base of the fourth version, but for one chunk, which is of the ninth."""
    lies, other = (Opened(encode(None, weights)) for weights in (version(4), version(9)))
    lies.payloads[0], lies.records[0]["length"] = other.payloads[0], other.records[0]["length"]
    return lies.sealed()


def based_on(store: Objects, data: bytes) -> dict[str, Any]:
    """A step to the fourth version from nothing, with the list of its parts."""
    listed = keep(store, parts.listed(memoryview(data), Head.parse(data)))
    return {"steps": (Step(kind="base", start=None, object=keep(store, data), parts=listed),)}


TURNED = Layout.of({name: TensorSpec(dtype, shape[::-1]) for name, dtype, shape, _ in LAYOUT.tensors})
"""Of as many bytes in the table, of as many chunks, and with the same hashes of the same elements."""


def turned(weights: MemoryWeights) -> MemoryWeights:
    return MemoryWeights(TURNED, {tensor.name: weights[tensor.name] for tensor in TURNED.tensors})


BASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a payload that leads elsewhere": (lambda: leading_elsewhere_from_nothing(), "chunk 0 of `obj/.*` comes to .*, and its record says"),
    "a delta": (lambda: encode(version(3), version(4)), "the base `obj/.*` of version 4 is a delta"),
    "of another model": (lambda: encode(None, turned(version(4))), r"of version 4 is of another model: `a` is BF16 \[50, 40\], not BF16 \[40, 50\]"),
    "of another state": (lambda: encode(None, version(5)), "of version 4 leads to state .*, and the version is"),
}


@pytest.mark.parametrize("what", BASES)
def test_no_chunk_is_made_anew_of_a_base_that_is_another_one(folder: Folder, tmp_path: Path, what: str) -> None:
    made, reason = BASES[what]
    publish(folder, 3)
    after(folder, base=4, old_root=None, **based_on(folder, made()))
    with reader(folder, tmp_path, copied(version(4)), ReceiveConfig(scrub_share=1)) as receiver:
        # The weights are this version already, so no base is fetched for it.
        assert receiver.join() == 4
        flipped_bit(receiver.weights, "a")
        there = copied(receiver.weights)
        with pytest.raises(Corrupt, match=reason):
            receiver.scrub()
        assert same(receiver.weights, there)


def test_a_chunk_that_is_made_anew_is_the_one_that_is_missing_or_refused(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 1)
    with Downloads(folder, tmp_path / "objects", FetchConfig()) as downloads:
        rebuilder = Rebuilder(folder, downloads, LAYOUT, read_versions(folder, RUN, ()), 1, part_bytes=1000)
        for chunk in LAYOUT.chunks():
            bits = version(1).read(chunk)
            assert np.array_equal(rebuilder.rebuild(chunk, hash_elements(bits, chunk.first)), bits)
            with pytest.raises(Corrupt, match=f"chunk {chunk.number} made anew comes to state .*, and version 1 has {StateHash(1, 2)}"):
                rebuilder.rebuild(chunk, StateHash(1, 2))


def test_changes_that_are_staged_are_of_weights_of_their_layout(folder: Folder, tmp_path: Path) -> None:
    publish(folder, 2)
    with reader(folder, tmp_path) as receiver:
        receiver.join(1)
        receiver.stage()
        assert Staged(tmp_path / "reader" / STAGED, LAYOUT).stop.sequence == 2
        with pytest.raises(Corrupt, match="`staged` is of weights of another layout"):
            Staged(tmp_path / "reader" / STAGED, OTHER)

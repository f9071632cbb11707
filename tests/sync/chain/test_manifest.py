import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.sync.chain.keys import Ed25519Private, Ed25519Public, HmacKey, check_signed
from bloomery.sync.chain.manifest import Manifest, Step, key, sequence_of
from bloomery.sync.chain.objects import Ref
from bloomery.types.errors import Corrupt, Forbidden, InvalidInput

DELTA = Step(kind="delta", start=3, object=Ref(blake3="a" * 64, size=100))
MERGED = Step(kind="merged", start=0, object=Ref(blake3="b" * 64, size=200))
BASE = Step(kind="base", start=None, object=Ref(blake3="c" * 64, size=1000), parts=Ref(blake3="d" * 64, size=64))
MANIFEST = Manifest(
    run="run-1",
    epoch=2,
    sequence=4,
    parent="e" * 64,
    base=4,
    old_root="0" * 32,
    new_root="1" * 32,
    layout="2" * 32,
    steps=(DELTA, MERGED, BASE),
)


def changed(**fields: Any) -> bytes:
    return msgspec.structs.replace(MANIFEST, **fields).to_json()


def test_a_manifest_comes_back_and_its_bytes_are_canonical() -> None:
    assert Manifest.from_json(MANIFEST.to_json(), "here") == MANIFEST
    spaced = json.dumps(json.loads(MANIFEST.to_json()), indent=1).encode()
    with pytest.raises(Corrupt, match="here is not in canonical form"):
        Manifest.from_json(spaced, "here")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no manifest"),
        (b"\xff\xfe", "no manifest"),
        (b"{}", "no manifest"),
        (b"[" * 100_000, "no manifest"),
        (MANIFEST.to_json().replace(b'"format":1', b'"format":2'), "no manifest"),
        (MANIFEST.to_json().replace(b'"epoch":2', b'"epoch":0'), "no manifest"),
        (MANIFEST.to_json().replace(b'"run":"run-1"', b'"run":"../run"'), "no manifest"),
        (MANIFEST.to_json().replace(b"a" * 64, b"../../" + b"a" * 58), "no manifest"),
        (MANIFEST.to_json().replace(b'"size":100}', b'"size":-1}'), "no manifest"),
        (MANIFEST.to_json().replace(b'"size":100}', b'"size":9999999999999999999999}'), "no manifest"),
        (changed(steps=()), "no manifest"),
        (changed(sequence=-1), "no manifest"),
        (changed(sequence=5, base=5), "a delta is of one"),
        (changed(steps=(DELTA, msgspec.structs.replace(MERGED, start=1), BASE)), "a delta is of one"),
        (changed(steps=(msgspec.structs.replace(DELTA, parts=BASE.parts), BASE)), "has a delta that starts from 3"),
        (changed(steps=(DELTA, msgspec.structs.replace(BASE, start=3))), "has a base that starts from 3"),
        (changed(steps=(DELTA, DELTA, BASE)), "names a step twice"),
        (changed(base=3), "newest base is that of version 3, and has one itself"),
        (changed(steps=(DELTA,)), "newest base is that of version 4, and has none itself"),
        (changed(base=5, steps=(DELTA,)), "newest base"),
        (changed(parent=None), "has no parent"),
        (changed(old_root=None), "starts anew from a base alone"),
        (changed(steps=(MERGED, BASE)), "starts anew from a base alone"),
    ],
)
def test_what_contradicts_itself_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Corrupt, match=reason):
        Manifest.from_json(data, "here")


@given(st.integers(0, 10**12 - 1))
def test_keys_are_in_the_order_of_their_numbers(number: int) -> None:
    assert sequence_of(key(number)) == number
    assert number == 10**12 - 1 or key(number) < key(number + 1)


@pytest.mark.parametrize(
    "name", ["v/1", "v/0000000000001", "v/00000000000x", "v/0000000000-1", "v/" + "\N{ARABIC-INDIC DIGIT ZERO}" * 12, "w/000000000001", "lease"]
)
def test_other_keys_are_no_manifests(name: str) -> None:
    assert sequence_of(name) is None


HMAC, OTHER_HMAC = HmacKey(b"secret of sixteen"), HmacKey(b"another of sixteen")
ED, OTHER_ED = Ed25519Private(bytes(range(32))), Ed25519Private(bytes(32))


@pytest.mark.parametrize(("signer", "verifier", "other"), [(HMAC, HMAC, OTHER_HMAC), (ED, Ed25519Public(ED.public.raw), OTHER_ED.public)])
def test_a_signature_is_of_these_bytes_and_of_this_key(signer: Any, verifier: Any, other: Any) -> None:
    signed = Manifest.from_json(MANIFEST.signed(signer).to_json(), "here")
    check(signed, verifier)
    check(signed, other, verifier)
    check(signed)
    with pytest.raises(Forbidden, match=f"here says that `{signer.name}` signed it, and only what `{other.name}` signed is taken"):
        check(signed, other)
    with pytest.raises(Forbidden, match="here is not signed"):
        check(MANIFEST, verifier)
    for forged in (
        msgspec.structs.replace(signed, epoch=3),
        msgspec.structs.replace(signed, signature=signed.signature[:-2]),
        msgspec.structs.replace(MANIFEST.signed(OTHER_HMAC), signed_by=signer.name),
    ):
        with pytest.raises(Forbidden, match="here was not signed by"):
            check(forged, verifier)


def check(manifest: Manifest, *trusted: Any) -> None:
    check_signed(manifest.to_sign, manifest.signed_by, manifest.signature, trusted, "here")


@pytest.mark.parametrize("make", [lambda: HmacKey(b"short"), lambda: Ed25519Private(bytes(31)), lambda: Ed25519Public(bytes(33))])
def test_keys_of_another_length_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match="bytes, not"):
        make()

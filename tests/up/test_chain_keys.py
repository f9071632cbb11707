"""The key with which runs sign what they publish is made once, and not where unsigned versions would be refused by it."""

from pathlib import Path

import pytest

from bloomery.config.data_dir import DataDir
from bloomery.sync.chain.keys import NO_KEYS, Ed25519Private, Ed25519Public, read_keys
from bloomery.sync.run_chain import chain_folder
from bloomery.types.errors import Conflict, InvalidInput
from bloomery.up import chain_keys


def start(data: DataDir, *, wanted: bool) -> None:
    chain_keys.check(data, wanted=wanted)
    chain_keys.make(data, wanted=wanted)


def test_a_key_that_was_asked_for_once_is_used_ever_after(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    start(data, wanted=False)
    assert read_keys(data.chain_key) == NO_KEYS
    start(data, wanted=True)
    raw = data.chain_key.read_bytes()
    assert data.chain_key.stat().st_mode & 0o777 == 0o600
    (data.blobs / chain_folder("run-1")).mkdir(parents=True)
    for wanted in (False, True):
        start(data, wanted=wanted)
    assert data.chain_key.read_bytes() == raw
    keys, public = read_keys(data.chain_key), Ed25519Public(bytes.fromhex(data.chain_key_public.read_text()))
    assert keys.signer is not None
    assert [key.name for key in keys.trusted] == [keys.signer.name] == [public.name]
    assert public.verify(b"it", keys.signer.sign(b"it"))
    assert not public.verify(b"it", Ed25519Private(bytes(32)).sign(b"it"))


def test_the_half_that_readers_have_is_that_of_the_key_whoever_died_in_between(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    start(data, wanted=True)
    told = data.chain_key_public.read_bytes()
    for left in (None, b"00" * 32):
        data.chain_key_public.unlink() if left is None else data.chain_key_public.write_bytes(left)
        start(data, wanted=False)
        assert data.chain_key_public.read_bytes() == told


def test_where_runs_have_versions_that_nobody_signed_no_key_is_made(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    (data.blobs / chain_folder("run-1")).mkdir(parents=True)
    with pytest.raises(Conflict, match=r"--sign-chains: runs in .* no key is here that signed them.*: put `chain_key` back"):
        start(data, wanted=True)
    assert not data.chain_key.exists()
    start(data, wanted=False)


def test_a_key_that_is_cut_off_is_refused_by_its_name(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.chain_key.write_bytes(bytes(31))
    with pytest.raises(InvalidInput, match="chain_key holds 31 bytes, and an ed25519 key has 32"):
        start(data, wanted=False)

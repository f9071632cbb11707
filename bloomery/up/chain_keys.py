"""The key that signs what runs publish to their chains (`sync.chain`): made once, where `--sign-chains` asks for it, and used from then on."""

import secrets
from typing import Final

from bloomery.config.data_dir import DataDir
from bloomery.disk.durable import replace, write_privately
from bloomery.sync.chain.keys import Ed25519Private, read_keys
from bloomery.sync.run_chain import FOLDER
from bloomery.types.errors import Conflict

_RAW_BYTES: Final = 32


def check(data: DataDir, *, wanted: bool) -> None:
    """Refuse what no key can be made for, and a key that is none."""
    read_keys(data.chain_key)
    if not wanted or data.chain_key.exists():
        return
    chains = data.blobs / FOLDER
    if chains.is_dir() and any(chains.iterdir()):
        raise Conflict(
            f"--sign-chains: runs in {data.root} have published versions that nobody signed, and with a key they would be refused: "
            "ask for it with a data directory in which no run has trained all parameters",
            field="sign_chains",
        )
    Ed25519Private(bytes(_RAW_BYTES))  # Says what is to be installed, where it is not.


def make(data: DataDir, *, wanted: bool) -> None:
    """Of a data directory that was checked; the caller holds its lock."""
    if wanted and not data.chain_key.exists():
        raw = secrets.token_bytes(_RAW_BYTES)
        replace(data.chain_key_public, f"{Ed25519Private(raw).public.raw.hex()}\n".encode())
        write_privately(data.chain_key, raw)

"""The key that signs what runs publish to their chains (`sync.chain`): made once, where `--sign-chains` asks for it, and used from then on."""

import secrets

from bloomery.config.data_dir import DataDir
from bloomery.disk.durable import replace, write_privately
from bloomery.sync.chain.keys import RAW_BYTES, Ed25519Private, read_keys
from bloomery.sync.run_chain import FOLDER
from bloomery.types.errors import Conflict


def check(data: DataDir, *, wanted: bool) -> None:
    """Refuse what no key can be made for, and a key that is none."""
    read_keys(data.chain_key)
    if not wanted or data.chain_key.exists():
        return
    chains = data.blobs / FOLDER
    if chains.is_dir() and any(chains.iterdir()):
        raise Conflict(
            f"--sign-chains: runs in {data.root} have published versions, and no key is here that signed them, so that a new one would refuse them: "
            f"put `{data.chain_key.name}` back if there was one (a backup has it), or ask for it with a data directory in which no run has trained "
            "all parameters",
            field="sign_chains",
        )
    Ed25519Private(bytes(RAW_BYTES))  # Says what is to be installed, where it is not.


def make(data: DataDir, *, wanted: bool) -> None:
    """Of a data directory that was checked; the caller holds its lock. Readers have the half of the key that is there, whoever died in between."""
    if wanted and not data.chain_key.exists():
        write_privately(data.chain_key, secrets.token_bytes(RAW_BYTES))
    if (signer := read_keys(data.chain_key).signer) is None:
        return
    public = f"{signer.public.raw.hex()}\n".encode()
    if not data.chain_key_public.exists() or data.chain_key_public.read_bytes() != public:
        replace(data.chain_key_public, public)

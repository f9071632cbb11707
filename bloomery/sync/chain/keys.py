"""Who signed a manifest: a secret that writer and readers share (HMAC-SHA256), or a private key whose public half readers have (ed25519).

A key has a name that is told beside the signature, so that a reader knows which of its keys to ask. ed25519 takes the package `cryptography`, which
`pip install bloomery[ed25519]` brings.
"""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from bloomery.types.errors import Forbidden, InvalidInput, NotSupported

MIN_SECRET_BYTES: Final = 16
RAW_BYTES: Final = 32
_NAME_DIGITS: Final = 16


class Signer(Protocol):
    """Of a writer."""

    name: str

    def sign(self, data: bytes) -> str:
        """The signature, in hexadecimal digits."""


class Verifier(Protocol):
    """Of a reader."""

    name: str

    def verify(self, data: bytes, signature: str) -> bool:
        """Whether the key of this name signed `data`."""


class HmacKey:
    """A shared secret: whoever can verify can sign."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise InvalidInput(f"a secret that signs has at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self.name = f"hmac-sha256:{self.sign(b'name of this key')[:_NAME_DIGITS]}"

    def sign(self, data: bytes) -> str:
        """See `Signer`."""
        return hmac.new(self._secret, data, hashlib.sha256).hexdigest()

    def verify(self, data: bytes, signature: str) -> bool:
        """See `Verifier`."""
        return hmac.compare_digest(self.sign(data).encode(), signature.encode())


class Ed25519Private:
    """A key of 32 bytes that only the writer has."""

    def __init__(self, raw: bytes) -> None:
        _check_raw(raw)
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise _missing() from error
        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = Ed25519Public(self._key.public_key().public_bytes_raw())
        self.name = self.public.name

    def sign(self, data: bytes) -> str:
        """See `Signer`."""
        return self._key.sign(data).hex()


class Ed25519Public:
    """The 32 bytes that readers have."""

    def __init__(self, raw: bytes) -> None:
        _check_raw(raw)
        try:
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError as error:
            raise _missing() from error
        self._wrong = InvalidSignature
        self._key = Ed25519PublicKey.from_public_bytes(raw)
        self.raw, self.name = raw, f"ed25519:{raw.hex()[:_NAME_DIGITS]}"

    def verify(self, data: bytes, signature: str) -> bool:
        """See `Verifier`."""
        try:
            self._key.verify(bytes.fromhex(signature), data)
        except (self._wrong, ValueError):
            return False
        return True


class Keys(NamedTuple):
    """What one who writes signs with, and whom those who read trust; without any nothing is signed, and nothing is asked."""

    signer: Ed25519Private | None
    trusted: tuple[Verifier, ...]


NO_KEYS: Final = Keys(signer=None, trusted=())


def read_keys(path: Path) -> Keys:
    """Of the private key in this file, if it is there."""
    if not path.exists():
        return NO_KEYS
    if len(raw := path.read_bytes()) != RAW_BYTES:
        raise InvalidInput(f"{path} holds {len(raw)} bytes, and an ed25519 key has {RAW_BYTES}")
    key = Ed25519Private(raw)
    return Keys(key, (key.public,))


def check_signed(data: bytes, signed_by: str, signature: str, trusted: Sequence[Verifier], what: str) -> None:
    """Refuse what none of the trusted keys signed; without any key nothing is asked."""
    if not trusted:
        return
    if not signature:
        raise Forbidden(f"{what} is not signed, and only what {_names(trusted)} signed is taken here")
    keys = [key for key in trusted if key.name == signed_by]
    if not keys:
        raise Forbidden(f"{what} says that `{signed_by}` signed it, and only what {_names(trusted)} signed is taken here")
    if not any(key.verify(data, signature) for key in keys):
        raise Forbidden(f"{what} was not signed by `{signed_by}`: its signature is that of something else, or of another key")


def _names(trusted: Sequence[Verifier]) -> str:
    return " or ".join(f"`{key.name}`" for key in trusted)


def _check_raw(raw: bytes) -> None:
    if len(raw) != RAW_BYTES:
        raise InvalidInput(f"an ed25519 key has {RAW_BYTES} bytes, not {len(raw)}")


def _missing() -> NotSupported:
    return NotSupported("ed25519 takes the package `cryptography`: pip install bloomery[ed25519], or sign with a shared secret")
